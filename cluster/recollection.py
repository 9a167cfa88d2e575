"""The tokens of ended streams, for clients that lost their connection to them.

A client that comes back, through any ingress, shows which stream it had and proof that it was its own; with
the tokens its stream is continued like any other that moves. Bounded in time (by each stream's own window,
which begins with its end) and in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.core.clock import Clock
from specdec.core.request import Resumption

MAX_TOKENS = 4_000_000
"""16 MB. What ended first is forgotten first."""


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

    def keep(self, resumption: Resumption, token_ids: Sequence[int]) -> None:
        """Remember an ended stream. Of several attempts at one stream the longest is kept."""
        self.forget_old()
        key = (resumption.name, resumption.proof)
        known = self._entries.pop(key, None)
        kept = array("I", token_ids)
        if known is not None:
            self.num_tokens -= len(known.token_ids)
            if len(known.token_ids) > len(kept):
                kept = known.token_ids
        self._entries[key] = _Entry(kept, self._clock.now_s() + resumption.window_s)
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
