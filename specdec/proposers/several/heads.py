"""Several drafters of heads beside one target, which keeps its hidden states for all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from specdec.core.ids import RequestId
from specdec.core.sequence import SequenceView
from specdec.proposers.compiled_drafters import PackedOfTarget
from specdec.proposers.heads_factory import LoadedDrafter
from specdec.proposers.hidden import HiddenRows, HiddenSource
from specdec.proposers.several.proposer import SeveralProposers


@dataclass(frozen=True, slots=True)
class SeveralLoaded:
    """Implements `LoadedDrafter` by several, each of which reads its own part of what is kept."""

    members: Sequence[LoadedDrafter]

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """See `LoadedDrafter`: those of all, each once."""
        return tuple(dict.fromkeys(layer for one in self.members for layer in one.hidden_layers))

    @property
    def state_width(self) -> int:
        """See `LoadedDrafter`."""
        return len(self.hidden_layers) * self._layer_width

    @property
    def later_bytes(self) -> int:
        """See `LoadedDrafter`."""
        return sum(one.later_bytes for one in self.members)

    @property
    def _layer_width(self) -> int:
        first = self.members[0]
        return first.state_width // len(first.hidden_layers)

    def proposer(self, source: HiddenSource, of_target: PackedOfTarget | None = None) -> SeveralProposers:
        """See `LoadedDrafter`."""
        return SeveralProposers([one.proposer(self._part(source, one), of_target) for one in self.members])

    def _part(self, source: HiddenSource, member: LoadedDrafter) -> HiddenSource:
        layers, width = self.hidden_layers, self._layer_width
        if member.hidden_layers == layers:
            return source
        places = [layers.index(one) for one in member.hidden_layers]
        return _PartOfStates(source, [slice(place * width, (place + 1) * width) for place in places])


class _PartOfStates:
    """Implements `HiddenSource` with some of the layers that another one has."""

    def __init__(self, source: HiddenSource, columns: Sequence[slice]) -> None:
        self._source = source
        self._columns = columns

    def await_rows(
        self, sequences: Sequence[SequenceView], awaited: Collection[RequestId] | None = None
    ) -> Mapping[RequestId, HiddenRows]:
        """See `HiddenSource.await_rows`."""
        rows = self._source.await_rows(sequences, awaited)
        return {request_id: _PartOfRows(its, self._columns) for request_id, its in rows.items()}

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """See `HiddenSource.release`."""
        self._source.release(tuple(request_ids))


class _PartOfRows:
    """Implements `HiddenRows`."""

    def __init__(self, rows: HiddenRows, columns: Sequence[slice]) -> None:
        self._rows = rows
        self._columns = columns

    @property
    def first_row(self) -> int:
        """See `HiddenRows.first_row`."""
        return self._rows.first_row

    @property
    def end_row(self) -> int:
        """See `HiddenRows.end_row`."""
        return self._rows.end_row

    def since(self, row: int, end: int | None = None) -> torch.Tensor:
        """See `HiddenRows.since`."""
        rows = self._rows.since(row, end)
        return torch.cat([rows[..., one] for one in self._columns], dim=-1)

    def read_from(self, row: int) -> None:
        """See `HiddenRows.read_from`."""
        self._rows.read_from(row)
