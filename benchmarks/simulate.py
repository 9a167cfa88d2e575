"""Thousands of GPUs in a virtual clock: modes, pool sizes, loads and failures, by the real policy code.

Llama 70B on groups of eight H100 and smaller Llamas as drafters, by rooflines; requests by the distributions
of public traces. Scheduler, controllers, fan-out, draft deadlines, placement on draft workers and their fair
batches are the engine's own functions; verdicts come by chance. Nothing here says how fast a kernel is: it
says what follows for a cluster from given costs. The same seed gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from benchmarks.report import progress_bar, report_headlines, write_results
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
    scaling: ScalingPlan
    loads: LoadPlan
    failures: FailurePlan


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
    scaling=ScalingPlan(groups=(8, 240), one_pool=(4, 8), seconds=1.0, warm_up_s=0.25),
    loads=LoadPlan(batches=(4, 32, 96), lengths=(2, 4), seconds=8.0, learning_s=8.0, pools=1, seeds=2),
    failures=FailurePlan(pools=1, period_s=10.0),
)
FULL = Plan(
    modes=ModesPlan(drafters=("1B", "3B", "8B"), batches=(1, 8, 32, 128), traces=("chat", "code")),
    pools=PoolPlan(
        drafters=("1B", "3B"), lengths=(2, 4), batches=(8, 32, 96), traces=("chat",), group_seconds=20.0
    ),
    scaling=ScalingPlan(groups=(8, 32, 128, 512), one_pool=(2, 4, 8, 16, 32)),
    loads=LoadPlan(
        batches=(1, 4, 8, 16, 32, 64, 128), lengths=(2, 4, 6), drafters=("1B", "3B"), learning_s=30.0
    ),
    failures=FailurePlan(pools=4, period_s=20.0),
)


def headlines_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Quote the modes where T_draft is nearest to T_verify, and the worst load of the controller: the lowest
    bound below which its goodput is with 95 % confidence, and the lowest median.
    """
    ratios = [row["controller_vs_best_fixed"] for row in results["loads"]]
    even = min(results["modes"], key=lambda row: abs(row["draft_over_verify"] - 1.0))
    return {
        "sim_ping_pong_vs_lockstep": even["vs_lockstep"]["ping_pong"],
        "sim_draft_ahead_vs_lockstep": even["vs_lockstep"]["draft_ahead"],
        "sim_pool_rule_error": results["pools"]["median_error"],
        "sim_controller_vs_best_fixed": min(ratio.upper for ratio in ratios),
        "sim_controller_vs_best_fixed_median": min(ratio.median for ratio in ratios),
    }


def simulate(plan: Plan, progress: Progress) -> dict[str, Any]:
    """Run everything."""

    def part(name: str, total: int) -> Callable[[], None]:
        return partial(progress.advance, progress.add_task(name, total=total))

    modes, pools, scaling, loads = plan.modes, plan.pools, plan.scaling, plan.loads
    num_cells = len(modes.traces) * len(modes.drafters) * len(modes.batches)
    num_pools = len(pools.traces) * len(pools.drafters) * len(pools.lengths) * len(pools.batches)
    num_loads = len(loads.drafters) * len(loads.batches)
    return {
        "modes": compare_modes(modes, part("modes", 3 * num_cells)),
        "pools": size_pools(pools, part("pools", 3 * num_pools)),
        "scaling": scale(scaling, part("sizes", 4 * (len(scaling.groups) + len(scaling.one_pool)))),
        "loads": compare_controller(
            loads, part("loads", num_loads * (3 * (len(loads.lengths) + loads.seeds) + 1))
        ),
        "failures": endure(plan.failures, part("failures", 2)),
    }


def main(
    quick: Annotated[bool, typer.Option(help="Fewer situations: under two minutes on one core.")] = False,
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
