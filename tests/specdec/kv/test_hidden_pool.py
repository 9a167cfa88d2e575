"""Hidden states beside K/V."""

from __future__ import annotations

import torch

from specdec.core.plan import SlotMove
from specdec.kv.hidden_pool import HiddenPool


def _filled() -> HiddenPool:
    """Slot s holds [s, s]."""
    pool = HiddenPool(2, num_blocks=3, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    slots = torch.arange(12)
    pool.write(slots, slots[:, None].expand(12, 2).float())
    return pool


def test_rows_of_places_follow_the_block_table() -> None:
    assert _filled().read([2, 1], 2, 6)[:, 0].tolist() == [10, 11, 4, 5]


def test_blocks_are_copied_whole() -> None:
    pool = _filled()
    pool.copy_blocks([1], [2])
    assert pool.read([2], 0, 4)[:, 1].tolist() == [4, 5, 6, 7]


def test_moves_read_what_was_there_before_any() -> None:
    pool = _filled()
    pool.move_slots([SlotMove(6, 5), SlotMove(9, 6)])
    assert pool.read([0, 1, 2], 4, 12)[:, 0].tolist() == [4, 6, 9, 7, 8, 9, 10, 11]
