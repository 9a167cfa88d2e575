// Sixteen lanes at a time, written with the compilers' vector extensions: AVX-512 takes them as they are,
// narrower machines in pieces. Intrinsics only where compilers miss the instruction: bf16 dot products, and
// conversions between 16 and 32 bits, which GCC makes of halves.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#if defined(__AVX512BF16__)
#define DH_BF16_DOT 1
#endif
#endif

namespace dh {

constexpr int kLanes = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

struct bf16 {
  uint16_t bits;
};

template <typename V>
inline V load_as(const void* source) {
  V value;
  std::memcpy(&value, source, sizeof(V));
  return value;
}

template <typename V>
inline void store_as(void* target, V value) {
  std::memcpy(target, &value, sizeof(V));
}

inline f32x16 splat(float value) { return value - f32x16{}; }
inline u32x16 splat_bits(uint32_t value) { return value - u32x16{}; }

inline f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) { return mask ? yes : no; }

inline f32x16 vmax(f32x16 a, f32x16 b) { return select(a > b, a, b); }

#if defined(__clang__)
#define DH_SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define DH_SHUFFLE(v, ...) __builtin_shuffle(v, i32x16{__VA_ARGS__})
#endif

// Folds the lanes by halves: lane i with lane i + 8, then + 4, + 2, + 1.
template <typename F>
inline float fold(f32x16 v, const F& f) {
  v = f(v, DH_SHUFFLE(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = f(v, DH_SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = f(v, DH_SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = f(v, DH_SHUFFLE(v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

inline float reduce_add(f32x16 v) {
  return fold(v, [](f32x16 a, f32x16 b) { return a + b; });
}

inline float reduce_max(f32x16 v) {
  return fold(v, [](f32x16 a, f32x16 b) { return vmax(a, b); });
}

inline float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  return load_as<float>(&bits);
}
inline float to_float(float value) { return value; }

inline u32x16 extend(u16x16 halves) {
#if defined(__AVX512F__)
  return (u32x16)_mm512_cvtepu16_epi32((__m256i)halves);
#else
  return __builtin_convertvector(halves, u32x16);
#endif
}

inline u16x16 low_halves(u32x16 words) {
#if defined(__AVX512F__)
  return (u16x16)_mm512_cvtepi32_epi16((__m512i)words);
#else
  return __builtin_convertvector(words, u16x16);
#endif
}

inline f32x16 widen(u16x16 halves) { return (f32x16)(extend(halves) << 16); }

inline f32x16 load16(const float* p) { return load_as<f32x16>(p); }
inline f32x16 load16(const bf16* p) { return widen(load_as<u16x16>(p)); }

// Round to nearest even; a NaN stays a (quiet) NaN.
inline u16x16 narrow(f32x16 v) {
  const u32x16 bits = (u32x16)v;
  const u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u32x16 nan = splat_bits(0x7fc0u);
  return low_halves((v != v) ? nan : rounded);
}

inline void store16(float* p, f32x16 v) { store_as(p, v); }
inline void store16(bf16* p, f32x16 v) { store_as(p, narrow(v)); }

// What the value becomes when it is stored as T and read again.
template <typename T>
inline f32x16 rounded(f32x16 v);
template <>
inline f32x16 rounded<float>(f32x16 v) {
  return v;
}
template <>
inline f32x16 rounded<bf16>(f32x16 v) {
  return widen(narrow(v));
}

template <typename T>
inline f32x16 load_tail(const T* p, int count) {
  alignas(64) T lane[kLanes] = {};
  std::memcpy(lane, p, count * sizeof(T));
  return load16(lane);
}

template <typename T>
inline void store_tail(T* p, f32x16 v, int count) {
  alignas(64) T lane[kLanes];
  store16(lane, v);
  std::memcpy(p, lane, count * sizeof(T));
}

// exp(x): 0 below -87.3, saturated above 88.3; within 2 units in the last place between
// (Cody-Waite reduction, degree-6 minimax polynomial as in Cephes expf).
inline f32x16 exp16(f32x16 x) {
  const f32x16 low = splat(-87.3f), high = splat(88.3f);
  const i32x16 vanishes = x < low;
  f32x16 y = select(x > high, high, x);
  y = select(vanishes, low, y);
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 shifted = y * 1.44269504088896341f + magic;
  const f32x16 n = shifted - magic;
  f32x16 r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32x16 p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const i32x16 exponent = ((i32x16)shifted - (i32x16)magic + 127) << 23;
  return select(vanishes, f32x16{}, p * (f32x16)exponent);
}

inline f32x16 tanh16(f32x16 x) {
  const f32x16 e = exp16(x * 2.0f);
  return 1.0f - 2.0f / (e + 1.0f);
}

// Asks for a cache line. GCC takes a function of nothing but __builtin_prefetch for one without effects, and
// drops it. The operand is the address: for one in memory, sums in a loop around it would be kept in memory too.
inline void prefetch_line(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 (%0)" : : "r"(p));
#else
  __builtin_prefetch(p);
#endif
}

#if defined(__clang__)
#define DH_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define DH_PICK(a, b, ...) __builtin_shuffle(a, b, u32x16{__VA_ARGS__})
#endif

// Transposes a 16 x 16 matrix of 32-bit values held in 16 vectors: pairs of 32 bits, pairs of 64, then
// quarters of a vector twice, each of which is a single cheap instruction where vectors are that wide.
inline void transpose16(u32x16* rows) {
  u32x16 a[kLanes], b[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    a[i] = DH_PICK(rows[i], rows[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    a[i + 1] = DH_PICK(rows[i], rows[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < kLanes; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = DH_PICK(a[i + j], a[i + j + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      b[i + 2 * j + 1] = DH_PICK(a[i + j], a[i + j + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  }
  // b[4 g + c] holds, in quarter q, column 4 q + c of rows 4 g .. 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    for (int h = 0; h < 2; ++h) {
      const u32x16 first = b[8 * h + c], second = b[8 * h + 4 + c];
      a[4 * c + h] = DH_PICK(first, second, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
      a[4 * c + 2 + h] = DH_PICK(first, second, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
  }
  for (int c = 0; c < 4; ++c) {
    for (int odd = 0; odd < 2; ++odd) {
      const u32x16 first = a[4 * c + 2 * odd], second = a[4 * c + 2 * odd + 1];
      rows[4 * odd + c] = DH_PICK(first, second, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
      rows[8 + 4 * odd + c] = DH_PICK(first, second, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
  }
}

// acc[lane] += a[lane].lo * b.lo + a[lane].hi * b.hi for pairs of bf16 packed in 32 bits, b the same in
// all lanes.
inline f32x16 dot_pairs(f32x16 acc, u32x16 a, uint32_t b) {
#ifdef DH_BF16_DOT
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)splat_bits(b));
#else
  const uint32_t low = b << 16, high = b & 0xffff0000u;
  acc += (f32x16)(a << 16) * load_as<float>(&low);
  return acc + (f32x16)(a & 0xffff0000u) * load_as<float>(&high);
#endif
}

// Numbers along an inner dimension, as units of 32 bits: a float, or two neighbouring bf16. acc[lane] += the products
// of unit a[lane] with unit b, the same in all lanes.
//
// A b that is multiplied by many times is taken apart once: `spread` writes the words, of 32 bits, that
// `multiply_add_spread` reads from memory as they are. Sums are the same, bit for bit.
template <typename T>
struct Units;

template <>
struct Units<float> {
  static constexpr int per = 1;
  static constexpr int words = 1;
  static f32x16 multiply_add(f32x16 acc, u32x16 a, uint32_t b) { return acc + (f32x16)a * load_as<float>(&b); }
  static void spread(uint32_t* target, uint32_t b) { *target = b; }
  static f32x16 multiply_add_spread(f32x16 acc, u32x16 a, const uint32_t* b) { return multiply_add(acc, a, *b); }
};

template <>
struct Units<bf16> {
  static constexpr int per = 2;
  static f32x16 multiply_add(f32x16 acc, u32x16 a, uint32_t b) { return dot_pairs(acc, a, b); }
#ifdef DH_BF16_DOT
  static constexpr int words = 1;
  static void spread(uint32_t* target, uint32_t b) { *target = b; }
  static f32x16 multiply_add_spread(f32x16 acc, u32x16 a, const uint32_t* b) { return dot_pairs(acc, a, *b); }
#else
  static constexpr int words = 2;
  static void spread(uint32_t* target, uint32_t b) {
    target[0] = b << 16;
    target[1] = b & 0xffff0000u;
  }
  static f32x16 multiply_add_spread(f32x16 acc, u32x16 a, const uint32_t* b) {
    acc += (f32x16)(a << 16) * load_as<float>(b);
    return acc + (f32x16)(a & 0xffff0000u) * load_as<float>(b + 1);
  }
#endif
};

}  // namespace dh
