"""A target behind a channel."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.description import TargetDescription
from specdec.core.errors import ChannelTimeout, ProtocolError, TransportError
from specdec.core.plan import TargetResult, TargetStep
from specdec.engine.targets.step_parts import StepAssembly, send_step
from specdec.transport.base import Channel, PeerAddress, PeerFound, PeerId, PeerLost, dropped_series
from specdec.transport.messages import (
    Fatal,
    Fenced,
    Hello,
    HiddenWish,
    RunStep,
    SendHidden,
    StepDone,
    StepPart,
    Welcome,
)

logger = logging.getLogger(__name__)

_SENT_IN_GRACE: Final = 4
"""Into how many parts the grace of a lost link is divided: at the end of each, what may have been lost with
it is sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTargetTimes:
    """How long a remote target is waited for, in seconds."""

    attach_timeout_s: float = 30.0
    step_timeout_s: float = 120.0
    """A step that is not answered by then counts as the death of the target."""
    resend_after_s: float = 1.0
    """Steps run once however often they are sent; this covers a link that broke and came back."""
    lost_link_grace_s: float = 1.0
    """After the link broke, how long it may take to stand again, or to bring an answer. Steps are sent again
    several times within it."""


class RemoteTarget:
    """Implements `engine.target.Target` over a channel that it owns.

    It takes possession of the worker when constructed: whoever attached before with a smaller incarnation
    is fenced off, and the worker forgets that one's sequences.
    """

    def __init__(
        self,
        channel: Channel,
        worker: PeerAddress,
        *,
        incarnation: int,
        times: RemoteTargetTimes | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Connect and attach.

        Args:
            channel: owned from now on.
            worker: where the target is.
            incarnation: greater than that of anybody who had the worker before.
            times: how long to wait.
            clock: of these times.

        Raises:
            ChannelTimeout: the worker did not answer in time.
            TransportError: the worker belongs to a newer incarnation, or died.
        """
        self._channel = channel
        self._worker = worker
        self._incarnation = incarnation
        self._times = times or RemoteTargetTimes()
        self._clock = clock or MonotonicClock()
        self._next_sequence = 0
        self._in_flight: deque[RunStep] = deque()
        self._done: dict[int, TargetResult] = {}
        self._parts = StepAssembly(StepDone)
        self.counters: Counter[str] = Counter()
        """stale_answers: to steps that nobody waits for any more. malformed_answers: parts that are of none.
        steps_in_parts: how often a step was too long for one message. sent_again: how often what was in
        flight was sent once more."""
        self._told: dict[str, int] = {}
        """What the worker has counted, by metric name."""
        self._lost_s: float | None = None
        channel.connect(worker)
        self._description = self._attach()

    @property
    def description(self) -> TargetDescription:
        """Facts about the target, as the worker gave them."""
        return self._description

    @property
    def messages_dropped(self) -> Mapping[str, int]:
        """What was dropped of what arrived, and of what was to be sent, by metric name (any thread).

        At this end, and at the worker's as far as it has told with its answers.
        """
        dropped = Counter(self._channel.counters.dropped)
        dropped["stale"] += self.counters["stale_answers"]
        dropped["malformed"] += self.counters["malformed_answers"]
        return {**dropped_series("target", "coordinator", dropped), **self._told}

    @property
    def is_elsewhere(self) -> bool:
        """Yes: the worker runs them."""
        return True

    def submit(self, step: TargetStep) -> None:
        """Send a round."""
        message = RunStep(self._incarnation, self._next_sequence, step)
        self._next_sequence += 1
        self._in_flight.append(message)
        self._send(message)

    def collect(self) -> TargetResult:
        """Wait for the answer to the oldest round in flight.

        Raises:
            TransportError: the worker died, was taken over, or does not answer.
        """
        assert self._in_flight, "collect without a submitted step"
        sequence = self._in_flight[0].sequence
        give_up_s = self._clock.now_s() + self._times.step_timeout_s
        while sequence not in self._done:
            self._await_news(give_up_s)
        self._in_flight.popleft()
        return self._done.pop(sequence)

    def check(self) -> None:
        """Look, without waiting, whether the worker is still there; for times without a step in flight.

        Raises:
            TransportError: it died or was taken over.
        """
        assert not self._in_flight, "the answer to a step tells the same"
        now_s = self._clock.now_s()
        try:
            while True:
                self._note_welcome(self._next_message(now_s))
        except ChannelTimeout:
            pass
        if self._lost_s is None:
            return
        if now_s - self._lost_s >= self._times.lost_link_grace_s:
            raise TransportError(f"target worker {self._worker.peer_id} is gone")
        self._channel.send(self._worker.peer_id, Hello(self._incarnation))

    def send_hidden(self, coordinator: PeerId, receiver: PeerAddress, wishes: Sequence[HiddenWish]) -> None:
        """Have the worker send hidden states to a draft worker, who knows us as `coordinator`.

        Best effort: rows that get lost cost the drafts that needed them.
        """
        order = SendHidden(
            incarnation=self._incarnation,
            coordinator=coordinator,
            receiver=receiver.peer_id,
            endpoint=receiver.endpoint,
            public_key=receiver.public_key,
            wishes=tuple(wishes),
        )
        self._channel.send(self._worker.peer_id, order)

    def close(self) -> None:
        """Close the channel. Idempotent."""
        self._channel.close()

    def _attach(self) -> TargetDescription:
        give_up_s = self._clock.now_s() + self._times.attach_timeout_s
        while True:
            self._channel.send(self._worker.peer_id, Hello(self._incarnation))
            try:
                message = self._next_message(give_up_s)
            except ChannelTimeout:
                if self._clock.now_s() >= give_up_s:
                    raise
                continue
            self._note_welcome(message)
            if isinstance(message, Welcome) and message.incarnation == self._incarnation:
                if message.description is None:
                    raise TransportError(f"{self._worker.peer_id} is not a target worker")
                return message.description

    def _await_news(self, give_up_s: float) -> None:
        """Take in one arrival; when none comes for a while, send what is in flight once more."""
        if self._lost_s is not None:
            give_up_s = min(give_up_s, self._lost_s + self._times.lost_link_grace_s)
        try:
            message = self._next_message(give_up_s)
        except ChannelTimeout:
            if self._clock.now_s() < give_up_s:
                self._send_again()
                return
            if self._lost_s is not None:
                raise TransportError(f"target worker {self._worker.peer_id} is gone") from None
            raise
        if isinstance(message, PeerFound):
            # It may be at its step still, or never have heard of it.
            self._send_again()
        elif isinstance(message, StepDone | StepPart):
            self._take_answer(message)
        else:
            self._note_welcome(message)

    def _take_answer(self, answer: StepDone | StepPart) -> None:
        """Keep the answer to a step in flight, or a part of one; count what answers nothing."""
        is_ours = answer.incarnation == self._incarnation
        if is_ours:
            self._lost_s = None
        if not is_ours or all(waiting.sequence != answer.sequence for waiting in self._in_flight):
            self.counters["stale_answers"] += isinstance(answer, StepDone) or answer.index == 0
            return
        done = answer if isinstance(answer, StepDone) else self._put_together(answer)
        if done is not None:
            self._done[done.sequence] = done.result
            self._take_counts(done.counts or {})

    def _take_counts(self, counts: Mapping[str, int]) -> None:
        """Keep what the worker has counted. Answers may come in any order; what they say only grows."""
        for series, count in counts.items():
            self._told[series] = max(count, self._told.get(series, 0))

    def _put_together(self, part: StepPart) -> StepDone | None:
        try:
            return self._parts.add(part)
        except ProtocolError as error:
            self.counters["malformed_answers"] += 1
            logger.warning("ignored what target worker %s sent: %s", self._worker.peer_id, error)
            return None

    def _send_again(self) -> None:
        self.counters["sent_again"] += 1
        for unanswered in self._in_flight:
            self._send(unanswered, self.counters["sent_again"])

    def _send(self, step: RunStep, num_before: int = 0) -> None:
        is_in_parts = send_step(self._channel, self._worker.peer_id, step, num_before)
        self.counters["steps_in_parts"] += is_in_parts

    def _note_welcome(self, message: object) -> None:
        """The link is there again if that is what the worker says to our `Hello`."""
        if isinstance(message, Welcome) and message.incarnation == self._incarnation:
            self._lost_s = None

    def _next_message(self, give_up_s: float) -> object:
        """Return the next message of the worker, after looking for those that end the relation.

        Raises:
            ChannelTimeout: nothing came until `give_up_s`, or for so long that what was sent is sent again.
            TransportError: the worker was taken over or reports its own end.
        """
        patience_s = self._times.resend_after_s
        if self._lost_s is not None:
            patience_s = min(patience_s, self._times.lost_link_grace_s / _SENT_IN_GRACE)
        patience_s = min(patience_s, give_up_s - self._clock.now_s())
        envelope = self._channel.receive(max(0.0, patience_s))
        match envelope.message:
            case Fenced(incarnation=fenced, current=current) if fenced == self._incarnation:
                raise TransportError(
                    f"target worker {self._worker.peer_id} was taken over: incarnation {current} > {fenced}"
                )
            case Fatal(reason=reason):
                raise TransportError(f"target worker {self._worker.peer_id} failed: {reason}")
            case PeerLost() if self._lost_s is None:
                self._lost_s = self._clock.now_s()
            case PeerFound():
                self._lost_s = None
        return envelope.message
