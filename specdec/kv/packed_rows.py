"""K and V in 8 bits: a row (one token, one head) is its numbers as int8, and behind them an fp32 scale.

Shape letters: D head size.
"""

from __future__ import annotations

from typing import Final

import torch

SCALE_BYTES: Final = 4
_LARGEST: Final = 127.0
_SMALLEST: Final = 1e-30
"""Rows of nothing larger are packed as zeros: 127 over less overflows."""


def is_packed(cache: torch.Tensor) -> bool:
    """Whether the rows of a cache are packed."""
    return cache.dtype == torch.int8


def packed_size(head_dim: int) -> int:
    """Return the bytes of a packed row."""
    return head_dim + SCALE_BYTES


def pack_rows(rows: torch.Tensor) -> torch.Tensor:
    """Pack rows [..., D], each by its own largest number; returns int8 [..., D + SCALE_BYTES].

    What is not finite comes back as NaN, in the whole row.
    """
    numbers = rows.float()
    largest = numbers.abs().amax(-1, keepdim=True)
    # A number over a tensor is its reciprocal times the number to PyTorch, which rounds twice.
    factor = torch.where(
        (largest > _SMALLEST) & largest.isfinite(), largest.new_tensor(_LARGEST) / largest, 0.0
    )
    scale = torch.where(largest.isfinite(), largest / _LARGEST, torch.nan)
    packed = torch.empty(
        (*rows.shape[:-1], packed_size(rows.shape[-1])), dtype=torch.int8, device=rows.device
    )
    packed[..., :-SCALE_BYTES] = (numbers * factor).round_().nan_to_num_()
    packed[..., -SCALE_BYTES:] = scale.contiguous().view(torch.int8)
    return packed


def unpack_rows(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what `pack_rows` has packed, [..., D], rounded to `dtype`."""
    scale = packed[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (packed[..., :-SCALE_BYTES].float() * scale).to(dtype)
