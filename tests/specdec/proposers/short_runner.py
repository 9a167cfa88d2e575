"""A toy model that knows few positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel
from specdec.model.batch import SequenceSlice

BLOCK_SIZE = 4


class ShortRunner(ToyRunner):
    """Knows `max_model_len` positions, and keeps book of those that it is given."""

    def __init__(self, model: ToyModel, *, num_blocks: int = 256, max_model_len: int = 256) -> None:
        super().__init__(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=max_model_len)
        self.most_attended = 0

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        for one in slices:
            first = one.start + one.num_dropped + (0 if one.shift is None else one.shift.offset)
            assert first >= 0
            assert first + len(one.token_ids) <= self.max_model_len, "a position that the model does not have"
            assert one.start <= first, "two tokens have one position"
            self.most_attended = max(self.most_attended, one.start + len(one.token_ids))
        return super().forward(slices)
