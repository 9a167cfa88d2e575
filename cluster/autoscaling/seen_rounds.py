"""What rounds took with batches of other sizes: whether more groups, with smaller ones, have shorter rounds.

Where a round waits for the weights, it takes as long however small its batch is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

_WORTH_DOUBLING = 0.9
"""Twice the groups are wanted for shorter rounds where these are to take less than this part of the time."""
_OTHER_SIZE = 1.5
"""So many times another batch is one of another size."""
_SEEN_FOR_S = 3600.0
"""What rounds took with another batch is known for so long: then it may be tried once more."""
_NEW_PART = 0.1


class SeenRounds(NamedTuple):
    """How long rounds were with batches of about one size."""

    num_running: float
    """Requests of a group."""
    round_s: float
    seen_s: float


Seen = Mapping[int, SeenRounds]
"""What rounds have taken, by the size of batches in powers of two."""


def with_rounds(seen: Seen, num_running: float, round_s: float, now_s: float) -> Seen:
    """Return what is known once rounds of batches of that size are counted in, without what was long ago."""
    num_running = max(1.0, num_running)
    size = round(math.log2(num_running))
    kept = {size: one for size, one in seen.items() if now_s - one.seen_s < _SEEN_FOR_S}
    before = kept.get(size, SeenRounds(num_running, round_s, now_s))
    kept[size] = SeenRounds(
        before.num_running + _NEW_PART * (num_running - before.num_running),
        before.round_s + _NEW_PART * (round_s - before.round_s),
        now_s,
    )
    return kept


class RoundLine(NamedTuple):
    """Seconds of a round: so many, and so many more for each request of its batch."""

    fixed_s: float
    each_s: float

    def round_s(self, num_running: float) -> float:
        """Return how long rounds of such a batch take."""
        return self.fixed_s + self.each_s * max(num_running, 1.0)

    def fewest_groups(self, num_running: float, limit_s: float, most: int) -> int:
        """Return the fewest groups whose rounds are within the limit, or of which twice as many would hardly
        take anything off.
        """
        for number in range(1, most):
            round_s = self.round_s(num_running / number)
            if round_s <= limit_s or self.round_s(num_running / (2 * number)) > _WORTH_DOUBLING * round_s:
                return number
        return most


def line_through(seen: Seen) -> RoundLine | None:
    """Return the line nearest to all that was seen; None: of batches of about one size there is none.

    By how much their rounds differ there is chance.
    """
    sizes = [one.num_running for one in seen.values()]
    if not sizes or max(sizes) < _OTHER_SIZE * min(sizes):
        return None
    mean_running = sum(sizes) / len(sizes)
    mean_s = sum(one.round_s for one in seen.values()) / len(seen)
    spread = sum((one.num_running - mean_running) ** 2 for one in seen.values())
    common = sum((one.num_running - mean_running) * (one.round_s - mean_s) for one in seen.values())
    each_s = max(0.0, common / spread)
    return RoundLine(mean_s - each_s * mean_running, each_s)
