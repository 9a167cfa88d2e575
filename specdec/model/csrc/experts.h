// The experts of a mixture: each row goes through the few experts that were chosen for it.
//
// Rows are brought together expert by expert, so that an expert's weights are read once per batch. What a row
// gets does not depend on the others: each product is one sum in ascending order, and a row's experts are
// added in the order of their numbers.
#pragma once

#include <vector>

#include "linear.h"
#include "rowwise.h"

namespace dh {

struct ExpertCall {
  Op activation;
  int32_t num_experts;
  int32_t num_chosen;     // experts per row
  int64_t expert_stride;  // bytes
  bool is_packed;
  int64_t weight_stride;
  int32_t num_units;
  int32_t num_columns;
  int64_t num_rows;
  const int64_t* chosen;  // [rows, num_chosen]
  int64_t chosen_stride;

  Linear linear(const char* weights, int expert) const {
    const char* own = weights + expert * expert_stride;
    return {is_packed ? reinterpret_cast<const uint32_t*>(own) : nullptr, own, weight_stride, nullptr, num_units,
            num_columns};
  }
};

struct ExpertShares {
  const char* data;
  Dtype dtype;
  int64_t row_stride;

  float at(int64_t row, int64_t slot) const {
    return load_lanes(data + (row * row_stride + slot) * size_of(dtype), dtype, 0, 1)[0];
  }
};

// A row, and which of its chosen experts.
struct ExpertSlot {
  int64_t row;
  int64_t slot;
};

// The rows of each expert, in order. Every thread makes its own: it is less than a share of the work.
class ExpertRows {
 public:
  void build(const ExpertCall& call) {
    starts_.assign(call.num_experts + 1, 0);
    each(call, [&](int64_t expert, ExpertSlot) { ++starts_[expert + 1]; });
    for (int e = 0; e < call.num_experts; ++e) starts_[e + 1] += starts_[e];
    slots_.resize(starts_[call.num_experts]);
    next_.assign(starts_.begin(), starts_.end() - 1);
    each(call, [&](int64_t expert, ExpertSlot slot) { slots_[next_[expert]++] = slot; });
  }

  const ExpertSlot* of(int expert) const { return slots_.data() + starts_[expert]; }
  int64_t count(int expert) const { return starts_[expert + 1] - starts_[expert]; }

 private:
  // Places that are no expert's number (garbage behind rows that are not finite) are left out.
  template <typename F>
  static void each(const ExpertCall& call, const F& f) {
    for (int64_t row = 0; row < call.num_rows; ++row) {
      for (int64_t slot = 0; slot < call.num_chosen; ++slot) {
        const int64_t expert = call.chosen[row * call.chosen_stride + slot];
        if (expert >= 0 && expert < call.num_experts) f(expert, ExpertSlot{row, slot});
      }
    }
  }

  std::vector<int64_t> starts_, next_;
  std::vector<ExpertSlot> slots_;
};

template <typename T>
struct ExpertScratch {
  ExpertRows rows;
  std::vector<T> gathered, first, second;
  std::vector<float> sums;

  static ExpertScratch& mine() {
    static thread_local ExpertScratch scratch;
    return scratch;
  }
};

inline f32v activate(Op op, f32v x) {
  switch (op) {
    case Op::kSilu: return x * sigmoidv(x);
    case Op::kRelu: return at_least(x, f32v{});
    case Op::kGelu: return x * 0.5f * (1.0f + erfv(x * 0.70710678f));
    default: return x * 0.5f * (1.0f + tanhv(0.79788456f * (x + 0.044715f * x * x * x)));
  }
}

// y [rows, num_chosen, columns] = activation(gate x) * (up x), for panels [first, last) of each expert.
template <typename T>
void experts_up(const ExpertCall& call, const char* gate, const char* up, const T* x, int64_t x_stride, T* y,
                int64_t y_stride, int first, int last) {
  if (first == last) return;
  ExpertScratch<T>& mine = ExpertScratch<T>::mine();
  mine.rows.build(call);
  const int64_t inner = int64_t(call.num_units) * Units<T>::per;
  const int64_t width = int64_t(last - first) * kPanelColumns;
  const int64_t begin = int64_t(first) * kPanelColumns;
  const int64_t end = std::min<int64_t>(call.num_columns, int64_t(last) * kPanelColumns);
  for (int e = 0; e < call.num_experts; ++e) {
    const int64_t count = mine.rows.count(e);
    if (count == 0) continue;
    const ExpertSlot* slots = mine.rows.of(e);
    mine.gathered.resize(std::max<size_t>(mine.gathered.size(), count * inner));
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(x + slots[i].row * x_stride, inner, mine.gathered.data() + i * inner);
    for (auto [weights, target] : {std::pair{gate, &mine.first}, std::pair{up, &mine.second}}) {
      target->resize(std::max<size_t>(target->size(), count * width));
      // The product writes at columns of the whole; the share's memory begins at its first.
      linear<T>(call.linear(weights, e), mine.gathered.data(), inner, target->data() - begin, width, count, first, last);
    }
    for (int64_t i = 0; i < count; ++i) {
      T* out = y + slots[i].row * y_stride + slots[i].slot * call.num_columns;
      for (int64_t column = begin; column < end; column += kLanes) {
        const int here = int(std::min<int64_t>(kLanes, end - column));
        const int64_t from = i * width + column - begin;
        const f32v gated = rounded<T>(activate(call.activation, load_tail(mine.first.data() + from, here)));
        store_tail(out + column, gated * load_tail(mine.second.data() + from, here), here);
      }
    }
  }
}

// y [rows, columns] = sum over a row's experts of share * (down x), x [rows, num_chosen, inner].
template <typename T>
void experts_down(const ExpertCall& call, const char* down, const T* x, int64_t x_stride, const ExpertShares& shares,
                  T* y, int64_t y_stride, int first, int last) {
  if (first == last) return;
  ExpertScratch<T>& mine = ExpertScratch<T>::mine();
  mine.rows.build(call);
  const int64_t inner = int64_t(call.num_units) * Units<T>::per;
  const int64_t width = int64_t(last - first) * kPanelColumns;
  const int64_t begin = int64_t(first) * kPanelColumns;
  const int64_t end = std::min<int64_t>(call.num_columns, int64_t(last) * kPanelColumns);
  mine.sums.assign(call.num_rows * width, 0.0f);
  for (int e = 0; e < call.num_experts; ++e) {
    const int64_t count = mine.rows.count(e);
    if (count == 0) continue;
    const ExpertSlot* slots = mine.rows.of(e);
    mine.gathered.resize(std::max<size_t>(mine.gathered.size(), count * inner));
    mine.first.resize(std::max<size_t>(mine.first.size(), count * width));
    for (int64_t i = 0; i < count; ++i)
      std::copy_n(x + slots[i].row * x_stride + slots[i].slot * inner, inner, mine.gathered.data() + i * inner);
    linear<T>(call.linear(down, e), mine.gathered.data(), inner, mine.first.data() - begin, width, count, first, last);
    for (int64_t i = 0; i < count; ++i) {
      const float share = shares.at(slots[i].row, slots[i].slot);
      float* sum = mine.sums.data() + slots[i].row * width;
      for (int64_t k = 0; k < width; k += kLanes) {
        const int here = int(std::min<int64_t>(kLanes, end - begin - k));
        if (here <= 0) break;
        storev(sum + k, loadv(sum + k) + share * load_tail(mine.first.data() + i * width + k, here));
      }
    }
  }
  for (int64_t row = 0; row < call.num_rows; ++row)
    for (int64_t column = begin; column < end; column += kLanes)
      store_tail(y + row * y_stride + column, loadv(mine.sums.data() + row * width + column - begin),
                 int(std::min<int64_t>(kLanes, end - column)));
}

}  // namespace dh
