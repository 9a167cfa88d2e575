"""A virtual clock: what is to happen, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventQueue:
    """Runs callbacks at their times; of equal times, in the order in which they were asked for."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.now_s = 0.0
        self.num_events = 0

    def at(self, time_s: float, callback: Callable[[], None]) -> None:
        """Call back at a moment that is not past."""
        assert time_s >= self.now_s - 1e-12, "an event in the past"
        heapq.heappush(self._heap, (time_s, self._number, callback))
        self._number += 1

    def run(self, until_s: float) -> None:
        """Let everything happen up to a moment."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, callback = heapq.heappop(self._heap)
            self.num_events += 1
            callback()
        self.now_s = max(self.now_s, until_s)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to happen any more."""
        return not self._heap


class ThinkingClock:
    """Goes on by `step_s` whenever it is looked at: what is timed by it takes so long."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._now_s = 0.0

    def now_s(self) -> float:
        """See `specdec.core.clock.Clock`."""
        self._now_s += self._step_s
        return self._now_s
