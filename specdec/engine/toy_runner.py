"""A model runner without a network, over the same toy model as `toy_target`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.engine.toy_target import ToyModel, slot_value
from specdec.model.batch import SequenceSlice
from specdec.sampling.noise import MASK_64


class ToyRunner:
    """A `Runner` whose K/V are numbers that depend on everything before them, read through block tables.

    A slice that claims K/V which are not there, or reads a stale block, gets other logits.
    """

    def __init__(
        self, model: ToyModel, *, num_blocks: int = 256, block_size: int = 4, max_model_len: int = 256
    ) -> None:
        self.model = model
        self.kv_generation = 0
        self.vocab_size = model.vocab_size
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.block_size = block_size
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

    def _run(self, one: SequenceSlice) -> list[NDArray[np.float64]]:
        assert one.parents is None, "the toy runner runs chains"
        slots = [
            block * self.block_size + offset for block in one.block_table for offset in range(self.block_size)
        ]
        assert one.start + len(one.token_ids) <= len(slots), "more tokens than the blocks hold"
        assert 0 not in one.block_table, "the scratch block is in a table"
        total = sum(self._slots[slot] for slot in slots[: one.start]) & MASK_64
        rows = []
        for row, token_id in enumerate(one.token_ids):
            place = one.start + row
            position = place + one.num_dropped
            is_shifted = one.shift is not None and position < one.shift.end
            shift = one.shift.offset if is_shifted and one.shift is not None else 0
            value = slot_value(total, position + shift, token_id)
            self._slots[slots[place]] = value
            total = (total + value) & MASK_64
            if row >= len(one.token_ids) - one.num_logit_rows:
                rows.append(self.model.logits(token_id, total))
        self.num_tokens_read += len(one.token_ids)
        return rows
