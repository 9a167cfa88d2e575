"""RMS norm as one Triton kernel. Importing this needs the `triton` package."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row_stride"])
def rms_norm_kernel(
    x,
    weight,
    out,
    epsilon,
    row_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS_BEFORE: tl.constexpr,
    PLUS_ONE: tl.constexpr,
):
    """One program per row: x / sqrt(mean(x^2) + epsilon), in fp32, times the weight (plus one, Gemma).

    ROUNDS_BEFORE: the quotient is rounded to the dtype of `x` before it meets the weight (Llama).
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < SIZE
    values = tl.load(x + row * row_stride + lane, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + epsilon)
    if ROUNDS_BEFORE:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    if PLUS_ONE:
        weights += 1.0
    tl.store(out + row * SIZE + lane, normed * weights, mask=inside)
