"""The noise of `specdec.sampling.noise` for rows of tensors: in ops that every device has, or as one kernel.

R rows, V token ids. 64-bit unsigned arithmetic runs in int64, where sums and products wrap alike.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from specdec.attention.triton import is_interpreted, launch
from specdec.core.proposal import NoiseStream
from specdec.sampling.noise import MULTIPLIER_1, MULTIPLIER_2, STREAM_TAGS, WEYL


def as_signed(value: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit number."""
    return value - (1 << 64) if value >= 1 << 63 else value


_WEYL = as_signed(WEYL)
_MULTIPLIER_1 = as_signed(MULTIPLIER_1)
_MULTIPLIER_2 = as_signed(MULTIPLIER_2)
_TAGS = {stream: as_signed(tag) for stream, tag in STREAM_TAGS.items()}

_NUMBERS_AT_ONCE = 1 << 15
"""Intermediate int64 and float64 values of so many stay in a core's cache."""
_NUMBERS_AT_ONCE_ELSEWHERE = 1 << 23
"""On devices they take 32 bytes each, which no pool leaves room for but in pieces: so many, 256 MiB."""
_NUMBERS_PER_PROGRAM = 1024


def row_keys(seeds_R: torch.Tensor, positions_R: torch.Tensor, stream: NoiseStream) -> torch.Tensor:
    """Return the row keys, int64 [R], of int64 seeds (bits of the unsigned seed) and positions."""
    streams_R = _mix64(_mix64(seeds_R + _WEYL) ^ _TAGS[stream])
    return _mix64(streams_R + (positions_R + 1) * _WEYL)


def hash_rows(row_keys_R: torch.Tensor, vocab_size: int, first_token_id: int = 0) -> torch.Tensor:
    """Return h as int64 [R, vocab_size] in [0, 2^32), for token ids from `first_token_id` on."""
    ids_V = torch.arange(first_token_id + 1, first_token_id + 1 + vocab_size, device=row_keys_R.device)
    return (_mix64(row_keys_R[:, None] + ids_V * _WEYL) >> 32) & 0xFFFFFFFF


def uniforms_from_hash(hash_bits: torch.Tensor) -> torch.Tensor:
    """Return u = (h + 0.5) 2^-32 in float64, exact."""
    return (hash_bits.double() + 0.5) * 2.0**-32


def gumbels_from_hash(hash_bits: torch.Tensor) -> torch.Tensor:
    """Return g in fp32 for h of any shape."""
    return uniforms_from_hash(hash_bits).neg_().log1p_().neg_().log_().neg_().float()


def gumbel_rows(row_keys_R: torch.Tensor, vocab_size: int, first_token_id: int = 0) -> torch.Tensor:
    """Return g in fp32 [R, vocab_size]: on a GPU with Triton as one kernel, instead of fifty."""
    if row_keys_R.is_cuda and (kernels := _import_kernels()) is not None:
        return _gumbel_rows_by(kernels, row_keys_R, vocab_size, first_token_id)
    return _gumbel_rows_by_ops(row_keys_R, vocab_size, first_token_id)


def _gumbel_rows_by(
    kernels: Any, row_keys_R: torch.Tensor, vocab_size: int, first_token_id: int
) -> torch.Tensor:
    num_rows = row_keys_R.shape[0]
    noise_RV = torch.empty(num_rows, vocab_size, device=row_keys_R.device)
    if num_rows > 0:
        launch(
            kernels.gumbel_kernel,
            (num_rows, -(-vocab_size // _NUMBERS_PER_PROGRAM)),
            row_keys_R.contiguous(),
            noise_RV,
            first_token_id,
            vocab_size,
            WEYL=_WEYL,
            MULTIPLIER_1=_MULTIPLIER_1,
            MULTIPLIER_2=_MULTIPLIER_2,
            BLOCK=_NUMBERS_PER_PROGRAM,
            INTERPRETED=is_interpreted(),
            num_warps=4,
        )
    return noise_RV


@functools.cache
def _import_kernels() -> Any:
    """The Triton kernels, or None where the package is missing."""
    try:
        return importlib.import_module("specdec.sampling.noise_kernels")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("triton"):
            raise
        return None


def _gumbel_rows_by_ops(row_keys_R: torch.Tensor, vocab_size: int, first_token_id: int) -> torch.Tensor:
    num_rows = row_keys_R.shape[0]
    numbers_at_once = _NUMBERS_AT_ONCE if row_keys_R.is_cpu else _NUMBERS_AT_ONCE_ELSEWHERE
    rows_at_once = max(1, numbers_at_once // vocab_size)
    noise_RV = torch.empty(num_rows, vocab_size, device=row_keys_R.device)
    for first in range(0, num_rows, rows_at_once):
        piece = slice(first, first + rows_at_once)
        noise_RV[piece] = gumbels_from_hash(hash_rows(row_keys_R[piece], vocab_size, first_token_id))
    return noise_RV


def gumbel_tokens(row_keys_R: torch.Tensor, token_ids_RN: torch.Tensor) -> torch.Tensor:
    """Return g in fp32 [R, N] of each row's own tokens, int64 [R, N]."""
    hashes_RN = _mix64(row_keys_R[:, None] + (token_ids_RN + 1) * _WEYL) >> 32
    return gumbels_from_hash(hashes_RN & 0xFFFFFFFF)


def _mix64(bits: torch.Tensor) -> torch.Tensor:
    # >> on int64 copies the sign bit: the masks make it the logical shift of the definition.
    bits = (bits ^ ((bits >> 30) & 0x3FFFFFFFF)) * _MULTIPLIER_1
    bits = (bits ^ ((bits >> 27) & 0x1FFFFFFFFF)) * _MULTIPLIER_2
    return bits ^ ((bits >> 31) & 0x1FFFFFFFF)
