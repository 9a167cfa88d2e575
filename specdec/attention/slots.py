"""Writing a step's keys and values into the pool with plain tensor operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.attention.metadata import AttentionMetadata
from specdec.kv.packed_rows import is_packed, pack_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSlots:
    """Where the rows of one step go in a pool."""

    blocks: torch.Tensor
    """int64 [T]"""
    offsets: torch.Tensor
    """int64 [T]: places in these blocks."""

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> PoolSlots:
        """Return those of a step."""
        slots, block_size = metadata.slot_mapping, metadata.block_size
        return cls(
            blocks=torch.div(slots, block_size, rounding_mode="floor"),
            offsets=torch.remainder(slots, block_size),
        )

    def write(
        self, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor
    ) -> None:
        """Write key and value [T, G, D] into one layer's pools [N, G, P, D], or packed ones."""
        if is_packed(key_cache):
            key, value = pack_rows(key), pack_rows(value)
        key_cache.transpose(1, 2)[self.blocks, self.offsets] = key
        value_cache.transpose(1, 2)[self.blocks, self.offsets] = value
