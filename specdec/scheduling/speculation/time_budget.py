"""How often a controller may do what takes time itself: so seldom that it takes a small share of all time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from specdec.core.clock import Clock
from specdec.core.decaying import moved

_DECAY = 0.25
_LARGEST_RISE = 3.0
"""A time that is longer than this many times the usual one counts as that: something interrupted it."""
_LONGEST_FIRST_S = 0.005
"""The first time counts as no more: much of what it does is not done again."""
_MOST_SAVED_S = 0.03
"""So much time may be saved up, and is there at first: some fifteen decisions."""


class TimeBudget:
    """Times something that is done again and again, and tells how long to wait in between.

    On one machine a decision takes 0.5 ms, on another, whose processor is slower and whose caches are full of
    weights, 3 ms: how often it is worth it cannot be a constant.
    """

    def __init__(self, clock: Clock | None, share: float) -> None:
        """Let it take `share` of the time at most; without a clock it is thought to take none."""
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share must be above 0 and at most 1, got {share}")
        self._clock = clock
        self._share = share
        self._usual_s: float | None = None
        self._begun_s = 0.0
        self._saved_s = _MOST_SAVED_S

    @contextmanager
    def timed(self, *, goes_on: bool = False) -> Iterator[None]:
        """Do it once, or (it goes on later) the first part of it."""
        clock = self._clock
        if clock is None:
            yield
            return
        started_s = clock.now_s()
        yield
        took_s, self._begun_s = self._begun_s + clock.now_s() - started_s, 0.0
        if goes_on:
            self._begun_s = took_s
            return
        longest_s = _LONGEST_FIRST_S if self._usual_s is None else _LARGEST_RISE * self._usual_s
        took_s = min(took_s, longest_s)
        self._usual_s = moved(self._usual_s, took_s, _DECAY)
        self._saved_s = max(-_MOST_SAVED_S, self._saved_s - took_s)

    @property
    def interval_s(self) -> float:
        """Seconds from one time to the next, at least; 0 before the first."""
        return 0.0 if self._usual_s is None else self._usual_s / self._share

    @property
    def has_saved(self) -> bool:
        """Whether it has taken less than its share: then it may be done more often for a while.

        Where much seems new all the time, since requests come and go and others use the same cores, it would
        be done more often for good, and cost several times its share.
        """
        return self._saved_s > 0.0

    def pass_time(self, seconds: float) -> None:
        """So much time has passed, of which it may take its share."""
        self._saved_s = min(_MOST_SAVED_S, self._saved_s + self._share * seconds)
