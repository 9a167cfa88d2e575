// y = x W^T (+ bias) for packed weights.
//
// The weight's rows (output columns) are packed in panels of 16 columns: for every unit of 32 bits along
// the inner dimension (one float, or two neighbouring bf16), the 16 columns' units side by side. An output
// is one sum over the inner dimension in ascending order, whatever the number of rows or threads.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"
#include "tiles.h"

namespace dh {

// Rows times panels of 16 columns whose sums are kept in registers at a time.
#if defined(__AVX512F__)
constexpr int kRowTile = 6;
constexpr int kPanelTile = 4;
#else
constexpr int kRowTile = 2;
constexpr int kPanelTile = 2;
#endif

template <typename T>
struct Packing;

template <>
struct Packing<float> {
  static constexpr int per = 1;
  static f32x16 multiply_add(f32x16 acc, u32x16 weights, uint32_t x) {
    return acc + (f32x16)weights * load_as<float>(&x);
  }
};

template <>
struct Packing<bf16> {
  static constexpr int per = 2;
  static f32x16 multiply_add(f32x16 acc, u32x16 weights, uint32_t x) { return dot_pairs(acc, weights, x); }
};

struct Linear {
  const uint32_t* panels;  // null: not packed
  const void* rows;        // not packed: W [columns, inner]
  int64_t row_stride;
  const void* bias;   // null: none; dtype of the weights
  int32_t num_units;  // units along the inner dimension
  int32_t num_columns;

  int64_t panel_size() const { return int64_t(num_units) * kLanes; }
};

// Packs panel `panel` of W [columns, inner], inner a multiple of the units' size.
template <typename T>
void pack_panel(const T* weight, int64_t row_stride, int64_t columns, int64_t num_units, int64_t panel,
                uint32_t* target) {
  for (int64_t unit = 0; unit < num_units; unit += kLanes) {
    u32x16 tile[kLanes] = {};
    const int64_t here = std::min<int64_t>(kLanes, num_units - unit);
    for (int c = 0; c < kLanes && panel * kLanes + c < columns; ++c)
      std::memcpy(&tile[c], weight + (panel * kLanes + c) * row_stride + unit * Packing<T>::per, here * 4);
    transpose16(tile);
    for (int64_t i = 0; i < here; ++i) store_as(target + (unit + i) * kLanes, tile[i]);
  }
}

template <typename T>
void pack_panels(const T* weight, int64_t row_stride, int64_t columns, int64_t num_units, uint32_t* panels) {
  for (int64_t panel = 0; panel * kLanes < columns; ++panel)
    pack_panel(weight, row_stride, columns, num_units, panel, panels + panel * num_units * kLanes);
}

template <typename T, int R, int P>
inline void linear_tile(const Linear& linear, const uint32_t* weights, int panel, const T* x, int64_t x_stride, T* y,
                        int64_t y_stride) {
  f32x16 sum[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) sum[r][p] = f32x16{};
  const int64_t panel_size = linear.panel_size();
  for (int unit = 0; unit < linear.num_units; ++unit) {
    u32x16 w[P];
    for (int p = 0; p < P; ++p) w[p] = load_as<u32x16>(weights + p * panel_size + unit * kLanes);
    for (int r = 0; r < R; ++r) {
      const uint32_t value = load_as<uint32_t>(x + r * x_stride + unit * Packing<T>::per);
      for (int p = 0; p < P; ++p) sum[r][p] = Packing<T>::multiply_add(sum[r][p], w[p], value);
    }
  }
  for (int p = 0; p < P; ++p) {
    const int column = (panel + p) * kLanes;
    const int here = std::min(kLanes, linear.num_columns - column);
    f32x16 bias = {};
    if (linear.bias != nullptr) bias = load_tail(static_cast<const T*>(linear.bias) + column, here);
    for (int r = 0; r < R; ++r) {
      const f32x16 value = linear.bias != nullptr ? sum[r][p] + bias : sum[r][p];
      if (here == kLanes)
        store16(y + r * y_stride + column, value);
      else
        store_tail(y + r * y_stride + column, value, here);
    }
  }
}

// Panels [panel, panel + P), which lie at `weights`, for all rows.
template <typename T, int P>
inline void linear_panels(const Linear& linear, const uint32_t* weights, int panel, const T* x, int64_t x_stride, T* y,
                          int64_t y_stride, int64_t rows) {
  in_tiles<kRowTile>(int(rows), [&](auto n, int row) {
    linear_tile<T, n.value, P>(linear, weights, panel, x + row * x_stride, x_stride, y + row * y_stride, y_stride);
  });
}

// y [rows, columns] = x [rows, inner] W^T + bias for panels [first, last).
template <typename T>
void linear(const Linear& linear, const T* x, int64_t x_stride, T* y, int64_t y_stride, int64_t rows, int first,
            int last) {
  int panel = first;
  if (linear.panels == nullptr) {
    // Packed panel by panel, each time: memory is slower than the transposition.
    static thread_local std::vector<uint32_t> packed;
    packed.resize(std::max<size_t>(packed.size(), linear.panel_size()));
    for (; panel < last; ++panel) {
      pack_panel(static_cast<const T*>(linear.rows), linear.row_stride, linear.num_columns, linear.num_units, panel,
                 packed.data());
      linear_panels<T, 1>(linear, packed.data(), panel, x, x_stride, y, y_stride, rows);
    }
    return;
  }
  const auto at = [&](int p) { return linear.panels + p * linear.panel_size(); };
  for (; panel + kPanelTile <= last; panel += kPanelTile)
    linear_panels<T, kPanelTile>(linear, at(panel), panel, x, x_stride, y, y_stride, rows);
  for (; panel < last; ++panel) linear_panels<T, 1>(linear, at(panel), panel, x, x_stride, y, y_stride, rows);
}

}  // namespace dh
