"""Rotary position embedding of queries and keys as one Triton kernel. Importing this needs `triton`."""

import triton
import triton.language as tl


@triton.jit
def _rounded(product, like):
    """A product as a tensor of the dtype of `like` holds it, in fp32 again."""
    return product.to(like.dtype.element_ty).to(tl.float32)


# Launched with enable_fp_fusion=False: a product that is not rounded by itself would be another number.
@triton.jit(do_not_specialize=["cosine_row_stride", "sine_row_stride"])
def rotary_kernel(
    query,
    key,
    cosine,
    sine,
    query_out,
    key_out,
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    cosine_row_stride,
    sine_row_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """One program per row and BLOCK_HEADS heads: x * cos + rotate_half(x) * sin, each product rounded.

    The heads of the queries come first, those of the keys behind them. Results are contiguous, [T, H, D] and
    [T, G, D].
    """
    row = tl.program_id(0).to(tl.int64)
    head_h = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    lane_d = tl.arange(0, BLOCK_HALF)
    in_half_d = lane_d < HALF
    cos_row = cosine + row * cosine_row_stride + lane_d
    sin_row = sine + row * sine_row_stride + lane_d
    low_cos_d = tl.load(cos_row, mask=in_half_d, other=0.0).to(tl.float32)[None, :]
    high_cos_d = tl.load(cos_row + HALF, mask=in_half_d, other=0.0).to(tl.float32)[None, :]
    low_sin_d = tl.load(sin_row, mask=in_half_d, other=0.0).to(tl.float32)[None, :]
    high_sin_d = tl.load(sin_row + HALF, mask=in_half_d, other=0.0).to(tl.float32)[None, :]
    is_query_h = head_h < NUM_HEADS
    kv_head_h = head_h - NUM_HEADS
    is_key_h = (kv_head_h >= 0) & (kv_head_h < NUM_KV_HEADS)
    query_hd = is_query_h[:, None] & in_half_d[None, :]
    key_hd = is_key_h[:, None] & in_half_d[None, :]
    from_query = query + row * query_row_stride + head_h[:, None] * query_head_stride + lane_d[None, :]
    from_key = key + row * key_row_stride + kv_head_h[:, None] * key_head_stride + lane_d[None, :]
    # At most one of the two is loaded, the other adds an exact zero.
    low_hd = tl.load(from_query, mask=query_hd, other=0.0).to(tl.float32)
    low_hd += tl.load(from_key, mask=key_hd, other=0.0).to(tl.float32)
    high_hd = tl.load(from_query + HALF, mask=query_hd, other=0.0).to(tl.float32)
    high_hd += tl.load(from_key + HALF, mask=key_hd, other=0.0).to(tl.float32)
    low_out_hd = _rounded(low_hd * low_cos_d, query) + _rounded(-high_hd * low_sin_d, query)
    high_out_hd = _rounded(high_hd * high_cos_d, query) + _rounded(low_hd * high_sin_d, query)
    to_query = query_out + (row * NUM_HEADS + head_h[:, None]) * (2 * HALF) + lane_d[None, :]
    to_key = key_out + (row * NUM_KV_HEADS + kv_head_h[:, None]) * (2 * HALF) + lane_d[None, :]
    tl.store(to_query, low_out_hd, mask=query_hd)
    tl.store(to_query + HALF, high_out_hd, mask=query_hd)
    tl.store(to_key, low_out_hd, mask=key_hd)
    tl.store(to_key + HALF, high_out_hd, mask=key_hd)
