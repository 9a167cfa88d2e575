// C interface of the paged attention: plain pointers and sizes, so that it can be built without PyTorch's
// headers and called without its dispatcher. specdec/attention/cpu.py mirrors the structs.

#include "paged_attention.h"

namespace {

struct Strided {
  void* data;
  int64_t row_stride;
  int64_t head_stride;
};

struct AttentionCall {
  Strided query, key, value, out;
};

template <typename T>
void run(const dh::Step& step, const dh::Layer& layer, const AttentionCall& call, int num_threads) {
  const auto input = [](const Strided& rows) {
    return dh::Rows<const T>{static_cast<const T*>(rows.data), rows.row_stride, rows.head_stride};
  };
  const dh::Operands<T> op = {input(call.query), input(call.key), input(call.value),
                              {static_cast<T*>(call.out.data), call.out.row_stride, call.out.head_stride}};
  static thread_local dh::AttentionPlan plan;
  static thread_local dh::PartialResults partials;
  dh::AttentionPlan& shared_plan = plan;  // of the calling thread, for the whole team
  dh::PartialResults& shared_partials = partials;
  dh::run_in_two_phases(
      num_threads,
      [&](const dh::Share& share) {
        if (share.index == 0) {
          shared_plan.build(step, layer, share.size);
          shared_partials.reserve(shared_plan.num_partials, layer.head_dim);
          if (dh::observes(step, layer)) shared_partials.reserve_sums(shared_plan.items.size());
        }
        dh::write_kv(share, step, layer, op);
      },
      [&](const dh::Share& share) {
        dh::prefetch_first_step(share, step, layer, shared_plan, sizeof(T));
        dh::paged_attention(share, step, layer, op, shared_plan, shared_partials);
      });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int drafthouse_attention_max_head_dim() { return dh::kMaxHeadDim; }

void drafthouse_paged_attention_f32(const dh::Step* step, const dh::Layer* layer, const AttentionCall* call,
                                    int num_threads) {
  run<float>(*step, *layer, *call, num_threads);
}

void drafthouse_paged_attention_bf16(const dh::Step* step, const dh::Layer* layer, const AttentionCall* call,
                                     int num_threads) {
  run<dh::bf16>(*step, *layer, *call, num_threads);
}
}
#pragma GCC visibility pop
