"""Cuts a lowered forward in two behind hidden states in its middle."""

from __future__ import annotations

from typing import NamedTuple

from specdec.model.lowering import Lowered, Operation
from specdec.model.recording import CannotLower
from specdec.model.trace import Value


class CutForward(NamedTuple):
    """What a forward does once it has some hidden states."""

    lowered: Lowered
    incoming: Value
    """These states."""


def behind_hidden(lowered: Lowered) -> CutForward:
    """Return what of a forward follows on the hidden states that it hands out.

    Raises:
        CannotLower: what follows reads more of what comes before than these, or there is more behind it.
    """
    assert lowered.hidden is not None, "there is nothing to cut at"
    incoming = lowered.hidden.value
    known, before = {incoming}, set[Value]()
    behind: list[Operation] = []
    for operation in lowered.operations:
        read = {ref.value for ref in operation.inputs if ref.value.kind == "row"}
        if operation.out.value is incoming or not read & known:
            before.add(operation.out.value)
            continue
        if not read <= known:
            raise CannotLower("layers behind the exit read more of those before it than their hidden states")
        known.add(operation.out.value)
        behind.append(operation)
    if lowered.output.value not in known or before & known != {incoming}:
        raise CannotLower("what comes behind the exit does not follow on its hidden states alone")
    return CutForward(Lowered(behind, lowered.output, None), incoming)
