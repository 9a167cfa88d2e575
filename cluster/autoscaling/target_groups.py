"""How many target groups are wanted: by requests, by waiting in the queue, by the time between tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.autoscaling.config import TargetScalingConfig
from cluster.autoscaling.pace import Wish

_MOST_AT_ONCE = 2.0
"""A signal never asks for more than so many times the groups that are there: how it scales is a guess."""
_RELAXED = 0.7
"""Groups are given up if the others stay below this share of the targets: between the two nothing changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """What one target group says of itself."""

    num_running: float = 0.0
    num_waiting: float = 0.0
    queue_wait_s: float = 0.0
    """How long one would wait that comes now, by the measured drain rate."""
    round_s: float | None = None
    """Mean time of its recent rounds; None: there were none."""


def wanted_groups(loads: Sequence[GroupLoad], max_num_seqs: int, config: TargetScalingConfig) -> Wish:
    """Return how many target groups are wanted, from reports of those that serve.

    A group is its whole placement group: the number is one of groups, whatever ranks they have.
    """
    num_groups = len(loads)
    if num_groups == 0:
        return Wish(number=0, is_idle=True)
    num_requests = sum(load.num_running + load.num_waiting for load in loads)
    occupancy = num_requests / max_num_seqs
    pressure = _pressure(loads, config)
    by_requests = math.ceil(occupancy / config.target_occupancy)
    if by_requests > num_groups or pressure > 1.0:
        by_pressure = math.ceil(num_groups * min(pressure, _MOST_AT_ONCE))
        most = math.ceil(num_groups * _MOST_AT_ONCE)
        return Wish(number=min(max(by_requests, by_pressure), most))
    relaxed = math.ceil(occupancy / (_RELAXED * config.target_occupancy))
    # With fewer groups, each has more to do: the pressure on those that stay grows as much.
    bearable = math.ceil(num_groups * pressure / _RELAXED)
    return Wish(number=min(num_groups, max(1, relaxed, bearable)), is_idle=num_requests == 0)


def _pressure(loads: Sequence[GroupLoad], config: TargetScalingConfig) -> float:
    """Return the largest of the latencies over its target; above 1, more groups are wanted."""
    mean_wait_s = sum(load.queue_wait_s for load in loads) / len(loads)
    pressure = mean_wait_s / config.target_queue_wait_s
    rounds_s = [load.round_s for load in loads if load.round_s is not None and load.num_running > 0]
    if config.target_itl_ms is not None and rounds_s:
        pressure = max(pressure, 1000.0 * sum(rounds_s) / len(rounds_s) / config.target_itl_ms)
    return pressure
