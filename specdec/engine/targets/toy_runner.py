"""A model runner without a network, over the same toy model as `toy_target`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.core.plan import SlotMove
from specdec.engine.targets.toy_target import ToyModel, move_toy_slots, slot_value
from specdec.model.batch import SequenceSlice
from specdec.sampling.noise import MASK_64
from specdec.tree.topology import ROOT, topology_of


class ToyRunner:
    """A `Runner` whose K/V are numbers that depend on everything before them, read through block tables.

    A slice that claims K/V which are not there, or reads a stale block, gets other logits.
    """

    def __init__(
        self, model: ToyModel, *, num_blocks: int = 256, block_size: int = 4, max_model_len: int = 256
    ) -> None:
        self.model = model
        self.kv_generation = 0
        self.hidden: None = None
        self.taps: None = None
        """It keeps no hidden states."""
        self.vocab_size = model.vocab_size
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.row_buckets: tuple[int, ...] = ()
        self.num_forwards = 0
        self.num_tokens_read = 0
        self._slots = [0] * (num_blocks * block_size)

    def forward(self, slices: Sequence[SequenceSlice], observation: None = None) -> torch.Tensor:
        """Return fp32 logits [sum of num_logit_rows, vocab]; there is no attention to observe."""
        self.num_forwards += 1
        rows: list[NDArray[np.float64]] = []
        for one in slices:
            rows.extend(self._run(one))
        if not rows:
            return torch.empty(0, self.vocab_size)
        return torch.from_numpy(np.stack(rows)).float()

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """See `model.batch.Runner.copy_blocks`."""
        assert not set(sources) & set(destinations), "a block is copied from and to"
        size = self.block_size
        for source, destination in zip(sources, destinations, strict=True):
            copied = self._slots[source * size : (source + 1) * size]
            self._slots[destination * size : (destination + 1) * size] = copied

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """See `model.batch.Runner.move_slots`."""
        move_toy_slots(self._slots, moves)

    def _run(self, one: SequenceSlice) -> list[NDArray[np.float64]]:
        slots = [
            block * self.block_size + offset for block in one.block_table for offset in range(self.block_size)
        ]
        assert one.start + len(one.token_ids) <= len(slots), "more tokens than the blocks hold"
        assert 0 not in one.block_table, "the scratch block is in a table"
        before = sum(self._slots[slot] for slot in slots[: one.start]) & MASK_64
        rows = []
        totals: list[int] = []
        topology = topology_of(len(one.token_ids), None if one.parents is None else tuple(one.parents))
        for row, (token_id, parent) in enumerate(zip(one.token_ids, topology.parents, strict=True)):
            total = before if parent == ROOT else totals[parent]
            place = one.start + row
            position = one.start + topology.depths[row] - 1 + one.num_dropped
            is_shifted = one.shift is not None and position < one.shift.end
            shift = one.shift.offset if is_shifted and one.shift is not None else 0
            value = slot_value(total, position + shift, token_id)
            self._slots[slots[place]] = value
            total = (total + value) & MASK_64
            totals.append(total)
            if row >= len(one.token_ids) - one.num_logit_rows:
                rows.append(self.model.logits(token_id, total))
        self.num_tokens_read += len(one.token_ids)
        return rows
