"""When tokens reach their readers: time to the first one, gaps between events, how even it is among streams.

A round may bring several tokens of one stream and one of another, so three things are told apart:

    gap              between two events of a stream, as its reader sees them: an event is what a round brought
    time per token   of a whole stream: from its first event to its last, over the tokens after the first
    slow streams     the slowest tenth by that: with speculation, those whose drafts are not accepted, and who
                     pay for the rows that the others' drafts take

Fairness is Jain's index of the streams' times per token: 1 when all are equal, 1/n when one alone waits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One stream as its reader saw it. Seconds on one clock."""

    sent_s: float
    events: tuple[tuple[float, int], ...]
    """(time, number of new tokens); only events with tokens."""

    @property
    def first_token_s(self) -> float:
        """From sending the request to its first token."""
        return self.events[0][0] - self.sent_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between events."""
        return tuple(later - earlier for (earlier, _), (later, _) in pairwise(self.events))

    @property
    def num_tokens(self) -> int:
        """All of its tokens."""
        return sum(number for _, number in self.events)

    @property
    def time_per_token_s(self) -> float | None:
        """After the first event; None when there was only one."""
        num_later = self.num_tokens - self.events[0][1]
        return (self.events[-1][0] - self.events[0][0]) / num_later if num_later else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """What many streams add up to. Milliseconds, by percentile."""

    num_streams: int
    tokens_per_s: float
    """Of all streams, from the first request to the last token."""
    ttft_ms: dict[int, float]
    itl_ms: dict[int, float]
    """Gaps between events, all streams' together."""
    longest_gap_ms: dict[int, float]
    """The worst gap of each stream."""
    tpot_ms: dict[int, float]
    """Time per token of each stream."""
    slow_tenth_tpot_ms: float
    """Mean over the slowest tenth of the streams."""
    tokens_per_event: float
    fairness: float


def cadence_of(timelines: Sequence[Timeline]) -> Cadence:
    """Add up streams, each of which has had a token."""
    per_token = sorted(one.time_per_token_s for one in timelines if one.time_per_token_s is not None)
    num_tokens = sum(one.num_tokens for one in timelines)
    seconds = max(one.events[-1][0] for one in timelines) - min(one.sent_s for one in timelines)
    slow = per_token[-math.ceil(len(per_token) / 10) :] or [0.0]
    return Cadence(
        num_streams=len(timelines),
        tokens_per_s=num_tokens / seconds,
        ttft_ms=_percentiles_ms([one.first_token_s for one in timelines]),
        itl_ms=_percentiles_ms([gap for one in timelines for gap in one.gaps_s]),
        longest_gap_ms=_percentiles_ms([max(one.gaps_s) for one in timelines if one.gaps_s]),
        tpot_ms=_percentiles_ms(per_token),
        slow_tenth_tpot_ms=1e3 * sum(slow) / len(slow),
        tokens_per_event=num_tokens / sum(len(one.events) for one in timelines),
        fairness=jain(per_token),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def jain(amounts: Sequence[float]) -> float:
    """Return Jain's fairness index, (sum x)^2 / (n sum x^2); 1.0 for nobody."""
    squares = sum(amount * amount for amount in amounts)
    return sum(amounts) ** 2 / (len(amounts) * squares) if squares else 1.0


def arrival_times(num_requests: int, per_second: float, seed: int) -> list[float]:
    """Return when requests are sent (seconds from the start): independent of each other, as users come."""
    generator = random.Random(seed)
    times, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += generator.expovariate(per_second)
        times.append(now_s)
    return times


def _percentiles_ms(seconds: Sequence[float]) -> dict[int, float]:
    return {percent: 1e3 * percentile(seconds, percent) if seconds else 0.0 for percent in PERCENTILES}
