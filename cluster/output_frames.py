"""Frames of outputs that can be sent, however long the log-probabilities are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from specdec.core.outputs import RequestOutput
from specdec.core.sampling_params import MAX_LOGPROBS
from specdec.transport.parts import in_parts

_HEAD_BYTES = 64
"""Of a frame, before its outputs, and of an output's lists of log-probabilities."""
_SCORE_BYTES = 18
"""Log-probabilities at one position, but for the alternatives, at most: a token id, a float and two lists."""
_ALTERNATIVE_BYTES = 15
"""A pair of token id and log-probability, at most."""


class OutputFrames:
    """Divides outputs by what one message holds."""

    def __init__(self, max_message_bytes: int) -> None:
        """`max_message_bytes` is the longest message that can be sent."""
        self._most_bytes = max_message_bytes - _HEAD_BYTES

    def holds(self, output: RequestOutput) -> bool:
        """Whether there is room for an output in a frame of its own."""
        most_bytes = self._most_bytes
        return (
            not _are_long((output,), most_bytes)
            or _num_bytes(output) <= most_bytes
            or len(msgspec.msgpack.encode(output)) <= most_bytes
        )

    def divided(self, outputs: Sequence[RequestOutput]) -> Iterator[tuple[RequestOutput, ...]]:
        """Return the outputs of one frame after the other."""
        if not _are_long(outputs, self._most_bytes):
            return iter((tuple(outputs),))
        return in_parts(((output, _num_bytes(output)) for output in outputs), self._most_bytes)


def too_large(output: RequestOutput) -> str:
    """Return what to tell a client whose output no frame holds."""
    num_scored = len(output.prompt_logprobs or ())
    return (
        f"the log-probabilities of {num_scored} prompt tokens are too long to be sent: ask for fewer "
        f"alternatives (prompt_logprobs, or logprobs with echo), or send a shorter prompt"
    )


def _are_long(outputs: Iterable[RequestOutput], most_bytes: int) -> bool:
    """Return whether log-probabilities may take half of a frame; nothing else is long."""
    num_scores = sum(len(output.prompt_logprobs or ()) + len(output.logprobs or ()) for output in outputs)
    return num_scores * (_SCORE_BYTES + MAX_LOGPROBS * _ALTERNATIVE_BYTES) > most_bytes // 2


def _num_bytes(output: RequestOutput) -> int:
    """Return how long an output is when it is encoded, or a little more."""
    rest = msgspec.structs.replace(output, logprobs=None, prompt_logprobs=None)
    return (
        len(msgspec.msgpack.encode(rest))
        + _HEAD_BYTES
        + sum(
            _SCORE_BYTES + _ALTERNATIVE_BYTES * len(scores.top)
            for scores in (*(output.prompt_logprobs or ()), *(output.logprobs or ()))
        )
    )
