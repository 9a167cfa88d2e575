"""What share of the last seconds something took, from a count of its seconds."""

from __future__ import annotations

import threading
from collections import deque

from specdec.core.clock import Clock

RECENT_S = 10.0
"""How far back "recent" goes."""


class RecentShare:
    """A share of time that follows a count which only grows; idle time counts."""

    def __init__(self, clock: Clock) -> None:
        """Begin now, with a count of 0."""
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = deque([(clock.now_s(), 0.0)])
        """When the count was looked at, and what it was."""

    def take(self, total_s: float, num_busy: int = 1) -> float:
        """Return by how much the count has grown over the time that has passed since (any thread).

        That is since it was looked at `RECENT_S` ago, or before. Of several whose seconds are added up it is
        the mean. At most 1: what is counted when it is over may have begun earlier.
        """
        with self._lock:
            now_s, seen = self._clock.now_s(), self._seen
            while len(seen) > 1 and seen[1][0] <= now_s - RECENT_S:
                seen.popleft()
            seen.append((now_s, total_s))
            since_s, before_s = seen[0]
        whole_s = (now_s - since_s) * num_busy
        return min(1.0, (total_s - before_s) / whole_s) if whole_s > 0.0 else 0.0
