"""What a model runner is fed: a flat batch of slices of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from specdec.core.plan import SlotMove

if TYPE_CHECKING:
    import torch


class PositionShift(NamedTuple):
    """Added to the position ids that a model is given for a sequence (see `model.rotary`)."""

    offset: int
    end: int
    """Positions from here on are given as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSlice:
    """Consecutive tokens of one sequence to run through the model.

    K/V of everything before `start` are in the blocks of `block_table`; K/V of these tokens are written
    there. The last `num_logit_rows` tokens yield logits. Where only a part of what comes before is read,
    `start` and the block table count what is, and `num_dropped` says how much is not.
    """

    token_ids: Sequence[int]
    start: int
    """Place of the first token among those of the block table: its absolute position, less `num_dropped`."""
    block_table: Sequence[int]
    """Block ids covering places 0 .. start + len(token_ids) - 1 (or more)."""
    num_logit_rows: int
    parents: Sequence[int] | None = None
    """Tree: parent row (index into token_ids, -1: the cached prefix) of each token; None: a chain.
    Position ids follow depth."""
    num_known: int = 0
    """Tree: nodes that were read before, whose K/V lie right before those of these tokens. `parents` are of
    them too, and count from the first of them. `try_generate` alone takes such slices."""
    shift: PositionShift | None = None
    """For models whose rotary embedding depends on the length of the sequence."""
    num_dropped: int = 0
    """Tokens of the sequence before these whose K/V the block table leaves out."""
    depth: int = 0
    """Of a token drafted in a chain: how many were drafted up to it. 0: committed ones, or a tree."""
    states: torch.Tensor | None = None
    """For drafters that read them: what the target made of the tokens one before these (none for the first
    of a sequence, which has nothing before it). None: of drafted tokens."""


def logit_rows(slices: Sequence[SequenceSlice]) -> list[int]:
    """Return the rows of the flat batch that yield logits: the last `num_logit_rows` of each slice."""
    rows: list[int] = []
    end = 0
    for piece in slices:
        end += len(piece.token_ids)
        rows.extend(range(end - piece.num_logit_rows, end))
    return rows


class NativeChooser(NamedTuple):
    """Compiled code that chooses tokens from logits; `dh::Chooser` in csrc/layout.h says how it is called."""

    function: int
    """Its address."""
    parameters: int
    """Address of what it is given."""
    memory: object
    """Keeps alive what `parameters` points to."""


NO_TOKEN = -1
"""Stands where logits were not finite, and behind that."""


class Generated(NamedTuple):
    """Tokens chosen for a batch of slices, without the interpreter between forwards and choices."""

    token_ids: list[int]
    """Slice after slice, `num_logit_rows` + `num_more` each, `NO_TOKEN` where there is none."""
    forward_s: float
    choose_s: float


class PagedModel(Protocol):
    """A model with its own paged KV pool, for whoever shares the pool out."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int


class Runner(PagedModel, Protocol):
    """One that is run on slices of sequences."""

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Run one flat batch; return logits [sum of num_logit_rows, vocab] in slice order, fp32.

        The returned tensor is only valid until the next call.
        """
        ...

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy K and V of block `sources[i]` to block `destinations[i]`; no block is in both lists."""
        ...

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """Move K and V of single tokens, all at once: see `TargetStep.moves`."""
        ...


class GeneratingRunner(Runner, Protocol):
    """A runner that may choose tokens itself, and go on with them."""

    def try_generate(
        self, slices: Sequence[SequenceSlice], num_more: Sequence[int], chooser: NativeChooser
    ) -> Generated | None:
        """Run `slices`, choose a token at every logit row, and go on behind the last row of each slice.

        What is chosen is what the forward of each batch and `chooser` on its logits give.

        Args:
            slices: block tables cover the further tokens but the last as well.
            num_more: of each slice, tokens wanted behind the one of its last row. Each costs a forward, in
                which all slices that still want one take part; 0 where there is no logit row, and of trees.
            chooser: knows the sequences by their order in `slices`.

        Returns:
            None, with nothing done, when this batch cannot be run in one go: run it step by step.
        """
        ...
