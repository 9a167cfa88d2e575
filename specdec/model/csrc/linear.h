// y = x W^T (+ bias) for packed weights.
//
// The weight's rows (output columns) are packed in panels of 32 columns: for every unit of 32 bits along
// the inner dimension (one float, or two neighbouring bf16), the 32 columns' units side by side, so that a
// panel is read from end to end. An output is one sum over the inner dimension in ascending order, whatever
// the number of rows or threads.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"
#include "tiles.h"

namespace dh {

constexpr int kPanelColumns = 32;
constexpr int kPanelVectors = kPanelColumns / kLanes;

// Rows whose sums are kept in registers at a time, and up to how many rows those of two panels are. Few rows
// need the second panel, since a sum waits for its predecessor; more rows are better read a panel but once.
template <typename T>
constexpr int kRowTile = kLanes == 16 ? 12 : kLanes == 8 ? (Units<T>::per == 2 ? 4 : 3) : 1;
constexpr int kRowTileOfTwo = kLanes == 16 ? 6 : kLanes == 8 ? 1 : 0;

// How far ahead weights are asked for, in units. The processor's own prefetching ends at every page, and knows
// nothing of what is read next.
constexpr int kUnitsAhead = 16;
constexpr int kUnitsOfLine = 16;  // units of columns side by side in a cache line

// Packed panels, one behind the other: what is read after those at hand. Null: nobody knows.
struct Panels {
  const uint32_t* data = nullptr;
  int64_t size = 0;  // of a panel
};

struct Linear {
  const uint32_t* panels;  // null: not packed
  const void* rows;        // not packed: W [columns, inner]
  int64_t row_stride;
  const void* bias;   // null: none; dtype of the weights
  int32_t num_units;  // units along the inner dimension
  int32_t num_columns;

  int64_t panel_size() const { return int64_t(num_units) * kPanelColumns; }
};

inline int64_t num_panels(int64_t columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }

// Packs panel `panel` of W [columns, inner], inner a multiple of the units' size; columns that are missing
// are zeros.
template <typename T>
void pack_panel(const T* weight, int64_t row_stride, int64_t columns, int64_t num_units, int64_t panel,
                uint32_t* target) {
  for (int v = 0; v < kPanelVectors; ++v) {
    const int64_t column = panel * kPanelColumns + v * kLanes;
    for (int64_t unit = 0; unit < num_units; unit += kLanes) {
      u32v tile[kLanes] = {};
      const int64_t here = std::min<int64_t>(kLanes, num_units - unit);
      for (int c = 0; c < kLanes && column + c < columns; ++c)
        std::memcpy(&tile[c], weight + (column + c) * row_stride + unit * Units<T>::per, here * 4);
      transpose(tile);
      for (int64_t i = 0; i < here; ++i) store_as(target + (unit + i) * kPanelColumns + v * kLanes, tile[i]);
    }
  }
}

template <typename T>
void pack_panels(const T* weight, int64_t row_stride, int64_t columns, int64_t num_units, uint32_t* panels) {
  for (int64_t panel = 0; panel < num_panels(columns); ++panel)
    pack_panel(weight, row_stride, columns, num_units, panel, panels + panel * num_units * kPanelColumns);
}

// sum[r][v] += a unit of row r times the units w[v] of kLanes columns.
template <typename T, int R, int V>
inline void add_products(f32v (&sum)[R][V], const u32v (&w)[V], const T* x, int64_t x_stride) {
  if constexpr (kLanes == 16) {  // the row's number comes from memory, as an operand of the product
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const uint32_t value = load_as<uint32_t>(x + r * x_stride);
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[r][v] = Units<T>::multiply_add(sum[r][v], w[v], value);
    }
  } else {  // registers are few: the rows' numbers are kept, and what is made of w[v] only as long as it is needed
    u32v values[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) values[r] = splat_bits(load_as<uint32_t>(x + r * x_stride));
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r][v] = Units<T>::multiply_add(sum[r][v], w[v], values[r]);
  }
}

// Sums of R rows times P panels, row after row. Out of line: where compilers see the sums being used, they
// keep them in memory instead of registers, and store each of them at every unit.
template <typename T, int R, int P>
[[gnu::noinline]] void sum_tile(const Panels& panels, const Panels& next, int num_units, const T* __restrict x,
                                int64_t x_stride, f32v* __restrict sums) {
  constexpr int V = P * kPanelVectors;
  f32v sum[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sum[r][v] = f32v{};
  const uint32_t *at = panels.data, *ahead = at + kUnitsAhead * kPanelColumns;
  int64_t size_ahead = panels.size;
  for (int64_t unit = 0; unit < num_units; ++unit, at += kPanelColumns, ahead += kPanelColumns) {
    if (unit == num_units - kUnitsAhead) {
      ahead = next.data;
      size_ahead = next.size;
    }
    u32v w[V];
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      const int64_t column = v % kPanelVectors * kLanes;
      if (column % kUnitsOfLine == 0) prefetch_line(ahead + v / kPanelVectors * size_ahead + column);
      w[v] = load_as<u32v>(at + v / kPanelVectors * panels.size + column);
    }
    add_products<T, R, V>(sum, w, x + unit * Units<T>::per, x_stride);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) sums[r * V + v] = sum[r][v];
}

// Adds the bias (null: none), and writes sums of R rows times P panels as rows of y; columns from `num_columns` on
// are padding.
template <typename T, int R, int P>
inline void store_tile(const f32v* sums, const T* bias, int num_columns, int panel, T* y, int64_t y_stride) {
  constexpr int V = P * kPanelVectors;
  for (int v = 0; v < V; ++v) {
    const int column = panel * kPanelColumns + v * kLanes;
    const int here = std::min(kLanes, num_columns - column);
    if (here <= 0) return;
    f32v added = {};
    if (bias != nullptr) added = load_tail(bias + column, here);
    for (int r = 0; r < R; ++r) {
      const f32v value = bias != nullptr ? sums[r * V + v] + added : sums[r * V + v];
      if (here == kLanes)
        storev(y + r * y_stride + column, value);
      else
        store_tail(y + r * y_stride + column, value, here);
    }
  }
}

template <typename T, int R, int P>
inline void linear_tile(const Linear& linear, const Panels& panels, const Panels& next, int panel, const T* x,
                        int64_t x_stride, T* y, int64_t y_stride) {
  f32v sums[R * P * kPanelVectors];
  sum_tile<T, R, P>(panels, next, linear.num_units, x, x_stride, sums);
  store_tile<T, R, P>(sums, static_cast<const T*>(linear.bias), linear.num_columns, panel, y, y_stride);
}

// Panels [panel, panel + P), which are `panels`, for all rows; then `next` is read.
template <typename T, int P>
inline void linear_panels(const Linear& linear, const Panels& panels, const Panels& next, int panel, const T* x,
                          int64_t x_stride, T* y, int64_t y_stride, int64_t rows) {
  in_tiles<P == 1 ? kRowTile<T> : kRowTileOfTwo>(int(rows), [&](auto n, int row) {
    linear_tile<T, n.value, P>(linear, panels, next, panel, x + row * x_stride, x_stride, y + row * y_stride,
                               y_stride);
  });
}

// y [rows, columns] = x [rows, inner] W^T + bias for panels [first, last); after them `next` is read.
template <typename T>
void linear(const Linear& linear, const T* x, int64_t x_stride, T* y, int64_t y_stride, int64_t rows, int first,
            int last, const Panels& next = {}) {
  int panel = first;
  if (linear.panels == nullptr) {
    // Packed panel by panel, each time: memory is slower than the transposition.
    static thread_local std::vector<uint32_t> packed;
    packed.resize(std::max<size_t>(packed.size(), linear.panel_size()));
    for (; panel < last; ++panel) {
      pack_panel(static_cast<const T*>(linear.rows), linear.row_stride, linear.num_columns, linear.num_units, panel,
                 packed.data());
      linear_panels<T, 1>(linear, {packed.data(), 0}, {packed.data(), 0}, panel, x, x_stride, y, y_stride, rows);
    }
    return;
  }
  const auto at = [&](int p) { return Panels{linear.panels + p * linear.panel_size(), linear.panel_size()}; };
  const auto after = [&](int p) { return p < last ? at(p) : next; };
  if constexpr (kRowTileOfTwo > 0) {
    if (rows <= kRowTileOfTwo)
      for (; panel + 2 <= last; panel += 2)
        linear_panels<T, 2>(linear, at(panel), after(panel + 2), panel, x, x_stride, y, y_stride, rows);
  }
  for (; panel < last; ++panel)
    linear_panels<T, 1>(linear, at(panel), after(panel + 1), panel, x, x_stride, y, y_stride, rows);
}

}  // namespace dh
