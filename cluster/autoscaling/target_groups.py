"""How many target groups are wanted: by requests and their K/V, by waiting in the queue, by the time between
tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from cluster.autoscaling.config import TargetScalingConfig
from cluster.autoscaling.pace import Wish
from cluster.autoscaling.seen_rounds import Seen, line_through, with_rounds

_MOST_AT_ONCE = 2.0
"""A signal never asks for more than so many times the groups that are there: how it scales is a guess."""
_RELAXED = 0.7
"""Groups are given up if the others stay below this share of the targets: between the two nothing changes."""


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


def with_loads(seen: Seen, loads: Sequence[GroupLoad], now_s: float) -> Seen:
    """Return what is known of rounds once these reports are counted in."""
    busy = [load for load in loads if load.round_s is not None and load.num_running > 0]
    if not busy:
        return seen
    num_running = sum(load.num_running for load in busy) / len(busy)
    round_s = sum(load.round_s or 0.0 for load in busy) / len(busy)
    return with_rounds(seen, num_running, round_s, now_s)


def wanted_groups(
    loads: Sequence[GroupLoad],
    max_num_seqs: int,
    config: TargetScalingConfig,
    seen: Seen = MappingProxyType({}),
    *,
    num_waiting_elsewhere: float = 0.0,
) -> Wish:
    """Return how many target groups are wanted, from reports of those that serve.

    A group is its whole placement group: the number is one of groups, whatever ranks they have. `seen` is
    what `with_loads` knows of rounds: whether smaller batches make them shorter. `num_waiting_elsewhere`
    requests are at groups that do not serve.
    """
    num_groups = len(loads)
    if num_groups == 0:
        return Wish(number=0, is_idle=num_waiting_elsewhere == 0)
    first = replace(loads[0], num_waiting=loads[0].num_waiting + num_waiting_elsewhere)
    loads = [first, *loads[1:]]  # what counts is their sum
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
    line = line_through(seen)
    if line is None:
        pressure = 1000.0 * sum(rounds_s) / len(rounds_s) / config.target_itl_ms
        by_rounds = _by_latency(pressure, len(loads), share)
    else:
        limit_s = share * config.target_itl_ms / 1000.0
        by_rounds = line.fewest_groups(num_running, limit_s, config.max_groups)
    # More groups make rounds shorter by making batches smaller: none is smaller than one request.
    return max(by_load, by_waiting, min(by_rounds, math.ceil(num_running)))


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
