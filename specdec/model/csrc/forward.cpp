// Runs a lowered forward: a list of instructions over buffers.
//
// specdec/model/lowering.py makes the list and decides where threads must wait for each other;
// specdec/model/native_forward.py mirrors the structs.

#include <vector>

#include "linear.h"
#include "paged_attention.h"
#include "pool.h"
#include "rowwise.h"

namespace {

using dh::bf16;
using dh::Dtype;
using dh::Operand;
using dh::Share;

enum class Kind : int32_t { kElementwise = 0, kMean, kNorm, kRotary, kGather, kLinear, kWriteKv, kAttention };

// How an instruction is cut into shares.
enum class Cut : int32_t {
  kRows = 0,  // some rows each
  kColumns,   // some panels of 16 columns each, of all rows
  kPlanned,       // attention: by its own plan
};

enum class Index : int32_t { kTokens = 0, kPositions, kLogitRows };

struct Instruction {
  Kind kind;
  dh::Op op;
  Cut cut;
  int32_t sync;        // needs what other shares of earlier instructions have written: a phase begins
  int32_t logit_rows;  // runs over the rows that yield logits, not over all
  dh::Extent extent;
  Operand out, a, b, c;  // `buffer` -1: absent
  float scalar, scalar2;
  dh::Norm norm;
  Index index;          // gather: which ids
  int32_t num_indices;  // gather: ids are below this
  int32_t weight;       // linear: buffer of the weights
  int32_t is_packed;    // linear: they are panels; else rows of W
  int64_t weight_stride;  // linear, not packed: elements between rows
  int32_t num_units;
  int32_t num_columns;
  int32_t layer;        // attention
  int32_t plan;         // attention: layers with equal heads and window share a plan
};

struct Inputs {
  const int64_t* token_ids;
  const int64_t* logit_rows;
  int32_t num_logit_rows;
  int32_t num_threads;
};

std::vector<int> find_phases(const std::vector<Instruction>& instructions) {
  std::vector<int> starts;
  for (size_t i = 0; i < instructions.size(); ++i)
    if (i == 0 || instructions[i].sync) starts.push_back(int(i));
  starts.push_back(int(instructions.size()));
  return starts;
}

class Program : public dh::Phased {
 public:
  Program(std::vector<Instruction> instructions, int64_t num_buffers, int64_t num_plans)
      : Program(find_phases(instructions), std::move(instructions), num_buffers, num_plans) {}
  ~Program() override { dh::Pool::instance().quiesce(); }

  void set_buffer(int64_t index, void* data) { buffers_[index] = static_cast<char*>(data); }

  // 0, or 1 when an id is out of range.
  int run(const dh::Step& step, const dh::Layer* layers, const Inputs& inputs) {
    step_ = step;
    layers_ = layers;
    inputs_ = inputs;
    failed_.store(0, std::memory_order_relaxed);
    plan(inputs.num_threads);
    dh::Pool::instance().run(*this, inputs.num_threads);
    return failed_.load(std::memory_order_relaxed);
  }

 private:
  Program(std::vector<int>&& phases, std::vector<Instruction>&& instructions, int64_t num_buffers, int64_t num_plans)
      : Phased(int(phases.size()) - 1),
        phases_(std::move(phases)),
        instructions_(std::move(instructions)),
        buffers_(num_buffers, nullptr),
        plans_(num_plans) {}

  void plan(int num_shares) {
    std::vector<bool> planned(plans_.size(), false);
    int64_t num_partials = 0;
    int head_dim = 0;
    for (const Instruction& instruction : instructions_) {
      if (instruction.kind != Kind::kAttention || planned[instruction.plan]) continue;
      const dh::Layer& layer = layers_[instruction.layer];
      plans_[instruction.plan].build(step_, layer, num_shares);
      planned[instruction.plan] = true;
      num_partials = std::max(num_partials, plans_[instruction.plan].num_partials);
      head_dim = std::max(head_dim, layer.head_dim);
    }
    partials_.reserve(num_partials, head_dim);
  }

  void execute(int phase, const Share& share) override {
    for (int i = phases_[phase]; i < phases_[phase + 1]; ++i) {
      const Instruction& instruction = instructions_[i];
      switch (instruction.cut) {
        case Cut::kRows: rows(share, instruction); break;
        case Cut::kColumns: columns(share, instruction); break;
        case Cut::kPlanned: attention(share, instruction); break;
      }
    }
  }

  // Address of the operand's row, null when it is absent.
  char* at(const Operand& operand, int64_t row) const {
    if (operand.buffer < 0) return nullptr;
    if (operand.by_position) row = step_.positions[row];
    return buffers_[operand.buffer] +
           (operand.offset + row * operand.row_stride) * dh::size_of(operand.dtype);
  }

  void rows(const Share& share, const Instruction& in) {
    if (in.kind == Kind::kWriteKv) {
      in.a.dtype == Dtype::kFloat ? write_kv<float>(share, in) : write_kv<bf16>(share, in);
      return;
    }
    int64_t first, last;
    share.of(in.logit_rows ? inputs_.num_logit_rows : step_.num_rows, &first, &last);
    for (int64_t row = first; row < last; ++row) {
      if (in.kind == Kind::kGather) {
        gather(in, row);
        continue;
      }
      const dh::RowPointers pointers = {at(in.out, row), at(in.a, row), at(in.b, row)};
      if (in.kind == Kind::kElementwise)
        dh::elementwise_row(in.op, in.extent, in.out, in.a, in.b, pointers, in.scalar, in.scalar2, 0, in.extent.n[2]);
      else if (in.kind == Kind::kNorm)
        dh::norm_row(in.norm, in.extent, in.out, in.a, in.b, in.c, pointers, at(in.c, row));
      else if (in.kind == Kind::kRotary)
        dh::rotary_row(in.extent, in.out, in.a, in.b, in.c, pointers, at(in.c, row));
      else
        dh::mean_row(in.extent, in.out, in.a, pointers);
    }
  }

  void gather(const Instruction& in, int64_t row) {
    const int64_t* ids = in.index == Index::kTokens      ? inputs_.token_ids
                         : in.index == Index::kPositions ? step_.positions
                                                         : inputs_.logit_rows;
    const int64_t limit = in.index == Index::kLogitRows ? step_.num_rows : in.num_indices;
    int64_t id = ids[row];
    if (id < 0 || id >= limit) {
      failed_.store(1, std::memory_order_relaxed);
      id = 0;
    }
    const size_t bytes = in.extent.n[2] * dh::size_of(in.out.dtype);
    std::memcpy(at(in.out, row), at(in.a, id), bytes);
  }

  void columns(const Share& share, const Instruction& in) {
    const int num_columns = in.kind == Kind::kLinear ? in.num_columns : in.extent.n[2];
    const int64_t num_rows = in.logit_rows ? inputs_.num_logit_rows : step_.num_rows;
    int64_t first, last;
    share.of((num_columns + dh::kLanes - 1) / dh::kLanes, &first, &last);
    if (in.kind == Kind::kLinear) {
      if (in.a.dtype == Dtype::kFloat)
        linear<float>(in, num_rows, int(first), int(last));
      else
        linear<bf16>(in, num_rows, int(first), int(last));
      return;
    }
    const int begin = int(first) * dh::kLanes, end = std::min(num_columns, int(last) * dh::kLanes);
    for (int64_t row = 0; row < num_rows; ++row) {
      const dh::RowPointers pointers = {at(in.out, row), at(in.a, row), at(in.b, row)};
      dh::elementwise_row(in.op, in.extent, in.out, in.a, in.b, pointers, in.scalar, in.scalar2, begin, end);
    }
  }

  template <typename T>
  void linear(const Instruction& in, int64_t num_rows, int first, int last) {
    const void* weight = buffers_[in.weight];
    const dh::Linear linear = {in.is_packed ? static_cast<const uint32_t*>(weight) : nullptr,
                               weight, in.weight_stride, at(in.b, 0), in.num_units, in.num_columns};
    dh::linear<T>(linear, reinterpret_cast<const T*>(at(in.a, 0)), in.a.row_stride,
                  reinterpret_cast<T*>(at(in.out, 0)), in.out.row_stride, num_rows, first, last);
  }

  template <typename T>
  dh::Rows<T> heads(const Operand& operand) const {
    return {reinterpret_cast<T*>(at(operand, 0)), operand.row_stride, operand.stride[1]};
  }

  template <typename T>
  void write_kv(const Share& share, const Instruction& in) const {
    const dh::Operands<T> op = {{}, heads<const T>(in.a), heads<const T>(in.b), {}};
    dh::write_kv(share, step_, layers_[in.layer], op);
  }

  void attention(const Share& share, const Instruction& in) {
    in.out.dtype == Dtype::kFloat ? attend<float>(share, in) : attend<bf16>(share, in);
  }

  template <typename T>
  void attend(const Share& share, const Instruction& in) {
    const dh::Operands<T> op = {heads<const T>(in.a), {}, {}, heads<T>(in.out)};
    dh::paged_attention(share, step_, layers_[in.layer], op, plans_[in.plan], partials_);
  }

  const std::vector<int> phases_;
  const std::vector<Instruction> instructions_;
  std::vector<char*> buffers_;
  std::vector<dh::AttentionPlan> plans_;
  dh::PartialResults partials_;
  dh::Step step_ = {};
  const dh::Layer* layers_ = nullptr;
  Inputs inputs_ = {};
  std::atomic<int> failed_{0};
};

}  // namespace

extern "C" {

int drafthouse_instruction_size() { return sizeof(Instruction); }

Program* drafthouse_program_create(const Instruction* instructions, int64_t count, int64_t num_buffers,
                                   int64_t num_plans) {
  return new Program({instructions, instructions + count}, num_buffers, num_plans);
}

void drafthouse_program_destroy(Program* program) { delete program; }

void drafthouse_program_set_buffer(Program* program, int64_t index, void* data) { program->set_buffer(index, data); }

int drafthouse_program_run(Program* program, const dh::Step* step, const dh::Layer* layers, const Inputs* inputs) {
  return program->run(*step, layers, *inputs);
}

void drafthouse_pack_f32(const float* weight, int64_t columns, int64_t inner, uint32_t* panels) {
  dh::pack_panels(weight, inner, columns, inner / dh::Packing<float>::per, panels);
}

void drafthouse_pack_bf16(const bf16* weight, int64_t columns, int64_t inner, uint32_t* panels) {
  dh::pack_panels(weight, inner, columns, inner / dh::Packing<bf16>::per, panels);
}
}
