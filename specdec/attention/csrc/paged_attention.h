// Attention over a paged KV cache for a flat batch of slices of sequences.
//
// Every result row is computed by the same operations in the same order whatever else is in the batch and
// however many threads there are: keys are taken in steps of kStep and chunks of kChunk by their index in
// the sequence's cache, each chunk gives a partial softmax, and partials are merged in order. A lone long
// sequence is spread over threads by chunk, a large batch by sequence and KV head. Nodes of a tree are taken
// at the index that they would have if the path of the row were a chain, wherever they lie.
#pragma once

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "attention_tiles.h"
#include "observation.h"
#include "packed_rows.h"
#include "simd.h"
#include "team.h"
#include "tiles.h"

namespace dh {

constexpr int kStep = 64;     // keys between two looks at the running maximum
constexpr int kChunk = 512;   // keys of one partial softmax
constexpr int kRowBlock = 64; // most query rows (of all heads that share a KV head) that share a pass over the keys
constexpr int kMaxHeadDim = 256;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// One step's batch; specdec/attention/metadata.py describes the arrays.
struct Step {
  const int32_t* query_start;
  const int32_t* context_lens;
  const int32_t* block_tables;
  const int64_t* slots;
  const uint8_t* ancestor_mask;  // rows of chains are not looked at; null: chains only
  int32_t num_rows;
  int32_t num_sequences;
  int32_t table_width;
  int32_t mask_width;
  Observation observation;
  // Trees of which a part was read before; null: none. Columns of the mask begin with these nodes.
  const int32_t* num_known;  // of each sequence: nodes whose K/V lie before those of this step's rows
  const uint8_t* is_tree;    // of each sequence; null: chains only

  bool tree(int sequence) const { return is_tree != nullptr && is_tree[sequence]; }
  int known(int sequence) const { return num_known == nullptr ? 0 : num_known[sequence]; }
};

// What one layer's attention is. Pools are [blocks, num_kv_heads, block_size, head_dim], contiguous; packed ones have
// rows of packed_rows.h instead.
struct Layer {
  void* key_pool;
  void* value_pool;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  int32_t window;  // 0: none
  float scaling;
  float softcap;  // 0: none
  int32_t is_packed;

  // Of one token and head in a pool, whose numbers have so many bytes unless they are packed.
  int64_t row_bytes(size_t number) const { return is_packed ? packed_bytes(head_dim) : head_dim * int64_t(number); }
};

// Whether anything of a layer is observed.
inline bool observes(const Step& step, const Layer& layer) {
  return step.observation.masses != nullptr && !(step.observation.skips_windows && layer.window != 0);
}

// [rows, heads, head_dim] with unit stride in the last dimension; strides in elements.
template <typename T>
struct Rows {
  T* data;
  int64_t row_stride;
  int64_t head_stride;

  T* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};

template <typename T>
struct Operands {
  Rows<const T> query, key, value;
  Rows<T> out;
};

// Rows whose sums are kept in registers at a time.
constexpr int kScoreRows = kLanes == 16 ? 6 : 4;
constexpr int kScoreTiles = kLanes == 16 ? 2 : 1;  // of kLanes keys: numbers of a query are read once for all of them
constexpr int kValueRows = kLanes == 16 ? 6 : 2;

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Writes a share of the rows: the same rows as in every other row-wise operation.
template <typename T>
void write_kv(const Share& share, const Step& step, const Layer& layer, const Operands<T>& op) {
  int64_t first, last;
  share.of(step.num_rows, &first, &last);
  const int64_t bytes = layer.row_bytes(sizeof(T));
  for (int64_t row = first; row < last; ++row) {
    const int64_t block = step.slots[row] / layer.block_size, offset = step.slots[row] % layer.block_size;
    for (int64_t head = 0; head < layer.num_kv_heads; ++head) {
      const int64_t at = ((block * layer.num_kv_heads + head) * layer.block_size + offset) * bytes;
      char* key = static_cast<char*>(layer.key_pool) + at;
      char* value = static_cast<char*>(layer.value_pool) + at;
      if (layer.is_packed) {
        pack_row(op.key.at(row, head), layer.head_dim, key);
        pack_row(op.value.at(row, head), layer.head_dim, value);
        continue;
      }
      std::memcpy(key, op.key.at(row, head), bytes);
      std::memcpy(value, op.value.at(row, head), bytes);
    }
  }
}

// The query rows of one work item.
struct RowBlock {
  int sequence;
  int kv_head;
  int first;  // first folded row: query row * group + head in group
  int count;  // folded rows
};

// Keys [first, last) of a sequence, of one head.
struct Keys {
  int sequence = 0;
  int kv_head = 0;
  int first = 0;
  int last = 0;
};

// Offsets in the pool, in bytes, of the first kStep keys; returns how many these are.
inline int locate_step(const Step& step, const Layer& layer, const Keys& keys, int64_t stride, int64_t* offsets) {
  const int32_t* table = step.block_tables + int64_t(keys.sequence) * step.table_width;
  const int count = std::min(kStep, keys.last - keys.first);
  for (int t = 0; t < count;) {
    const int key = keys.first + t, at = key % layer.block_size;
    const int64_t block = table[key / layer.block_size];
    const int64_t first = ((block * layer.num_kv_heads + keys.kv_head) * layer.block_size + at) * stride;
    const int here = std::min(layer.block_size - at, count - t);
    for (int i = 0; i < here; ++i) offsets[t + i] = first + i * stride;
    t += here;
  }
  return count;
}

inline void prefetch_bytes(const void* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) prefetch_line(static_cast<const char*>(data) + at);
}

template <typename T>
class BlockAttention {
 public:
  BlockAttention(const Step& step, const Layer& layer, const Operands<T>& op)
      : step_(step),
        layer_(layer),
        op_(op),
        group_(layer.num_heads / layer.num_kv_heads),
        row_bytes_(layer.row_bytes(sizeof(T))),
        num_units_(round_up((layer.head_dim + Units<T>::per - 1) / Units<T>::per, kLanes)),
        num_words_(num_units_ * Units<T>::words),
        padded_dim_(round_up(layer.head_dim, kLanes)),
        uses_amx_(uses_amx()) {}

  // Whether products are those of a matrix unit.
  static bool uses_amx() {
#ifdef DH_AMX
    return std::is_same_v<T, bf16> && has_amx();
#else
    return false;
#endif
  }

  int padded_dim() const { return padded_dim_; }

  // Loads the query rows of `block` and forgets the state; nothing is recorded.
  void begin(const RowBlock& block) {
    block_ = block;
    sums_ = nullptr;
    row_start_ = step_.query_start[block.sequence];
    const int num_rows = step_.query_start[block.sequence + 1] - row_start_;
    base_ = step_.context_lens[block.sequence] - num_rows - step_.known(block.sequence);
    is_tree_ = step_.tree(block.sequence);
    for (int r = 0; r < block.count; ++r) {
      const bool is_same = r > 0 && query_row(r) == query_row(r - 1);
      own_[r] = is_same ? own_[r - 1] : base_ + (is_tree_ ? depth(r) : query_row(r));
      alignas(64) uint32_t units[kMaxHeadDim] = {};
      std::memcpy(units, op_.query.at(row(r), head(r)), layer_.head_dim * sizeof(T));
      uint32_t* target = query_ + r * num_words_;
      for (int unit = 0; unit < num_units_; ++unit) Units<T>::spread(target + unit * Units<T>::words, units[unit]);
    }
    take_rows(0, block.count);
  }

  // Records the sums of blocks of the keys [first, last), which are attended to next, when a row is observed.
  void record(BlockSums* sums, int first, int last) {
    for (int r = 0; r < block_.count && sums_ == nullptr; ++r)
      if (step_.observation.rows[row(r)] >= 0) sums_ = sums;
    if (sums_ != nullptr) sums_->begin(block_.count, first / layer_.block_size, (last - 1) / layer_.block_size + 1);
  }

  // Tells what row r attends to of the blocks in `sums`, once its maximum and total are known.
  void tell(const BlockSums& sums, int r, float maximum, float total) const {
    const Observation& told = step_.observation;
    const int32_t number = told.rows[row(r)];
    if (number >= 0)
      sums.hand_over(r, maximum, total, told.masses + (int64_t(number) * told.num_heads + head(r)) * told.width,
                     told.width);
  }

  // Attends to keys [first, last) chunk by chunk and writes the rows. Then `after` is attended to.
  void attend_and_write(int first, int last, const Keys& after) {
    if (first / kChunk == (last - 1) / kChunk) {
      reset();
      attend(first, last, after);
      finish(maximum_, total_, weighted_);
      return;
    }
    std::fill(merged_maximum_, merged_maximum_ + block_.count, kMinusInfinity);
    std::fill(merged_total_, merged_total_ + block_.count, 0.0f);
    std::fill(merged_weighted_, merged_weighted_ + block_.count * padded_dim_, 0.0f);
    for (int chunk = first / kChunk; chunk * kChunk < last; ++chunk) {
      const int end = std::min(last, (chunk + 1) * kChunk);
      reset();
      attend(std::max(first, chunk * kChunk), end, end < last ? Keys{block_.sequence, block_.kv_head, end, last} : after);
      for (int r = 0; r < block_.count; ++r)
        merge(merged_maximum_ + r, merged_total_ + r, merged_weighted_ + r * padded_dim_, maximum_[r], total_[r],
              weighted_ + r * padded_dim_, padded_dim_);
    }
    finish(merged_maximum_, merged_total_, merged_weighted_);
  }

  // Attends to keys [first, last) of one chunk and leaves row r's partial result at `target(r)`:
  // the maximum, the total, and from float kLanes on the weighted sum.
  template <typename Target>
  void attend_and_keep(int first, int last, const Keys& after, const Target& target) {
    reset();
    attend(first, last, after);
    for (int r = 0; r < block_.count; ++r) {
      float* partial = target(r);
      partial[0] = maximum_[r];
      partial[1] = total_[r];
      std::memcpy(partial + kLanes, weighted_ + r * padded_dim_, padded_dim_ * sizeof(float));
    }
  }

  // Folds the partial state (m, l, a) of row r into (maximum, total, weighted), which hold what came before.
  static void merge(float* maximum, float* total, float* weighted, float m, float l, const float* a, int dim) {
    if (m == kMinusInfinity && l == 0.0f) return;  // nothing was visible; NaN scores leave no maximum, but a NaN l
    const float top = std::max(*maximum, m);
    const float old_scale = expv(splat(*maximum - top))[0];  // exp(-inf) is 0: nothing came before
    const float new_scale = expv(splat(m - top))[0];
    *total = *total * old_scale + l * new_scale;
    for (int d = 0; d < dim; d += kLanes)
      storev(weighted + d, loadv(weighted + d) * old_scale + loadv(a + d) * new_scale);
    *maximum = top;
  }

  void write(int r, float total, const float* weighted) const {
    T* target = op_.out.at(row(r), head(r));
    const float scale = total > 0.0f ? 1.0f / total : 0.0f;
    int d = 0;
    for (; d + kLanes <= layer_.head_dim; d += kLanes) storev(target + d, loadv(weighted + d) * scale);
    if (d < layer_.head_dim) store_tail(target + d, loadv(weighted + d) * scale, layer_.head_dim - d);
  }

 private:
  void finish(const float* maximum, const float* total, const float* weighted) const {
    for (int r = 0; r < block_.count; ++r) {
      write(r, total[r], weighted + r * padded_dim_);
      if (sums_ != nullptr) tell(*sums_, r, maximum[r], total[r]);
    }
  }

  void reset() {
    std::fill(maximum_, maximum_ + block_.count, kMinusInfinity);
    std::fill(totals_, totals_ + block_.count * kLanes, 0.0f);
    std::fill(weighted_, weighted_ + block_.count * padded_dim_, 0.0f);
  }

  // Adds keys [first, last), which lie in one chunk and start at a step, to the state.
  void attend(int first, int last, const Keys& after) {
    if (is_tree_)
      attend_in_tree(first, last, after);
    else
      add_keys(first, last, after);
    for (int r = 0; r < block_.count; ++r) total_[r] = reduce_add(loadv(totals_ + r * kLanes));
  }

  // All rows share the steps whose keys are older than the tree. From the step on in which it begins, those of each
  // node see other keys.
  void attend_in_tree(int first, int last, const Keys& after) {
    const int shared = std::clamp(base_ / kStep * kStep, first, last);
    add_keys(first, shared, shared < last ? Keys{block_.sequence, block_.kv_head, shared, last} : after);
    for (int r = 0; r < block_.count; r = end_) {
      take_rows(r, std::min(block_.count, (query_row(r) + 1) * group_ - block_.first));
      find_path(r);
      add_keys(shared, std::min(last, own_[r] + 1), end_ == block_.count ? after : Keys{});
    }
    path_.clear();
    take_rows(0, block_.count);
  }

  // Rows [begin, end) are those that keys are added to.
  void take_rows(int begin, int end) {
    begin_ = begin;
    end_ = end;
#ifdef DH_AMX
    if (!uses_amx_) return;
    for (int r = begin; r < end; r += kTileRows)
      rows_to_columns(query_ + r * num_words_, num_words_, std::min(kTileRows, end - r), num_units_,
                      query_columns_ + (r - begin) * num_units_);
#endif
  }

  const uint8_t* ancestors(int r) const { return step_.ancestor_mask + row(r) * step_.mask_width; }

  // Of the node of row r: how many it has above it.
  int depth(int r) const { return std::accumulate(ancestors(r), ancestors(r) + step_.mask_width, 0) - 1; }

  // The nodes that row r sees; those above others come before them.
  void find_path(int r) {
    path_.clear();
    for (int node = 0; node < step_.mask_width; ++node)
      if (ancestors(r)[node]) path_.push_back(node);
  }

  // Blocks lie anywhere in the pool and hardware does not guess where the next ones are: while a step's keys are looked
  // at, those of the next step, or of what is attended to after this, are asked for, and while its weights and sums are
  // found, the values.
  void add_keys(int first, int last, const Keys& after) {
    locate(first, last, here_);
    for (int key = first; key < last; key += kStep) {
      const int count = std::min(kStep, last - key);
      num_next_ = key + kStep < last ? locate(key + kStep, last, next_)
                                     : locate_step(step_, layer_, after, row_bytes_, next_);
      score(key, count);
      update(count);
      if (sums_ != nullptr)
        for (int r = begin_; r < end_; ++r)
          sums_->add(r, key, count, layer_.block_size, maximum_[r], scores_ + r * kStep);
      accumulate(count);
      std::swap(here_, next_);
    }
  }

  // Offsets in the pool of the first step of keys [first, last) as the rows see them; returns how many these are.
  int locate(int first, int last, int64_t* offsets) const {
    const int count = locate_step(step_, layer_, {block_.sequence, block_.kv_head, first, last}, row_bytes_, offsets);
    for (int t = path_.empty() ? count : std::max(0, base_ - first); t < count; ++t) {
      const int at = base_ + path_[first + t - base_];
      locate_step(step_, layer_, {block_.sequence, block_.kv_head, at, at + 1}, row_bytes_, offsets + t);
    }
    return count;
  }

  // Asks for the next step's rows that are due with parts [before, after) of `all` of what is done meanwhile. A core
  // waits for few lines at once, and what is looked at would wait behind many: verifying on Zen 4 takes 0.9 times as
  // long as with all of them asked for as fast as a loop goes.
  void ask_next(const void* pool, int before, int after, int all) const {
    const int last = num_next_ * after / all;
    for (int t = num_next_ * before / all; t < last; ++t)
      prefetch_bytes(static_cast<const char*>(pool) + next_[t], row_bytes_);
  }

  // Where the numbers of a pool's rows of this step are, in rows_; of packed ones the integers, and in scales_ what
  // they are to be multiplied by: once for each row and query row, not for each number.
  void find_rows(const void* pool, int count) {
    const char* first = static_cast<const char*>(pool);
    if (!layer_.is_packed) {
      for (int t = 0; t < count; ++t) rows_[t] = reinterpret_cast<const T*>(first + here_[t]);
      return;
    }
    for (int t = 0; t < count; ++t) {
      T* row = unpacked_ + t * kMaxHeadDim;
      scales_[t] = unpack_row(first + here_[t], layer_.head_dim, row);
      rows_[t] = row;
    }
    std::fill(scales_ + count, scales_ + round_up(count, kLanes), 0.0f);
  }

  // Multiplies row r's scores, or weights, by the scales of packed rows.
  void scale_row(int r, int padded) {
    float* scores = scores_ + r * kStep;
    for (int t = 0; t < padded; t += kLanes) storev(scores + t, loadv(scores + t) * loadv(scales_ + t));
  }

  int query_row(int r) const { return (block_.first + r) / group_; }
  int64_t row(int r) const { return row_start_ + query_row(r); }
  int64_t head(int r) const { return int64_t(block_.kv_head) * group_ + (block_.first + r) % group_; }

  // Scores of keys [key, key + count) for every row, masked, in scores_[row][kStep].
  void score(int key, int count) {
    find_rows(layer_.key_pool, count);
    const int padded = round_up(count, kLanes), num_rows = end_ - begin_;
    std::fill(rows_ + count, rows_ + padded, kNoNumbers);
#ifdef DH_AMX
    if constexpr (std::is_same_v<T, bf16>) {
      if (uses_amx_) score_in_tiles(padded);
    }
#endif
    for (int tile = uses_amx_ ? padded : 0; tile < padded;) {
      const int here = std::min(kScoreTiles, (padded - tile) / kLanes);
      for (int i = 0; i < here; ++i) load_columns(tile + i * kLanes, columns_ + i * kLanes * num_units_);
      one_of<kScoreTiles>(here, [&](auto tiles) {
        in_tiles<kScoreRows>(num_rows, [&](auto rows, int i) {
          const int before = tile * num_rows + i * here * kLanes;
          ask_next(layer_.key_pool, before, before + rows.value * here * kLanes, padded * num_rows);
          score_rows<rows.value, tiles.value>(begin_ + i, tile);
        });
      });
      tile += here * kLanes;
    }
    for (int r = begin_; r < end_; ++r) {
      if (layer_.is_packed) scale_row(r, padded);
      if (layer_.softcap != 0.0f) cap(r, padded);
      mask(r, key, padded);
    }
  }

#ifdef DH_AMX
  // As `score`, but for the mask.
  void score_in_tiles(int padded) {
    const int num_tiles = padded / kTileRows, all = num_tiles * (end_ - begin_);
    const char* keys[kStep / kTileRows];
    int64_t key_bytes = row_bytes_;
    // Sixteen keys that begin at a multiple of sixteen are neighbours, but on a path. What lies behind the last key is
    // masked.
    if (path_.empty() && !layer_.is_packed && layer_.block_size % kTileRows == 0 && layer_.head_dim % (2 * kTileUnits) == 0) {
      for (int tile = 0; tile < num_tiles; ++tile) keys[tile] = reinterpret_cast<const char*>(rows_[tile * kTileRows]);
    } else {
      key_bytes = num_units_ * int64_t(sizeof(uint32_t));
      for (int t = 0; t < padded; ++t) {
        uint32_t* key = columns_ + t * num_units_;
        std::memcpy(key, rows_[t], layer_.head_dim * sizeof(T));
        std::memset(reinterpret_cast<T*>(key) + layer_.head_dim, 0, key_bytes - layer_.head_dim * sizeof(T));
      }
      for (int tile = 0; tile < num_tiles; ++tile)
        keys[tile] = reinterpret_cast<const char*>(columns_ + tile * kTileRows * num_units_);
    }
    for (int r = begin_; r < end_; r += kTileRows) {
      const int num_rows = std::min(kTileRows, end_ - r);
      one_of<kStep / kTileRows>(num_tiles, [&](auto tiles) {
        score_tiles<tiles.value>(keys, key_bytes, query_columns_ + (r - begin_) * num_units_, num_units_, tile_sums_);
      });
      for (int tile = 0; tile < num_tiles; ++tile) {
        const int before = (r - begin_) * num_tiles + tile * num_rows;
        ask_next(layer_.key_pool, before, before + num_rows, all);
        scores_to_rows(tile_sums_ + tile * kTileNumbers, num_rows, layer_.scaling,
                       scores_ + r * kStep + tile * kTileRows, kStep);
      }
    }
  }

  // Adds values to the sums; their weights are packed.
  void accumulate_in_tiles(int count) {
    const int num_steps = (count + kTileTokens - 1) / kTileTokens, num_tokens = num_steps * kTileTokens;
    const int columns = round_up(layer_.head_dim, 2 * kTileUnits);
    const int64_t step_numbers = int64_t(columns) * kTileUnits;
    std::fill(rows_ + count, rows_ + num_tokens, kNoNumbers);
    for (int r = begin_; r < end_; ++r) {
      const int padded = round_up(count, kLanes);
      std::memset(reinterpret_cast<T*>(scores_ + r * kStep) + padded, 0, (num_tokens - padded) * sizeof(T));
    }
    for (int t = 0; t < num_tokens; t += 2) {
      pair_values(rows_[t], rows_[t + 1], layer_.head_dim, t % kTileTokens / 2,
                  columns_ + t / kTileTokens * step_numbers);
      ask_next(layer_.value_pool, num_tokens + t, num_tokens + t + 2, 2 * num_tokens);
    }
    for (int r = begin_; r < end_; r += kTileRows) {
      const int num_rows = std::min(kTileRows, end_ - r);
      for (int d = 0; d < columns; d += kTilesOfValues * kTileUnits) {
        const uint32_t* tiles = columns_ + d * kTileUnits;
        if (columns - d >= kTilesOfValues * kTileUnits)
          add_values<kTilesOfValues>(r, num_rows, d, tiles, step_numbers, num_steps);
        else
          add_values<kTilesOfValues / 2>(r, num_rows, d, tiles, step_numbers, num_steps);
      }
    }
  }

  template <int N>
  void add_values(int r, int num_rows, int d, const uint32_t* tiles, int64_t step_numbers, int num_steps) {
    value_tiles<N>(scores_ + r * kStep, kStep * sizeof(float), tiles, step_numbers, num_steps, tile_sums_);
    for (int i = 0; i < num_rows; ++i) {
      const float rescale = rescale_[r + i];
      for (int c = 0; c < N; c += 2) {
        float* weighted = weighted_ + (r + i) * padded_dim_ + d + c * kTileUnits;
        const float* sums = tile_sums_ + (i * N + c) * kTileUnits;
        storev(weighted, multiply_add(loadv(weighted), rescale, in_order<false>(sums)));
        if (d + (c + 1) * kTileUnits < padded_dim_)
          storev(weighted + kTileUnits, multiply_add(loadv(weighted + kTileUnits), rescale, in_order<true>(sums)));
      }
    }
  }
#endif

  // kLanes keys as columns: columns[unit][lane] is unit `unit` of the step's key `tile + lane`.
  void load_columns(int tile, uint32_t* columns) const {
    const int bytes = layer_.head_dim * int(sizeof(T));
    for (int unit = 0; unit < num_units_; unit += kLanes) {
      u32v square[kLanes];
      const int here = std::min(int(sizeof(u32v)), bytes - unit * 4);
      const auto source = [&](int lane) { return reinterpret_cast<const char*>(rows_[tile + lane]) + unit * 4; };
      if (here == int(sizeof(u32v))) {
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes; ++lane) square[lane] = load_as<u32v>(source(lane));
      } else {
        for (int lane = 0; lane < kLanes; ++lane) {
          square[lane] = u32v{};
          std::memcpy(&square[lane], source(lane), here);
        }
      }
      transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store_as(columns + (unit + i) * kLanes, square[i]);
    }
  }

  // Of R rows with the keys of K tiles, which are in columns_. Out of line, and its loops taken apart, for the reason
  // that sums of linear.h are.
  template <int R, int K>
  [[gnu::noinline]] void score_rows(int r, int tile) {
    f32v even[R][K], odd[R][K];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
      for (int k = 0; k < K; ++k) even[i][k] = odd[i][k] = f32v{};
    constexpr int words = Units<T>::words;
    const uint32_t* query = query_ + r * num_words_;
    const uint32_t* columns = columns_;
    for (int unit = 0; unit < num_units_; unit += 2, columns += 2 * kLanes, query += 2 * words) {
      u32v a[K], b[K];
#pragma GCC unroll 16
      for (int k = 0; k < K; ++k) {
        a[k] = load_as<u32v>(columns + k * kLanes * num_units_);
        b[k] = load_as<u32v>(columns + k * kLanes * num_units_ + kLanes);
      }
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i) {
        const uint32_t* mine = query + i * num_words_;
#pragma GCC unroll 16
        for (int k = 0; k < K; ++k) {
          even[i][k] = Units<T>::multiply_add_spread(even[i][k], a[k], mine);
          odd[i][k] = Units<T>::multiply_add_spread(odd[i][k], b[k], mine + words);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
      for (int k = 0; k < K; ++k)
        storev(scores_ + (r + i) * kStep + tile + k * kLanes, (even[i][k] + odd[i][k]) * layer_.scaling);
  }

  void cap(int r, int padded) {
    float* scores = scores_ + r * kStep;
    for (int t = 0; t < padded; t += kLanes)
      storev(scores + t, tanhv(loadv(scores + t) / layer_.softcap) * layer_.softcap);
  }

  // Masks keys [key, key + padded) for row r.
  void mask(int r, int key, int padded) {
    float* scores = scores_ + r * kStep;
    for (int t = std::max(0, own_[r] + 1 - key); t < padded; ++t) scores[t] = kMinusInfinity;
    if (layer_.window == 0) return;
    const int hidden = std::min(padded, own_[r] - layer_.window + 1 - key);
    for (int t = 0; t < hidden; ++t) scores[t] = kMinusInfinity;
  }

  // Online softmax: turns scores into weights relative to the new maximum, and finds what is to be multiplied by what
  // came before. Loop after loop over all rows, so that none waits for the reductions of the one before it.
  void update(int count) {
    const int padded = round_up(count, kLanes);
    alignas(64) float highest[kRowBlock], offset[kRowBlock];
    std::copy_n(maximum_, kRowBlock, highest);  // rows beside those that keys are added to keep theirs
    for (int r = begin_; r < end_; ++r) {
      const float* scores = scores_ + r * kStep;
      f32v top = loadv(scores);
      for (int t = kLanes; t < padded; t += kLanes) top = vmax(top, loadv(scores + t));
      highest[r] = std::max(reduce_max(top), maximum_[r]);
    }
    for (int r = begin_ / kLanes * kLanes; r < end_; r += kLanes) {
      const f32v before = loadv(maximum_ + r), now = loadv(highest + r);
      const i32v grows = now > before;
      storev(rescale_ + r, select(grows, expv(before - now), splat(1.0f)));
      storev(maximum_ + r, select(grows, now, before));
      storev(offset + r, select(now == splat(kMinusInfinity), f32v{}, now));
    }
    for (int r = begin_; r < end_; ++r) {
      float* scores = scores_ + r * kStep;
      f32v sum = {};
      for (int t = 0; t < padded; t += kLanes) {
        const f32v weight = Weighted<T>::rounded(expv(loadv(scores + t) - offset[r]));
        storev(scores + t, weight);
        sum += weight;
      }
      ask_next(layer_.value_pool, r - begin_, r - begin_ + 1, 2 * (end_ - begin_));
      float* totals = totals_ + r * kLanes;
      storev(totals, multiply_add(loadv(totals), rescale_[r], sum));
    }
  }

  void accumulate(int count) {
    find_rows(layer_.value_pool, count);
    rows_[count] = kNoNumbers;
    for (int r = begin_; r < end_; ++r) {
      if (layer_.is_packed) scale_row(r, round_up(count, kLanes));
      Weighted<T>::pack(scores_ + r * kStep, round_up(count, kLanes));
    }
#ifdef DH_AMX
    if constexpr (std::is_same_v<T, bf16>) {
      if (uses_amx_) return accumulate_in_tiles(count);
    }
#endif
    int d = 0;
    for (; d + 4 * kLanes <= layer_.head_dim; d += 4 * kLanes) accumulate_columns<4>(d, count);
    for (; d + kLanes <= layer_.head_dim; d += kLanes) accumulate_columns<1>(d, count);
    if (d < layer_.head_dim) {
      ask_next(layer_.value_pool, padded_dim_ + d, 2 * padded_dim_, 2 * padded_dim_);
      accumulate_tail(d, count);
    }
  }

  template <int V>
  void accumulate_columns(int d, int count) {
    const int num_rows = end_ - begin_;
    in_tiles<kValueRows>(num_rows, [&](auto rows, int i) {
      const int all = num_rows * padded_dim_, before = all + num_rows * d + i * V * kLanes;
      ask_next(layer_.value_pool, before, before + rows.value * V * kLanes, 2 * all);
      accumulate_rows<rows.value, V>(begin_ + i, d, count);
    });
  }

  // Out of line, and its loops taken apart, for the reason that `score_rows` is.
  template <int R, int V>
  [[gnu::noinline]] void accumulate_rows(int r, int d, int count) {
    f32v sum[R][V];
    float* weighted = weighted_ + r * padded_dim_ + d;
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[i][v] = loadv(weighted + i * padded_dim_ + v * kLanes) * rescale_[r + i];
    const float* words = scores_ + r * kStep;
    for (int t = 0; t < count; t += Weighted<T>::tokens, ++words) {
      f32v values[V];
      Weighted<T>::load(values, rows_ + t, d);
#pragma GCC unroll 16
      for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sum[i][v] = Weighted<T>::multiply_add(sum[i][v], values[v], words + i * kStep);
    }
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) storev(weighted + i * padded_dim_ + v * kLanes, sum[i][v]);
  }

  void accumulate_tail(int d, int count) {
    for (int r = begin_; r < end_; ++r) {
      float* weighted = weighted_ + r * padded_dim_ + d;
      const float* words = scores_ + r * kStep;
      f32v sum = loadv(weighted) * rescale_[r];
      for (int t = 0; t < count; t += Weighted<T>::tokens, ++words) {
        f32v values[1];
        Weighted<T>::load_tail(values, rows_ + t, d, layer_.head_dim - d);
        sum = Weighted<T>::multiply_add(sum, values[0], words);
      }
      storev(weighted, sum);
    }
  }

  const Step& step_;
  const Layer& layer_;
  const Operands<T>& op_;
  const int group_;
  const int64_t row_bytes_;
  const int num_units_;
  const int num_words_;  // of a query row, which is spread
  const int padded_dim_;
  const bool uses_amx_;

  RowBlock block_ = {};
  int64_t row_start_ = 0;
  int base_ = 0;  // cached tokens older than this step
  bool is_tree_ = false;
  int begin_ = 0, end_ = 0;  // of the block's rows, those that keys are added to
  int own_[kRowBlock];       // of each row, the index in the cache that it has in a chain of what it sees
  std::vector<int32_t> path_;  // nodes, in the order of that chain; empty: keys are taken as they lie
  BlockSums* sums_ = nullptr;
  alignas(64) static constexpr T kNoNumbers[kMaxHeadDim] = {};  // a row where there is none
  const T* rows_[kStep + 1];  // products of values may be of two: of the last one and of none
  int64_t offsets_[2][kStep];
  int64_t* here_ = offsets_[0];  // of the step's keys and values in the pool
  int64_t* next_ = offsets_[1];  // of the next step's
  int num_next_ = 0;

  alignas(64) T unpacked_[kStep * kMaxHeadDim];
  alignas(64) float scales_[kStep];
  alignas(64) uint32_t query_[kRowBlock * kMaxHeadDim];
#ifdef DH_AMX
  alignas(64) uint32_t query_columns_[kRowBlock * kMaxHeadDim / 2];
  alignas(64) float tile_sums_[kStep * kTileRows];
#endif
  alignas(64) uint32_t columns_[kScoreTiles * kMaxHeadDim * kLanes];
  alignas(64) float scores_[(kRowBlock + kLanes) * kStep];  // tiles of rows' weights may begin at any of them
  alignas(64) float weighted_[kRowBlock * kMaxHeadDim];
  alignas(64) float maximum_[kRowBlock] = {};
  alignas(64) float rescale_[kRowBlock];  // what sums of what came before a step are to be multiplied by
  alignas(64) float totals_[kRowBlock * kLanes];
  float total_[kRowBlock];
  alignas(64) float merged_weighted_[kRowBlock * kMaxHeadDim];
  float merged_maximum_[kRowBlock];
  float merged_total_[kRowBlock];
};

// A row block, or one chunk of it.
struct WorkItem {
  RowBlock block;
  int first_key;
  int last_key;
  int64_t cost;
  int split;        // which split block this is a chunk of; -1: it is a whole block
  int64_t partial;  // chunk: index of the first of its rows among the partial results

  Keys keys() const { return {block.sequence, block.kv_head, first_key, last_key}; }
};

// A block whose chunks are separate items. Whoever finishes the last of them merges them all.
struct Split {
  int first_item;
  int num_chunks;
  std::atomic<int> finished{0};

  Split(int first, int count) : first_item(first), num_chunks(count) {}
  Split(const Split& other) : first_item(other.first_item), num_chunks(other.num_chunks) {}
};

// How one step's attention is shared out; the same for all layers of equal heads and window.
struct AttentionPlan {
  std::vector<WorkItem> items;
  std::vector<int> share_start;  // items of share s: share_start[s] .. share_start[s + 1] - 1
  std::vector<Split> splits;
  int64_t num_partials = 0;

  void build(const Step& step, const Layer& layer, int num_shares) {
    items.clear();
    splits.clear();
    num_partials = 0;
    const int group = layer.num_heads / layer.num_kv_heads;
    int64_t total = 0, largest = 0;
    for_each_block(step, layer, group, [&](const RowBlock&, int, int, int64_t cost) {
      total += cost;
      largest = std::max(largest, cost);
    });
    // Merging costs: split only where whole blocks would leave threads idle.
    const bool split = num_shares > 1 && largest * num_shares > total + total / 4;
    for_each_block(step, layer, group, [&](const RowBlock& block, int first, int last, int64_t cost) {
      const int from = first / kChunk, to = (last + kChunk - 1) / kChunk;
      if (!split || to - from < 2 || cost * num_shares * 4 < total) {
        items.push_back({block, first, last, cost, -1, 0});
        return;
      }
      splits.emplace_back(int(items.size()), to - from);
      for (int chunk = from; chunk < to; ++chunk) {
        const int begin = std::max(first, chunk * kChunk), end = std::min(last, (chunk + 1) * kChunk);
        items.push_back({block, begin, end, cost_of(block, begin, end), int(splits.size()) - 1, num_partials});
        num_partials += block.count;
      }
    });
    finish(num_shares, total);
  }

 private:
  static int64_t cost_of(const RowBlock& block, int first, int last) {
    // Reading a key costs about as much as using it for eight rows.
    return int64_t(last - first) * (8 + block.count) + 256;
  }

  // Blocks of a sequence and KV head come one after the other: keys of the one before may still be in a cache.
  template <typename Visit>
  static void for_each_block(const Step& step, const Layer& layer, int group, const Visit& visit) {
    for (int s = 0; s < step.num_sequences; ++s) {
      const int rows = step.query_start[s + 1] - step.query_start[s];
      const int base = step.context_lens[s] - rows;
      const bool tree = step.tree(s);
      for (int head = 0; head < layer.num_kv_heads; ++head) {
        in_even_parts(kRowBlock, rows * group, [&](int count, int first) {
          const int last_key = tree ? base + rows : base + (first + count - 1) / group + 1;
          // No row of this step stands at a lower position than its tree, nor, in a chain, than its index.
          const int lowest = tree ? base - step.known(s) : base + first / group;
          const int first_key = layer.window == 0 ? 0 : std::max(0, lowest - layer.window + 1) / kStep * kStep;
          const RowBlock block = {s, head, first, count};
          visit(block, first_key, last_key, cost_of(block, first_key, last_key));
        });
      }
    }
  }

  void finish(int num_shares, int64_t total) {
    share_start.assign(num_shares + 1, int(items.size()));
    share_start[0] = 0;
    int64_t before = 0;
    int share = 0;
    for (int i = 0; i < int(items.size()); ++i) {
      // An item goes to the share of the whole cost that holds the item's middle.
      const int64_t middle = before + items[i].cost / 2;
      while (share + 1 < num_shares && middle * num_shares >= total * (share + 1)) share_start[++share] = i;
      before += items[i].cost;
    }
  }
};

// Partial results of chunks: per row maximum, total and padded_dim weighted sums.
struct PartialResults {
  std::vector<float> values;
  std::vector<BlockSums> sums;  // of each item, where a step is observed
  int stride = 0;

  void reserve(int64_t num_partials, int head_dim) {
    stride = round_up(head_dim, kLanes) + kLanes;
    if (int64_t(values.size()) < num_partials * stride) values.resize(num_partials * stride);
  }
  void reserve_sums(size_t num_items) {
    if (sums.size() < num_items) sums.resize(num_items);
  }
  float* at(int64_t index) { return values.data() + index * stride; }
};

template <typename T>
void merge_chunks(BlockAttention<T>& attention, const AttentionPlan& plan, const Split& split,
                  PartialResults& partials, bool is_observed) {
  const RowBlock& block = plan.items[split.first_item].block;
  const int dim = attention.padded_dim();
  alignas(64) float weighted[kMaxHeadDim];
  attention.begin(block);
  for (int r = 0; r < block.count; ++r) {
    float maximum = kMinusInfinity, total = 0.0f;
    std::fill(weighted, weighted + dim, 0.0f);
    for (int chunk = 0; chunk < split.num_chunks; ++chunk) {
      const float* partial = partials.at(plan.items[split.first_item + chunk].partial + r);
      BlockAttention<T>::merge(&maximum, &total, weighted, partial[0], partial[1], partial + kLanes, dim);
    }
    attention.write(r, total, weighted);
    if (!is_observed) continue;
    for (int chunk = 0; chunk < split.num_chunks; ++chunk)
      attention.tell(partials.sums[split.first_item + chunk], r, maximum, total);
  }
}

// Asks for the keys and values that `paged_attention` will look at first.
inline void prefetch_first_step(const Share& share, const Step& step, const Layer& layer, const AttentionPlan& plan,
                                size_t element_size) {
  const int item = plan.share_start[share.index];
  if (item == plan.share_start[share.index + 1]) return;
  const int64_t bytes = layer.row_bytes(element_size);
  int64_t offsets[kStep];
  const int count = locate_step(step, layer, plan.items[item].keys(), bytes, offsets);
  for (const void* pool : {layer.key_pool, layer.value_pool})
    for (int t = 0; t < count; ++t) prefetch_bytes(static_cast<const char*>(pool) + offsets[t], bytes);
}

// Attends to what `write_kv` has put into the pool, once all of it is there.
template <typename T>
void paged_attention(const Share& share, const Step& step, const Layer& layer, const Operands<T>& op,
                     AttentionPlan& plan, PartialResults& partials) {
  BlockAttention<T> attention(step, layer, op);
#ifdef DH_AMX
  if (attention.uses_amx()) shape_for_attention();
#endif
  static thread_local BlockSums sums;
  const bool is_observed = observes(step, layer);
  for (int i = plan.share_start[share.index]; i < plan.share_start[share.index + 1]; ++i) {
    const WorkItem& item = plan.items[i];
    const Keys after = i + 1 < plan.share_start[share.index + 1] ? plan.items[i + 1].keys() : Keys{};
    attention.begin(item.block);
    if (is_observed) attention.record(item.split < 0 ? &sums : partials.sums.data() + i, item.first_key, item.last_key);
    if (item.split < 0) {
      attention.attend_and_write(item.first_key, item.last_key, after);
      continue;
    }
    attention.attend_and_keep(item.first_key, item.last_key, after,
                              [&](int r) { return partials.at(item.partial + r); });
    Split& split = plan.splits[item.split];
    if (split.finished.fetch_add(1, std::memory_order_acq_rel) == split.num_chunks - 1) {
      split.finished.store(0, std::memory_order_relaxed);  // for the next layer
      merge_chunks(attention, plan, split, partials, is_observed);
    }
  }
#ifdef DH_AMX
  if (attention.uses_amx()) release_tiles();
#endif
}

}  // namespace dh
