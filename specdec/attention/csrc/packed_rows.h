// Rows of K and V in 8 bits: a row's numbers as int8, and behind them an fp32 scale; specdec/kv/packed_rows.py says
// the same. Rows lie where they come to lie: nothing here is aligned.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace dh {

constexpr float kLargestPacked = 127.0f;
constexpr float kSmallestPacked = 1e-30f;  // rows of nothing larger become zeros: 127 over less overflows

inline int64_t packed_bytes(int64_t head_dim) { return head_dim + int64_t(sizeof(float)); }

// What is not finite makes the whole row NaN.
template <typename T>
void pack_row(const T* row, int head_dim, char* packed) {
  float largest = 0.0f;
  bool is_finite = true;
  for (int d = 0; d < head_dim; ++d) {
    const float size = std::fabs(to_float(row[d]));
    is_finite = is_finite && size <= std::numeric_limits<float>::max();
    largest = std::max(largest, size);
  }
  const float factor = is_finite && largest > kSmallestPacked ? kLargestPacked / largest : 0.0f;
  const float scale = is_finite ? largest / kLargestPacked : std::numeric_limits<float>::quiet_NaN();
  for (int d = 0; d < head_dim; ++d)
    packed[d] = is_finite ? char(int8_t(std::nearbyint(to_float(row[d]) * factor))) : char(0);
  std::memcpy(packed + head_dim, &scale, sizeof(scale));
}

inline f32v widen_bytes(i8v bytes) {
#if defined(__AVX512F__)
  return (f32v)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  return (f32v)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadu_si64(&bytes)));
#else
  return __builtin_convertvector(bytes, f32v);
#endif
}

// Integers of up to 8 bits: nothing is lost.
inline void store_integers(float* p, f32v v) { storev(p, v); }
inline void store_integers(bf16* p, f32v v) { store_as(p, low_halves((u32v)v >> 16)); }

// Leaves the integers of a row in `row`; returns the scale that they are to be multiplied by.
template <typename T>
float unpack_row(const char* packed, int head_dim, T* row) {
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) store_integers(row + d, widen_bytes(load_as<i8v>(packed + d)));
  if (d < head_dim) {
    alignas(64) char bytes[kLanes] = {};
    alignas(64) T lane[kLanes];
    std::memcpy(bytes, packed + d, head_dim - d);
    store_integers(lane, widen_bytes(load_as<i8v>(bytes)));
    std::memcpy(row + d, lane, (head_dim - d) * sizeof(T));
  }
  float scale;
  std::memcpy(&scale, packed + head_dim, sizeof(scale));
  return scale;
}

}  // namespace dh
