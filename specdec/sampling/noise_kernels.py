"""The noise of `specdec.sampling.noise` as one Triton kernel. Importing this needs the `triton` package."""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _mix64(bits, MULTIPLIER_1: tl.constexpr, MULTIPLIER_2: tl.constexpr):
    # As in `noise_rows`: the masks make >> on int64 the logical shift of the definition.
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * MULTIPLIER_1
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * MULTIPLIER_2
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["first_id", "vocab_size"])
def gumbel_kernel(
    row_keys,
    noise,
    first_id,
    vocab_size,
    WEYL: tl.constexpr,
    MULTIPLIER_1: tl.constexpr,
    MULTIPLIER_2: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program per BLOCK token ids of a row: g in fp32 [R, V] of int64 row keys [R].

    The functions are those that PyTorch calls on a GPU, and so are the bits.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(row_keys + row)
    hashes = _mix64(key + (index + first_id + 1).to(tl.int64) * WEYL, MULTIPLIER_1, MULTIPLIER_2)
    uniform = (((hashes >> 32) & 0xFFFFFFFF).to(tl.float64) + 0.5) * 2.3283064365386963e-10
    if INTERPRETED:
        gumbel = -tl.log(-tl.log(1.0 - uniform))
    else:
        gumbel = -libdevice.log(-libdevice.log1p(-uniform))
    tl.store(noise + row * vocab_size + index, gumbel.to(tl.float32), mask=index < vocab_size)
