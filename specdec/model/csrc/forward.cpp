// Runs a lowered forward: a list of instructions over buffers.
//
// specdec/model/lowering.py makes the list and decides where threads must wait for each other;
// specdec/model/instructions.py and native_forward.py mirror the structs.

#include <chrono>
#include <utility>
#include <vector>

#include "experts.h"
#include "layout.h"
#include "linear.h"
#include "operations.h"
#include "paged_attention.h"
#include "pool.h"
#include "quantized_linear.h"
#include "ranks.h"
#include "rowwise.h"

namespace {

using dh::bf16;
using dh::Dtype;
using dh::Operand;
using dh::Share;
using dh::WeightFormat;
using Clock = std::chrono::steady_clock;

enum class Kind : int32_t {
  kElementwise = 0,
  kMean,
  kNorm,
  kRotary,
  kGather,
  kLinear,
  kWriteKv,
  kAttention,
  kSoftmax,
  kLargest,
  kExpertsUp,
  kExpertsDown,
  kHandOn,   // ranks: rows into the own slot
  kFetch,    // ranks without shared memory: the other slots are filled
  kSumUp,    // ranks: everyone's rows added
  kLineUp,   // ranks: everyone's rows side by side
  kSpread,   // elements to their places in a wider row
};

// How an instruction is cut into shares.
enum class Cut : int32_t {
  kRows = 0,  // some rows each
  kColumns,   // some panels of columns each, of all rows
  kPlanned,       // attention: by its own plan
};

enum class Index : int32_t { kTokens = 0, kLogitRows = 2 };

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
  WeightFormat weight_format;
  int32_t is_packed;    // linear, floats: they are panels; else rows of W
  int64_t weight_stride;  // linear, not packed: elements between rows
  int32_t num_units;
  int32_t num_columns;
  int32_t scales;         // linear, quantized: buffer of the scales
  int32_t num_groups;     // linear, quantized: scales per column
  int32_t layer;        // attention
  int32_t plan;         // attention: layers with equal heads and window share a plan
  int32_t second_weight;  // experts, up: beside the gate's
  int32_t num_experts;
  int64_t expert_stride;  // bytes between the weights (or panels) of one expert and the next
  int32_t first_index;    // gather: of ids, the first in the table; ids of other ranks' tables give zeros
  int32_t num_in_table;
  int32_t meeting;        // ranks: number of the exchange of rows within a forward, from 1
  int32_t unused;
};

struct Inputs {
  const int64_t* token_ids;
  const int64_t* position_ids;  // rows of tables over positions
  const int64_t* logit_rows;
  int32_t num_logit_rows;
  int32_t num_threads;
};

// Where the fp32 logits [rows, vocab_size] are.
struct Logits {
  int32_t buffer;
  int32_t vocab_size;
};

// What becomes of the logits, when tokens are chosen from them; see dh::Chooser.
struct Choice {
  const dh::Chooser* chooser;
  const int32_t* sequences;
  const int64_t* positions;
  int64_t* token_ids;
};

// Hidden states that are handed out beside the logits, one row for each of the batch; 0 bytes: none.
struct Hidden {
  int32_t buffer;
  int64_t row_bytes;
};

// Instructions at which a phase begins. The last phase has none: in it, tokens are chosen.
std::vector<int> find_phases(const std::vector<Instruction>& instructions) {
  std::vector<int> starts;
  for (size_t i = 0; i < instructions.size(); ++i)
    if (i == 0 || instructions[i].sync) starts.push_back(int(i));
  starts.insert(starts.end(), 2, int(instructions.size()));
  return starts;
}

// Of each instruction, the next linear layer whose floats are packed; -1: there is none.
std::vector<int> find_next_linear(const std::vector<Instruction>& instructions) {
  std::vector<int> next(instructions.size(), -1);
  for (int i = int(instructions.size()) - 2; i >= 0; --i) {
    const Instruction& in = instructions[i + 1];
    const bool is_packed = in.kind == Kind::kLinear && in.is_packed && in.weight_format == WeightFormat::kFloat;
    next[i] = is_packed ? i + 1 : next[i + 1];
  }
  return next;
}

class Program : public dh::Phased {
 public:
  Program(std::vector<Instruction> instructions, int64_t num_buffers, int64_t num_plans, Logits logits)
      : Program(find_phases(instructions), std::move(instructions), num_buffers, num_plans, logits) {}
  ~Program() override { dh::Pool::instance().quiesce(); }

  void set_buffer(int64_t index, void* data) { buffers_[index] = static_cast<char*>(data); }

  // Needed where a weight is quantized.
  void set_quantized_linear(dh::QuantizedLinearKernel* kernel) { quantized_linear_ = kernel; }

  // Ranks: `link` must outlive the program, `num_meetings` are in each run.
  void set_link(const dh::RankLink* link, int num_meetings) {
    link_ = link;
    num_meetings_ = num_meetings;
  }

  void set_hidden(const Hidden& hidden) { hidden_ = hidden; }
  int64_t hidden_row_bytes() const { return hidden_.row_bytes; }

  // Copies hidden states [first, last) of the latest run; returns where the next ones go.
  char* copy_hidden(int64_t first, int64_t last, char* to) const {
    const char* rows = buffers_[hidden_.buffer];
    return std::copy(rows + first * hidden_.row_bytes, rows + last * hidden_.row_bytes, to);
  }

  // Of rows that go on: their hidden states are given to the next forward as this buffer.
  void set_feedback(int buffer) { feedback_ = buffer; }

  // Keeps row `row` of the latest run for the next one, behind `rows`.
  void keep_for_next(int64_t row, std::vector<char>& rows) const {
    if (feedback_ < 0) return;
    rows.resize(rows.size() + hidden_.row_bytes);
    copy_hidden(row, row + 1, &rows[rows.size() - hidden_.row_bytes]);
  }

  // Gives the next run what was kept for it; `rows` must live as long.
  void give(std::vector<char>& rows) {
    if (feedback_ >= 0) buffers_[feedback_] = rows.data();
  }

  // 0, 1 when an id is out of range, or 2 when another rank is lost. With `choice`, tokens are chosen as well.
  int run(const dh::Step& step, const dh::Layer* layers, const Inputs& inputs, const Choice* choice = nullptr) {
    step_ = step;
    layers_ = layers;
    inputs_ = inputs;
    choice_ = choice;
    failed_.store(0, std::memory_order_relaxed);
    plan(inputs.num_threads);
    dh::Pool::instance().run(*this, inputs.num_threads);
    meetings_before_ += num_meetings_;
    return failed_.load(std::memory_order_relaxed);
  }

  // When the latest run with a choice had its logits.
  Clock::time_point had_logits() const { return had_logits_; }

 private:
  Program(std::vector<int>&& phases, std::vector<Instruction>&& instructions, int64_t num_buffers, int64_t num_plans,
          Logits logits)
      : Phased(int(phases.size()) - 1),
        phases_(std::move(phases)),
        instructions_(std::move(instructions)),
        next_linear_(find_next_linear(instructions_)),
        buffers_(num_buffers, nullptr),
        plans_(num_plans),
        logits_(logits) {}

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
      if (step_.observation.masses != nullptr) partials_.reserve_sums(plans_[instruction.plan].items.size());
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
    if (phases_[phase] == int(instructions_.size()) && choice_ != nullptr) choose(share);
  }

  void choose(const Share& share) {
    if (share.index == 0) had_logits_ = Clock::now();
    int64_t first, last;
    share.of(inputs_.num_logit_rows, &first, &last);
    if (first == last) return;
    choice_->chooser->choose(choice_->chooser->parameters, reinterpret_cast<const float*>(buffers_[logits_.buffer]),
                             logits_.vocab_size, first, last, choice_->sequences, choice_->positions,
                             choice_->token_ids);
  }

  // Address of the operand's row, null when it is absent.
  char* at(const Operand& operand, int64_t row) const {
    if (operand.buffer < 0) return nullptr;
    if (operand.by_position) row = inputs_.position_ids[row];
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
    if (in.kind >= Kind::kFetch && in.kind <= Kind::kLineUp) {
      take(share, in, first, last);
      return;
    }
    for (int64_t row = first; row < last; ++row) {
      if (in.kind == Kind::kGather) {
        gather(in, row);
        continue;
      }
      if (in.kind == Kind::kHandOn) {
        hand_on(in, row, 0, in.extent.n[2]);
        continue;
      }
      if (in.kind == Kind::kSpread) {
        dh::spread_row(in.extent.n[2], in.num_columns, at(in.out, row), in.out.dtype, at(in.a, row),
                       reinterpret_cast<const int64_t*>(buffers_[in.b.buffer]));
        continue;
      }
      const dh::RowPointers pointers = {at(in.out, row), at(in.a, row), at(in.b, row)};
      if (in.kind == Kind::kElementwise)
        dh::elementwise_row(in.op, in.extent, in.out, in.a, in.b, pointers, in.scalar, in.scalar2, 0, in.extent.n[2]);
      else if (in.kind == Kind::kNorm)
        dh::norm_row(in.norm, in.extent, in.out, in.a, in.b, in.c, pointers, at(in.c, row));
      else if (in.kind == Kind::kRotary)
        dh::rotary_row(in.extent, in.out, in.a, in.b, in.c, pointers, at(in.c, row));
      else if (in.kind == Kind::kSoftmax)
        dh::softmax_row(in.extent, in.out, in.a, pointers);
      else if (in.kind == Kind::kLargest)
        dh::largest_row(in.extent.n[2], in.num_columns, in.out, in.a, pointers);
      else
        dh::mean_row(in.extent, in.out, in.a, pointers, in.scalar);
    }
  }

  void gather(const Instruction& in, int64_t row) {
    const int64_t* ids = in.index == Index::kTokens ? inputs_.token_ids : inputs_.logit_rows;
    const int64_t limit = in.index == Index::kLogitRows ? step_.num_rows : in.num_indices;
    int64_t id = ids[row];
    if (id < 0 || id >= limit) {
      int none = 0;
      failed_.compare_exchange_strong(none, 1);
      id = 0;
    }
    const size_t bytes = in.extent.n[2] * dh::size_of(in.out.dtype);
    if (in.index == Index::kTokens) id -= in.first_index;
    if (in.index == Index::kTokens && (id < 0 || id >= in.num_in_table))
      std::memset(at(in.out, row), 0, bytes);
    else
      std::memcpy(at(in.out, row), at(in.a, id), bytes);
  }

  uint32_t number_of(const Instruction& in) const { return meetings_before_ + uint32_t(in.meeting); }

  // Columns [first, last) of a row.
  void hand_on(const Instruction& in, int64_t row, int64_t first, int64_t last) const {
    const int64_t size = dh::size_of(in.a.dtype);
    char* slot = dh::Meeting(*link_).own_slot(number_of(in));
    std::memcpy(slot + (row * in.extent.n[2] + first) * size, at(in.a, row) + first * size, (last - first) * size);
  }

  // Everyone's rows [first, last); what comes before in this phase is nothing.
  void take(const Share& share, const Instruction& in, int64_t first, int64_t last) {
    const dh::Meeting meeting(*link_);
    const uint32_t number = number_of(in);
    const int64_t size = dh::size_of(in.out.dtype), width = in.extent.n[2];
    if (in.kind == Kind::kFetch) {
      const int64_t num_rows = in.logit_rows ? inputs_.num_logit_rows : step_.num_rows;
      if (share.index == 0 && failed_.load() != 2 && !meeting.exchange(number, num_rows * width * size)) failed_.store(2);
      return;
    }
    // When somebody is lost, the rest of the forward is run through without waiting for anyone.
    if (meeting.is_shared() && (failed_.load(std::memory_order_relaxed) == 2 || !meeting.meet(number))) {
      failed_.store(2);
      return;
    }
    for (int64_t row = first; row < last; ++row) {
      char* out = at(in.out, row);
      for (int rank = 0; in.kind == Kind::kLineUp && rank < meeting.num_ranks(); ++rank)
        std::memcpy(out + rank * width * size, meeting.slot(number, rank) + row * width * size, width * size);
      for (int64_t k = 0; in.kind == Kind::kSumUp && k < width; k += dh::kLanes) {
        const int here = int(std::min<int64_t>(dh::kLanes, width - k));
        dh::f32v sum = {};
        for (int rank = 0; rank < meeting.num_ranks(); ++rank) {
          const char* from = meeting.slot(number, rank) + (row * width + k) * size;
          const dh::f32v part = dh::load_lanes(from, in.out.dtype, 1, here);
          sum = rank == 0 ? part : sum + part;
        }
        dh::store_lanes(out + k * size, in.out.dtype, 1, sum, here);
      }
    }
  }

  void columns(const Share& share, const Instruction& in) {
    const bool is_rowwise = in.kind == Kind::kElementwise || in.kind == Kind::kHandOn;
    const int num_columns = is_rowwise ? in.extent.n[2] : in.num_columns;
    const int64_t num_rows = in.logit_rows ? inputs_.num_logit_rows : step_.num_rows;
    int64_t first, last;
    share.of(dh::num_panels(num_columns), &first, &last);
    if (in.weight_format != WeightFormat::kFloat) {
      quantized_linear(in, num_rows, int(first), int(last));
      return;
    }
    if (!is_rowwise) {
      if (in.a.dtype == Dtype::kFloat)
        products<float>(share, in, num_rows, int(first), int(last));
      else
        products<bf16>(share, in, num_rows, int(first), int(last));
      return;
    }
    const int begin = int(first) * dh::kPanelColumns, end = std::min(num_columns, int(last) * dh::kPanelColumns);
    for (int64_t row = 0; row < num_rows; ++row) {
      if (in.kind == Kind::kHandOn) {
        if (begin < end) hand_on(in, row, begin, end);
        continue;
      }
      const dh::RowPointers pointers = {at(in.out, row), at(in.a, row), at(in.b, row)};
      dh::elementwise_row(in.op, in.extent, in.out, in.a, in.b, pointers, in.scalar, in.scalar2, begin, end);
    }
  }

  template <typename T>
  void products(const Share& share, const Instruction& in, int64_t num_rows, int first, int last) {
    if (in.kind == Kind::kLinear) return linear<T>(in, num_rows, first, last, next_panels(share, in));
    const dh::ExpertCall call = {in.op, in.num_experts, in.num_indices, in.expert_stride, in.is_packed != 0,
                                 in.weight_stride, in.num_units, in.num_columns, num_rows,
                                 reinterpret_cast<const int64_t*>(at(in.b, 0)), in.b.row_stride};
    const T* x = reinterpret_cast<const T*>(at(in.a, 0));
    T* y = reinterpret_cast<T*>(at(in.out, 0));
    if (in.kind == Kind::kExpertsUp)
      dh::experts_up<T>(call, buffers_[in.weight], buffers_[in.second_weight], x, in.a.row_stride, y,
                        in.out.row_stride, first, last);
    else
      dh::experts_down<T>(call, buffers_[in.weight], x, in.a.row_stride, {at(in.c, 0), in.c.dtype, in.c.row_stride}, y,
                          in.out.row_stride, first, last);
  }

  // Where this share of the next linear layer begins.
  dh::Panels next_panels(const Share& share, const Instruction& in) const {
    const int index = next_linear_[&in - instructions_.data()];
    if (index < 0) return {};
    const Instruction& next = instructions_[index];
    int64_t first, last;
    share.of(dh::num_panels(next.num_columns), &first, &last);
    const int64_t size = int64_t(next.num_units) * dh::kPanelColumns;
    return {reinterpret_cast<const uint32_t*>(buffers_[next.weight]) + first * size, size};
  }

  template <typename T>
  void linear(const Instruction& in, int64_t num_rows, int first, int last, const dh::Panels& next) {
    const void* weight = buffers_[in.weight];
    const dh::Linear linear = {in.is_packed ? static_cast<const uint32_t*>(weight) : nullptr,
                               weight, in.weight_stride, at(in.b, 0), in.num_units, in.num_columns};
    dh::linear<T>(linear, reinterpret_cast<const T*>(at(in.a, 0)), in.a.row_stride,
                  reinterpret_cast<T*>(at(in.out, 0)), in.out.row_stride, num_rows, first, last, next);
  }

  void quantized_linear(const Instruction& in, int64_t num_rows, int first, int last) {
    const bool is_bf16 = in.a.dtype != Dtype::kFloat;
    const dh::QuantizedLinear linear = {in.weight_format, buffers_[in.weight], buffers_[in.scales], at(in.b, 0),
                                        in.num_units * (is_bf16 ? 2 : 1), in.num_groups, in.num_columns};
    const dh::LinearRows rows = {at(in.a, 0), in.a.row_stride, at(in.out, 0), in.out.row_stride, num_rows, is_bf16};
    quantized_linear_(&linear, &rows, first, last);
  }

  template <typename T>
  dh::Rows<T> heads(const Operand& operand) const {
    return {reinterpret_cast<T*>(at(operand, 0)), operand.row_stride, operand.stride[1]};
  }

  template <typename T>
  void write_kv(const Share& share, const Instruction& in) const {
    const dh::Operands<T> op = {{}, heads<const T>(in.a), heads<const T>(in.b), {}};
    dh::write_kv(share, step_, layers_[in.layer], op);
    dh::prefetch_first_step(share, step_, layers_[in.layer], plans_[in.plan], sizeof(T));
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
  const std::vector<int> next_linear_;
  std::vector<char*> buffers_;
  std::vector<dh::AttentionPlan> plans_;
  dh::PartialResults partials_;
  dh::Step step_ = {};
  const dh::Layer* layers_ = nullptr;
  dh::QuantizedLinearKernel* quantized_linear_ = nullptr;
  Inputs inputs_ = {};
  const Logits logits_;
  const Choice* choice_ = nullptr;
  Clock::time_point had_logits_;
  std::atomic<int> failed_{0};
  const dh::RankLink* link_ = nullptr;
  int num_meetings_ = 0;
  uint32_t meetings_before_ = 0;
  Hidden hidden_ = {};
  int feedback_ = -1;
};

// Slices, the tokens chosen at their logit rows, and as many more behind the last of each as it wants.
class Generation {
 public:
  // `chosen` has room for num_logit_rows + num_more tokens of slice after slice, filled with kNone, and `hidden`,
  // unless it is null, for the hidden states of num_rows + num_more rows of each; the first forward is observed.
  Generation(Program& program, const dh::Layer* layers, std::vector<dh::Slice> slices, int64_t* chosen, char* hidden,
             const dh::Observation& observation)
      : program_(program), layers_(layers), slices_(std::move(slices)), observation_(observation) {
    for (const dh::Slice& slice : slices_) {
      sequences_.push_back(int32_t(sequences_.size()));
      targets_.push_back(chosen);
      chosen += slice.num_logit_rows + slice.num_more;
      hidden_targets_.push_back(hidden);
      if (hidden != nullptr) hidden += (slice.num_rows + slice.num_more) * program.hidden_row_bytes();
    }
  }

  // As Program::run. A sequence whose logits are not finite goes no further.
  int run(const int64_t* token_ids, const dh::Chooser& chooser, int num_threads) {
    while (!slices_.empty()) {
      if (const int failed = forward(token_ids, chooser, num_threads)) return failed;
      go_on();
      token_ids = next_ids_.data();
    }
    return 0;
  }

  double forward_s() const { return forward_s_; }
  double choose_s() const { return choose_s_; }

 private:
  int forward(const int64_t* token_ids, const dh::Chooser& chooser, int num_threads) {
    layout_.build(slices_, layers_[0].block_size);
    dh::Step step = layout_.step();
    step.observation = std::exchange(observation_, {});
    const std::vector<int64_t>& logit_rows = layout_.logit_rows();
    sequence_of_row_.clear();
    for (size_t s = 0; s < slices_.size(); ++s)
      sequence_of_row_.insert(sequence_of_row_.end(), slices_[s].num_logit_rows, sequences_[s]);
    position_of_row_.clear();
    for (int64_t row : logit_rows) position_of_row_.push_back(layout_.absolute()[row] + 1);
    chosen_.assign(logit_rows.size(), dh::Chooser::kNone);
    const Choice choice = {&chooser, sequence_of_row_.data(), position_of_row_.data(), chosen_.data()};
    const Clock::time_point started = Clock::now();
    const int failed =
        program_.run(step, layers_,
                     {token_ids, layout_.position_ids().data(), logit_rows.data(), int32_t(logit_rows.size()),
                      num_threads},
                     &choice);
    forward_s_ += seconds(program_.had_logits() - started);
    choose_s_ += seconds(Clock::now() - program_.had_logits());
    return failed;
  }

  // Keeps the slices that want another token, each one token further on.
  void go_on() {
    size_t kept = 0;
    const int64_t* chosen = chosen_.data();
    int64_t end_row = 0;
    next_ids_.clear();
    next_rows_.clear();
    for (size_t s = 0; s < slices_.size(); ++s) {
      dh::Slice slice = slices_[s];
      int64_t* target = std::copy_n(chosen, slice.num_logit_rows, targets_[s]);
      chosen += slice.num_logit_rows;
      const int64_t first_row = std::exchange(end_row, end_row + slice.num_rows);
      char* hidden = hidden_targets_[s];
      if (hidden != nullptr) hidden = program_.copy_hidden(first_row, end_row, hidden);
      if (slice.num_logit_rows == 0 || slice.num_more == 0 || target[-1] == dh::Chooser::kNone) continue;
      next_ids_.push_back(target[-1]);
      program_.keep_for_next(end_row - 1, next_rows_);
      sequences_[kept] = sequences_[s];
      targets_[kept] = target;
      hidden_targets_[kept] = hidden;
      slices_[kept++] = {slice.block_table, slice.start + slice.num_rows, 1, 1, slice.num_more - 1, slice.shift,
                          slice.shift_end, slice.num_dropped, nullptr, 0};
    }
    slices_.resize(kept);
    program_.give(next_rows_);
  }

  static double seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

  Program& program_;
  const dh::Layer* const layers_;
  dh::Layout layout_;
  std::vector<dh::Slice> slices_;
  dh::Observation observation_;
  std::vector<int32_t> sequences_;  // number of each slice in the call
  std::vector<int64_t*> targets_;   // where its next token goes
  std::vector<char*> hidden_targets_;  // where the hidden states of its next rows go; null: nowhere
  std::vector<int32_t> sequence_of_row_;
  std::vector<int64_t> position_of_row_, chosen_, next_ids_;
  std::vector<char> next_rows_;
  double forward_s_ = 0, choose_s_ = 0;
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int drafthouse_instruction_size() { return sizeof(Instruction); }

Program* drafthouse_program_create(const Instruction* instructions, int64_t count, int64_t num_buffers,
                                   int64_t num_plans, int32_t logits_buffer, int32_t vocab_size) {
  return new Program({instructions, instructions + count}, num_buffers, num_plans, {logits_buffer, vocab_size});
}

void drafthouse_program_destroy(Program* program) { delete program; }

void drafthouse_program_set_buffer(Program* program, int64_t index, void* data) { program->set_buffer(index, data); }

void drafthouse_program_set_quantized_linear(Program* program, dh::QuantizedLinearKernel* kernel) {
  program->set_quantized_linear(kernel);
}

void drafthouse_program_set_link(Program* program, const dh::RankLink* link, int32_t num_meetings) {
  program->set_link(link, num_meetings);
}

int drafthouse_program_run(Program* program, const dh::Step* step, const dh::Layer* layers, const Inputs* inputs) {
  return program->run(*step, layers, *inputs);
}

void drafthouse_program_set_hidden(Program* program, int32_t buffer, int64_t row_bytes) {
  program->set_hidden({buffer, row_bytes});
}

void drafthouse_program_set_feedback(Program* program, int32_t buffer) { program->set_feedback(buffer); }

// As Program::run, of rows that attend to nothing and all yield logits. With a chooser, which knows them by
// `sequences` and `positions`, a token is chosen behind each.
int drafthouse_program_run_rows(Program* program, const Inputs* inputs, const dh::Chooser* chooser,
                                const int32_t* sequences, const int64_t* positions, int64_t* chosen) {
  dh::Step step = {};
  step.num_rows = inputs->num_logit_rows;
  const Choice choice = {chooser, sequences, positions, chosen};
  return program->run(step, nullptr, *inputs, chooser == nullptr ? nullptr : &choice);
}

// As Program::run. `hidden` takes hidden states unless it is null, `seconds` what forwards and choices took.
int drafthouse_program_generate(Program* program, const dh::Layer* layers, const dh::Slice* slices, int64_t num_slices,
                                const int64_t* token_ids, const dh::Chooser* chooser, int32_t num_threads,
                                int64_t* chosen, char* hidden, double* seconds, const dh::Observation* observation) {
  Generation generation(*program, layers, {slices, slices + num_slices}, chosen, hidden, *observation);
  const int failed = generation.run(token_ids, *chooser, num_threads);
  seconds[0] = generation.forward_s();
  seconds[1] = generation.choose_s();
  return failed;
}

void drafthouse_linear(const dh::LinearCall* call) {
  call->is_bf16 ? dh::run_linear<bf16>(*call) : dh::run_linear<float>(*call);
}

void drafthouse_rows(const dh::RowCall* call) { dh::run_rows(*call); }

void drafthouse_quantized(const dh::QuantizedCall* call, dh::QuantizedLinearKernel* kernel, int num_threads) {
  dh::run_quantized(*call, kernel, num_threads);
}

int drafthouse_linear_size() { return sizeof(dh::LinearCall); }
int drafthouse_rows_size() { return sizeof(dh::RowCall); }
int drafthouse_quantized_size() { return sizeof(dh::QuantizedCall); }

void drafthouse_pack_f32(const float* weight, int64_t columns, int64_t inner, uint32_t* panels) {
  dh::pack_panels(weight, inner, columns, inner / dh::Units<float>::per, panels);
}

void drafthouse_pack_bf16(const bf16* weight, int64_t columns, int64_t inner, uint32_t* panels) {
  dh::pack_panels(weight, inner, columns, inner / dh::Units<bf16>::per, panels);
}
}
#pragma GCC visibility pop
