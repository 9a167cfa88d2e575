"""Streams that may be what targets die of: they run alone, one after the other (`crash_policy`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from cluster.crash_policy import MAX_CLEARED, PROBATION_OUTPUTS
from cluster.desk_stream import DeskStream
from specdec.core.ids import RequestId


class Quarantine:
    """Who is suspected, whose turn it is, and what losses of the target say of streams.

    Who is alone changes in the engine's thread only, which so may ask without the desk's lock. Everything
    else happens under it.
    """

    def __init__(self, streams: Mapping[RequestId, DeskStream]) -> None:
        """`streams` are the desk's, which change."""
        self._streams = streams
        self._waiting: deque[RequestId] = deque()
        self._alone: DeskStream | None = None
        self._probation_left = 0
        self._num_losses = 0

    @property
    def has_waiting(self) -> bool:
        """Whether anybody waits for a turn."""
        return bool(self._waiting)

    @property
    def is_occupied(self) -> bool:
        """Whether anybody runs alone, or is to."""
        return self._alone is not None or bool(self._waiting)

    def is_in(self, stream: DeskStream) -> bool:
        """Whether it was given a turn, and that is not over."""
        return stream is self._alone

    def is_alone(self, stream: DeskStream) -> bool:
        """Whether it runs alone, still suspected."""
        return self.is_in(stream) and stream.is_suspect

    def add(self, stream: DeskStream) -> None:
        """Have a suspect wait for its turn."""
        stream.awaits_turn = True
        self._waiting.append(stream.request_id)

    def begin_anew(self) -> None:
        """Have all suspects wait for their turns: the engine is new and empty."""
        self._alone = None
        for stream in self._streams.values():
            stream.awaits_turn = stream.is_suspect
        # Those that came as suspects have not been admitted.
        self._waiting = deque(r for r, stream in self._streams.items() if stream.is_suspect)

    def take_turns(
        self,
        is_busy: Callable[[], bool],
        run: Callable[[DeskStream], None],
        let_go: Callable[[DeskStream], None],
    ) -> bool:
        """Run one stream alone, if any is to be; return whether one is under way, or about to be.

        Args:
            is_busy: whether the engine works on something.
            run: gives it a stream. Where that fails the turn is still to come.
            let_go: takes one that is suspected no more.
        """
        while True:
            alone = self._alone
            if alone is not None:
                if alone.is_suspect and self._streams.get(alone.request_id) is alone:
                    return True
                self._alone = None  # it has ended, is suspected no more, or its ingress began a new epoch
            if not self._waiting:
                return False
            stream = self._streams.get(self._waiting[0])
            if stream is not None and stream.awaits_turn:  # nobody waits for one that has left
                if not stream.is_suspect:
                    let_go(stream)
                elif is_busy():
                    return True  # alone means alone: what runs ends first, and nothing new begins
                else:
                    self._alone = stream
                    self._probation_left = PROBATION_OUTPUTS
                    run(stream)
                stream.awaits_turn = False
            self._waiting.popleft()

    def clears(self, stream: DeskStream) -> bool:
        """Note an output after which a stream goes on; return whether it is suspected no more for it."""
        if not self.is_alone(stream) or stream.num_cleared >= MAX_CLEARED:
            return False
        self._probation_left -= 1
        if self._probation_left > 0:
            return False
        self._alone = None
        stream.num_crashes = 0
        stream.num_cleared += 1
        return True

    def guilty(self, begun: Sequence[DeskStream]) -> list[DeskStream]:
        """Return whom a loss is to be blamed on, of those that were in flight.

        Alone means alone, unless what it was suspected for has been taken back meanwhile.
        """
        return [stream for stream in begun if self.is_alone(stream)]

    def note_loss(self, begun: Sequence[DeskStream]) -> list[DeskStream]:
        """Count a loss of the target for those that were in flight, and for the other choices of these.

        Returns:
            Those whose ingress has to be told: what was lost with the target is not counted once more if this
            coordinator is, too, before they have begun again.
        """
        self._num_losses += 1
        responses = {(stream.ingress, stream.response) for stream in begun}
        changed: list[DeskStream] = []
        for stream in self._streams.values():
            is_counted = (stream.ingress, stream.response) in responses
            if is_counted:
                stream.num_crashes += 1
                stream.losses = (*stream.losses, self._num_losses)
            if stream.is_admitted and (is_counted or stream.has_begun):
                changed.append(stream)
            stream.has_begun = False
        return changed
