"""Hidden states that a target keeps of its sequences, for those who draft from them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from specdec.core.ids import RequestId
from specdec.core.plan import SlotMove
from specdec.core.sequence import SequenceView
from specdec.kv.hidden_pool import HiddenPool
from specdec.proposers.hidden import HiddenRows


class _Kept(NamedTuple):
    block_table: array[int]
    """The target's own: it follows its changes."""
    end_row: int
    """One behind the newest row that was computed."""
    elsewhere: Mapping[int, int]
    """Rows of a path that stands in a tree, with the places where they lie until they are moved."""


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

    def note(
        self, request_id: RequestId, block_table: array[int], end_row: int, path: tuple[int, Sequence[int]]
    ) -> None:
        """Note that the rows of a sequence before `end_row` are there; the newest computation counts.

        `path`: of a draft, the place of its first node, and the nodes that stand. They lie in the order in
        which they were proposed until their K/V are moved, which is when the next step begins.
        """
        first, nodes = path
        elsewhere = {first + index: first + node for index, node in enumerate(nodes) if index != node}
        self._kept[request_id] = _Kept(block_table, end_row, elsewhere)

    def moved(self, moves: Sequence[SlotMove]) -> None:
        """Note that rows have been moved."""
        destinations = {move.destination for move in moves}
        for request_id, kept in self._kept.items():
            if kept.elsewhere:
                still = {
                    row: place
                    for row, place in kept.elsewhere.items()
                    if self._pool.slot(kept.block_table, row) not in destinations
                }
                self._kept[request_id] = kept._replace(elsewhere=still)

    def hidden_rows(self, request_id: RequestId, first_row: int, end_row: int) -> torch.Tensor | None:
        """See `HiddenTaps.hidden_rows`."""
        kept = self._kept.get(request_id)
        if kept is None or end_row > kept.end_row:
            return None
        rows = self._pool.read(kept.block_table, first_row, end_row)
        for row, place in kept.elsewhere.items():
            if first_row <= row < end_row:
                rows[row - first_row] = self._pool.rows[self._pool.slot(kept.block_table, place)]
        return rows

    def await_rows(
        self, sequences: Sequence[SequenceView], awaited: Collection[RequestId] | None = None
    ) -> Mapping[RequestId, HiddenRows]:
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

    def since(self, row: int, end: int | None = None) -> torch.Tensor:
        """See `HiddenRows.since`."""
        assert 0 <= row < self.end_row, f"row {row} of 0 .. {self.end_row - 1}"
        return self._pool.read(self._block_table, row, self.end_row if end is None else end)

    def read_from(self, row: int) -> None:
        """See `HiddenRows.read_from`: they are not its own to forget."""
