"""What timelines come to: percentiles, rates, and goodput under service-level objectives."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from deploy.load.generator import Timeline
from specdec.core.errors import ConfigError

Latency = Literal["ttft", "tpot", "itl", "e2e"]
"""In seconds, of one request, counted from when it was due:

ttft   until its first text
tpot   mean per token after the first
itl    the longest between two deliveries, where a request has to have one number; else every one of them
e2e    until its end
"""
LATENCIES: tuple[Latency, ...] = get_args(Latency)
PERCENTILES = (50, 90, 95, 99)
_COLUMNS = (
    "due_s", "sent_s", "ended_s", "ttft_s", "tpot_s", "itl_max_s", "e2e_s",
    "num_prompt_tokens", "num_output_tokens", "num_deliveries", "is_good", "error",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Of one latency, in seconds, over all requests that were complete."""

    number: int
    mean: float
    percentiles: Mapping[int, float]
    """Between two observations interpolated linearly."""
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One run."""

    num_requests: int
    num_completed: int
    errors: Mapping[str, int]
    """Failed requests by kind."""
    reasons: Mapping[str, str]
    """What the server said of the first of them, by kind, where it said something."""
    duration_s: float
    """From the start until the last request ended."""
    offered_per_s: float
    """Requests due per second, until the last one was due."""
    completed_per_s: float
    output_tokens_per_s: float
    """Of complete requests."""
    num_prompt_tokens: int
    num_output_tokens: int
    latencies: Mapping[Latency, Distribution]
    """Without those of which there is no observation."""
    objectives: Mapping[Latency, float]
    num_good: int
    """Requests that were complete and met every objective."""
    goodput_per_s: float
    good_share: float
    """Of all requests, failed ones too."""
    max_lateness_s: float
    """How much later than it was due a request was sent: large where this machine is too slow."""


def objectives_of(texts: Sequence[str]) -> dict[Latency, float]:
    """Return the objectives that options like `ttft=0.5` (seconds) give.

    Raises:
        ConfigError: one is none.
    """
    objectives: dict[Latency, float] = {}
    for text in texts:
        name, _, limit = text.partition("=")
        for latency in LATENCIES:
            if latency == name:
                objectives[latency] = _seconds(text, limit)
                break
        else:
            raise ConfigError(f"--slo: must be one of {', '.join(LATENCIES)}, then =SECONDS; got {text!r}")
    return objectives


def _seconds(text: str, limit: str) -> float:
    try:
        seconds = float(limit)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--slo: must end in a number of seconds above 0, got {text!r}")
    return seconds


def latency_of(timeline: Timeline, latency: Latency) -> float | None:
    """Return a latency of one request; None where it has none: an answer of one token has no tpot."""
    times_s = timeline.deliveries_s
    if latency == "e2e":
        return timeline.ended_s - timeline.due_s
    if latency == "ttft":
        return times_s[0] - timeline.due_s if times_s else None
    if latency == "itl":
        return max(gaps_s(timeline), default=None)
    num_tokens = timeline.num_output_tokens or 0
    return (times_s[-1] - times_s[0]) / (num_tokens - 1) if times_s and num_tokens > 1 else None


def gaps_s(timeline: Timeline) -> list[float]:
    """Return the times between deliveries."""
    return [later - earlier for earlier, later in pairwise(timeline.deliveries_s)]


def is_good(timeline: Timeline, objectives: Mapping[Latency, float]) -> bool:
    """Whether a request was complete and met every objective that applies to it."""
    if timeline.error is not None:
        return False
    given = ((latency_of(timeline, latency), limit_s) for latency, limit_s in objectives.items())
    return all(seconds is None or seconds <= limit_s for seconds, limit_s in given)


def report_of(timelines: Sequence[Timeline], objectives: Mapping[Latency, float]) -> LoadReport:
    """Sum a run up. There is at least one request."""
    completed = [timeline for timeline in timelines if timeline.error is None]
    duration_s = max(timeline.ended_s for timeline in timelines)
    num_output_tokens = sum(timeline.num_output_tokens or 0 for timeline in completed)
    num_good = sum(is_good(timeline, objectives) for timeline in timelines)
    latencies = {latency: _distribution(_observations(completed, latency)) for latency in LATENCIES}
    return LoadReport(
        num_requests=len(timelines),
        num_completed=len(completed),
        errors=dict(Counter(timeline.error for timeline in timelines if timeline.error is not None)),
        reasons=_reasons(timelines),
        duration_s=duration_s,
        offered_per_s=_per_s(len(timelines), max(timeline.due_s for timeline in timelines)),
        completed_per_s=_per_s(len(completed), duration_s),
        output_tokens_per_s=_per_s(num_output_tokens, duration_s),
        num_prompt_tokens=sum(timeline.num_prompt_tokens or 0 for timeline in completed),
        num_output_tokens=num_output_tokens,
        latencies={latency: found for latency, found in latencies.items() if found is not None},
        objectives=dict(objectives),
        num_good=num_good,
        goodput_per_s=_per_s(num_good, duration_s),
        good_share=num_good / len(timelines),
        max_lateness_s=max(timeline.sent_s - timeline.due_s for timeline in timelines),
    )


def _reasons(timelines: Sequence[Timeline]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for timeline in timelines:
        if timeline.error is not None and timeline.reason is not None:
            reasons.setdefault(timeline.error, timeline.reason)
    return reasons


def _per_s(number: int, seconds: float) -> float:
    return number / seconds if seconds > 0 else 0.0


def _observations(completed: Sequence[Timeline], latency: Latency) -> list[float]:
    if latency == "itl":
        return [gap for timeline in completed for gap in gaps_s(timeline)]
    found = (latency_of(timeline, latency) for timeline in completed)
    return [seconds for seconds in found if seconds is not None]


def _distribution(seconds: Sequence[float]) -> Distribution | None:
    if not seconds:
        return None
    values = np.asarray(seconds)
    return Distribution(
        number=len(seconds),
        mean=float(values.mean()),
        percentiles={rank: float(np.percentile(values, rank)) for rank in PERCENTILES},
        max=float(values.max()),
    )


def csv_of(timelines: Sequence[Timeline], objectives: Mapping[Latency, float]) -> str:
    """Return one line per request, in order of time."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for timeline in timelines:
        ttft, tpot, itl, e2e = (latency_of(timeline, latency) for latency in LATENCIES)
        times = (timeline.due_s, timeline.sent_s, timeline.ended_s, ttft, tpot, itl, e2e)
        writer.writerow(
            [
                *("" if seconds is None else f"{seconds:.6f}" for seconds in times),
                timeline.num_prompt_tokens,
                timeline.num_output_tokens,
                len(timeline.deliveries_s),
                int(is_good(timeline, objectives)),
                timeline.error or "",
            ]
        )
    return text.getvalue()
