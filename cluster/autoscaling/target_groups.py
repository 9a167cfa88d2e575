"""How many target groups are wanted: by requests and their K/V, by waiting in the queue, by the time between
tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from cluster.autoscaling.config import TargetScalingConfig
from cluster.autoscaling.pace import Wish

_MOST_AT_ONCE = 2.0
"""A signal never asks for more than so many times the groups that are there: how it scales is a guess."""
_RELAXED = 0.7
"""Groups are given up if the others stay below this share of the targets: between the two nothing changes."""

_WORTH_DOUBLING = 0.9
"""Twice the groups are wanted for shorter rounds where these are to take less than this part of the time."""
_SEEN_FOR_S = 3600.0
"""What rounds took with another batch is known for so long: then it may be tried once more."""
_NEW_PART = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """What one target group says of itself."""

    num_running: float = 0.0
    num_waiting: float = 0.0
    kv_usage: float = 0.0
    """Share of its KV blocks that requests hold, 0 to 1. What a prefix cache keeps beyond that can be given
    to others at once, and is not in it."""
    queue_wait_s: float = 0.0
    """How long one would wait that comes now, by the measured drain rate."""
    round_s: float | None = None
    """Mean time of its recent rounds; None: there were none."""


class SeenRounds(NamedTuple):
    """How long rounds were with batches of about one size."""

    num_running: float
    """Requests of a group."""
    round_s: float
    seen_s: float


Seen = Mapping[int, SeenRounds]
"""What rounds have taken, by the size of batches in powers of two."""


def with_loads(seen: Seen, loads: Sequence[GroupLoad], now_s: float) -> dict[int, SeenRounds]:
    """Return what is known of rounds once these reports are counted in, without what was long ago."""
    kept = {size: one for size, one in seen.items() if now_s - one.seen_s < _SEEN_FOR_S}
    busy = [load for load in loads if load.round_s is not None and load.num_running > 0]
    if busy:
        num_running = max(1.0, sum(load.num_running for load in busy) / len(busy))
        round_s = sum(load.round_s or 0.0 for load in busy) / len(busy)
        size = round(math.log2(num_running))
        before = kept.get(size, SeenRounds(num_running, round_s, now_s))
        kept[size] = SeenRounds(
            before.num_running + _NEW_PART * (num_running - before.num_running),
            before.round_s + _NEW_PART * (round_s - before.round_s),
            now_s,
        )
    return kept


def wanted_groups(
    loads: Sequence[GroupLoad],
    max_num_seqs: int,
    config: TargetScalingConfig,
    seen: Seen = MappingProxyType({}),
) -> Wish:
    """Return how many target groups are wanted, from reports of those that serve.

    A group is its whole placement group: the number is one of groups, whatever ranks they have. `seen` is
    what `with_loads` knows of rounds: whether smaller batches make them shorter.
    """
    num_groups = len(loads)
    if num_groups == 0:
        return Wish(number=0, is_idle=True)
    needed = _needed(loads, max_num_seqs, config, seen, share=1.0)
    if needed > num_groups:
        return Wish(number=min(needed, math.ceil(num_groups * _MOST_AT_ONCE)))
    relaxed = _needed(loads, max_num_seqs, config, seen, share=_RELAXED)
    is_idle = all(load.num_running + load.num_waiting == 0 for load in loads)
    return Wish(number=min(num_groups, max(1, relaxed)), is_idle=is_idle)


def _needed(
    loads: Sequence[GroupLoad], max_num_seqs: int, config: TargetScalingConfig, seen: Seen, share: float
) -> int:
    """Return how many groups would stay below this share of the targets."""
    by_load = math.ceil(_load_in_groups(loads, max_num_seqs) / (share * config.target_occupancy))
    mean_wait_s = sum(load.queue_wait_s for load in loads) / len(loads)
    by_waiting = _by_latency(mean_wait_s / config.target_queue_wait_s, len(loads), share)
    rounds_s = [load.round_s for load in loads if load.round_s is not None and load.num_running > 0]
    if config.target_itl_ms is None or not rounds_s:
        return max(by_load, by_waiting)
    num_running = sum(load.num_running for load in loads)
    line = _line_through(seen)
    if line is None:
        pressure = 1000.0 * sum(rounds_s) / len(rounds_s) / config.target_itl_ms
        by_rounds = _by_latency(pressure, len(loads), share)
    else:
        by_rounds = _by_line(line, num_running, share * config.target_itl_ms / 1000.0, config.max_groups)
    # More groups make rounds shorter by making batches smaller: none is smaller than one request.
    return max(by_load, by_waiting, min(by_rounds, math.ceil(num_running)))


class _Line(NamedTuple):
    """Seconds of a round: so many, and so many more for each request of its batch."""

    fixed_s: float
    each_s: float

    def round_s(self, num_running: float) -> float:
        return self.fixed_s + self.each_s * max(num_running, 1.0)


def _line_through(seen: Seen) -> _Line | None:
    """Return the line nearest to all that was seen; None: of batches of one size there is none."""
    if len(seen) < 2:
        return None
    mean_running = sum(one.num_running for one in seen.values()) / len(seen)
    mean_s = sum(one.round_s for one in seen.values()) / len(seen)
    spread = sum((one.num_running - mean_running) ** 2 for one in seen.values())
    common = sum((one.num_running - mean_running) * (one.round_s - mean_s) for one in seen.values())
    each_s = max(0.0, common / spread) if spread > 0.0 else 0.0
    return _Line(mean_s - each_s * mean_running, each_s)


def _by_line(line: _Line, num_running: float, limit_s: float, most: int) -> int:
    """Return the fewest groups whose rounds are within the limit, or that twice as many would hardly better.

    Where a round waits for the weights, it takes as long however small its batch is.
    """
    for number in range(1, most):
        round_s = line.round_s(num_running / number)
        if round_s <= limit_s or line.round_s(num_running / (2 * number)) > _WORTH_DOUBLING * round_s:
            return number
    return most


def _load_in_groups(loads: Sequence[GroupLoad], max_num_seqs: int) -> float:
    """Return how many groups all requests, running and waiting, would fill.

    A group is full when it has no place for a request or no memory, whichever comes first. By places alone,
    groups whose memory is the limit look empty as soon as another one has taken what waited: it would go, and
    be missed, for ever. Those that wait are taken to need as much as those that run.
    """
    filled = sum(max(load.num_running / max_num_seqs, load.kv_usage) for load in loads)
    num_running = sum(load.num_running for load in loads)
    num_waiting = sum(load.num_waiting for load in loads)
    each = filled / num_running if num_running > 0 else 0.0
    # Means of different moments may say nonsense: nobody needs less than a place, or more than a group.
    return filled + num_waiting * min(max(each, 1.0 / max_num_seqs), 1.0)


def _by_latency(pressure: float, num_groups: int, share: float) -> int:
    """Return the groups that bring a latency, so many times its target, to this share of it: with more groups
    each has less to do, with fewer more, and the latency is taken to change as much.
    """
    return math.ceil(num_groups * min(pressure, _MOST_AT_ONCE) / share)
