"""How often a door writes to its streams: less often to each, the more there are.

What a delivery costs is nearly all in handing it to Ray Serve and its proxy, however little it holds; without
bound, many streams of short rounds take the cores that would compute the next ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

DEFAULT_MAX_DELIVERIES_PER_S = 500.0
_LONGEST_S = 0.25
"""No stream waits longer for what is there, however many there are: it still looks like one."""


class DeliveryBudget:
    """Divides the deliveries of one door among its streams."""

    def __init__(self, max_per_s: float = DEFAULT_MAX_DELIVERIES_PER_S) -> None:
        """`max_per_s`: deliveries of all streams together, per second."""
        self._max_per_s = max_per_s
        self._num_streams = 0

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count a stream while it is open."""
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    @property
    def interval_s(self) -> float:
        """Seconds for which a stream gathers what comes after a delivery."""
        return min(_LONGEST_S, self._num_streams / self._max_per_s)
