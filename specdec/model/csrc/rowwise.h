// Operations that look at one row at a time: elementwise arithmetic with broadcasting, means, norms.
//
// Results are those of PyTorch's eager kernels: fp32 arithmetic, rounded to the result's dtype once per
// operation. A row's result does not depend on the other rows.
#pragma once

#include <cmath>

#include "simd.h"

namespace dh {

enum class Dtype : int32_t { kFloat = 0, kBfloat16, kInt64 };

inline int64_t size_of(Dtype dtype) { return dtype == Dtype::kFloat ? 4 : dtype == Dtype::kBfloat16 ? 2 : 8; }

// A tensor [rows, dims...]: strides in elements.
struct Operand {
  int32_t buffer;
  Dtype dtype;
  int64_t offset;  // in elements
  int64_t row_stride;
  int64_t stride[3];
  int32_t by_position;  // the row is that of the position id, not of the batch
  int32_t unused;
};

enum class Op : int32_t {
  kCopy = 0,
  kAdd,
  kSub,
  kMul,
  kDiv,
  kNeg,
  kSquare,
  kCube,
  kSqrt,
  kRsqrt,
  kReciprocal,
  kExp,
  kTanh,
  kSigmoid,
  kSilu,
  kRelu,
  kGelu,
  kGeluTanh,
  kClamp,
};

inline f32v load_lanes(const char* p, Dtype dtype, int64_t stride, int count) {
  if (stride == 1 && count == kLanes)
    return dtype == Dtype::kFloat ? loadv(reinterpret_cast<const float*>(p)) : loadv(reinterpret_cast<const bf16*>(p));
  if (stride == 0)
    return splat(dtype == Dtype::kFloat ? load_as<float>(p) : to_float(load_as<bf16>(p)));
  alignas(64) float lane[kLanes] = {};
  for (int i = 0; i < count; ++i)
    lane[i] = dtype == Dtype::kFloat ? load_as<float>(p + i * stride * 4) : to_float(load_as<bf16>(p + i * stride * 2));
  return loadv(lane);
}

inline void store_lanes(char* p, Dtype dtype, int64_t stride, f32v v, int count) {
  if (stride == 1 && count == kLanes) {
    if (dtype == Dtype::kFloat)
      storev(reinterpret_cast<float*>(p), v);
    else
      storev(reinterpret_cast<bf16*>(p), v);
    return;
  }
  alignas(64) float lane[kLanes];
  alignas(32) bf16 half[kLanes];
  storev(lane, v);
  storev(half, v);
  for (int i = 0; i < count; ++i) {
    if (dtype == Dtype::kFloat)
      store_as(p + i * stride * 4, lane[i]);
    else
      store_as(p + i * stride * 2, half[i]);
  }
}

inline f32v sqrtv(f32v v) {
  alignas(64) float lane[kLanes];
  storev(lane, v);
  for (int i = 0; i < kLanes; ++i) lane[i] = std::sqrt(lane[i]);
  return loadv(lane);
}

// Within 1.5e-7 (Abramowitz and Stegun, 7.1.26).
inline f32v erfv(f32v x) {
  const i32v negative = x < f32v{};
  const f32v a = select(negative, -x, x);
  const f32v t = 1.0f / (1.0f + 0.3275911f * a);
  f32v p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const f32v y = 1.0f - p * t * expv(-a * a);
  return select(negative, -y, y);
}

// NaN stays NaN.
inline f32v at_least(f32v x, f32v low) { return select(x < low, low, x); }

inline f32v sigmoidv(f32v x) { return 1.0f / (1.0f + expv(-x)); }

struct Extent {
  int32_t n[3];
};

struct RowPointers {
  char* out;
  const char* a;
  const char* b;
};

// out = f(a, b) over the dims of one row; lanes [first, last) of the innermost one.
template <typename F>
inline void map_row(const F& f, const Extent& extent, const Operand& out, const Operand& a, const Operand& b,
                    RowPointers row, int first, int last) {
  const int64_t out_size = size_of(out.dtype), a_size = size_of(a.dtype), b_size = size_of(b.dtype);
  for (int i = 0; i < extent.n[0]; ++i) {
    for (int j = 0; j < extent.n[1]; ++j) {
      char* out_at = row.out + (i * out.stride[0] + j * out.stride[1]) * out_size;
      const char* a_at = row.a + (i * a.stride[0] + j * a.stride[1]) * a_size;
      const char* b_at = row.b == nullptr ? nullptr : row.b + (i * b.stride[0] + j * b.stride[1]) * b_size;
      for (int k = first; k < last; k += kLanes) {
        const int count = last - k < kLanes ? last - k : kLanes;
        const f32v x = load_lanes(a_at + k * a.stride[2] * a_size, a.dtype, a.stride[2], count);
        f32v y = {};
        if (b_at != nullptr) y = load_lanes(b_at + k * b.stride[2] * b_size, b.dtype, b.stride[2], count);
        store_lanes(out_at + k * out.stride[2] * out_size, out.dtype, out.stride[2], f(x, y), count);
      }
    }
  }
}

// One row of an elementwise operation. Without a second operand, `scalar` takes its place.
inline void elementwise_row(Op op, const Extent& extent, const Operand& out, const Operand& a, const Operand& b,
                            RowPointers row, float scalar, float scalar2, int first, int last) {
  const bool has_b = row.b != nullptr;
  const f32v s = splat(scalar), s2 = splat(scalar2);
  const auto map = [&](const auto& f) { map_row(f, extent, out, a, b, row, first, last); };
  switch (op) {
    case Op::kCopy: return map([](f32v x, f32v) { return x; });
    case Op::kAdd: return map([=](f32v x, f32v y) { return x + (has_b ? y : s); });
    case Op::kSub: return map([=](f32v x, f32v y) { return x - (has_b ? y : s); });
    case Op::kMul: return map([=](f32v x, f32v y) { return x * (has_b ? y : s); });
    case Op::kDiv: return map([=](f32v x, f32v y) { return x / (has_b ? y : s); });
    case Op::kNeg: return map([](f32v x, f32v) { return -x; });
    case Op::kSquare: return map([](f32v x, f32v) { return x * x; });
    case Op::kCube: return map([](f32v x, f32v) { return x * x * x; });
    case Op::kSqrt: return map([](f32v x, f32v) { return sqrtv(x); });
    case Op::kRsqrt: return map([](f32v x, f32v) { return 1.0f / sqrtv(x); });
    case Op::kReciprocal: return map([](f32v x, f32v) { return 1.0f / x; });
    case Op::kExp: return map([](f32v x, f32v) { return expv(x); });
    case Op::kTanh: return map([](f32v x, f32v) { return tanhv(x); });
    case Op::kSigmoid: return map([](f32v x, f32v) { return sigmoidv(x); });
    case Op::kSilu: return map([](f32v x, f32v) { return x * sigmoidv(x); });
    case Op::kRelu: return map([](f32v x, f32v) { return at_least(x, f32v{}); });
    case Op::kGelu: return map([](f32v x, f32v) { return x * 0.5f * (1.0f + erfv(x * 0.70710678f)); });
    case Op::kGeluTanh:
      return map([](f32v x, f32v) {
        return x * 0.5f * (1.0f + tanhv(0.79788456f * (x + 0.044715f * x * x * x)));
      });
    case Op::kClamp: return map([=](f32v x, f32v) {
      const f32v low = at_least(x, s);
      return select(low > s2, s2, low);
    });
  }
}

// Sum over the innermost dimension, divided by `divisor`.
inline void mean_row(const Extent& extent, const Operand& out, const Operand& a, RowPointers row, float divisor) {
  const int64_t out_size = size_of(out.dtype), a_size = size_of(a.dtype);
  for (int i = 0; i < extent.n[0]; ++i) {
    for (int j = 0; j < extent.n[1]; ++j) {
      const char* at = row.a + (i * a.stride[0] + j * a.stride[1]) * a_size;
      f32v sum = {};
      int k = 0;
      for (; k + kLanes <= extent.n[2]; k += kLanes)
        sum += load_lanes(at + k * a.stride[2] * a_size, a.dtype, a.stride[2], kLanes);
      float total = reduce_add(sum);
      for (; k < extent.n[2]; ++k) total += load_lanes(at + k * a.stride[2] * a_size, a.dtype, 0, 1)[0];
      char* out_at = row.out + (i * out.stride[0] + j * out.stride[1]) * out_size;
      store_lanes(out_at, out.dtype, 1, splat(total / divisor), 1);
    }
  }
}

// Softmax over the innermost dimension, which is contiguous in `a` and `out`.
inline void softmax_row(const Extent& extent, const Operand& out, const Operand& a, RowPointers row) {
  const int64_t out_size = size_of(out.dtype), a_size = size_of(a.dtype);
  const int n = extent.n[2];
  const auto lanes = [&](int k) { return n - k < kLanes ? n - k : kLanes; };
  for (int i = 0; i < extent.n[0]; ++i) {
    for (int j = 0; j < extent.n[1]; ++j) {
      const char* at = row.a + (i * a.stride[0] + j * a.stride[1]) * a_size;
      char* out_at = row.out + (i * out.stride[0] + j * out.stride[1]) * out_size;
      float largest = load_lanes(at, a.dtype, 0, 1)[0];
      for (int k = 0; k < n; ++k) {
        const float value = load_lanes(at + k * a_size, a.dtype, 0, 1)[0];
        largest = value > largest || value != value ? value : largest;
      }
      float total = 0.0f;
      for (int k = 0; k < n; k += kLanes) {
        const f32v e = expv(load_lanes(at + k * a_size, a.dtype, 1, lanes(k)) - largest);
        for (int lane = 0; lane < lanes(k); ++lane) total += e[lane];
      }
      for (int k = 0; k < n; k += kLanes) {
        const f32v e = expv(load_lanes(at + k * a_size, a.dtype, 1, lanes(k)) - largest);
        store_lanes(out_at + k * out_size, out.dtype, 1, e / total, lanes(k));
      }
    }
  }
}

// The `count` largest of a row of one dimension, falling, the first of equal ones first: their places when the
// result is of integers, else their values. A NaN is larger than everything.
inline void largest_row(int n, int count, const Operand& out, const Operand& a, RowPointers row) {
  const auto value = [&](int k) { return load_lanes(row.a + k * size_of(a.dtype), a.dtype, 0, 1)[0]; };
  const auto before = [](float x, int i, float y, int j) {
    if (x != x || y != y) return x != x && (y == y || i < j);
    return x > y || (x == y && i < j);
  };
  float last = 0.0f;
  int last_at = -1;
  for (int c = 0; c < count; ++c) {
    int best = -1;
    float best_value = 0.0f;
    for (int k = 0; k < n; ++k) {
      const float here = value(k);
      if (last_at >= 0 && !before(last, last_at, here, k)) continue;
      if (best < 0 || before(here, k, best_value, best)) best = k, best_value = here;
    }
    last = best_value, last_at = best;
    if (out.dtype == Dtype::kInt64)
      store_as(row.out + c * 8, int64_t(best));
    else
      store_lanes(row.out + c * size_of(out.dtype), out.dtype, 1, splat(best_value), 1);
  }
}

// out[places[i]] = a[i] of `count` elements; -inf in the other places of the `width`. Of one dtype, contiguous.
inline void spread_row(int width, int count, char* out, Dtype dtype, const char* a, const int64_t* places) {
  const f32v nothing = splat(-INFINITY);
  const int64_t size = size_of(dtype);
  for (int k = 0; k < width; k += kLanes)
    store_lanes(out + k * size, dtype, 1, nothing, width - k < kLanes ? width - k : kLanes);
  for (int i = 0; i < count; ++i) std::memcpy(out + places[i] * size, a + i * size, size);
}

// What a norm does beside dividing by the root of the (centred or plain) mean square.
struct Norm {
  int32_t centred;       // layer norm: subtract the mean
  int32_t round_before;  // round to the result's dtype before the weight is multiplied (Llama), not only after
  float epsilon;
};

// Layer norm or RMS norm over the innermost dimension, which is contiguous in `a`.
inline void norm_row(const Norm& norm, const Extent& extent, const Operand& out, const Operand& a, const Operand& w,
                     const Operand& bias, RowPointers row, const char* bias_row) {
  const int64_t out_size = size_of(out.dtype), a_size = size_of(a.dtype);
  const int64_t w_size = size_of(w.dtype), bias_size = size_of(bias.dtype);
  const int n = extent.n[2];
  const auto lanes = [&](int k) { return n - k < kLanes ? n - k : kLanes; };
  for (int i = 0; i < extent.n[0]; ++i) {
    for (int j = 0; j < extent.n[1]; ++j) {
      const char* at = row.a + (i * a.stride[0] + j * a.stride[1]) * a_size;
      float mean = 0.0f;
      if (norm.centred) {
        f32v sum = {};
        for (int k = 0; k < n; k += kLanes) sum += load_lanes(at + k * a_size, a.dtype, 1, lanes(k));
        mean = reduce_add(sum) / n;
      }
      f32v squares = {};
      for (int k = 0; k < n; k += kLanes) {
        f32v x = load_lanes(at + k * a_size, a.dtype, 1, lanes(k)) - mean;
        if (lanes(k) < kLanes) {
          alignas(64) float lane[kLanes] = {};
          store_tail(lane, x, lanes(k));
          x = loadv(lane);
        }
        squares += x * x;
      }
      const float scale = 1.0f / std::sqrt(reduce_add(squares) / n + norm.epsilon);
      char* out_at = row.out + (i * out.stride[0] + j * out.stride[1]) * out_size;
      for (int k = 0; k < n; k += kLanes) {
        const int count = lanes(k);
        f32v x = (load_lanes(at + k * a_size, a.dtype, 1, count) - mean) * scale;
        if (norm.round_before && out.dtype == Dtype::kBfloat16) x = rounded<bf16>(x);
        if (row.b != nullptr) x *= load_lanes(row.b + k * w_size, w.dtype, 1, count);
        if (bias_row != nullptr) x += load_lanes(bias_row + k * bias_size, bias.dtype, 1, count);
        store_lanes(out_at + k * out_size, out.dtype, 1, x, count);
      }
    }
  }
}

// Rotary embedding over pairs (k, k + half) of the innermost dimension: out = a * cos + rotate_half(a) * sin,
// each product and the sum rounded to the result's dtype, as the separate operations do. `b` holds the
// cosines, `c` the sines.
inline void rotary_row(const Extent& extent, const Operand& out, const Operand& a, const Operand& b, const Operand& c,
                       RowPointers row, const char* sines) {
  const int half = extent.n[2] / 2;
  const int64_t out_size = size_of(out.dtype), a_size = size_of(a.dtype);
  const int64_t b_size = size_of(b.dtype), c_size = size_of(c.dtype);
  const bool narrow_result = out.dtype == Dtype::kBfloat16;
  const auto round = [&](f32v v) { return narrow_result ? rounded<bf16>(v) : v; };
  for (int i = 0; i < extent.n[0]; ++i) {
    for (int j = 0; j < extent.n[1]; ++j) {
      const char* at = row.a + (i * a.stride[0] + j * a.stride[1]) * a_size;
      char* out_at = row.out + (i * out.stride[0] + j * out.stride[1]) * out_size;
      for (int k = 0; k < half; k += kLanes) {
        const int count = half - k < kLanes ? half - k : kLanes;
        const f32v low = load_lanes(at + k * a_size, a.dtype, 1, count);
        const f32v high = load_lanes(at + (k + half) * a_size, a.dtype, 1, count);
        const f32v cos_low = load_lanes(row.b + k * b_size, b.dtype, 1, count);
        const f32v cos_high = load_lanes(row.b + (k + half) * b_size, b.dtype, 1, count);
        const f32v sin_low = load_lanes(sines + k * c_size, c.dtype, 1, count);
        const f32v sin_high = load_lanes(sines + (k + half) * c_size, c.dtype, 1, count);
        store_lanes(out_at + k * out_size, out.dtype, 1, round(low * cos_low) + round(-high * sin_low), count);
        store_lanes(out_at + (k + half) * out_size, out.dtype, 1, round(high * cos_high) + round(low * sin_high),
                    count);
      }
    }
  }
}

}  // namespace dh
