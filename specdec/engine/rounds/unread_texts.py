"""Outputs whose text is still to be read."""

from __future__ import annotations

from msgspec.structs import force_setattr

from specdec.core.outputs import RequestOutput
from specdec.engine.requests.live_request import LiveRequest


class UnreadTexts:
    """Outputs of rounds, until their text is read: from a token to its text takes longer than to commit it.

    No worker needs the text, so it can be read while they are busy. It has to be read before the same request
    goes on, or ends: text belongs to the output of the tokens that released it.
    """

    __slots__ = ("_outputs",)

    def __init__(self) -> None:
        self._outputs: list[tuple[RequestOutput, LiveRequest]] = []

    def add(self, output: RequestOutput, live: LiveRequest) -> None:
        """Keep the last output of a request, which has no text yet."""
        self._outputs.append((output, live))

    def read(self) -> None:
        """Let all outputs have their text."""
        outputs, self._outputs = self._outputs, []
        for output, live in outputs:
            force_setattr(output, "text", live.take_text())  # nobody has seen it yet
