"""Steps that are longer than a message: cut by who sends them, put together by who runs them.

A step grows with its rows times the vocabulary where grammars mask them, or where drafts bring along what
they were drawn from: no number of rows keeps it below a bound in bytes.
"""

from __future__ import annotations

from collections import OrderedDict

from specdec.core.errors import MessageTooLong, ProtocolError
from specdec.transport.messages import RunStep, StepPart, decode, encode

MOST_PARTS = 256
_NUM_INCOMPLETE = 4
"""At least the number of steps a coordinator may have in flight."""
_BESIDE_BYTES = 64
"""Of a part, beside its content."""


def parts_of(step: RunStep, most_bytes: int) -> list[StepPart]:
    """Cut a step into messages of at most `most_bytes`.

    Raises:
        MessageTooLong: it would be more than `MOST_PARTS`.
    """
    frame, each = encode(step), most_bytes - _BESIDE_BYTES
    count = -(-len(frame) // each)
    if count > MOST_PARTS:
        raise MessageTooLong(len(frame), MOST_PARTS * each)
    return [
        StepPart(step.incarnation, step.sequence, index, count, frame[index * each : (index + 1) * each])
        for index in range(count)
    ]


class StepAssembly:
    """Puts steps of one owner together, whatever the network does to their parts."""

    def __init__(self) -> None:
        self._incomplete: OrderedDict[int, dict[int, StepPart]] = OrderedDict()

    def add(self, part: StepPart) -> RunStep | None:
        """Take a part in; return the step that it completes, if it does.

        Raises:
            ProtocolError: it is no part of a step.
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
        step = decode(b"".join(parts[index].content for index in range(part.count)))
        if not isinstance(step, RunStep) or (step.incarnation, step.sequence) != (
            part.incarnation,
            part.sequence,
        ):
            raise ProtocolError(f"the parts of step {part.sequence} are no such step")
        return step

    def clear(self) -> None:
        """Forget what has not been completed."""
        self._incomplete.clear()
