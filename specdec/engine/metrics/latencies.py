"""How long something took, each time: a histogram as Prometheus counts it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

BOUNDS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip


class Latencies:
    """Durations counted by how long they were."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        """[i]: at most `BOUNDS_S[i]` and more than the bound before; the last: more than all."""
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def series(self, name: str) -> Mapping[str, float]:
        """Return all values by name (any thread)."""
        up_to = list(accumulate(list(self._counts)))
        bounds = (*map(str, BOUNDS_S), "+Inf")
        return {
            **{f'{name}_bucket{{le="{bound}"}}': count for bound, count in zip(bounds, up_to, strict=True)},
            f"{name}_sum": self._sum_s,
            f"{name}_count": up_to[-1],
        }
