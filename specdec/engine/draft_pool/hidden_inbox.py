"""At the draft worker: hidden states from target workers, checked and kept until drafts are made of them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.errors import ChannelTimeout
from specdec.core.ids import RequestId
from specdec.core.sequence import SequenceView
from specdec.engine.draft_pool.server import sequence_name
from specdec.proposers.hidden import HiddenRows, ReceivedRows
from specdec.transport.base import Envelope, LinkNews, PeerAddress, PeerId, TensorChannel
from specdec.transport.messages import HiddenRun, HiddenStates

_MAX_SEQUENCES: Final = 1024
"""Of one coordinator: more than any serves at a time. The one not heard of for longest gives way."""


_MOST_ARRIVALS: Final = 1024
"""Taken in before drafts are made of what has come: who sends on and on keeps nobody waiting."""


@dataclass(slots=True)
class _Kept:
    epoch: int
    committed_len: int
    """Of the prefix that the rows are those of; 0 while some of it are on their way."""
    prefix_hash: int
    rows: ReceivedRows


class HiddenInbox:
    """Implements `proposers.hidden.HiddenSource` over a channel that it owns.

    What is malformed, stale or foreign is counted and dropped. It costs drafts, no more: rows are given only
    to the prefix that they were sent for, and drafts are verified whatever they were made of. What has been
    read is forgotten (`HiddenRows.read_from`), so that little is kept of a sequence whose drafter keeps up.
    """

    def __init__(
        self,
        channel: TensorChannel,
        *,
        layers: tuple[int, ...],
        width: int,
        wait_s: float = 0.02,
        max_rows: int = 1 << 16,
        device: torch.device | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Keep rows of `width` numbers (all layers together), at most `max_rows` for each coordinator.

        Those of one sequence are kept whatever their number: its drafter has room for it, or refuses it.
        `wait_s`: how long a round waits for rows that are still on their way. `device`: where they are kept,
        wherever they arrive; None: on the CPU.
        """
        self._channel = channel
        self._layers = layers
        self._width = width
        self._wait_s = wait_s
        self._max_rows = max_rows
        self._device = device or torch.device("cpu")
        self._clock = clock or MonotonicClock()
        self._speakers: dict[PeerId, PeerId] = {}
        self._kept: dict[PeerId, OrderedDict[RequestId, _Kept]] = {}
        self._names: dict[RequestId, tuple[PeerId, RequestId]] = {}
        self._silent: set[RequestId] = set()
        """Sequences that were waited for in vain, of which nothing has come since."""
        self._lock = threading.Lock()
        self.counters: Counter[str] = Counter()
        """hidden_rows_received, hidden_gaps (rows lost on the way), hidden_sequences_displaced (there was no
        room for what they had not read), hidden_waits_in_vain, and by reason hidden_malformed_dropped,
        hidden_stale_dropped, hidden_foreign_dropped."""

    @property
    def address(self) -> PeerAddress:
        """What coordinators tell their target workers."""
        return self._channel.address

    @property
    def dropped(self) -> Mapping[str, int]:
        """What was dropped of what target workers sent, here and by the channel, by reason."""
        dropped = Counter(self._channel.counters.dropped)
        for reason in ("malformed", "stale", "foreign"):
            dropped[reason] += self.counters[f"hidden_{reason}_dropped"]
        return +dropped

    @property
    def num_sequences(self) -> int:
        """Sequences of which rows are kept."""
        with self._lock:
            return sum(len(kept) for kept in self._kept.values())

    @property
    def num_rows(self) -> int:
        """Rows that are kept."""
        with self._lock:
            return sum(self._num_rows(coordinator) for coordinator in self._kept)

    def admit(self, targets: Iterable[tuple[PeerAddress, PeerId]]) -> None:
        """Hear exactly these target workers, each for the sequences of its coordinator alone (any thread).

        What was heard of a coordinator from others is forgotten: attempts may be counted anew since then.
        """
        pairs = list(targets)
        speakers = {target.peer_id: coordinator for target, coordinator in pairs}
        with self._lock:
            before, self._speakers = _by_coordinator(self._speakers), speakers
            now = _by_coordinator(speakers)
            for coordinator in list(self._kept):
                if before[coordinator] != now[coordinator]:
                    for request_id in list(self._kept[coordinator]):
                        self._forget(coordinator, request_id)
                    del self._kept[coordinator]
        self._channel.admit([target for target, _ in pairs])

    def await_rows(
        self, sequences: Sequence[SequenceView], awaited: Collection[RequestId] | None = None
    ) -> Mapping[RequestId, HiddenRows]:
        """See `HiddenSource.await_rows`.

        Who was waited for in vain is not waited for again before something has come of it.
        """
        self._take_arrivals()
        until_s = self._clock.now_s() + self._wait_s
        late = self._late(sequences, awaited)
        while late:
            patience_s = until_s - self._clock.now_s()
            if patience_s <= 0.0:
                self.counters["hidden_waits_in_vain"] += 1
                self._silent.update(one.request_id for one in late)
                break
            try:
                self._take(self._channel.receive(patience_s))
            except ChannelTimeout:
                continue
            late = self._late(late, awaited)
        with self._lock:
            return {
                sequence.request_id: kept.rows
                for sequence in sequences
                if (kept := self._of(sequence)) is not None and _is_of(kept, sequence)
            }

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget sequences, by the names that the draft server gives them."""
        with self._lock:
            for request_id in request_ids:
                self._silent.discard(request_id)
                name = self._names.get(request_id)
                if name is not None:
                    self._forget(*name)

    def close(self) -> None:
        """Close the channel. Idempotent."""
        self._channel.close()

    def _late(
        self, sequences: Sequence[SequenceView], awaited: Collection[RequestId] | None
    ) -> list[SequenceView]:
        """Return which sequences are worth waiting for."""
        with self._lock:
            return [
                one
                for one in sequences
                if (awaited is None or one.request_id in awaited)
                and one.request_id not in self._silent
                and not ((kept := self._of(one)) is not None and kept.committed_len >= one.committed_len)
            ]

    def _of(self, sequence: SequenceView) -> _Kept | None:
        name = self._names.get(sequence.request_id)
        return None if name is None else self._kept[name[0]].get(name[1])

    def _num_rows(self, coordinator: PeerId) -> int:
        return sum(kept.rows.num_rows for kept in self._kept[coordinator].values())

    def _take_arrivals(self) -> None:
        for _ in range(_MOST_ARRIVALS):
            try:
                self._take(self._channel.receive(0))
            except ChannelTimeout:
                return

    def _take(self, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, LinkNews):
            return
        if not isinstance(message, HiddenStates):
            self.counters["hidden_malformed_dropped"] += 1
            return
        hidden = (envelope.tensors or {}).get("hidden")
        with self._lock:
            if self._speakers.get(envelope.sender) != message.coordinator:
                self.counters["hidden_foreign_dropped"] += 1
                return
            if hidden is None or not self._fits(message, hidden):
                self.counters["hidden_malformed_dropped"] += 1
                return
            coordinator, begin = PeerId(message.coordinator), 0
            for run in message.runs:
                self._keep(coordinator, run, hidden[begin : begin + run.num_rows])
                begin += run.num_rows
            self._make_room(coordinator)

    def _fits(self, message: HiddenStates, hidden: torch.Tensor) -> bool:
        """Whether the tensor is what the message says, and that of what we need."""
        num_rows = sum(run.num_rows for run in message.runs)
        return (
            len(message.runs) > 0
            and message.layers == self._layers
            and hidden.shape == (num_rows, self._width)
            and hidden.is_floating_point()
            and all(
                run.num_rows > 0
                and run.first_row >= 0
                and run.first_row + run.num_rows <= run.committed_len - 1
                for run in message.runs
            )
        )

    def _keep(self, coordinator: PeerId, run: HiddenRun, hidden: torch.Tensor) -> None:
        sequences = self._kept.setdefault(coordinator, OrderedDict())
        kept = sequences.get(run.request_id)
        end_row = run.first_row + run.num_rows
        if kept is None or kept.epoch < run.epoch:
            self._forget(coordinator, run.request_id)
            kept = sequences[run.request_id] = _Kept(run.epoch, 0, 0, ReceivedRows(run.first_row))
            self._names[sequence_name(coordinator, run.request_id, run.epoch)] = (coordinator, run.request_id)
        elif run.epoch < kept.epoch:
            self.counters["hidden_stale_dropped"] += 1
            return
        elif run.first_row < kept.rows.first_row and kept.rows.are_missed:
            kept.rows = ReceivedRows(run.first_row)  # sent once more, because they were asked for
        elif end_row <= kept.rows.end_row:
            self.counters["hidden_stale_dropped"] += 1
            return
        elif run.first_row > kept.rows.end_row:
            self.counters["hidden_gaps"] += 1
            kept.rows = ReceivedRows(run.first_row)
        new = hidden[kept.rows.end_row - run.first_row :]
        # A copy: the parcel that it came in holds the rows of others as well.
        kept.rows.append(new.to(self._device, copy=True))
        kept.committed_len, kept.prefix_hash = 0, 0
        if end_row == run.committed_len - 1:
            kept.committed_len, kept.prefix_hash = run.committed_len, run.prefix_hash
        self.counters["hidden_rows_received"] += len(new)
        self._silent.discard(sequence_name(coordinator, run.request_id, run.epoch))
        sequences.move_to_end(run.request_id)

    def _make_room(self, coordinator: PeerId) -> None:
        """Have sequences of a coordinator give way, those of which nothing has come for longest first."""
        sequences = self._kept[coordinator]
        num_rows = self._num_rows(coordinator)
        while len(sequences) > 1 and (len(sequences) > _MAX_SEQUENCES or num_rows > self._max_rows):
            oldest, kept = next(iter(sequences.items()))
            num_rows -= kept.rows.num_rows
            self.counters["hidden_sequences_displaced"] += 1
            self._forget(coordinator, oldest)

    def _forget(self, coordinator: PeerId, request_id: RequestId) -> None:
        kept = self._kept[coordinator].pop(request_id, None)
        if kept is not None:
            self._names.pop(sequence_name(coordinator, request_id, kept.epoch), None)


def _by_coordinator(speakers: Mapping[PeerId, PeerId]) -> defaultdict[PeerId, set[PeerId]]:
    """Return which target workers speak for whom."""
    coordinators: defaultdict[PeerId, set[PeerId]] = defaultdict(set)
    for target, coordinator in speakers.items():
        coordinators[coordinator].add(target)
    return coordinators


def _is_of(kept: _Kept, sequence: SequenceView) -> bool:
    return (kept.committed_len, kept.prefix_hash) == (sequence.committed_len, sequence.prefix_hash)
