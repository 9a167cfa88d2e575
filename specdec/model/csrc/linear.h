// y = x W^T (+ bias) for packed weights.
//
// The weight's rows (output columns) are packed in panels of 32 columns: for every unit of 32 bits along
// the inner dimension (one float, or two neighbouring bf16), the 32 columns' units side by side, so that a
// panel is read from end to end. An output is one sum over the inner dimension in ascending order (by a matrix unit:
// of thirty-two numbers at a time), whatever the number of rows or threads.
#pragma once

#include <algorithm>
#include <vector>

#include "amx.h"
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

// There are sixteen vectors of eight lanes: sums of six rows times half a panel, the half's weights and a number of a
// row. Below as many rows as these, reading the weights takes longer than the products.
constexpr bool kInHalves = kLanes == 8;
constexpr int kHalfColumns = kPanelColumns / 2;
constexpr int kHalfVectors = kPanelVectors / 2;
constexpr int kRowTileOfHalf = 6;
constexpr int kFewestRowsInHalves = 4;
constexpr int64_t kRowsSpread = 8 * kRowTileOfHalf;  // at a time: they stay in a cache while all panels go by

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

// Adds the bias (null: none), and writes sums of R rows times V vectors of columns as rows of y, from `first_column`
// on; columns from `num_columns` on are padding.
template <typename T, int R, int V>
inline void store_tile(const f32v* sums, const T* bias, int num_columns, int first_column, T* y, int64_t y_stride) {
  for (int v = 0; v < V; ++v) {
    const int column = first_column + v * kLanes;
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
  store_tile<T, R, P * kPanelVectors>(sums, static_cast<const T*>(linear.bias), linear.num_columns,
                                      panel * kPanelColumns, y, y_stride);
}

// Sums of R rows, which are spread, times half a panel, row after row; `ahead` is asked for meanwhile, a line per unit.
// Of each unit the words are taken one after the other: as few vectors as can be are in use at a time.
template <typename T, int R>
[[gnu::noinline]] void sum_half(const uint32_t* __restrict at, const uint32_t* ahead, int64_t ahead_stride,
                                int num_units, const uint32_t* __restrict x, int64_t x_stride,
                                f32v* __restrict sums) {
  constexpr int words = Units<T>::words;
  f32v sum[R][kHalfVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kHalfVectors; ++v) sum[r][v] = f32v{};
  for (int unit = 0; unit < num_units; ++unit, at += kPanelColumns, ahead += ahead_stride, x += words) {
    prefetch_line(ahead);
#pragma GCC unroll 2
    for (int word = 0; word < words; ++word) {
      f32v w[kHalfVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kHalfVectors; ++v) w[v] = Units<T>::word(load_as<u32v>(at + v * kLanes), word);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const f32v value = (f32v)splat_bits(x[r * x_stride + word]);
#pragma GCC unroll 16
        for (int v = 0; v < kHalfVectors; ++v) sum[r][v] = multiply_add(w[v], value, sum[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kHalfVectors; ++v) sums[r * kHalfVectors + v] = sum[r][v];
}

// As `linear`, of packed weights. Whole panels are asked for before their turn.
template <typename T>
void linear_in_halves(const Linear& linear, const T* x, int64_t x_stride, T* y, int64_t y_stride, int64_t rows,
                      int first, int last, const Panels& next) {
  static thread_local std::vector<uint32_t> spread;
  constexpr int words = Units<T>::words;
  const int64_t size = linear.panel_size(), width = int64_t(linear.num_units) * words;
  spread.resize(std::max<size_t>(spread.size(), kRowsSpread * width));
  for (int64_t begin = 0; begin < rows; begin += kRowsSpread) {
    const int count = int(std::min(kRowsSpread, rows - begin));
    for (int row = 0; row < count; ++row)
      Units<T>::spread_row(spread.data() + row * width, x + (begin + row) * x_stride, width);
    for (int panel = first; panel < last; ++panel) {
      const uint32_t* at = linear.panels + panel * size;
      const uint32_t* following = begin + count < rows ? linear.panels + first * size : next.data;
      if (panel + 1 < last) following = at + size;
      in_tiles<kRowTileOfHalf>(count, [&](auto n, int row) {
        for (int half = 0; half < 2; ++half) {
          const bool asks = row == 0 && following != nullptr;
          f32v sums[n.value * kHalfVectors];
          sum_half<T, n.value>(at + half * kHalfColumns,
                               asks ? following + int64_t(half) * linear.num_units * kUnitsOfLine : at,
                               asks ? kUnitsOfLine : 0, linear.num_units, spread.data() + row * width, width, sums);
          store_tile<T, n.value, kHalfVectors>(sums, static_cast<const T*>(linear.bias), linear.num_columns,
                                               panel * kPanelColumns + half * kHalfColumns,
                                               y + (begin + row) * y_stride, y_stride);
        }
      });
    }
  }
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

#ifdef DH_AMX
// Rows whose sums are in tiles at a time: two tiles of them, times those of a panel's columns. Of one tile of rows, few
// as they are, those of two panels: a sum waits for its predecessor.
constexpr int kRowsInTiles = 2 * kTileRows;
constexpr int kTilesOfPanel = kPanelColumns / kTileRows;
constexpr int kTilesOfRows = 4, kTilesOfWeights = 6;  // behind the sums
constexpr int64_t kUnitBytes = sizeof(uint32_t);

// Sums of `num_rows` rows, in R tiles, times P panels, row after row. Units that are missing in the last tile are zeros.
// Panels are asked for ahead, unless they have been read before.
template <int R, int P>
void sum_in_tiles(const Panels& panels, const Panels& next, bool are_new, int num_units, const bf16* x,
                  int64_t x_stride, int num_rows, float* sums) {
  constexpr int C = P * kTilesOfPanel;
  static_assert(R * C <= kTilesOfRows);
  const int rows_each = (num_rows + R - 1) / R;
  const auto add = [&](const void* rows, int64_t row_bytes, const uint32_t* weights, int64_t panel_size) {
    load_tile<kTilesOfRows>(rows, row_bytes);
    if constexpr (R == 2) load_tile<kTilesOfRows + 1>(static_cast<const char*>(rows) + rows_each * row_bytes, row_bytes);
    [&]<int... c>(std::integer_sequence<int, c...>) {
      ((load_tile<kTilesOfWeights + c % 2>(weights + c / kTilesOfPanel * panel_size + c % kTilesOfPanel * kTileUnits,
                                           kPanelColumns * kUnitBytes),
        add_tile_products<c, kTilesOfRows, kTilesOfWeights + c % 2>(),
        R == 2 ? add_tile_products<(R - 1) * C + c, kTilesOfRows + R - 1, kTilesOfWeights + c % 2>() : void()),
       ...);
    }(std::make_integer_sequence<int, C>{});
  };
  [&]<int... tile>(std::integer_sequence<int, tile...>) {
    (zero_tile<tile>(), ...);
  }(std::make_integer_sequence<int, R * C>{});
  int unit = 0;
  for (; unit + kTileUnits <= num_units; unit += kTileUnits) {
    const bool is_last = unit + 2 * kTileUnits > num_units;
    const Panels& ahead = is_last ? next : panels;
    if (are_new && ahead.data != nullptr) {
      const uint32_t* at = is_last ? next.data : panels.data + int64_t(unit + kTileUnits) * kPanelColumns;
      for (int p = 0; p < P; ++p)
        for (int line = 0; line < kTileUnits * kPanelColumns; line += kUnitsOfLine)
          prefetch_line(at + p * ahead.size + line);
    }
    add(x + unit * Units<bf16>::per, x_stride * int64_t(sizeof(bf16)), panels.data + int64_t(unit) * kPanelColumns,
        panels.size);
  }
  if (unit < num_units) {
    alignas(64) uint32_t rows[kRowsInTiles * kTileUnits] = {}, weights[P * kTileUnits * kPanelColumns] = {};
    const int rest = num_units - unit;
    for (int row = 0; row < num_rows; ++row)
      std::memcpy(rows + row * kTileUnits, x + row * x_stride + unit * Units<bf16>::per, rest * kUnitBytes);
    for (int p = 0; p < P; ++p)
      std::memcpy(weights + p * kTileUnits * kPanelColumns,
                  panels.data + p * panels.size + int64_t(unit) * kPanelColumns, rest * kPanelColumns * kUnitBytes);
    add(rows, kTileUnits * kUnitBytes, weights, kTileUnits * kPanelColumns);
  }
  [&]<int... tile>(std::integer_sequence<int, tile...>) {
    (store_tile<tile>(sums + (tile / C * rows_each * C + tile % C) * kTileRows, C * kTileRows * sizeof(float)), ...);
  }(std::make_integer_sequence<int, R * C>{});
}

// Shapes of tiles for sums of rows times C tiles of columns.
template <int R, int C>
void shape_for_sums(int num_rows) {
  TileShapes shapes;
  for (int r = 0; r < R; ++r) {
    const int here = (num_rows + R - 1 - r) / R;
    for (int c = 0; c < C; ++c) shapes.set(r * C + c, here);
    shapes.set(kTilesOfRows + r, here);
  }
  for (int i = 0; i < 2; ++i) shapes.set(kTilesOfWeights + i, kTileRows);
  shape_tiles(shapes);
}

template <int R, int P>
void linear_tiles(const Linear& linear, const Panels& panels, const Panels& next, bool are_new, int panel,
                  const bf16* x, int64_t x_stride, bf16* y, int64_t y_stride, int num_rows) {
  constexpr int V = P * kPanelVectors;
  alignas(64) float sums[R * kTileRows * P * kPanelColumns];
  sum_in_tiles<R, P>(panels, next, are_new, linear.num_units, x, x_stride, num_rows, sums);
  for (int row = 0; row < num_rows; ++row)
    store_tile<bf16, 1, V>(reinterpret_cast<const f32v*>(sums + row * P * kPanelColumns),
                           static_cast<const bf16*>(linear.bias), linear.num_columns, panel * kPanelColumns,
                           y + row * y_stride, y_stride);
}

// As `linear`.
inline void linear_in_tiles(const Linear& linear, const bf16* x, int64_t x_stride, bf16* y, int64_t y_stride,
                            int num_rows, int first, int last, const Panels& next) {
  if (num_rows == 0) return;  // no logits are asked for; there are no tiles without rows
  static thread_local std::vector<uint32_t> packed;
  const bool is_packed = linear.panels != nullptr;
  if (!is_packed) packed.resize(std::max<size_t>(packed.size(), linear.panel_size()));
  const auto at = [&](int panel) {
    if (is_packed) return Panels{linear.panels + panel * linear.panel_size(), linear.panel_size()};
    pack_panel(static_cast<const bf16*>(linear.rows), linear.row_stride, linear.num_columns, linear.num_units, panel,
               packed.data());
    return Panels{packed.data(), 0};
  };
  const auto after = [&](int panel) {
    return panel == last ? next : is_packed ? at(panel) : Panels{};
  };
  int panel = first, shaped_for = 0;
  if (num_rows <= kTileRows) {
    if (is_packed && panel + 2 <= last) {
      shape_for_sums<1, 2 * kTilesOfPanel>(num_rows);
      for (; panel + 2 <= last; panel += 2)
        linear_tiles<1, 2>(linear, at(panel), after(panel + 2), true, panel, x, x_stride, y, y_stride, num_rows);
    }
    if (panel < last) shape_for_sums<1, kTilesOfPanel>(num_rows);
    for (; panel < last; ++panel)
      linear_tiles<1, 1>(linear, at(panel), after(panel + 1), true, panel, x, x_stride, y, y_stride, num_rows);
  } else {
    for (; panel < last; ++panel) {
      const Panels panels = at(panel);
      in_even_parts(kRowsInTiles, num_rows, [&](int count, int row) {
        if (count != shaped_for) shape_for_sums<2, kTilesOfPanel>(shaped_for = count);
        linear_tiles<2, 1>(linear, panels, after(panel + 1), row == 0, panel, x + row * x_stride, x_stride,
                           y + row * y_stride, y_stride, count);
      });
    }
  }
  release_tiles();
}
#endif

// y [rows, columns] = x [rows, inner] W^T + bias for panels [first, last); after them `next` is read.
template <typename T>
void linear(const Linear& linear, const T* x, int64_t x_stride, T* y, int64_t y_stride, int64_t rows, int first,
            int last, const Panels& next = {}) {
#ifdef DH_AMX
  if constexpr (std::is_same_v<T, bf16>) {
    if (has_amx()) {
      linear_in_tiles(linear, x, x_stride, y, y_stride, int(rows), first, last, next);
      return;
    }
  }
#endif
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
  if constexpr (kInHalves) {
    if (rows >= kFewestRowsInHalves) {
      linear_in_halves<T>(linear, x, x_stride, y, y_stride, rows, first, last, next);
      return;
    }
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
