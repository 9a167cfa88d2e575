"""What coordinators want of the draft pool, on its way to the pool's replicas: over the directory.

The pool's replicas report it to Serve with their own numbers, because a policy hears its own replicas alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
import ray
from ray.exceptions import RayError

from cluster.directory_actor import find_directory
from specdec.transport.status import RecentStatus

_READ_TIMEOUT_S = 1.0


class DraftDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Of one coordinator."""

    num_requests: float
    """That run or wait."""
    utilization: float
    """Share of the last seconds, idle time included, in which a draft worker drafted for it: the mean over
    them; NaN: it has no rounds, as while its target is loaded, so that nothing of its is known. A number, and
    no field of its own: readers of another version can neither add None up nor take what they do not know."""
    wait_share: float
    """Waiting for drafts over the time of a round."""
    hidden_share: float | None
    """Of drafting, the share that goes on behind verification."""
    worth: float | None
    """Tokens per second with drafts over those without."""
    drafting_share: float = 0.0
    """T_draft over the time of a round."""


def demand_of(metrics: Mapping[str, float], recent: RecentStatus | None) -> DraftDemand:
    """Return a coordinator's demand, from its engine's metrics and what its rounds were like lately."""
    round_s = 0.0 if recent is None else recent.round_s
    worth = metrics.get("speculation_pool_worth")
    return DraftDemand(
        num_requests=metrics.get("num_requests_running", 0.0) + metrics.get("num_requests_waiting", 0.0),
        utilization=math.nan if recent is None else float(metrics.get("draft_utilization", 0.0)),
        wait_share=0.0 if recent is None or not round_s else recent.draft_wait_s / round_s,
        hidden_share=None if recent is None else recent.hidden_share,
        worth=None if worth is None else float(worth),
        drafting_share=0.0 if recent is None or not round_s else (recent.draft_s or 0.0) / round_s,
    )


def pool_stats(demands: Iterable[DraftDemand]) -> dict[str, float]:
    """Return what all coordinators together want; means are weighted by requests.

    What a worker does for one coordinator and for another adds up; a batch for both counts for each. Those
    of which nothing is known say how many requests they have, and no shares: without any others there are
    none. Who would be slower with drafts drafts nothing, and loses nothing: that weighs as a worth of 1, so
    that the pool is worth nothing only where it is so for all.
    """
    demands = list(demands)
    stats = {"num_requests": sum(one.num_requests for one in demands)}
    if not stats["num_requests"]:
        return stats
    serving = [one for one in demands if not math.isnan(one.utilization)]
    if any(one.num_requests for one in serving):
        stats["utilization"] = min(1.0, sum(one.utilization for one in serving))
        for name in ("wait_share", "drafting_share"):
            stats[name] = _mean((getattr(one, name), one.num_requests) for one in serving)
    hidden = [(one.hidden_share, one.num_requests) for one in demands if one.hidden_share is not None]
    worth = [(max(1.0, one.worth), one.num_requests) for one in demands if one.worth is not None]
    for name, known in (("hidden_share", hidden), ("worth", worth)):
        if any(weight for _, weight in known):
            stats[name] = _mean(known)
    return stats


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    pairs = list(weighted)
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)


def read_demands(namespace: str) -> tuple[DraftDemand, ...] | None:
    """Return what each coordinator said last; None while nobody knows."""
    directory = find_directory(namespace)
    if directory is None:
        return None
    try:
        demands: tuple[DraftDemand, ...] = ray.get(directory.demands.remote(), timeout=_READ_TIMEOUT_S)
    except RayError:
        return None
    return demands
