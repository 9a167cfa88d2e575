"""Hidden states of the target, as proposers that declare `hidden_layers` get them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
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

    def since(self, row: int, end: int | None = None) -> torch.Tensor:
        """Return rows `row` .. `end` - 1 (None: to the last); at the cost of those alone."""
        ...

    def read_from(self, row: int) -> None:
        """Hear that whoever reads them goes on at `row`: earlier ones may be forgotten, later ones may not.

        Where it is before `first_row`, it needs rows that are not there.
        """
        ...


class ReceivedRows:
    """Implements `HiddenRows` on rows that have come one after the other."""

    def __init__(self, first_row: int) -> None:
        self._chunks: deque[torch.Tensor] = deque()
        self.first_row = first_row
        self.end_row = first_row
        self.are_missed = False
        """Whether somebody needs rows before the first."""

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return self.end_row - self.first_row

    def append(self, rows: torch.Tensor) -> None:
        """Add the rows that follow."""
        self._chunks.append(rows)
        self.end_row += len(rows)

    def since(self, row: int, end: int | None = None) -> torch.Tensor:
        """See `HiddenRows.since`."""
        assert self.first_row <= row < self.end_row, f"row {row} of {self.first_row} .. {self.end_row - 1}"
        end = self.end_row if end is None else end
        wanted: list[torch.Tensor] = []
        begin = self.end_row
        for chunk in reversed(self._chunks):
            begin -= len(chunk)
            if begin <= end:
                wanted.append(chunk[: end - begin])
            if begin <= row:
                break
        return torch.cat(wanted[::-1])[row - begin :]

    def read_from(self, row: int) -> None:
        """See `HiddenRows.read_from`."""
        self.are_missed = row < self.first_row
        while self._chunks and self.first_row + len(self._chunks[0]) <= row:
            self.first_row += len(self._chunks.popleft())
        if self._chunks and self.first_row < row:
            self._chunks[0] = self._chunks[0][row - self.first_row :].clone()
            self.first_row = row


class PrefixStates:
    """What a draft model is given that reads the target's states: those of the prefixes of one call."""

    def __init__(self, source: HiddenSource, layers: tuple[int, ...]) -> None:
        """Take them, of `layers`, from `source`."""
        self.layers = layers
        self._source = source
        self._rows: Mapping[RequestId, HiddenRows] = {}
        self.missing: dict[RequestId, int] = {}
        """Of sequences of the last call, the first row that is needed and has been lost."""

    def begin(
        self,
        sequences: Sequence[SequenceView],
        awaited: Collection[RequestId],
        first_unread: Callable[[SequenceView], int],
    ) -> list[SequenceView]:
        """Begin a call; return the sequences that can be read.

        Those are not whose rows have not come, or do not reach back to the first that is needed.

        Args:
            sequences: of the call.
            awaited: those that are worth waiting for.
            first_unread: how many tokens of a sequence have been read and need not be read again.
        """
        self._rows = self._source.await_rows([one for one in sequences if one.committed_len > 1], awaited)
        self.missing = {}
        readable: list[SequenceView] = []
        for one in sequences:
            if one.request_id not in self._rows:
                continue
            start = first_unread(one)
            self._rows[one.request_id].read_from(_row_before(start))
            if self.reach_back_to(one.request_id, start):
                readable.append(one)
        return readable

    def reach_back_to(self, request_id: RequestId, start: int) -> bool:
        """Return whether a readable sequence can be read from token `start` on; if not, its rows are missing.

        That may be before what `begin` was told: it had to give way to another sequence of its call.
        """
        first, rows = _row_before(start), self._rows[request_id]
        if rows.first_row <= first:
            return True
        rows.read_from(first)
        self.missing[request_id] = first
        return False

    def before(self, request_id: RequestId, start: int, end: int) -> torch.Tensor:
        """Return the rows one before tokens `start` .. `end` - 1; the first token of a sequence has none."""
        first = _row_before(start)
        return self._rows[request_id].since(first, end - 1)

    def release(self, request_ids: Sequence[RequestId]) -> None:
        """Forget these sequences."""
        self._source.release(request_ids)


def _row_before(position: int) -> int:
    """Return the row that is read with the token at a position; the first token has none."""
    return max(position, 1) - 1


class HiddenSource(Protocol):
    """Where a proposer gets them from: in a draft worker, or in the target's process."""

    def await_rows(
        self, sequences: Sequence[SequenceView], awaited: Collection[RequestId] | None = None
    ) -> Mapping[RequestId, HiddenRows]:
        """Return the rows of exactly the prefixes given.

        Those of the `awaited` sequences (None: of all) are waited for a little, if they are on their way.
        Sequences whose newest rows have not come are absent: they go without a proposal in this round.
        """
        ...

    def release(self, request_ids: Sequence[RequestId]) -> None:
        """Forget these sequences. Unknown ids are ignored."""
        ...
