"""What Ray Serve hands to a scaling policy."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext


def told_s(context: AutoscalingContext) -> float:
    """Read the time that the test tells, in the place of this machine's clock."""
    assert context.current_time is not None
    return context.current_time


def context(
    reports: dict[str, dict[str, float]],
    *,
    target: int,
    now_s: float,
    state: dict[str, Any],
    bounds: tuple[int, int],
) -> AutoscalingContext:
    metrics: dict[str, dict[str, float]] = {"running_requests": dict.fromkeys(reports, 0.0)}
    for replica, report in reports.items():
        for name, value in report.items():
            metrics.setdefault(name, {})[replica] = value
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="Coordinator",
        app_name="drafthouse",
        current_num_replicas=len(reports),
        target_num_replicas=target,
        running_replicas=list(reports),
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics=metrics,
        raw_metrics={},
        capacity_adjusted_min_replicas=bounds[0],
        capacity_adjusted_max_replicas=bounds[1],
        policy_state=state,
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=now_s,
        config=None,
    )
