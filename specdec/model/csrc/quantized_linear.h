// y = x W^T (+ bias) for weights quantized to 8 or 4 bits, turned into numbers in registers.
//
// specdec/model/quantized_linear.py lays the weights out: panels of 32 columns, in them chunks of the inner
// dimension, in them the columns side by side. A weight is a small integer times the scale of its group: a
// stretch of the inner dimension of one column (8 bits: all of it). An output is, group by group in ascending
// order, the sum of the group's products in ascending order, times the group's scale, whatever the number of
// rows or threads. Such integers are exact in bf16, so that nothing of a weight is rounded once more.
#pragma once

#include <type_traits>

#include "linear.h"

namespace dh {

enum class WeightFormat : int32_t { kFloat = 0, kInt8, kInt4 };

struct QuantizedLinear {
  WeightFormat format;
  const char* panels;
  const void* scales;  // [panel][group][kPanelColumns], of Format::Scale<T>
  const void* bias;    // null: none; dtype of the activations
  int32_t inner;       // a multiple of num_groups * Format::kDepth
  int32_t num_groups;
  int32_t num_columns;
};

struct LinearRows {
  const void* x;  // [count, inner]
  int64_t x_stride;
  void* y;  // [count, columns], of the dtype of x
  int64_t y_stride;
  int64_t count;
  int32_t is_bf16;  // else float
};

// Panels [first, last) of all rows: `drafthouse_quantized_linear` of quantized_linear.cpp.
using QuantizedLinearKernel = void(const QuantizedLinear* linear, const LinearRows* rows, int32_t first, int32_t last);


#ifdef DH_BF16_DOT
typedef uint16_t u16x32 __attribute__((vector_size(64)));
#endif

// Pairs of bf16 from two signed integers each.
inline u32v bf16_pairs(i32v low, i32v high) {
  const u32v low_bits = (u32v)__builtin_convertvector(low, f32v);
  const u32v high_bits = (u32v)__builtin_convertvector(high, f32v);
  return (low_bits >> 16) | (high_bits & 0xffff0000u);
}

// A format says how a chunk of kLanes columns, kDepth long and kBytes large, becomes the units that `Units<T>`
// multiplies: unit<T>(chunk, u) is the u-th of them.

// Chunks [columns][2].
struct Int8 {
  static constexpr int kDepth = 2;
  static constexpr int kBytes = kDepth * kLanes;
  template <typename T>
  using Scale = float;

  static i32v element(const char* chunk, int index) {
    const i16v both = load_as<i16v>(chunk);
    return __builtin_convertvector(index == 0 ? (i16v)((u16v)both << 8) >> 8 : both >> 8, i32v);
  }

  template <typename T>
  static u32v unit(const char* chunk, int u) {
    if constexpr (std::is_same_v<T, float>) {
      return (u32v)__builtin_convertvector(element(chunk, u), f32v);
    } else {
#ifdef DH_BF16_DOT
      const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(chunk)));
      const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(chunk + kLanes)));
      return (u32v)_mm512_cvtne2ps_pbh(second, first);
#else
      return bf16_pairs(element(chunk, 0), element(chunk, 1));
#endif
    }
  }
};

// Chunks [columns] of 32 bits: element 2 j + h is the j-th nibble of the h-th half, in two's complement.
struct Int4 {
  static constexpr int kDepth = 8;
  static constexpr int kBytes = kDepth * kLanes / 2;
  template <typename T>
  using Scale = T;

  static i32v element(const char* chunk, int index) {
    const int shift = 16 * (index % 2) + 4 * (index / 2);
    return (i32v)(load_as<u32v>(chunk) << (28 - shift)) >> 28;
  }

  template <typename T>
  static u32v unit(const char* chunk, int u) {
    if constexpr (std::is_same_v<T, float>) {
      return (u32v)__builtin_convertvector(element(chunk, u), f32v);
    } else {
#ifdef DH_BF16_DOT
      // Of an index, bits 0 to 4 count, and bit 4 is part of the next nibble: the table says the same twice.
      constexpr u16x32 kNumbers = {
          0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0,
          0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
          0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
      const u16x32 nibbles = load_as<u16x32>(chunk) >> (4 * u);
      return (u32v)_mm512_permutexvar_epi16((__m512i)nibbles, (__m512i)kNumbers);
#else
      return bf16_pairs(element(chunk, 2 * u), element(chunk, 2 * u + 1));
#endif
    }
  }
};

template <typename Format>
constexpr int64_t panel_bytes(int64_t inner) {
  return inner / Format::kDepth * Format::kBytes * kPanelVectors;
}

constexpr int kBytesAhead = 2048;
constexpr int kLineBytes = 64;

// Outputs of R rows times P panels, row after row. Out of line for the reason that `sum_tile` is.
template <typename Format, typename T, int R, int P>
[[gnu::noinline]] void sum_quantized_tile(const QuantizedLinear& linear, int panel, const T* __restrict x,
                                          int64_t x_stride, f32v* __restrict sums) {
  using Scale = typename Format::template Scale<T>;
  constexpr int V = P * kPanelVectors;
  constexpr int kUnits = Format::kDepth / Units<T>::per;
  constexpr int kChunkBytes = Format::kBytes * kPanelVectors;
  const int64_t panel_size = panel_bytes<Format>(linear.inner);
  const char* __restrict weights = linear.panels + panel * panel_size;
  const Scale* __restrict scales = static_cast<const Scale*>(linear.scales) +
                                   int64_t(panel) * linear.num_groups * kPanelColumns;
  const int num_chunks = linear.inner / linear.num_groups / Format::kDepth;
  for (int i = 0; i < R * V; ++i) sums[i] = f32v{};
  for (int group = 0; group < linear.num_groups; ++group) {
    f32v sum[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
      for (int v = 0; v < V; ++v) sum[r][v] = f32v{};
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      for (int p = 0; p < P; ++p)
        for (int line = 0; line < kChunkBytes; line += kLineBytes)
          prefetch_line(weights + p * panel_size + line + kBytesAhead);
#pragma GCC unroll 16
      for (int u = 0; u < kUnits; ++u) {
        u32v w[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
          w[v] = Format::template unit<T>(
              weights + (v / kPanelVectors) * panel_size + (v % kPanelVectors) * Format::kBytes, u);
        add_products<T, R, V>(sum, w, x + u * Units<T>::per, x_stride);
      }
      weights += kChunkBytes;
      x += Format::kDepth;
    }
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) {
      const int64_t at = (int64_t(v / kPanelVectors) * linear.num_groups + group) * kPanelColumns;
      const f32v scale = loadv(scales + at + (v % kPanelVectors) * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sums[r * V + v] = multiply_add(sum[r][v], scale, sums[r * V + v]);
    }
  }
}

// Panels [panel, panel + P) for all rows, in tiles of up to N.
template <typename Format, typename T, int N, int P>
inline void quantized_panels(const QuantizedLinear& linear, int panel, const T* x, int64_t x_stride, T* y,
                             int64_t y_stride, int64_t rows) {
  in_tiles<N>(int(rows), [&](auto n, int row) {
    f32v sums[n.value * P * kPanelVectors];
    sum_quantized_tile<Format, T, n.value, P>(linear, panel, x + row * x_stride, x_stride, sums);
    store_tile<T, n.value, P * kPanelVectors>(sums, static_cast<const T*>(linear.bias), linear.num_columns,
                                              panel * kPanelColumns, y + row * y_stride, y_stride);
  });
}

// y [rows, columns] = x [rows, inner] W^T + bias for panels [first, last).
template <typename Format, typename T>
void quantized_linear(const QuantizedLinear& linear, const T* x, int64_t x_stride, T* y, int64_t y_stride,
                      int64_t rows, int first, int last) {
  int panel = first;
  if constexpr (kRowTileOfTwo > 0) {
    if (rows <= kRowTileOfTwo)
      for (; panel + 2 <= last; panel += 2)
        quantized_panels<Format, T, kRowTileOfTwo, 2>(linear, panel, x, x_stride, y, y_stride, rows);
  }
  for (; panel < last; ++panel)
    quantized_panels<Format, T, kRowTile<T>, 1>(linear, panel, x, x_stride, y, y_stride, rows);
}

}  // namespace dh
