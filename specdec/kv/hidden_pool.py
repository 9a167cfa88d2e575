"""Hidden states of the target beside its K/V: one row for every slot of the cache.

A row is what the target made of a token, for drafters that draft from it. It lies where the token's K/V lie,
and so has their life: found again with a cached prefix, overwritten where a rejected draft was, gone with the
block. Nothing else has to be remembered or freed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.core.plan import SlotMove
from specdec.kv.huge_pages import huge_zeros


class HiddenPool:
    """Rows [number of blocks * block size, width], zero at the start; slot = block * block size + offset."""

    def __init__(
        self, width: int, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.width = width
        self.block_size = block_size
        size = (num_blocks * block_size, width)
        self.rows = (
            huge_zeros(size, dtype) if device.type == "cpu" else torch.zeros(size, dtype=dtype, device=device)
        )

    @property
    def num_bytes(self) -> int:
        """Memory of all rows."""
        return self.rows.nbytes

    def write(self, slots_T: torch.Tensor, rows_TW: torch.Tensor) -> None:
        """Put row i into slot i of `slots_T` (int64, on the pool's device)."""
        self.rows.index_copy_(0, slots_T, rows_TW)

    def slot(self, block_table: Sequence[int], place: int) -> int:
        """Return where the row of a place of a sequence is."""
        return block_table[place // self.block_size] * self.block_size + place % self.block_size

    def read(self, block_table: Sequence[int], first: int, end: int) -> torch.Tensor:
        """Return a copy of the rows of places `first` .. `end` - 1 of a sequence, [end - first, width]."""
        return self.read_slots([self.slot(block_table, place) for place in range(first, end)])

    def read_slots(self, slots: Sequence[int]) -> torch.Tensor:
        """Return a copy of the rows of `slots`, [slots, width]."""
        return self.rows.index_select(0, torch.tensor(slots, dtype=torch.long, device=self.rows.device))

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy all rows of block `sources[i]` to block `destinations[i]`; no block is in both lists."""
        device = self.rows.device
        blocks = self.rows.view(-1, self.block_size, self.width)
        copied = blocks.index_select(0, torch.tensor(sources, dtype=torch.long, device=device))
        blocks.index_copy_(0, torch.tensor(destinations, dtype=torch.long, device=device), copied)

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """Move rows from slot to slot; all are read before any is written. No slot is a destination twice."""
        sources, destinations = torch.tensor(moves, dtype=torch.long, device=self.rows.device).T
        self.rows[destinations] = self.rows[sources]
