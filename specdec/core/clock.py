"""Time as a dependency, so that every policy can be tested under a clock that a test moves."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary fixed point; never decreases."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Return `time.perf_counter()`."""
        return time.perf_counter()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """Return the time set last."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by `seconds` (must not be negative)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back (advance by {seconds})")
        self._now_s += seconds
