"""Hidden states that a target keeps of its sequences, for those who draft from them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from specdec.core.ids import RequestId
from specdec.core.sequence import SequenceView
from specdec.kv.hidden_pool import HiddenPool
from specdec.proposers.hidden import HiddenRows


class _Kept(NamedTuple):
    block_table: array[int]
    """The target's own: it follows its changes."""
    end_row: int
    """One behind the newest row that was computed."""


class KeptRows:
    """Implements `hidden_sender.HiddenTaps`, and `proposers.hidden.HiddenSource` in the target's process.

    Rows lie where K/V lie, so that a sequence has those of a cached prefix too, and no row is missing that
    the target has computed.
    """

    def __init__(self, pool: HiddenPool, layers: Sequence[int]) -> None:
        """Hand out rows of `pool`, which hold the states of `layers` side by side."""
        self._pool = pool
        self._layers = tuple(layers)
        self._kept: dict[RequestId, _Kept] = {}

    @property
    def layers(self) -> tuple[int, ...]:
        """See `HiddenTaps.layers`."""
        return self._layers

    @property
    def num_sequences(self) -> int:
        """Sequences of which rows are kept."""
        return len(self._kept)

    def note(self, request_id: RequestId, block_table: array[int], end_row: int) -> None:
        """Note that the rows of a sequence before `end_row` are there; the newest computation counts."""
        self._kept[request_id] = _Kept(block_table, end_row)

    def hidden_rows(self, request_id: RequestId, first_row: int, end_row: int) -> torch.Tensor | None:
        """See `HiddenTaps.hidden_rows`."""
        kept = self._kept.get(request_id)
        if kept is None or end_row > kept.end_row:
            return None
        return self._pool.read(kept.block_table, first_row, end_row)

    def await_rows(self, sequences: Sequence[SequenceView]) -> Mapping[RequestId, HiddenRows]:
        """See `HiddenSource.await_rows`: there is nothing to wait for."""
        return {
            one.request_id: _TableRows(self._pool, kept.block_table, one.committed_len - 1)
            for one in sequences
            if (kept := self._kept.get(one.request_id)) is not None
            and 1 <= one.committed_len - 1 <= kept.end_row
        }

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """See `HiddenSource.release`."""
        for request_id in request_ids:
            self._kept.pop(request_id, None)


class _TableRows:
    """Implements `HiddenRows` on a sequence's blocks."""

    first_row = 0

    def __init__(self, pool: HiddenPool, block_table: array[int], end_row: int) -> None:
        self._pool = pool
        self._block_table = block_table
        self.end_row = end_row

    def since(self, row: int) -> torch.Tensor:
        """See `HiddenRows.since`."""
        assert 0 <= row < self.end_row, f"row {row} of 0 .. {self.end_row - 1}"
        return self._pool.read(self._block_table, row, self.end_row)
