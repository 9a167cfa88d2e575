// As many lanes at a time as a register of the machine has, written with the compilers' vector extensions: of
// wider vectors GCC keeps the sums of a loop in memory, which is ten times slower. Intrinsics only where
// compilers miss the instruction: bf16 dot products, conversions between 8, 16 and 32 bits, which GCC makes
// of halves, and the larger and the smaller of two.
#pragma once

#include <cstdint>
#include <cstring>

#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__)
#define DH_BF16_DOT 1
#endif

namespace dh {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float f32v __attribute__((vector_size(4 * kLanes)));
typedef int32_t i32v __attribute__((vector_size(4 * kLanes)));
typedef uint32_t u32v __attribute__((vector_size(4 * kLanes)));
typedef int16_t i16v __attribute__((vector_size(2 * kLanes)));
typedef uint16_t u16v __attribute__((vector_size(2 * kLanes)));
typedef int8_t i8v __attribute__((vector_size(kLanes)));

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

inline f32v splat(float value) { return value - f32v{}; }
inline u32v splat_bits(uint32_t value) { return value - u32v{}; }

// a * b + c, rounded once. Written as a product and a sum, GCC makes one operation of it or two, as it thinks is
// faster around it: of the same sum in tiles of another height, too, whose bits must be the same.
inline f32v multiply_add(f32v a, f32v b, f32v c) {
#if defined(__AVX512F__)
  return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
inline f32v multiply_add(f32v a, float b, f32v c) { return multiply_add(a, splat(b), c); }

inline f32v select(i32v mask, f32v yes, f32v no) { return mask ? yes : no; }

// Of a NaN and anything, what stands second.
inline f32v vmax(f32v a, f32v b) {
#if defined(__AVX512F__)
  return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

inline f32v vmin(f32v a, f32v b) {
#if defined(__AVX512F__)
  return (f32v)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return select(a < b, a, b);
#endif
}

// The numbers of a and b, side by side, at these places.
template <int... I>
inline u32v pick(u32v a, u32v b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, I...);
#else
  return __builtin_shuffle(a, b, u32v{I...});
#endif
}

// Lane i of the result is lane i ^ Distance of v.
template <int Distance, int... I>
inline f32v exchange(f32v v, std::integer_sequence<int, I...>) {
  return (f32v)pick((u32v)v, (u32v)v, std::integer_sequence<int, (I ^ Distance)...>{});
}

// Folds the lanes by halves: of sixteen, lane i with lane i + 8, then + 4, + 2, + 1.
template <int Half = kLanes / 2, typename F>
inline float fold(f32v v, const F& f) {
  v = f(v, exchange<Half>(v, std::make_integer_sequence<int, kLanes>{}));
  if constexpr (Half > 1) return fold<Half / 2>(v, f);
  return v[0];
}

inline float reduce_add(f32v v) {
  return fold(v, [](f32v a, f32v b) { return a + b; });
}

// Of four lanes each, those at `First` and behind it of a and b: one of a, one of b, the next of a, the next of b.
template <int First, int... Lane>
inline f32v take_in_turn(f32v a, f32v b, std::integer_sequence<int, Lane...>) {
  return (f32v)pick((u32v)a, (u32v)b,
                    std::integer_sequence<int, (Lane / 4 * 4 + First + Lane % 4 / 2 + Lane % 2 * kLanes)...>{});
}

// Of four lanes each, those at `First` and behind it of a and b: two of a, two of b.
template <int First, int... Lane>
inline f32v take_in_pairs(f32v a, f32v b, std::integer_sequence<int, Lane...>) {
  return (f32v)pick((u32v)a, (u32v)b,
                    std::integer_sequence<int, (Lane / 4 * 4 + First + Lane % 2 + Lane % 4 / 2 * kLanes)...>{});
}

template <int Half = kLanes / 2>
inline f32v add_fours(f32v v) {
  if constexpr (Half < 4) return v;
  else return add_fours<Half / 2>(v + exchange<Half>(v, std::make_integer_sequence<int, kLanes>{}));
}

// Lanes [0, 4) of the result are the sums of a, b, c and d, which take not half of what they take one by one.
inline f32v reduce_add(f32v a, f32v b, f32v c, f32v d) {
  constexpr std::make_integer_sequence<int, kLanes> lanes{};
  const f32v ab = take_in_turn<0>(a, b, lanes) + take_in_turn<2>(a, b, lanes);
  const f32v cd = take_in_turn<0>(c, d, lanes) + take_in_turn<2>(c, d, lanes);
  return add_fours(take_in_pairs<0>(ab, cd, lanes) + take_in_pairs<2>(ab, cd, lanes));
}

inline float reduce_max(f32v v) {
  return fold(v, [](f32v a, f32v b) { return vmax(a, b); });
}

inline float to_float(bf16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  return load_as<float>(&bits);
}
inline float to_float(float value) { return value; }

inline u32v extend(u16v halves) {
#if defined(__AVX512F__)
  return (u32v)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
  return (u32v)_mm256_cvtepu16_epi32((__m128i)halves);
#else
  return __builtin_convertvector(halves, u32v);
#endif
}

inline u16v low_halves(u32v words) {
#if defined(__AVX512F__)
  return (u16v)_mm512_cvtepi32_epi16((__m512i)words);
#elif defined(__AVX2__)
  const __m256i low = (__m256i)(words & 0xffffu);
  return (u16v)_mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
#else
  return __builtin_convertvector(words, u16v);
#endif
}

inline f32v widen(u16v halves) { return (f32v)(extend(halves) << 16); }

inline f32v loadv(const float* p) { return load_as<f32v>(p); }
inline f32v loadv(const bf16* p) { return widen(load_as<u16v>(p)); }

// Round to nearest even; a NaN stays a (quiet) NaN.
inline u16v narrow(f32v v) {
  const u32v bits = (u32v)v;
  const u32v rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u32v nan = splat_bits(0x7fc0u);
  return low_halves((v != v) ? nan : rounded);
}

inline void storev(float* p, f32v v) { store_as(p, v); }
inline void storev(bf16* p, f32v v) { store_as(p, narrow(v)); }

// What the value becomes when it is stored as T and read again.
template <typename T>
inline f32v rounded(f32v v);
template <>
inline f32v rounded<float>(f32v v) {
  return v;
}
template <>
inline f32v rounded<bf16>(f32v v) {
  return widen(narrow(v));
}

template <typename T>
inline f32v load_tail(const T* p, int count) {
  alignas(64) T lane[kLanes] = {};
  std::memcpy(lane, p, count * sizeof(T));
  return loadv(lane);
}

template <typename T>
inline void store_tail(T* p, f32v v, int count) {
  alignas(64) T lane[kLanes];
  storev(lane, v);
  std::memcpy(p, lane, count * sizeof(T));
}

// exp(x): 0 below -87.3, or where AVX512 scales below -104, saturated above 88.3; within 2 units in the last place
// between, as far as these are normal numbers (Cody-Waite reduction, degree-6 minimax polynomial as in Cephes expf).
inline f32v expv(f32v x) {
#if defined(__AVX512F__)
  const f32v low = splat(-110.0f);
#else
  const f32v low = splat(-87.3f);
#endif
  const f32v y = vmax(low, vmin(splat(88.3f), x));
  const f32v magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32v shifted = y * 1.44269504088896341f + magic;
  const f32v n = shifted - magic;
  f32v r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  f32v p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
  return (f32v)_mm512_scalef_ps((__m512)p, (__m512)n);  // 2^n need not be a number of its own
#else
  const i32v exponent = ((i32v)shifted - (i32v)magic + 127) << 23;
  return select(x < low, f32v{}, p * (f32v)exponent);
#endif
}

inline f32v tanhv(f32v x) {
  const f32v e = expv(x * 2.0f);
  return 1.0f - 2.0f / (e + 1.0f);
}

// Asks for a cache line, into the second level: the first waits for few at a time, and what is asked for ahead would
// push what is looked at out of it. On Zen 4 attention over random pages takes 0.6 times as long as with the first
// level, and a forward of few rows 0.85 times. GCC takes a function of nothing but __builtin_prefetch for one without
// effects, and drops it. The operand is the address: for one in memory, sums in a loop around it would be kept in
// memory too.
inline void prefetch_line(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 (%0)" : : "r"(p));
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

// Places of `pick` that interleave: of each four lanes the first two, or the last two (High), in runs of Run
// numbers, of a and b in turn.
template <int Run, bool High, int... I>
constexpr auto interleaved(std::integer_sequence<int, I...>) {
  return std::integer_sequence<int, (I / 4 * 4 + (High ? 2 : 0) + (Run == 1 ? I % 4 / 2 : I % 2) +
                                     ((Run == 1 ? I % 2 : I % 4 / 2) ? kLanes : 0))...>{};
}

template <int Run, bool High>
inline u32v interleave(u32v a, u32v b) {
  return pick(a, b, interleaved<Run, High>(std::make_integer_sequence<int, kLanes>{}));
}

// Quarters of a, then of b: the first and third (or, Odd, the second and fourth) of each; of eight lanes the halves.
template <bool Odd, int... I>
inline u32v pick_quarters(u32v a, u32v b, std::integer_sequence<int, I...>) {
  constexpr int half = kLanes / 2;
  return pick(a, b,
              std::integer_sequence<int, ((I < half ? 0 : kLanes) + I % half / 4 * 8 + (Odd ? 4 : 0) + I % 4)...>{});
}

template <bool Odd>
inline u32v quarters(u32v a, u32v b) {
  return pick_quarters<Odd>(a, b, std::make_integer_sequence<int, kLanes>{});
}

// Transposes a matrix of N x N 32-bit values held in as many vectors: pairs of 32 bits, pairs of 64, then
// quarters of a vector, twice where it has four of them; each is a single cheap instruction.
template <int N = kLanes>
inline void transpose(u32v* rows) {
  u32v a[N], b[N];
  for (int i = 0; i < N; i += 2) {
    a[i] = interleave<1, false>(rows[i], rows[i + 1]);
    a[i + 1] = interleave<1, true>(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < N; i += 4) {
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = interleave<2, false>(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = interleave<2, true>(a[i + j], a[i + j + 2]);
    }
  }
  // b[4 g + c] holds, in quarter q, column 4 q + c of rows 4 g .. 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    if constexpr (N == 4) {
      rows[c] = b[c];
    } else if constexpr (N == 8) {
      rows[c] = quarters<false>(b[c], b[4 + c]);
      rows[4 + c] = quarters<true>(b[c], b[4 + c]);
    } else {
      const u32v even[2] = {quarters<false>(b[c], b[4 + c]), quarters<false>(b[8 + c], b[12 + c])};
      const u32v odd[2] = {quarters<true>(b[c], b[4 + c]), quarters<true>(b[8 + c], b[12 + c])};
      rows[c] = quarters<false>(even[0], even[1]);
      rows[8 + c] = quarters<true>(even[0], even[1]);
      rows[4 + c] = quarters<false>(odd[0], odd[1]);
      rows[12 + c] = quarters<true>(odd[0], odd[1]);
    }
  }
}

// acc[lane] += a[lane].lo * b.lo + a[lane].hi * b.hi for pairs of bf16 packed in 32 bits; b may be the same in
// all lanes.
inline f32v dot_pairs(f32v acc, u32v a, u32v b) {
  acc = multiply_add((f32v)(a << 16), (f32v)(b << 16), acc);
  return multiply_add((f32v)(a & 0xffff0000u), (f32v)(b & 0xffff0000u), acc);
}
inline f32v dot_pairs(f32v acc, u32v a, uint32_t b) {
#ifdef DH_BF16_DOT
  return (f32v)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)splat_bits(b));
#else
  const uint32_t low = b << 16, high = b & 0xffff0000u;
  acc = multiply_add((f32v)(a << 16), load_as<float>(&low), acc);
  return multiply_add((f32v)(a & 0xffff0000u), load_as<float>(&high), acc);
#endif
}

// Numbers along an inner dimension, as units of 32 bits: a float, or two neighbouring bf16. acc[lane] += the products
// of unit a[lane] with unit b, the same in all lanes.
//
// A b that is multiplied by many times is taken apart once: `spread` writes the words, of 32 bits, that
// `multiply_add_spread` reads from memory as they are, and by which what `word` makes of an a is multiplied, one after
// the other. Sums are the same, bit for bit.
template <typename T>
struct Units;

template <>
struct Units<float> {
  static constexpr int per = 1;
  static constexpr int words = 1;
  static f32v multiply_add(f32v acc, u32v a, u32v b) { return dh::multiply_add((f32v)a, (f32v)b, acc); }
  static f32v multiply_add(f32v acc, u32v a, uint32_t b) {
    return dh::multiply_add((f32v)a, load_as<float>(&b), acc);
  }
  static void spread(uint32_t* target, uint32_t b) { *target = b; }
  static void spread_row(uint32_t* target, const float* row, int64_t count) { std::memcpy(target, row, 4 * count); }
  static f32v word(u32v a, int) { return (f32v)a; }
  static f32v multiply_add_spread(f32v acc, u32v a, const uint32_t* b) { return multiply_add(acc, a, *b); }
};

template <>
struct Units<bf16> {
  static constexpr int per = 2;
  static f32v multiply_add(f32v acc, u32v a, u32v b) { return dot_pairs(acc, a, b); }
  static f32v multiply_add(f32v acc, u32v a, uint32_t b) { return dot_pairs(acc, a, b); }
#ifdef DH_BF16_DOT
  static constexpr int words = 1;
  static void spread(uint32_t* target, uint32_t b) { *target = b; }
  static f32v multiply_add_spread(f32v acc, u32v a, const uint32_t* b) { return dot_pairs(acc, a, *b); }
#else
  static constexpr int words = 2;
  static void spread(uint32_t* target, uint32_t b) {
    target[0] = b << 16;
    target[1] = b & 0xffff0000u;
  }
  static void spread_row(uint32_t* __restrict target, const bf16* __restrict row, int64_t count) {
    for (int64_t i = 0; i < count; ++i) target[i] = uint32_t(row[i].bits) << 16;
  }
  static f32v word(u32v a, int index) { return (f32v)(index == 0 ? a << 16 : a & 0xffff0000u); }
  static f32v multiply_add_spread(f32v acc, u32v a, const uint32_t* b) {
    acc = dh::multiply_add(word(a, 0), load_as<float>(b), acc);
    return dh::multiply_add(word(a, 1), load_as<float>(b + 1), acc);
  }
#endif
};

// Sums of values over tokens, columns side by side in lanes: acc[lane] += the values of as many neighbouring tokens as
// a product has, times these tokens' weights, which share a word of 32 bits, the same in all lanes. What is made of
// values is made once for all rows of a tile.
template <typename T>
struct Weighted {
  static constexpr int tokens = 1;
  // What products take weights for.
  static f32v rounded(f32v weights) { return weights; }
  // Puts words of `count` weights, a multiple of kLanes, where the weights were.
  static void pack(float*, int) {}
  // Values of V vectors of columns, which begin at rows[i] + d.
  template <int V>
  static void load(f32v (&values)[V], const T* const* rows, int d) {
#pragma GCC unroll 16
    for (int v = 0; v < V; ++v) values[v] = loadv(rows[0] + d + v * kLanes);
  }
  static void load_tail(f32v (&values)[1], const T* const* rows, int d, int count) {
    values[0] = dh::load_tail(rows[0] + d, count);
  }
  static f32v multiply_add(f32v acc, f32v values, const float* word) { return dh::multiply_add(values, *word, acc); }
};

#ifdef DH_BF16_DOT
// Two tokens to a product, of weights rounded to bf16. An average divides by the sum of the rounded ones: what all
// values have in common then comes out as it is.
template <>
struct Weighted<bf16> {
  static constexpr int tokens = 2;
  static f32v rounded(f32v weights) { return widen((u16v)_mm512_cvtneps_pbh((__m512)weights)); }
  static void pack(float* weights, int count) {
    char* words = reinterpret_cast<char*>(weights);
    for (int t = 0; t < count; t += kLanes)
      store_as(words + t * sizeof(bf16), (u16v)_mm512_cvtneps_pbh((__m512)loadv(weights + t)));
  }
  template <int V>
  static void load(f32v (&values)[V], const bf16* const* rows, int d) {
#pragma GCC unroll 16
    for (int v = 0; v + 1 < V; v += 2) {
      const u16v2 first = load_as<u16v2>(rows[0] + d + v * kLanes), second = load_as<u16v2>(rows[1] + d + v * kLanes);
      values[v] = pair<0>(first, second, std::make_integer_sequence<int, 2 * kLanes>{});
      values[v + 1] = pair<kLanes>(first, second, std::make_integer_sequence<int, 2 * kLanes>{});
    }
    if constexpr (V % 2 != 0) {
      const int last = d + (V - 1) * kLanes;
      values[V - 1] = pair(load_as<u16v>(rows[0] + last), load_as<u16v>(rows[1] + last));
    }
  }
  static void load_tail(f32v (&values)[1], const bf16* const* rows, int d, int count) {
    u16v both[2] = {};
    for (int i = 0; i < 2; ++i) std::memcpy(both + i, rows[i] + d, count * sizeof(bf16));
    values[0] = pair(both[0], both[1]);
  }
  static f32v multiply_add(f32v acc, f32v values, const float* word) {
    return dot_pairs(acc, (u32v)values, load_as<uint32_t>(word));
  }

 private:
  typedef uint16_t u16v2 __attribute__((vector_size(4 * kLanes)));

  static f32v pair(u16v first, u16v second) { return (f32v)(extend(first) | extend(second) << 16); }
  // Columns from `First` on.
  template <int First, int... I>
  static f32v pair(u16v2 first, u16v2 second, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return (f32v)__builtin_shufflevector(first, second, (First + I / 2 + I % 2 * 2 * kLanes)...);
#else
    return (f32v)__builtin_shuffle(first, second, u16v2{(First + I / 2 + I % 2 * 2 * kLanes)...});
#endif
  }
};
#endif

}  // namespace dh
