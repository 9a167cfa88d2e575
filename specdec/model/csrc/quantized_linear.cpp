// The kernels of quantized linear layers: a library of their own, built only where a model needs them.
// specdec/model/native_forward.py hands the function to the forward.

#include "quantized_linear.h"

namespace {

template <typename Format, typename T>
void run(const dh::QuantizedLinear& linear, const dh::LinearRows& rows, int first, int last) {
  dh::quantized_linear<Format, T>(linear, static_cast<const T*>(rows.x), rows.x_stride, static_cast<T*>(rows.y),
                                  rows.y_stride, rows.count, first, last);
}

template <typename T>
void run(const dh::QuantizedLinear& linear, const dh::LinearRows& rows, int first, int last) {
  if (linear.format == dh::WeightFormat::kInt8)
    run<dh::Int8, T>(linear, rows, first, last);
  else
    run<dh::Int4, T>(linear, rows, first, last);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" void drafthouse_quantized_linear(const dh::QuantizedLinear* linear, const dh::LinearRows* rows,
                                            int32_t first, int32_t last) {
  if (rows->is_bf16)
    run<dh::bf16>(*linear, *rows, first, last);
  else
    run<float>(*linear, *rows, first, last);
}
#pragma GCC visibility pop
