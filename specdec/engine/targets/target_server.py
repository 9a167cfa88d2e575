"""Serves a target in this process to one coordinator at a time."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict

import msgspec

from specdec.core.errors import ChannelTimeout, ProtocolError
from specdec.core.ids import RequestId
from specdec.core.plan import TargetStep
from specdec.engine.targets.hidden_sender import HiddenSender
from specdec.engine.targets.step_parts import StepAssembly, send_step
from specdec.engine.targets.target import Target
from specdec.transport.base import Channel, PeerId, dropped_series
from specdec.transport.messages import (
    Fatal,
    Fenced,
    Hello,
    Message,
    RunStep,
    SendHidden,
    StepDone,
    StepPart,
    Welcome,
)

logger = logging.getLogger(__name__)

_NUM_KEPT_ANSWERS = 4
"""At least the number of steps a coordinator may have in flight."""
_DROPPED_AS = (
    ("stale_steps", "stale"),
    ("stale_wishes", "stale"),
    ("malformed_steps", "malformed"),
    ("unexpected_messages", "unexpected_kind"),
)
"""Counters of messages that came to nothing, and for what reason they are exported."""


class TargetServer:
    """Runs each step of the current owner once and in order, whatever the network does to messages.

    The owner is the sender of the greatest incarnation seen. When it changes, the sequences of the former
    owner are forgotten before the new owner's first step.
    """

    def __init__(self, channel: Channel, target: Target, *, hidden: HiddenSender | None = None) -> None:
        """Serve `target`; with `hidden`, draft workers get hidden states as the owner wishes."""
        self._channel = channel
        self._target = target
        self._hidden = hidden
        self._owner: PeerId | None = None
        self._incarnation = -1
        self._next_sequence = 0
        self._early: dict[int, TargetStep] = {}
        self._parts = StepAssembly(RunStep)
        self._answers: OrderedDict[int, StepDone] = OrderedDict()
        self._known: set[RequestId] = set()
        self._left_behind: tuple[RequestId, ...] = ()
        """Sequences of former owners, until the next step releases them."""
        self.counters: Counter[str] = Counter()
        """stale_steps (of somebody who is not the owner any more, or never was), repeated_steps,
        malformed_steps (parts that are of none), answers_in_parts (how often one was too long for one
        message), stale_wishes (for hidden states), unexpected_messages (not for a target worker). With each
        answer the owner is told what was dropped, here and by the channels."""

    def step(self, timeout_s: float | None) -> bool:
        """Handle the next message; return whether one came within `timeout_s`.

        Raises:
            Exception: whatever the target raises, after telling the owner: the process should end then.
        """
        try:
            envelope = self._channel.receive(timeout_s)
        except ChannelTimeout:
            return False
        match envelope.message:
            case Hello(incarnation=incarnation):
                self._attach(envelope.sender, incarnation)
            case RunStep() as message:
                self._accept(envelope.sender, message)
            case StepPart() as part:
                self._accept_part(envelope.sender, part)
            case SendHidden() as order if self._hidden is not None:
                if envelope.sender == self._owner and order.incarnation == self._incarnation:
                    self._hidden.take(order)
                else:
                    self.counters["stale_wishes"] += 1
            case _:
                self.counters["unexpected_messages"] += 1
                logger.debug("ignored %s from %s", type(envelope.message).__name__, envelope.sender)
        return True

    def _attach(self, sender: PeerId, incarnation: int) -> None:
        if incarnation < self._incarnation or (incarnation == self._incarnation and sender != self._owner):
            self._channel.send(sender, Fenced(incarnation, self._incarnation))
            return
        if incarnation > self._incarnation:
            logger.info("%s takes possession (incarnation %d)", sender, incarnation)
            former = self._owner
            if former is not None and former != sender:
                self._channel.send(former, Fenced(self._incarnation, incarnation))
            self._owner, self._incarnation = sender, incarnation
            self._next_sequence = 0
            self._early.clear()
            self._parts.clear()
            self._answers.clear()
            # Those of the owner before are among them already, if this one has not run a step.
            self._left_behind += tuple(self._known)
            self._known.clear()
            if self._hidden is not None:
                self._hidden.forget_all()
        self._channel.send(sender, Welcome(incarnation, self._target.description))

    def _accept(self, sender: PeerId, message: RunStep) -> None:
        if sender != self._owner or message.incarnation != self._incarnation:
            self.counters["stale_steps"] += 1
            self._channel.send(sender, Fenced(message.incarnation, self._incarnation))
            return
        if message.sequence < self._next_sequence:
            self.counters["repeated_steps"] += 1
        if message.sequence in self._answers:
            self._answer(message.sequence)
        elif message.sequence >= self._next_sequence:
            self._early[message.sequence] = message.step
        while (step := self._early.pop(self._next_sequence, None)) is not None:
            self._run(step)

    def _accept_part(self, sender: PeerId, part: StepPart) -> None:
        """Put a long step together; of one that is not to be run, its first part stands for it."""
        is_ours = sender == self._owner and part.incarnation == self._incarnation
        if not is_ours or part.sequence < self._next_sequence:
            if part.index == 0:
                nothing = TargetStep(step_id=-1, works=())
                self._accept(sender, RunStep(part.incarnation, part.sequence, nothing))
            return
        try:
            step = self._parts.add(part)
        except ProtocolError as error:
            self.counters["malformed_steps"] += 1
            logger.warning("ignored what %s sent: %s", sender, error)
            return
        if step is not None:
            self._accept(sender, step)

    def _run(self, step: TargetStep) -> None:
        if self._left_behind:
            step = msgspec.structs.replace(step, released=(*self._left_behind, *step.released))
            self._left_behind = ()
        self._known.difference_update(step.released)
        self._known.update(sequence.request_id for sequence in step.admitted)
        try:
            self._target.submit(step)
            result = self._target.collect()
        except Exception as error:
            # A process border: the owner learns why before this process ends.
            self._send_to_owner(Fatal(f"{type(error).__name__}: {error}"))
            raise
        sequence = self._next_sequence
        self._next_sequence += 1
        # As it is now: parts of an answer that is sent again must fit those that were sent before.
        self._answers[sequence] = StepDone(self._incarnation, sequence, result, self._counts())
        while len(self._answers) > _NUM_KEPT_ANSWERS:
            self._answers.popitem(last=False)
        self._answer(sequence)
        if self._hidden is not None:
            self._hidden.step_done(self._known)

    def _answer(self, sequence: int) -> None:
        assert self._owner is not None
        done = self._answers[sequence]
        is_in_parts = send_step(self._channel, self._owner, done, self.counters["repeated_steps"])
        self.counters["answers_in_parts"] += is_in_parts

    def _counts(self) -> dict[str, int] | None:
        """What the owner is told: all since the start, so that it may hear it twice, or not at once."""
        dropped = dict(self._channel.counters.dropped)
        for name, reason in _DROPPED_AS:
            if num_dropped := self.counters[name]:
                dropped[reason] = dropped.get(reason, 0) + num_dropped
        counts = dropped_series("target", "target_worker", dropped)
        if self._hidden is not None:
            counts |= dropped_series("hidden", "target_worker", self._hidden.dropped)
        return counts or None

    def _send_to_owner(self, message: Message) -> None:
        assert self._owner is not None
        self._channel.send(self._owner, message)
