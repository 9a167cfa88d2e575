"""Hidden states that an early exit leaves behind its last layer, for those who go on from there.

They are of one step: whoever wants them collects them while the exit runs, and finds them by the slot of the
pool that has the row's K/V.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from specdec.attention.metadata import slot_list
from specdec.model.batch import SequenceSlice


class ExitStates:
    """States of rows [1, width], each by its slot. A slot is of one token as long as these are kept."""

    def __init__(self, block_size: int) -> None:
        """Keep none yet, of a pool with blocks of `block_size` tokens."""
        self._block_size = block_size
        self._addresses: dict[int, int] = {}
        """By slot."""
        self._rows: list[torch.Tensor] = []

    def keep(self, slots: Sequence[int], rows: torch.Tensor) -> None:
        """Keep `rows` [len(slots), width] themselves, contiguous: nobody writes there once they are read."""
        first, size = rows.data_ptr(), rows.stride(0) * rows.element_size()
        self._addresses.update(zip(slots, count(first, size), strict=False))
        self._rows.append(rows)

    def missing(self, slices: Sequence[SequenceSlice]) -> list[SequenceSlice]:
        """Return what has to run through the exit so that all rows of a batch are here, without logits."""
        missing: list[SequenceSlice] = []
        for piece in slices:
            slots = slot_list([piece], block_size=self._block_size)
            num_here = next((at for at, slot in enumerate(slots) if slot not in self._addresses), len(slots))
            if piece.parents is not None:  # rows of a tree are read together, or not at all
                num_here = 0
            if num_here < len(slots):
                rest = piece.token_ids[num_here:]
                missing.append(replace(piece, token_ids=rest, start=piece.start + num_here, num_logit_rows=0))
        return missing

    def of(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Return the states of all rows of a batch, which has some, [T, width].

        Copied as they lie side by side: chunks of prompts at once, drafts, which came step by step, row by
        row. Of the few rows of a verification, array operations take longer.
        """
        addresses = [self._addresses[slot] for slot in slot_list(slices, block_size=self._block_size)]
        rows = self._rows[0].new_empty((len(addresses), self._rows[0].shape[1]))
        size, first = rows.stride(0) * rows.element_size(), 0
        for at, address in enumerate(addresses, 1):
            if at == len(addresses) or addresses[at] != address + size:
                ctypes.memmove(rows.data_ptr() + first * size, addresses[first], (at - first) * size)
                first = at
        return rows


class ExitTap:
    """The last layer of an early exit. Not thread-safe."""

    def __init__(self, layer: torch.nn.Module) -> None:
        """Listen to `layer`, which the whole model runs too."""
        self._layer = layer
        self._state: torch.Tensor | None = None
        self.states: ExitStates | None = None
        """Where a compiled early exit keeps what it leaves now; None: nobody wants it."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, the model runs once, eagerly; afterwards `state` is that of its batch."""
        hook = self._layer.register_forward_hook(self._note)
        try:
            yield
        finally:
            hook.remove()

    def state(self) -> torch.Tensor:
        """Return [T, width]: what the layer gave when somebody was listening."""
        assert self._state is not None, "the layer has not run"
        return self._state

    @contextmanager
    def collecting(self, states: ExitStates) -> Iterator[None]:
        """Within, keep in `states` what a compiled early exit leaves."""
        self.states = states
        try:
            yield
        finally:
            self.states = None

    def _note(self, layer: torch.nn.Module, args: Any, output: Any) -> None:
        self._state = (output if isinstance(output, torch.Tensor) else output[0])[0]
