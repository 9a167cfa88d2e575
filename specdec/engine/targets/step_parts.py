"""Steps, and answers to them, that are longer than a message: cut by who sends them, put together by who
hears them.

A step grows with its rows times the vocabulary where grammars mask them, or where drafts bring along what
they were drawn from, and its answer with the log-probabilities that are asked for: no number of rows keeps
either below a bound in bytes.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Generic, TypeVar

from specdec.core.errors import MessageTooLong, ProtocolError
from specdec.transport.base import Channel, PeerId
from specdec.transport.messages import RunStep, StepDone, StepPart, decode, encode

MOST_PARTS = 256
_NUM_INCOMPLETE = 4
"""At least the number of steps a coordinator may have in flight."""
_BESIDE_BYTES = 64
"""Of a part, beside its content."""

Whole = TypeVar("Whole", bound=RunStep | StepDone)


def send_step(channel: Channel, peer_id: PeerId, message: RunStep | StepDone, num_before: int = 0) -> bool:
    """Send a step or an answer, in parts where it is too long for a message; return whether it was.

    Where `num_before` says that it was sent before, its parts go in another order each time: a queue that has
    no room for all of them would never take the last ones.

    Raises:
        ChannelClosed: see `Channel.send`.
        MessageTooLong: it would be more than `MOST_PARTS`.
    """
    try:
        channel.send(peer_id, message)
    except MessageTooLong as too_long:
        parts = parts_of(message, too_long.most_bytes)
        if num_before > 0:
            random.Random(num_before).shuffle(parts)
        for part in parts:
            channel.send(peer_id, part)
        return True
    return False


def parts_of(message: RunStep | StepDone, most_bytes: int) -> list[StepPart]:
    """Cut a step or an answer into messages of at most `most_bytes`.

    Raises:
        MessageTooLong: it would be more than `MOST_PARTS`.
    """
    frame, each = encode(message), most_bytes - _BESIDE_BYTES
    count = -(-len(frame) // each)
    if count > MOST_PARTS:
        raise MessageTooLong(len(frame), MOST_PARTS * each)
    return [
        StepPart(
            message.incarnation, message.sequence, index, count, frame[index * each : (index + 1) * each]
        )
        for index in range(count)
    ]


class StepAssembly(Generic[Whole]):
    """Puts steps of one owner together, or answers to them, whatever the network does to their parts."""

    def __init__(self, kind: type[Whole]) -> None:
        """Expect parts of such messages."""
        self._kind: type[Whole] = kind
        self._incomplete: OrderedDict[int, dict[int, StepPart]] = OrderedDict()

    def add(self, part: StepPart) -> Whole | None:
        """Take a part in; return the message that it completes, if it does.

        Raises:
            ProtocolError: it is no part of one.
        """
        if not 0 <= part.index < part.count <= MOST_PARTS:
            raise ProtocolError(f"part {part.index} of {part.count} of step {part.sequence}")
        parts = self._incomplete.setdefault(part.sequence, {})
        if any(one.count != part.count for one in parts.values()):
            # It was cut in another way before: what is there is of no use any more.
            parts.clear()
        parts[part.index] = part
        if len(parts) < part.count:
            while len(self._incomplete) > _NUM_INCOMPLETE:
                self._incomplete.popitem(last=False)
            return None
        del self._incomplete[part.sequence]
        whole = decode(b"".join(parts[index].content for index in range(part.count)))
        if not isinstance(whole, self._kind) or (whole.incarnation, whole.sequence) != (
            part.incarnation,
            part.sequence,
        ):
            raise ProtocolError(f"the parts of step {part.sequence} are no such {self._kind.__name__}")
        return whole

    def clear(self) -> None:
        """Forget what has not been completed."""
        self._incomplete.clear()
