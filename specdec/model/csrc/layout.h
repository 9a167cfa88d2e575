// Slices of sequences laid out as one flat batch, and tokens chosen from its logits.
//
// specdec/model/native_forward.py mirrors `Slice` and `Chooser`; specdec/attention/metadata.py describes
// the arrays and lays out what this does not: padding, other devices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "paged_attention.h"

namespace dh {

// Consecutive tokens of one sequence.
struct Slice {
  const int32_t* block_table;
  int64_t start;
  int64_t num_rows;
  int64_t num_logit_rows;  // the last ones of its rows
  int64_t num_more;        // tokens to go on with behind the one chosen at its last row
  int64_t shift;           // added to the position ids that the model is given, at positions below shift_end
  int64_t shift_end;
  int64_t num_dropped;     // tokens of the sequence before these that the block table leaves out
  const int32_t* parents;  // of its nodes: an earlier one, -1: what is before them; null: each follows the one before
  int64_t num_known;       // nodes that were read before, whose K/V lie before those of its rows, the other nodes
};

// Chooses tokens from fp32 logits; the caller brings it along, with what it needs to know.
//
// `choose` is called for rows [first, last) of a forward, by several threads at once for different rows.
// Row r belongs to slice number sequences[r] of the call and its token will stand at absolute position
// positions[r]. It writes token_ids[r]: the token, or kNone where the logits are not finite.
struct Chooser {
  using Choose = void(const void* parameters, const float* logits, int64_t row_stride, int64_t first, int64_t last,
                      const int32_t* sequences, const int64_t* positions, int64_t* token_ids);
  Choose* choose;
  const void* parameters;

  static constexpr int64_t kNone = -1;
};

// The arrays of one flat batch.
class Layout {
 public:
  void build(const std::vector<Slice>& slices, int block_size) {
    query_start_.assign(1, 0);
    context_lens_.clear();
    slots_.clear();
    position_ids_.clear();
    absolute_.clear();
    logit_rows_.clear();
    is_tree_.clear();
    int64_t longest = 0, num_rows = 0, most_nodes = 0;
    has_known_ = false;
    for (const Slice& slice : slices) {
      longest = std::max(longest, slice.start + slice.num_rows);
      num_rows += slice.num_rows;
      is_tree_.push_back(slice.parents != nullptr);
      if (is_tree_.back()) most_nodes = std::max(most_nodes, slice.num_known + slice.num_rows);
      has_known_ |= slice.num_known > 0;
    }
    mask_width_ = int(most_nodes);
    mask_.assign(num_rows * mask_width_, 0);
    num_known_.clear();
    table_width_ = int((longest + block_size - 1) / block_size);
    block_tables_.assign(slices.size() * table_width_, 0);
    for (size_t s = 0; s < slices.size(); ++s) {
      const Slice& slice = slices[s];
      const int64_t end = slice.start + slice.num_rows;
      std::copy_n(slice.block_table, (end + block_size - 1) / block_size, &block_tables_[s * table_width_]);
      const int64_t first_row = int64_t(absolute_.size());
      if (is_tree_[s]) place_nodes(slice);
      num_known_.push_back(int32_t(slice.num_known));
      for (int64_t at = slice.start; at < end; ++at) {
        slots_.push_back(int64_t(slice.block_table[at / block_size]) * block_size + at % block_size);
        const int64_t node = slice.num_known + at - slice.start;
        if (is_tree_[s]) see_path(slice, first_row, node);
        const int64_t position = (is_tree_[s] ? node_positions_[node] : at) + slice.num_dropped;
        absolute_.push_back(position);
        position_ids_.push_back(position < slice.shift_end ? position + slice.shift : position);
      }
      const int64_t end_row = int64_t(absolute_.size());
      for (int64_t row = end_row - slice.num_logit_rows; row < end_row; ++row) logit_rows_.push_back(row);
      query_start_.push_back(int32_t(end_row));
      context_lens_.push_back(int32_t(end));
    }
  }

  Step step() const {
    return {query_start_.data(), context_lens_.data(), block_tables_.data(), slots_.data(),
            mask_width_ == 0 ? nullptr : mask_.data(), int32_t(absolute_.size()), int32_t(context_lens_.size()),
            table_width_, mask_width_, {}, has_known_ ? num_known_.data() : nullptr,
            mask_width_ == 0 ? nullptr : is_tree_.data()};
  }

  // What the model is given.
  const std::vector<int64_t>& position_ids() const { return position_ids_; }
  // Places in the sequence.
  const std::vector<int64_t>& absolute() const { return absolute_; }
  const std::vector<int64_t>& logit_rows() const { return logit_rows_; }

 private:
  // Siblings stand at the same position, wherever their K/V are.
  void place_nodes(const Slice& slice) {
    node_positions_.clear();
    for (int64_t node = 0; node < slice.num_known + slice.num_rows; ++node) {
      const int64_t parent = slice.parents[node];
      node_positions_.push_back(parent < 0 ? slice.start - slice.num_known : node_positions_[parent] + 1);
    }
  }

  // The row of a node sees what its parent sees, and itself.
  void see_path(const Slice& slice, int64_t first_row, int64_t node) {
    uint8_t* sees = &mask_[(first_row + node - slice.num_known) * mask_width_];
    sees[node] = 1;
    int64_t parent = slice.parents[node];
    if (parent >= slice.num_known)
      std::copy_n(&mask_[(first_row + parent - slice.num_known) * mask_width_], parent + 1, sees);
    else  // it has no row here
      for (; parent >= 0; parent = slice.parents[parent]) sees[parent] = 1;
  }

  std::vector<int32_t> query_start_, context_lens_, block_tables_;
  std::vector<int64_t> slots_, position_ids_, absolute_, logit_rows_;
  std::vector<uint8_t> mask_, is_tree_;
  std::vector<int32_t> num_known_;
  std::vector<int64_t> node_positions_;  // of one slice
  int table_width_ = 0, mask_width_ = 0;
  bool has_known_ = false;
};

}  // namespace dh
