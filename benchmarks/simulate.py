"""Thousands of GPUs in a virtual clock: modes, pool sizes, loads and failures, by the real policy code.

Llama 70B on groups of eight H100 and smaller Llamas as drafters, by rooflines; requests by the distributions
of public traces. Scheduler, controllers, fan-out, draft deadlines, placement on draft workers and their fair
batches are the engine's own functions; verdicts come by chance. Nothing here says how fast a kernel is: it
says what follows for a cluster from given costs. The same seed gives the same numbers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.report import progress_bar, report_headlines, write_results
from benchmarks.simulation.equal_devices import Cell, EqualDevicesPlan, compare_equal_devices
from benchmarks.simulation.experiments import (
    FailurePlan,
    LoadPlan,
    ModesPlan,
    PoolPlan,
    ScalingPlan,
    compare_controller,
    compare_modes,
    endure,
    scale,
    size_pools,
)
from benchmarks.simulation.plots import draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is simulated."""

    modes: ModesPlan
    pools: PoolPlan
    equal_devices: EqualDevicesPlan
    scaling: ScalingPlan
    loads: LoadPlan
    failures: FailurePlan
    controlled_failures: FailurePlan


QUICK = Plan(
    modes=ModesPlan(drafters=("1B", "3B"), batches=(8, 32), seconds=4.0),
    pools=PoolPlan(
        drafters=("1B", "3B"),
        lengths=(4,),
        batches=(8, 32),
        traces=("chat",),
        shares=((1, 4), (1, 2), (1, 1), (2, 1)),
        group_seconds=4.0,
    ),
    equal_devices=EqualDevicesPlan(
        drafters=("1B", "3B"),
        traces=("chat",),
        batches=(16,),
        groups=(4, 8),
        learning_s=1.0,
        group_seconds=16.0,
    ),
    scaling=ScalingPlan(groups=(8, 240), one_pool=(4, 8), seconds=1.0, warm_up_s=0.25),
    loads=LoadPlan(batches=(4, 32, 96), lengths=(2, 4), seconds=8.0, pools=1, seeds=2),
    failures=FailurePlan(pools=1, period_s=10.0),
    controlled_failures=FailurePlan(pools=1, period_s=8.0),
)
FULL = Plan(
    modes=ModesPlan(drafters=("1B", "3B", "8B"), batches=(1, 8, 32, 128), traces=("chat", "code")),
    pools=PoolPlan(
        drafters=("1B", "3B"), lengths=(2, 4), batches=(8, 32, 96), traces=("chat",), group_seconds=20.0
    ),
    equal_devices=EqualDevicesPlan(
        drafters=("1B", "3B"),
        traces=("chat", "long"),
        batches=(4, 16, 64),
        all_sizes=(
            Cell(drafter="1B", trace="chat", batch=16),
            Cell(drafter="3B", trace="chat", batch=16),
        ),
    ),
    scaling=ScalingPlan(groups=(8, 32, 128, 512), one_pool=(2, 4, 8, 16, 32)),
    loads=LoadPlan(
        batches=(1, 4, 8, 16, 32, 64, 128),
        lengths=(2, 4, 6),
        drafters=("1B", "3B"),
        pools=1,
        seconds=16.0,
        learning_s_per_request=0.35,
    ),
    failures=FailurePlan(pools=4, period_s=20.0),
    controlled_failures=FailurePlan(pools=2, period_s=15.0),
)


def headlines_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Quote the modes where T_draft is nearest to T_verify; draft workers, as many as the rule says, beside
    colocated drafting, where they do best and in the middle; and the worst load of the controller: the lowest
    bound below which its goodput is with 95 % confidence, and the lowest median.
    """
    beside = [
        one["vs_colocated"] for row in results["equal_devices"] for one in row["apart"] if one["is_by_rule"]
    ]
    ratios = [row["controller_vs_best_fixed"] for row in results["loads"]]
    even = min(results["modes"], key=lambda row: abs(row["draft_over_verify"] - 1.0))
    return {
        "sim_ping_pong_vs_lockstep": even["vs_lockstep"]["ping_pong"],
        "sim_draft_ahead_vs_lockstep": even["vs_lockstep"]["draft_ahead"],
        "sim_pool_rule_error": results["pools"]["median_error"],
        "sim_apart_vs_colocated_best": max(beside),
        "sim_apart_vs_colocated_median": statistics.median(beside),
        "sim_controller_vs_best_fixed": min(ratio.upper for ratio in ratios),
        "sim_controller_vs_best_fixed_median": min(ratio.median for ratio in ratios),
    }


def simulate(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Run everything."""

    def part(name: str, total: int) -> Callable[[], None]:
        return partial(progress.advance, progress.add_task(name, total=total))

    modes, pools, scaling = plan.modes, plan.pools, plan.scaling
    num_cells = len(modes.traces) * len(modes.drafters) * len(modes.batches)
    num_pools = len(pools.traces) * len(pools.drafters) * len(pools.lengths) * len(pools.batches)
    results: dict[str, Any] = {
        "modes": compare_modes(modes, part("modes", 3 * num_cells)),
        "pools": size_pools(pools, part("pools", 3 * num_pools)),
    }
    x, equal = results["pools"]["x"], plan.equal_devices
    return {
        **results,
        "equal_devices": compare_equal_devices(equal, x, part("equal devices", equal.num_runs(x))),
        "scaling": scale(scaling, part("sizes", 4 * (len(scaling.groups) + len(scaling.one_pool)))),
        "loads": compare_controller(plan.loads, part("loads", plan.loads.num_runs())),
        "failures": endure(plan.failures, part("failures", 2)),
        "controlled_failures": endure(
            plan.controlled_failures, part("the same, k controlled", 2), is_controlled=True
        ),
    }


def main(
    quick: Annotated[bool, typer.Option(help="Fewer situations: about two minutes on one core.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write raw results here.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write pictures into this folder (matplotlib).")] = None,
) -> None:
    """Simulate clusters of up to thousands of GPUs.

    Example: python -m benchmarks.simulate --json runs/simulate.json --plots runs/images
    """
    plan = QUICK if quick else FULL
    with progress_bar() as progress:
        results = simulate(plan, progress)
    headlines = headlines_of(results)
    write_results(json, {"plan": plan, **results, "headlines": headlines})
    if plots is not None:
        draw(results, plots)
    report_headlines(headlines)


if __name__ == "__main__":
    typer.run(main)
