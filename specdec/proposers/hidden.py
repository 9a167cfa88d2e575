"""Hidden states of the target, as proposers that declare `hidden_layers` get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from specdec.core.ids import RequestId
from specdec.core.sequence import SequenceView


class HiddenRows(Protocol):
    """Rows of one sequence, without a gap, up to the one before its last committed token.

    The row of the token at position s is what the target made of it, [len(hidden_layers) * hidden size]: it
    gave token s + 1. Early rows may be missing: they were lost, or the target no longer keeps them.
    """

    @property
    def first_row(self) -> int:
        """Position of the first."""
        ...

    @property
    def end_row(self) -> int:
        """One behind the last."""
        ...

    def since(self, row: int) -> torch.Tensor:
        """Return rows `row` .. end_row - 1; at the cost of those alone."""
        ...


class ReceivedRows:
    """Implements `HiddenRows` on rows that have come one after the other."""

    def __init__(self, first_row: int) -> None:
        self._chunks: list[torch.Tensor] = []
        self.first_row = first_row
        self.end_row = first_row

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return self.end_row - self.first_row

    def append(self, rows: torch.Tensor) -> None:
        """Add the rows that follow."""
        self._chunks.append(rows)
        self.end_row += len(rows)

    def since(self, row: int) -> torch.Tensor:
        """See `HiddenRows.since`."""
        assert self.first_row <= row < self.end_row, f"row {row} of {self.first_row} .. {self.end_row - 1}"
        wanted: list[torch.Tensor] = []
        begin = self.end_row
        for chunk in reversed(self._chunks):
            begin -= len(chunk)
            wanted.append(chunk)
            if begin <= row:
                break
        return torch.cat(wanted[::-1])[row - begin :]


class PrefixStates:
    """What a draft model is given that reads the target's states: those of the prefixes of one call."""

    def __init__(self, source: HiddenSource, layers: tuple[int, ...]) -> None:
        """Take them, of `layers`, from `source`."""
        self.layers = layers
        self._source = source
        self._rows: Mapping[RequestId, HiddenRows] = {}

    def begin(self, sequences: Sequence[SequenceView]) -> list[SequenceView]:
        """Begin a call; return the sequences that can be read.

        Those are not whose rows have not come, or no longer reach back to the first.
        """
        self._rows = self._source.await_rows([one for one in sequences if one.committed_len > 1])
        return [
            one
            for one in sequences
            if (rows := self._rows.get(one.request_id)) is not None and rows.first_row == 0
        ]

    def before(self, request_id: RequestId, start: int, end: int) -> torch.Tensor:
        """Return the rows one before tokens `start` .. `end` - 1; the first token of a sequence has none."""
        first = max(start, 1) - 1
        return self._rows[request_id].since(first)[: end - 1 - first]

    def release(self, request_ids: Sequence[RequestId]) -> None:
        """Forget these sequences."""
        self._source.release(request_ids)


class HiddenSource(Protocol):
    """Where a proposer gets them from: in a draft worker, or in the target's process."""

    def await_rows(self, sequences: Sequence[SequenceView]) -> Mapping[RequestId, HiddenRows]:
        """Return the rows of exactly the prefixes given; wait a little for those that are on their way.

        Sequences whose newest rows have not come are absent: they go without a proposal in this round.
        """
        ...

    def release(self, request_ids: Sequence[RequestId]) -> None:
        """Forget these sequences. Unknown ids are ignored."""
        ...
