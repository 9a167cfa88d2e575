// Single operations, for forwards that run eagerly: what a compiled forward computes, one call each. What a row
// (of elementwise operations: an element) becomes does not depend on what lies beside it.
//
// specdec/model/invariance/native.py mirrors the structs.
#pragma once

#include <algorithm>
#include <cmath>

#include "linear.h"
#include "quantized_linear.h"
#include "rowwise.h"
#include "team.h"

namespace dh {

struct LinearCall {
  Linear linear;
  const void* x;  // [rows, inner]
  int64_t x_stride;
  void* y;  // [rows, columns]
  int64_t y_stride;
  int64_t num_rows;
  int32_t is_bf16;  // else float
  int32_t num_threads;
};

enum class RowKind : int32_t { kUnary = 0, kCos, kSin, kPower, kMean, kSoftmax, kNorm };

struct QuantizedCall {
  QuantizedLinear linear;
  LinearRows rows;
};

// All of one dtype, rows of `row_size` elements one behind the other. Operations that look at one element take
// rows of any length.
struct RowCall {
  RowKind kind;
  Op op;         // unary
  Dtype dtype;
  int32_t num_threads;
  const char* x;
  const char* y;  // power: exponents; norm: weight, null for none
  const char* z;  // norm: bias, null for none
  char* out;      // mean: one element per row
  int64_t num_elements;
  int32_t row_size;
  float scalar;  // mean: the divisor; norm: epsilon
  Norm norm;
};

// Shares small enough for one core are not worth waking others.
constexpr int64_t kElementsPerThread = 1 << 13;

template <typename F>
void on_threads(int num_threads, const F& run) {
#if defined(_OPENMP)
  if (num_threads > 1) {
#pragma omp parallel num_threads(num_threads)
    run(Share{omp_get_thread_num(), omp_get_num_threads()});
    return;
  }
#endif
  run(Share{0, 1});
}

template <typename T>
void run_linear(const LinearCall& call) {
  on_threads(call.num_threads, [&](const Share& share) {
    int64_t first, last;
    share.of(num_panels(call.linear.num_columns), &first, &last);
    if (first < last)
      linear<T>(call.linear, static_cast<const T*>(call.x), call.x_stride, static_cast<T*>(call.y), call.y_stride,
                call.num_rows, int(first), int(last));
  });
}

inline void run_quantized(const QuantizedCall& call, QuantizedLinearKernel* kernel, int num_threads) {
  on_threads(num_threads, [&](const Share& share) {
    int64_t first, last;
    share.of(num_panels(call.linear.num_columns), &first, &last);
    if (first < last) kernel(&call.linear, &call.rows, int32_t(first), int32_t(last));
  });
}

// Element by element, with the functions of the C library: few elements (angles of rotary embeddings).
template <typename T, typename F>
inline void each_element(const RowCall& call, int64_t first, int64_t last, const F& f) {
  const T* x = reinterpret_cast<const T*>(call.x);
  const T* y = reinterpret_cast<const T*>(call.y);
  for (int64_t i = first; i < last; ++i) {
    const float value = f(to_float(x[i]), y == nullptr ? call.scalar : to_float(y[i]));
    store_lanes(call.out + i * sizeof(T), call.dtype, 1, splat(value), 1);
  }
}

template <typename T>
void run_rows(const RowCall& call, int64_t first, int64_t last) {
  const Extent extent = {1, 1, call.row_size};
  const Operand operand = {0, call.dtype, 0, 0, {0, 0, 1}, 0, 0};
  const int64_t row_bytes = int64_t(call.row_size) * sizeof(T);
  for (int64_t row = first; row < last; ++row) {
    const int64_t begin = row * call.row_size, end = std::min(call.num_elements, begin + call.row_size);
    const RowPointers at = {call.out + row * row_bytes, call.x + row * row_bytes, nullptr};
    switch (call.kind) {
      case RowKind::kUnary:
        elementwise_row(call.op, extent, operand, operand, operand, at, 0.0f, 0.0f, 0, int(end - begin));
        break;
      case RowKind::kCos:
        each_element<T>(call, begin, end, [](float x, float) { return std::cos(x); });
        break;
      case RowKind::kSin:
        each_element<T>(call, begin, end, [](float x, float) { return std::sin(x); });
        break;
      case RowKind::kPower:
        each_element<T>(call, begin, end, [](float x, float y) { return std::pow(x, y); });
        break;
      case RowKind::kMean:
        mean_row(extent, operand, operand, {call.out + row * int64_t(sizeof(T)), at.a, nullptr}, call.scalar);
        break;
      case RowKind::kSoftmax:
        softmax_row(extent, operand, operand, at);
        break;
      case RowKind::kNorm:
        norm_row(call.norm, extent, operand, operand, operand, operand, {at.out, at.a, call.y}, call.z);
        break;
    }
  }
}

inline void run_rows(const RowCall& call) {
  const int64_t num_rows = (call.num_elements + call.row_size - 1) / call.row_size;
  const int64_t worth = std::max<int64_t>(1, call.num_elements / kElementsPerThread);
  on_threads(int(std::min<int64_t>(call.num_threads, worth)), [&](const Share& share) {
    int64_t first, last;
    share.of(num_rows, &first, &last);
    call.dtype == Dtype::kFloat ? run_rows<float>(call, first, last) : run_rows<bf16>(call, first, last);
  });
}

}  // namespace dh
