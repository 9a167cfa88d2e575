"""What a model runner is fed: a flat batch of slices of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """Consecutive tokens of one sequence to run through the model.

    K/V of everything before `start` are in the blocks of `block_table`; K/V of these tokens are written
    there. The last `num_logit_rows` tokens yield logits.
    """

    token_ids: Sequence[int]
    start: int
    """Absolute position of the first token."""
    block_table: Sequence[int]
    """Block ids covering positions 0 .. start + len(token_ids) - 1 (or more)."""
    num_logit_rows: int
    parents: Sequence[int] | None = None
    """Tree: parent row (index into token_ids, -1: the cached prefix) of each token; None: a chain.
    Position ids follow depth."""


class Runner(Protocol):
    """A model with its own paged KV pool."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Run one flat batch; return logits [sum of num_logit_rows, vocab] in slice order, fp32.

        The returned tensor is only valid until the next call.
        """
        ...
