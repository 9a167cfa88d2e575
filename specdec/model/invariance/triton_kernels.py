"""The Triton kernels of `invariance.on_gpu`. Importing this needs the `triton` package.

M rows of a tile, N columns of a tile, K inputs. Tiles and the order of sums are constants of the dtype: what
a row becomes does not depend on how many there are, nor on where in a tile it lies.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_columns,
    num_inputs,
    x_stride,
    weight_row_stride,
    weight_column_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out [rows, columns] = x W^T + bias, one tile per program: its inputs in ascending order, one fp32 sum.

    WIDEN computes products of low-precision numbers in fp32, for the interpreter, which has no bfloat16.
    """
    # Programs that share columns are neighbours: weights are read once, from the cache by the others.
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists_M = row_M < num_rows
    exists_N = column_N < num_columns
    x_M = x + row_M.to(tl.int64) * x_stride
    weight_N = weight + column_N.to(tl.int64) * weight_row_stride
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, num_inputs, BLOCK_K):
        input_K = first + tl.arange(0, BLOCK_K)
        exists_K = input_K < num_inputs
        x_MK = tl.load(x_M[:, None] + input_K[None, :], mask=exists_M[:, None] & exists_K[None, :], other=0.0)
        weight_KN = tl.load(
            weight_N[None, :] + input_K.to(tl.int64)[:, None] * weight_column_stride,
            mask=exists_K[:, None] & exists_N[None, :],
            other=0.0,
        )
        if WIDEN:
            x_MK = x_MK.to(tl.float32)
            weight_KN = weight_KN.to(tl.float32)
        acc_MN = tl.dot(x_MK, weight_KN, acc_MN, input_precision="ieee")
    if HAS_BIAS:
        acc_MN += tl.load(bias + column_N, mask=exists_N, other=0.0).to(tl.float32)[None, :]
    place_MN = row_M.to(tl.int64)[:, None] * num_columns + column_N[None, :]
    tl.store(out + place_MN, acc_MN, mask=exists_M[:, None] & exists_N[None, :])


@triton.jit
def sum_kernel(x, out, row_size, divisor, BLOCK: tl.constexpr):
    """One program per row: its sum, piece by piece in ascending order, over `divisor`; fp32 in between."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, row_size, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        total += tl.load(x + row * row_size + lane, mask=lane < row_size, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(total, 0) / divisor)


@triton.jit
def softmax_kernel(x, out, row_size, BLOCK: tl.constexpr):
    """One program per row, which fits into a block."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < row_size
    values = tl.load(x + row * row_size + lane, mask=inside, other=float("-inf")).to(tl.float32)
    weights = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * row_size + lane, weights / tl.sum(weights, 0), mask=inside)


@triton.jit
def norm_kernel(
    x,
    weight,
    bias,
    out,
    row_size,
    epsilon,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Layer norm (CENTRED) or RMS norm, one program per row, which fits into a block; fp32 in between."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < row_size
    values = tl.load(x + row * row_size + lane, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        values = tl.where(inside, values - tl.sum(values, 0) / row_size, 0.0)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / row_size + epsilon)
    if HAS_WEIGHT:
        normed *= tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        normed += tl.load(bias + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * row_size + lane, normed, mask=inside)
