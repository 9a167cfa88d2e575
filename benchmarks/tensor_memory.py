"""How much memory the tensors of this process take."""

from __future__ import annotations

import gc
from collections import Counter
from typing import NamedTuple

import torch


class _Storage(NamedTuple):
    """What tensors share; two devices may have the same addresses."""

    device: str
    address: int


class _Extent(NamedTuple):
    """Where a tensor lies in its storage, in bytes."""

    start: int
    end: int


def live_tensor_bytes() -> Counter[str]:
    """Return the bytes of all tensors by kind of device (`cpu`, `cuda`), what they share counted once.

    Packed weights are pieces off the front of large storages of bytes, of which the rest was never written:
    there only the pieces count. What recorded CUDA graphs keep for themselves is in no tensor.
    """
    gc.collect()
    pieces: dict[_Storage, set[_Extent]] = {}
    to_the_end: dict[_Storage, set[_Extent]] = {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor) and one.device.type != "meta" and one.numel() > 0:
            extent, storage = _extent(one), one.untyped_storage()
            may_be_left = one.dtype == torch.uint8 and extent.end == storage.nbytes()
            kind = to_the_end if may_be_left else pieces
            kind.setdefault(_Storage(one.device.type, storage.data_ptr()), set()).add(extent)
    num_bytes: Counter[str] = Counter()
    for place, extents in (to_the_end | pieces).items():
        num_bytes[place.device] += _covered(extents)
    return num_bytes


def _extent(tensor: torch.Tensor) -> _Extent:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start, each = int(tensor.storage_offset()), tensor.element_size()
    return _Extent(start * each, (start + int(last) + 1) * each)


def _covered(extents: set[_Extent]) -> int:
    """Return how many bytes lie in at least one of them."""
    total, reached = 0, 0
    for start, end in sorted(extents):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
