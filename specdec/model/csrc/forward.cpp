// Runs a lowered forward: a list of instructions over buffers, in one parallel region.
//
// specdec/model/lowering.py makes the list and decides where threads must wait for each other;
// specdec/model/native_forward.py mirrors the structs.

#include <vector>

#include "linear.h"
#include "paged_attention.h"
#include "rowwise.h"

namespace {

using dh::bf16;
using dh::Dtype;
using dh::Member;
using dh::Operand;

enum class Kind : int32_t { kElementwise = 0, kMean, kNorm, kRotary, kGather, kLinear, kAttention };

// How the team shares an instruction out.
enum class Share : int32_t {
  kRows = 0,  // each thread some rows
  kColumns,   // each thread some panels of 16 columns, all rows
  kOwn,       // attention: by its own plan
};

enum class Index : int32_t { kTokens = 0, kPositions, kLogitRows };

struct Instruction {
  Kind kind;
  dh::Op op;
  Share share;
  int32_t sync;        // wait for all threads first
  int32_t logit_rows;  // runs over the rows that yield logits, not over all
  dh::Extent extent;
  Operand out, a, b, c;  // `buffer` -1: absent
  float scalar, scalar2;
  dh::Norm norm;
  Index index;          // gather: which ids
  int32_t num_indices;  // gather: ids are below this
  int32_t weight;       // linear: buffer of the packed panels
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

struct Program {
  std::vector<Instruction> instructions;
  std::vector<char*> buffers;
  std::vector<dh::AttentionPlan> plans;
  dh::PartialResults partials;
};

class Run {
 public:
  Run(Program& program, const dh::Step& step, const dh::Layer* layers, const Inputs& inputs)
      : program_(program), step_(step), layers_(layers), inputs_(inputs) {}

  // 0, or 1 when an id is out of range.
  int operator()() {
    dh::run_team(inputs_.num_threads, [this](const Member& member) {
      if (member.index == 0) plan(member.size);
      int64_t first_row[2], last_row[2];
      member.share(step_.num_rows, &first_row[0], &last_row[0]);
      member.share(inputs_.num_logit_rows, &first_row[1], &last_row[1]);
      for (size_t i = 0; i < program_.instructions.size(); ++i) {
        const Instruction& instruction = program_.instructions[i];
        if (instruction.sync) member.sync();
        switch (instruction.share) {
          case Share::kRows:
            rows(instruction, first_row[instruction.logit_rows], last_row[instruction.logit_rows]);
            break;
          case Share::kColumns: columns(member, instruction); break;
          case Share::kOwn: attention(member, instruction); break;
        }
      }
    });
    return failed_.load(std::memory_order_relaxed);
  }

 private:
  void plan(int num_threads) {
    std::vector<bool> planned(program_.plans.size(), false);
    int64_t num_partials = 0;
    int head_dim = 0;
    for (const Instruction& instruction : program_.instructions) {
      if (instruction.kind != Kind::kAttention || planned[instruction.plan]) continue;
      const dh::Layer& layer = layers_[instruction.layer];
      program_.plans[instruction.plan].build(step_, layer, num_threads);
      planned[instruction.plan] = true;
      num_partials = std::max(num_partials, program_.plans[instruction.plan].num_partials);
      head_dim = std::max(head_dim, layer.head_dim);
    }
    program_.partials.reserve(num_partials, head_dim);
  }

  // Address of the operand's row, null when it is absent.
  char* at(const Operand& operand, int64_t row) const {
    if (operand.buffer < 0) return nullptr;
    if (operand.by_position) row = step_.positions[row];
    return program_.buffers[operand.buffer] +
           (operand.offset + row * operand.row_stride) * dh::size_of(operand.dtype);
  }

  void rows(const Instruction& in, int64_t first, int64_t last) {
    if (in.kind == Kind::kLinear) return;  // always by columns
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

  void columns(const Member& member, const Instruction& in) {
    const int num_columns = in.kind == Kind::kLinear ? in.num_columns : in.extent.n[2];
    const int64_t num_rows = in.logit_rows ? inputs_.num_logit_rows : step_.num_rows;
    int64_t first, last;
    member.share((num_columns + dh::kLanes - 1) / dh::kLanes, &first, &last);
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
    const dh::Linear linear = {reinterpret_cast<const uint32_t*>(program_.buffers[in.weight]), at(in.b, 0),
                               in.num_units, in.num_columns};
    dh::linear<T>(linear, reinterpret_cast<const T*>(at(in.a, 0)), in.a.row_stride,
                  reinterpret_cast<T*>(at(in.out, 0)), in.out.row_stride, num_rows, first, last);
  }

  void attention(const Member& member, const Instruction& in) {
    if (in.out.dtype == Dtype::kFloat)
      attend<float>(member, in);
    else
      attend<bf16>(member, in);
  }

  template <typename T>
  dh::Rows<T> heads(const Operand& operand) const {
    return {reinterpret_cast<T*>(at(operand, 0)), operand.row_stride, operand.stride[1]};
  }

  template <typename T>
  void attend(const Member& member, const Instruction& in) {
    const dh::Layer& layer = layers_[in.layer];
    const dh::Operands<T> op = {heads<const T>(in.a), heads<const T>(in.b), heads<const T>(in.c), heads<T>(in.out)};
    dh::write_kv(member, step_, layer, op);
    member.sync();
    dh::paged_attention(member, step_, layer, op, program_.plans[in.plan], program_.partials);
  }

  Program& program_;
  const dh::Step& step_;
  const dh::Layer* layers_;
  const Inputs& inputs_;
  std::atomic<int> failed_{0};
};

template <typename T>
void pack(const void* weight, int64_t columns, int64_t inner, void* panels, int num_threads) {
  dh::run_team(num_threads, [&](const Member& member) {
    dh::pack_panels(static_cast<const T*>(weight), columns, inner, static_cast<uint32_t*>(panels), member);
  });
}

}  // namespace

extern "C" {

int drafthouse_instruction_size() { return sizeof(Instruction); }

Program* drafthouse_program_create(const Instruction* instructions, int64_t count, int64_t num_buffers,
                                   int64_t num_plans) {
  auto* program = new Program;
  program->instructions.assign(instructions, instructions + count);
  program->buffers.assign(num_buffers, nullptr);
  program->plans.resize(num_plans);
  return program;
}

void drafthouse_program_destroy(Program* program) { delete program; }

void drafthouse_program_set_buffer(Program* program, int64_t index, void* data) {
  program->buffers[index] = static_cast<char*>(data);
}

int drafthouse_program_run(Program* program, const dh::Step* step, const dh::Layer* layers, const Inputs* inputs) {
  return Run(*program, *step, layers, *inputs)();
}

void drafthouse_pack_f32(const void* weight, int64_t columns, int64_t inner, void* panels, int num_threads) {
  pack<float>(weight, columns, inner, panels, num_threads);
}

void drafthouse_pack_bf16(const void* weight, int64_t columns, int64_t inner, void* panels, int num_threads) {
  pack<bf16>(weight, columns, inner, panels, num_threads);
}
}
