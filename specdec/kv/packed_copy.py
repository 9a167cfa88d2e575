"""K and V of a pool once more, in 8 bits: what drafts of the target attend to, who verifies never does.

Blocks and slots are those of the pool. Slots are copied once their K and V are verified; behind them drafts
write their own, which nobody takes over: the pool itself stays as verification leaves it.

Shape letters: S stacked tensors (K and V of layers of one shape), N blocks, G key/value heads, P block size,
D head size, n slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from specdec.kv.packed_rows import pack_rows, packed_size
from specdec.kv.pool import KvPool, KvShape

_MOST_NUMBERS: Final = 1 << 22
"""Copied at a time, in fp32 for a moment: 16 MiB."""


class PackedCopy:
    """Implements `attention.base.LayerCaches`; int8 [N, G, P, D + 4] for each layer, as in `packed_rows`."""

    def __init__(self, pool: KvPool) -> None:
        """Make room for a copy of `pool`, and copy nothing yet."""
        self._pool = pool
        self._packed = KvPool(
            [KvShape(num_kv_heads=keys.shape[1], head_dim=packed_size(keys.shape[3])) for keys in pool.keys],
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            dtype=torch.int8,
            device=pool.keys[0].device,
        )

    @property
    def keys(self) -> Sequence[torch.Tensor]:
        """K, layer by layer."""
        return self._packed.keys

    @property
    def values(self) -> Sequence[torch.Tensor]:
        """V, layer by layer."""
        return self._packed.values

    @property
    def num_bytes(self) -> int:
        """Memory that is taken beside the pool."""
        return self._packed.num_bytes

    @torch.inference_mode()
    def copy(self, slots: Sequence[int]) -> None:
        """Copy K and V of all layers in these slots (block * block size + place), on the device."""
        if not slots:
            return
        size = self._pool.block_size
        every = torch.tensor(slots, dtype=torch.long, device=self._pool.keys[0].device)
        for source, packed in zip(self._pool.stacks, self._packed.stacks, strict=True):
            per_slot = source.shape[0] * source.shape[2] * source.shape[4]
            for some in torch.split(every, max(1, _MOST_NUMBERS // per_slot)):
                blocks, places = some // size, some % size
                packed[:, blocks, :, places] = pack_rows(source[:, blocks, :, places])


def packed_bytes_per_token(shapes: Sequence[KvShape]) -> int:
    """Return what a copy takes for each token: K and V of all layers."""
    return sum(2 * shape.num_kv_heads * packed_size(shape.head_dim) for shape in shapes)
