"""How many draft workers are wanted: as long as one more is worth more than it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.autoscaling.config import DraftScalingConfig
from cluster.autoscaling.pace import Wish


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """What coordinators and draft workers say of the pool."""

    num_workers: int
    """Those that serve."""
    num_requests: float = 0.0
    """That run or wait, in all target groups."""
    usage: float = 0.0
    """Requests in the pool over those that it takes, 0 to 1; workers that refuse some count as full."""
    utilization: float | None = None
    """Share of the time, idle time included, in which a worker drafts: the mean over them; None: nothing is
    known, of the shares below neither."""
    drafting_share: float = 0.0
    """Share of a round that drafting takes, hidden or not."""
    wait_share: float = 0.0
    """Share of a round in which it waits for drafts: the part of drafting that is not hidden."""
    hidden_share: float | None = None
    """Share of drafting that goes on while the target verifies; None: nothing is known."""
    worth: float | None = None
    """Tokens per second with drafts over those without; None: nothing is known yet."""


def gain_of_one_more(load: PoolLoad) -> float:
    """Return by what share goodput would grow at most with one more worker.

    A worker drafts for its part of the requests: with one more, the part of each, and what a round waits for
    it, shrink to n/(n+1). What is hidden behind verification brings nothing. Requests that the pool has no
    place for gain what drafts are worth.
    """
    n = max(1, load.num_workers)
    return load.wait_share / (n + 1) + (_worth(load) - 1.0) / (n + 1) * _share_left_out(load)


def loss_of_one_less(load: PoolLoad) -> float:
    """Return by what share goodput would fall with one worker less, by the same reckoning.

    Drafting that is hidden stays so only as far as there is time: what is over shows as waiting.
    """
    n = load.num_workers
    if n <= 1:
        return 1.0
    grown = n / (n - 1)
    hidden = load.hidden_share or 0.0
    # What is drafted behind verification grows as well, and may outgrow it: in a round, or, of a worker that
    # several groups share, all the time that it has.
    drafting = max(load.drafting_share, load.utilization or 0.0)
    overflow = max(0.0, drafting * hidden * grown - (1.0 - load.wait_share))
    return load.wait_share * (grown - 1.0) + overflow


def wanted_workers(load: PoolLoad, config: DraftScalingConfig) -> Wish:
    """Return how many draft workers are wanted."""
    n = load.num_workers
    if n == 0:
        return Wish(number=1 if load.num_requests > 0 else 0, is_idle=load.num_requests == 0)
    if load.num_requests == 0:
        return Wish(number=1, is_idle=True)
    if load.worth is not None and load.worth <= 1.0:
        return Wish(number=1)  # the target alone is as fast
    most = math.ceil(load.num_requests)  # a request is drafted for by one worker: others have nothing to do
    if n > most:
        return Wish(number=n - 1)
    busiest = max(load.usage, load.utilization or 0.0)
    if n < most and busiest > config.target_utilization and gain_of_one_more(load) >= config.min_gain:
        return Wish(number=n + 1)
    if n > 1 and load.utilization is not None:
        remaining = math.ceil(n * busiest / config.target_utilization)
        if remaining < n and loss_of_one_less(load) < config.min_gain / 2.0:
            return Wish(number=n - 1)
    return Wish(number=n)


def _worth(load: PoolLoad) -> float:
    return 1.0 if load.worth is None else load.worth


def _share_left_out(load: PoolLoad) -> float:
    """A pool that is full leaves some out; how many is not known: as many as another worker would take."""
    return 1.0 if load.usage >= 1.0 else 0.0
