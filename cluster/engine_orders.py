"""What the engine is to be given: whom to end, who runs alone, who comes back, who is new; in this order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

import msgspec

from cluster.desk_stream import DeskStream
from cluster.quarantine import Quarantine
from specdec.core.clock import Clock
from specdec.core.errors import CapacityError, InputError
from specdec.core.ids import Epoch, RequestId
from specdec.core.request import Request


class StreamEngine(Protocol):
    """What is needed of an engine."""

    @property
    def has_work(self) -> bool: ...

    def add_request(self, request: Request) -> None: ...
    def abort(self, request_id: RequestId, epoch: Epoch) -> None: ...


class Outcomes(Protocol):
    """Who hears what became of orders, in the engine's thread, without the desk's lock."""

    def note_admitted(self, stream: DeskStream) -> None:
        """The engine has a stream that is new to it."""
        ...

    def note_refused(self, stream: DeskStream, error: CapacityError | InputError) -> None:
        """It does not take a stream."""
        ...

    def note_not_replayed(self, stream: DeskStream, error: InputError) -> None:
        """It does not take a stream that the engine before had taken."""
        ...


class EngineOrders:
    """Orders that have not been carried out.

    They are given under the desk's lock, and carried out in the engine's thread, without it: an engine takes
    its time. What an order is about may be gone by then, or another attempt.
    """

    def __init__(self, streams: Mapping[RequestId, DeskStream], clock: Clock, outcomes: Outcomes) -> None:
        """`streams` are the desk's, which change."""
        self._streams = streams
        self._clock = clock
        self._outcomes = outcomes
        self._submitted: deque[tuple[RequestId, Epoch]] = deque()
        self._aborted: deque[tuple[RequestId, Epoch]] = deque()
        self._replays: deque[tuple[RequestId, Epoch]] = deque()
        self.quarantine = Quarantine(streams)
        """Who runs alone."""
        self.beginning: DeskStream | None = None
        """What the engine is being given."""
        self.num_replays = 0
        """Streams that were brought back."""

    @property
    def num_submitted(self) -> int:
        """New ones that the engine has not been given."""
        return len(self._submitted)

    @property
    def are_there(self) -> bool:
        """Whether there is anything to carry out that the engine has room for, perhaps."""
        return bool(self._submitted or self._aborted or self.quarantine.has_waiting)

    @property
    def are_held_up(self) -> bool:
        """Whether new requests wait here, and not in the engine's queue."""
        return self.quarantine.is_occupied or bool(self._replays)

    def submit(self, stream: DeskStream) -> None:
        """Order a stream that was taken in."""
        if stream.is_suspect:
            self.quarantine.add(stream)
        else:
            self._submitted.append(stream.attempt)

    def abort(self, streams: Iterable[DeskStream]) -> None:
        """Have streams ended."""
        self._aborted.extend(stream.attempt for stream in streams)

    def take_aborted(self) -> list[tuple[RequestId, Epoch]]:
        """Return, once, what is to be ended."""
        return [self._aborted.popleft() for _ in range(len(self._aborted))]

    def begin_anew(self) -> None:
        """Order every admitted stream to be brought back: the engine is new and empty."""
        self._aborted.clear()
        self.beginning = None
        for stream in self._streams.values():
            stream.has_begun = False
        self.quarantine.begin_anew()
        self._replays = deque(
            stream.attempt
            for stream in self._streams.values()
            if stream.is_admitted and not stream.is_suspect
        )

    def carry_out(self, engine: StreamEngine) -> None:
        """Give the engine what it is to have.

        Raises:
            TransportError: the target is lost; what was not carried out stays ordered.
        """
        runs_alone = self.quarantine.take_turns(
            lambda: engine.has_work, lambda stream: self._admit(engine, stream), self._let_go
        )
        if runs_alone or not self._replay(engine):
            return
        while self._submitted:
            request_id, epoch = self._submitted[0]
            stream = self._streams.get(request_id)
            # Doubled messages may have ordered it twice.
            if stream is not None and stream.epoch == epoch and not stream.is_admitted:
                self._admit(engine, stream)
            self._submitted.popleft()

    def _let_go(self, stream: DeskStream) -> None:
        """Order a stream with others that was to run alone."""
        (self._replays if stream.is_admitted else self._submitted).append(stream.attempt)

    def _replay(self, engine: StreamEngine) -> bool:
        """Bring back streams of the engine before; return whether all are back."""
        while self._replays:
            request_id, epoch = self._replays[0]
            stream = self._streams.get(request_id)
            # The next attempt has come as a suspect, perhaps, and run before.
            if stream is not None and stream.epoch == epoch and stream.is_admitted:
                self.beginning = stream
                try:
                    rest = stream.rest(self._clock.now_s())
                    engine.add_request(msgspec.structs.replace(rest, was_admitted=True))
                except CapacityError:
                    self.beginning = None
                    return False
                except InputError as error:
                    self._outcomes.note_not_replayed(stream, error)
                else:
                    self.num_replays += 1
                self.beginning = None
            self._replays.popleft()
        return True

    def _admit(self, engine: StreamEngine, stream: DeskStream) -> None:
        self.beginning = stream
        try:
            engine.add_request(stream.rest(self._clock.now_s()))
        except (CapacityError, InputError) as error:
            self._outcomes.note_refused(stream, error)
        else:
            stream.is_admitted = True
            stream.has_begun = self.quarantine.is_in(stream)
            self._outcomes.note_admitted(stream)
        self.beginning = None
