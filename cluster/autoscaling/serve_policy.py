"""The policies as Ray Serve calls them, and the options with which it does.

Serve's own delays are off: how soon a wish becomes a change is decided in `pace`. What has to be remembered
is in the state that Serve keeps for a policy. With no replica left, a call that waits for one (`wake`) makes
Serve start one by itself, before it asks a policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cluster.autoscaling.config import DraftScalingConfig, PaceConfig, TargetScalingConfig
from cluster.autoscaling.draft_pool import PoolLoad, wanted_workers
from cluster.autoscaling.pace import Fleet, ScalingMemory, Wish, decide
from cluster.autoscaling.seen_rounds import SeenRounds
from cluster.autoscaling.target_groups import GroupLoad, wanted_groups, with_loads
from cluster.autoscaling.wanted import WantedTeller

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

_ASKED_FOR = "num_asked_for"
_PACE = "pace"
_SEEN = "seen_rounds"
_HAS_TARGET = "has_target"
"""0 while a coordinator's target is lost and is loaded anew."""
_LOOK_BACK_S = 20.0
"""Serve averages what replicas report over so many seconds; they report every ten."""


def group_stats(
    metrics: Mapping[str, float], *, round_s: float | None, has_target: bool = True
) -> dict[str, float]:
    """Return what a coordinator reports, from its engine's metrics: for our policies and for others.

    `speculation_pool_worth` is there once the controller compares: at 1 or below for minutes, the draft pool
    is not worth its devices.
    """
    wanted = ("num_requests_running", "num_requests_waiting", "queue_wait_seconds", "kv_cache_usage_perc")
    stats = {name: float(metrics.get(name, 0.0)) for name in wanted} | {_HAS_TARGET: float(has_target)}
    worth = metrics.get("speculation_pool_worth")
    if worth is not None:
        stats["speculation_pool_worth"] = float(worth)
    return stats if round_s is None else {**stats, "round_seconds": round_s}


def _has_target(report: Mapping[str, float]) -> bool:
    return report.get(_HAS_TARGET, 1.0) >= 0.5  # Serve reports the mean over a while


def _monotonic_s(_: AutoscalingContext) -> float:
    """Return the time by which a wish has lasted: that of the context may be set forward, too."""
    return time.monotonic()


class TargetGroupPolicy:
    """Scales the Coordinator deployment: one replica is one whole target group."""

    def __init__(
        self,
        config: Mapping[str, Any],
        max_num_seqs: int,
        namespace: str = "",
        now_s: Callable[[AutoscalingContext], float] = _monotonic_s,
    ) -> None:
        """`namespace`: whose directory is told what is decided; empty: none. `now_s` reads the clock."""
        self._now_s = now_s
        self._config = TargetScalingConfig.model_validate(config)
        self._max_num_seqs = max_num_seqs
        self._teller = WantedTeller(namespace, "target") if namespace else None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many target groups there should be."""
        reports = _reports(context)
        loads = [
            GroupLoad(
                num_running=report.get("num_requests_running", 0.0),
                num_waiting=report.get("num_requests_waiting", 0.0),
                kv_usage=report.get("kv_cache_usage_perc", 0.0),
                queue_wait_s=report.get("queue_wait_seconds", 0.0),
                round_s=report.get("round_seconds"),
            )
            for report in reports
            if _has_target(report)
        ]
        # They run nothing, and their emptiness is none: they start again, and what waits there is for others.
        num_waiting = sum(
            report.get("num_requests_waiting", 0.0) for report in reports if not _has_target(report)
        )
        now_s = self._now_s(context)
        before = {int(size): SeenRounds(*one) for size, one in context.policy_state.get(_SEEN, {}).items()}
        seen = with_loads(before, loads, now_s)
        wish = wanted_groups(loads, self._max_num_seqs, self._config, seen, num_waiting_elsewhere=num_waiting)
        number, state = _decided(context, now_s, wish, len(loads), self._config, self._teller)
        return number, {**state, _SEEN: {size: tuple(one) for size, one in seen.items()}}


class DraftPoolPolicy:
    """Scales the DraftPool deployment: one replica is one draft worker, with all its ranks."""

    def __init__(
        self,
        config: Mapping[str, Any],
        namespace: str = "",
        now_s: Callable[[AutoscalingContext], float] = _monotonic_s,
    ) -> None:
        """`namespace` and `now_s` as for target groups."""
        self._now_s = now_s
        self._config = DraftScalingConfig.model_validate(config)
        self._teller = WantedTeller(namespace, "draft") if namespace else None

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many draft workers there should be."""
        reports = _reports(context)
        wish = wanted_workers(pool_load(reports), self._config)
        return _decided(context, self._now_s(context), wish, len(reports), self._config, self._teller)


def pool_load(reports: Sequence[Mapping[str, float]]) -> PoolLoad:
    """Sum up what draft workers report, each with what coordinators have said of the pool."""
    usages = [report["usage"] for report in reports if "usage" in report]

    def latest(name: str) -> float | None:
        return max((report[name] for report in reports if name in report), default=None)

    return PoolLoad(
        num_workers=len(reports),
        num_requests=latest("num_requests") or 0.0,
        usage=sum(usages) / len(usages) if usages else 0.0,
        utilization=latest("utilization"),
        drafting_share=latest("drafting_share") or 0.0,
        wait_share=latest("wait_share") or 0.0,
        hidden_share=latest("hidden_share"),
        worth=latest("worth"),
    )


def autoscaling_options(
    policy: type, policy_arguments: Mapping[str, Any], *, bounds: tuple[int, int], initial: int | None
) -> dict[str, Any]:
    """Return a deployment's `autoscaling_config`; `initial` None: as many as there are already."""
    low, high = bounds
    return {
        "min_replicas": low,
        "max_replicas": high,
        "initial_replicas": initial,
        "look_back_period_s": _LOOK_BACK_S,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "downscale_to_zero_delay_s": 0.0,
        "policy": {
            "policy_function": f"{policy.__module__}:{policy.__qualname__}",
            "policy_kwargs": dict(policy_arguments),
        },
    }


def _reports(context: AutoscalingContext) -> list[dict[str, float]]:
    """Return what each replica that serves has reported; those that have not yet are left out, and so is what
    is no number.
    """
    by_replica: dict[Any, dict[str, float]] = {}
    for name, values in (context.aggregated_metrics or {}).items():
        for replica, value in values.items():
            if replica in context.running_replicas and math.isfinite(value):
                by_replica.setdefault(replica, {})[name] = value
    # Serve adds a metric of its own; a replica whose report is still to come has nothing else.
    return [
        report
        for report in by_replica.values()
        if "num_requests_running" in report or "num_requests" in report
    ]


def _decided(
    context: AutoscalingContext,
    now_s: float,
    wish: Wish,
    num_ready: int,
    config: PaceConfig,
    teller: WantedTeller | None,
) -> tuple[int, dict[str, Any]]:
    number = context.target_num_replicas
    remembered = context.policy_state.get(_PACE)
    # Serve forgets with its controller, and at each deployment: there may just have been a change.
    memory = ScalingMemory(changed_s=now_s) if remembered is None else ScalingMemory(**remembered)
    if context.policy_state.get(_ASKED_FOR, number) != number:
        # Serve has started one by itself, or somebody has changed the bounds.
        memory = ScalingMemory(changed_s=now_s)
    fleet = Fleet(
        num_asked_for=number,
        num_ready=num_ready,
        low=context.capacity_adjusted_min_replicas,
        high=context.capacity_adjusted_max_replicas,
    )
    decided, memory = decide(wish, fleet, memory, config, now_s)
    if teller is not None:
        teller.tell(decided)
    return decided, {_PACE: asdict(memory), _ASKED_FOR: decided}
