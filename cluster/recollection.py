"""What is remembered of ended streams, for clients that lost their connection to them: tokens, or that it was
the stream that killed who served it.

A client that comes back, through any ingress, shows which stream it had and proof that it was its own; with
the tokens its stream is continued like any other that moves. Bounded in time (by each stream's own windows,
which begin with its end) and in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.crash_policy import response_of
from specdec.core.clock import Clock
from specdec.core.request import Resumption

MAX_TOKENS = 4_000_000
"""16 MB. What ended first is forgotten first."""
MAX_FAILED = 4096
"""Responses that are remembered for what they did."""


@dataclass(slots=True)
class _Entry:
    token_ids: array[int]
    until_s: float


class Recollection:
    """Tokens of streams that have ended here, by name and proof."""

    def __init__(self, clock: Clock, *, max_tokens: int = MAX_TOKENS) -> None:
        self._clock = clock
        self._max_tokens = max_tokens
        self._entries: dict[tuple[str, bytes], _Entry] = {}
        """Oldest first."""
        self.num_tokens = 0

    def keep(self, resumption: Resumption, token_ids: Sequence[int], *, is_door_silent: bool = False) -> None:
        """Remember an ended stream. Of several attempts at one stream the longest is kept.

        A client whose door hangs hears of that only when Serve has found it out, and its connection breaks:
        what it would come back to is kept for as long as it could be generated again, which costs more.
        """
        self.forget_old()
        key = (resumption.name, resumption.proof)
        known = self._entries.pop(key, None)
        kept = array("I", token_ids)
        if known is not None:
            self.num_tokens -= len(known.token_ids)
            if len(known.token_ids) > len(kept):
                kept = known.token_ids
        window_s = resumption.window_s
        if is_door_silent:
            window_s = max(window_s, resumption.replay_window_s)
        self._entries[key] = _Entry(kept, self._clock.now_s() + window_s)
        self.num_tokens += len(kept)
        while self.num_tokens > self._max_tokens:
            self._forget(next(iter(self._entries)))

    def recall(self, name: str, proof: bytes) -> tuple[int, ...] | None:
        """Return the tokens of a stream; None where it is not known, or not by this proof."""
        self.forget_old()
        entry = self._entries.get((name, proof))
        return None if entry is None else tuple(entry.token_ids)

    def forget_old(self) -> None:
        """Forget whose window is over. Call now and then."""
        now_s = self._clock.now_s()
        for key in [key for key, entry in self._entries.items() if entry.until_s <= now_s]:
            self._forget(key)

    def _forget(self, key: tuple[str, bytes]) -> None:
        self.num_tokens -= len(self._entries.pop(key).token_ids)


class FailedResponses:
    """Responses with a choice that was to blame for crashes: whoever comes back to one is told so again.

    All choices of a response have the same prompt, and fail together.
    """

    def __init__(self, clock: Clock, *, max_responses: int = MAX_FAILED) -> None:
        self._clock = clock
        self._max_responses = max_responses
        self._entries: dict[tuple[str, bytes], tuple[str, float]] = {}
        """Name of the choice and end of its window by response and proof, oldest first."""

    def keep(self, resumption: Resumption | None) -> None:
        """Remember the response of a stream while its client may come back; None: it never may.

        That is as long as its tokens are kept, or generated again, which would take the next workers down.
        """
        if resumption is None:
            return
        key = (response_of(resumption.name), resumption.proof)
        self._entries.pop(key, None)
        window_s = max(resumption.window_s, resumption.replay_window_s)
        self._entries[key] = resumption.name, self._clock.now_s() + window_s
        while len(self._entries) > self._max_responses:
            del self._entries[next(iter(self._entries))]

    def has(self, name: str, proof: bytes) -> bool:
        """Whether this stream's response is remembered, by this proof."""
        entry = self._entries.get((response_of(name), proof))
        return entry is not None and entry[1] > self._clock.now_s()

    def has_any(self, names: Iterable[str], proof: bytes) -> bool:
        """Whether the response of any of these streams is."""
        return any(self.has(name, proof) for name in names)

    def kept(self) -> tuple[Resumption, ...]:
        """Return what is remembered, with what is left of the windows, for others to remember."""
        self.forget_old()
        now_s = self._clock.now_s()
        return tuple(
            Resumption(name=name, proof=proof, window_s=until_s - now_s)
            for (_, proof), (name, until_s) in self._entries.items()
        )

    def forget_old(self) -> None:
        """Forget whose window is over. Call now and then."""
        now_s = self._clock.now_s()
        for key in [key for key, (_, until_s) in self._entries.items() if until_s <= now_s]:
            del self._entries[key]
