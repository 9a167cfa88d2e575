"""At the draft worker: hidden states from target workers, checked and kept until drafts are made of them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.errors import ChannelTimeout
from specdec.core.ids import RequestId
from specdec.core.sequence import SequenceView
from specdec.engine.draft_server import sequence_name
from specdec.proposers.hidden import HiddenRows, ReceivedRows
from specdec.transport.base import Envelope, PeerAddress, PeerId, TensorChannel
from specdec.transport.messages import HiddenRun, HiddenStates

_MAX_SEQUENCES: Final = 1024
"""Of one coordinator: more than any serves at a time. The one not heard of for longest gives way."""


@dataclass(slots=True)
class _Kept:
    epoch: int
    committed_len: int
    prefix_hash: int
    rows: ReceivedRows


class HiddenInbox:
    """Implements `proposers.hidden.HiddenSource` over a channel that it owns.

    What is malformed, stale or foreign is counted and dropped. It costs drafts, no more: rows are given only
    to the prefix that they were sent for, and drafts are verified whatever they were made of.
    """

    def __init__(
        self,
        channel: TensorChannel,
        *,
        layers: tuple[int, ...],
        width: int,
        wait_s: float = 0.02,
        max_rows: int = 1 << 16,
        clock: Clock | None = None,
    ) -> None:
        """Keep rows of `width` numbers (all layers together), at most `max_rows` for each coordinator.

        `wait_s`: how long a round waits for rows that are still on their way.
        """
        self._channel = channel
        self._layers = layers
        self._width = width
        self._wait_s = wait_s
        self._max_rows = max_rows
        self._clock = clock or MonotonicClock()
        self._speakers: dict[PeerId, PeerId] = {}
        self._kept: dict[PeerId, OrderedDict[RequestId, _Kept]] = {}
        self._num_rows: Counter[PeerId] = Counter()
        self._names: dict[RequestId, tuple[PeerId, RequestId]] = {}
        self.counters: Counter[str] = Counter()
        """hidden_rows_received, hidden_gaps (rows lost on the way), hidden_waits_in_vain, and by reason
        hidden_malformed_dropped, hidden_stale_dropped, hidden_foreign_dropped."""

    @property
    def address(self) -> PeerAddress:
        """What coordinators tell their target workers."""
        return self._channel.address

    @property
    def num_sequences(self) -> int:
        """Sequences of which rows are kept."""
        return sum(len(kept) for kept in self._kept.values())

    def admit(self, targets: Iterable[tuple[PeerAddress, PeerId]]) -> None:
        """Hear exactly these target workers, each for the sequences of its coordinator alone."""
        pairs = list(targets)
        self._speakers = {target.peer_id: coordinator for target, coordinator in pairs}
        self._channel.admit([target for target, _ in pairs])
        for coordinator in self._kept.keys() - set(self._speakers.values()):
            for request_id in list(self._kept[coordinator]):
                self._forget(coordinator, request_id)

    def await_rows(self, sequences: Sequence[SequenceView]) -> Mapping[RequestId, HiddenRows]:
        """See `HiddenSource.await_rows`."""
        self._take_arrivals()
        until_s = self._clock.now_s() + self._wait_s
        while not all(self._has(sequence) for sequence in sequences):
            patience_s = until_s - self._clock.now_s()
            if patience_s <= 0.0:
                self.counters["hidden_waits_in_vain"] += 1
                break
            try:
                self._take(self._channel.receive(patience_s))
            except ChannelTimeout:
                continue
        return {
            sequence.request_id: kept.rows
            for sequence in sequences
            if (kept := self._of(sequence)) is not None and _is_of(kept, sequence)
        }

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget sequences, by the names that the draft server gives them."""
        for request_id in request_ids:
            name = self._names.get(request_id)
            if name is not None:
                self._forget(*name)

    def close(self) -> None:
        """Close the channel. Idempotent."""
        self._channel.close()

    def _of(self, sequence: SequenceView) -> _Kept | None:
        name = self._names.get(sequence.request_id)
        return None if name is None else self._kept[name[0]].get(name[1])

    def _has(self, sequence: SequenceView) -> bool:
        kept = self._of(sequence)
        return kept is not None and kept.committed_len >= sequence.committed_len

    def _take_arrivals(self) -> None:
        while True:
            try:
                self._take(self._channel.receive(0))
            except ChannelTimeout:
                return

    def _take(self, envelope: Envelope) -> None:
        message = envelope.message
        if not isinstance(message, HiddenStates):
            self.counters["hidden_malformed_dropped"] += 1
            return
        if self._speakers.get(envelope.sender) != message.coordinator:
            self.counters["hidden_foreign_dropped"] += 1
            return
        hidden = (envelope.tensors or {}).get("hidden")
        if hidden is None or not self._fits(message, hidden):
            self.counters["hidden_malformed_dropped"] += 1
            return
        begin = 0
        for run in message.runs:
            self._keep(PeerId(message.coordinator), run, hidden[begin : begin + run.num_rows])
            begin += run.num_rows

    def _fits(self, message: HiddenStates, hidden: torch.Tensor) -> bool:
        """Whether the tensor is what the message says, and that of what we need."""
        num_rows = sum(run.num_rows for run in message.runs)
        return (
            message.layers == self._layers
            and hidden.shape == (num_rows, self._width)
            and hidden.is_floating_point()
            and all(
                run.num_rows > 0
                and run.first_row >= 0
                and run.first_row + run.num_rows == run.committed_len - 1
                for run in message.runs
            )
        )

    def _keep(self, coordinator: PeerId, run: HiddenRun, hidden: torch.Tensor) -> None:
        sequences = self._kept.setdefault(coordinator, OrderedDict())
        kept = sequences.get(run.request_id)
        if kept is not None and (run.epoch, run.committed_len) <= (kept.epoch, kept.committed_len):
            self.counters["hidden_stale_dropped"] += 1
            return
        if kept is None or kept.epoch != run.epoch:
            self._forget(coordinator, run.request_id)
            kept = sequences[run.request_id] = _Kept(run.epoch, 0, 0, ReceivedRows(run.first_row))
            self._names[sequence_name(coordinator, run.request_id, run.epoch)] = (coordinator, run.request_id)
        elif run.first_row > kept.rows.end_row:
            self.counters["hidden_gaps"] += 1
            self._num_rows[coordinator] -= kept.rows.num_rows
            kept.rows = ReceivedRows(run.first_row)
        new = hidden[max(0, kept.rows.end_row - run.first_row) :]
        # A copy: the parcel that it came in holds the rows of others as well.
        kept.rows.append(new.clone())
        kept.committed_len, kept.prefix_hash = run.committed_len, run.prefix_hash
        self.counters["hidden_rows_received"] += len(new)
        self._num_rows[coordinator] += len(new)
        sequences.move_to_end(run.request_id)
        while len(sequences) > 1 and (
            len(sequences) > _MAX_SEQUENCES or self._num_rows[coordinator] > self._max_rows
        ):
            self._forget(coordinator, next(iter(sequences)))

    def _forget(self, coordinator: PeerId, request_id: RequestId) -> None:
        kept = self._kept[coordinator].pop(request_id, None)
        if kept is not None:
            self._num_rows[coordinator] -= kept.rows.num_rows
            self._names.pop(sequence_name(coordinator, request_id, kept.epoch), None)


def _is_of(kept: _Kept, sequence: SequenceView) -> bool:
    return (kept.committed_len, kept.prefix_hash) == (sequence.committed_len, sequence.prefix_hash)
