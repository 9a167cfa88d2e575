"""Draft workers of their own beside drafting on the targets' GPUs, with as many GPUs in all.

Either T + 1 target groups draft for themselves, or T of them have the GPUs of the last one as draft workers.
Both have the same traffic: so many requests at any time, beginning with the same ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.simulation.cluster import Cluster, ClusterSpec, Outcome
from benchmarks.simulation.colocated import with_fastest_draft
from benchmarks.simulation.experiments import DRAFT_TOKENS, DRAFTERS, MODES, TRACES, Tick, fixed, goodput
from benchmarks.simulation.hardware import Hardware, llama_pair
from benchmarks.simulation.pool_rule import Situation, bare_times
from benchmarks.simulation.traffic import Trace
from specdec.scheduling.speculation.modes import OverlapMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One situation."""

    drafter: str
    trace: str
    batch: int
    """Requests at any time, for as many GPUs as one target group has."""

    @property
    def traffic(self) -> Trace:
        """What requests are like."""
        return TRACES[self.trace]

    @property
    def hardware(self) -> Hardware:
        """Both models, the drafter on one GPU."""
        return llama_pair(DRAFTERS[self.drafter])

    @property
    def mean_context(self) -> float:
        """Tokens of a request that runs."""
        return self.traffic.prompt.mean + self.traffic.output.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualDevicesPlan:
    """What is compared at equal numbers of GPUs."""

    drafters: Sequence[str]
    traces: Sequence[str]
    batches: Sequence[int]
    groups: Sequence[int] = (4, 8, 16, 32)
    """Numbers of target groups beside the draft workers of one more, of which the rule chooses."""
    widths: Sequence[int] = (1, 8)
    """GPUs of one draft worker."""
    all_sizes: Sequence[Cell] = ()
    """Where every number of groups is looked at, beside the rule's."""
    learning_s: float = 2.0
    seconds: float = 2.0
    """At least so many,"""
    group_seconds: float = 48.0
    """and so many of all groups of a run together."""

    @property
    def cells(self) -> list[Cell]:
        """All situations."""
        return [
            Cell(drafter=drafter, trace=trace, batch=batch)
            for drafter, trace, batch in itertools.product(self.drafters, self.traces, self.batches)
        ]

    def sizes(self, cell: Cell, x: float) -> list[tuple[OverlapMode, int]]:
        """Return which numbers of groups are looked at in which mode, given the X of the rule."""
        if cell in self.all_sizes:
            return list(itertools.product(MODES, self._with_room(cell)))
        return [(mode, self.groups_by_rule(cell, mode, x)) for mode in MODES]

    def groups_by_rule(self, cell: Cell, mode: OverlapMode, x: float) -> int:
        """Return how many groups draft workers are to serve: as near as can be to the rule's L / X."""
        situation = Situation(mode=mode, num_draft_tokens=DRAFT_TOKENS, num_sequences=cell.batch)
        load = bare_times(cell.hardware, cell.traffic, situation).load
        wanted = cell.hardware.target.num_gpus * x / load
        return min(self._with_room(cell), key=lambda groups: abs(math.log(groups / wanted)))

    def num_runs(self, x: float) -> int:
        """Return how many clusters are simulated."""
        sizes = [self.sizes(cell, x) for cell in self.cells]
        own = [2 * len({groups for _, groups in each}) + 1 for each in sizes]
        return sum(own) + len(self.widths) * sum(map(len, sizes))

    def _with_room(self, cell: Cell) -> list[int]:
        """Return the numbers of groups whose sequences draft workers have memory for: the simulation takes
        for granted that they do.
        """
        hardware = cell.hardware
        room = hardware.target.num_gpus * hardware.draft.kv_tokens
        return [groups for groups in self.groups if (groups + 1) * cell.batch * cell.mean_context <= room]


def whole_spec(cell: Cell, num_groups: int, *, drafts_on_one: bool = False) -> ClusterSpec:
    """Return groups that draft for themselves, under the controller: on as many of their GPUs as draft
    fastest, or on one.
    """
    hardware = cell.hardware
    if not drafts_on_one:
        hardware = with_fastest_draft(hardware, cell.batch, cell.mean_context)
    spec = ClusterSpec(
        hardware=hardware,
        controller=fixed(0),
        trace=cell.traffic,
        groups_per_pool=num_groups,
        workers_per_pool=0,
        kind="colocated",
    )
    return replace(spec, controller=goodput(hardware.in_one_process(), spec.limits, ("lockstep",)))


def apart_spec(cell: Cell, mode: OverlapMode, num_groups: int, width: int) -> ClusterSpec:
    """Return groups with draft workers of so many GPUs each, as many as one more group would have together.

    Pools are as small as they can be.
    """
    hardware = llama_pair(DRAFTERS[cell.drafter], draft_gpus=width)
    num_workers = hardware.target.num_gpus // width
    num_pools = math.gcd(num_groups, num_workers)
    spec = ClusterSpec(
        hardware=hardware,
        controller=fixed(0),
        trace=cell.traffic,
        num_pools=num_pools,
        groups_per_pool=num_groups // num_pools,
        workers_per_pool=num_workers // num_pools,
    )
    return replace(spec, controller=goodput(hardware, spec.limits, (mode,)))


def cluster_of(cell: Cell, spec: ClusterSpec) -> Cluster:
    """Return a cluster that always has as many requests as any other with as many GPUs."""
    cluster = Cluster(spec)
    cluster.keep_in_flight(cell.batch * spec.num_gpus // spec.hardware.target.num_gpus)
    return cluster


def compare_equal_devices(plan: EqualDevicesPlan, x: float, tick: Tick) -> list[dict[str, Any]]:
    """Return tokens per second by situation, kind of cluster and mode, given the X of the rule."""
    return [_compare(plan, cell, x, tick) for cell in plan.cells]


def _compare(plan: EqualDevicesPlan, cell: Cell, x: float, tick: Tick) -> dict[str, Any]:
    def run(spec: ClusterSpec) -> Outcome:
        seconds = max(plan.seconds, plan.group_seconds / spec.num_groups)
        outcome = cluster_of(cell, spec).measure(plan.learning_s, seconds)
        tick()
        return outcome

    sizes = plan.sizes(cell, x)
    plain: dict[int, Outcome] = {}
    """By how many groups there are beside the draft workers, if there are draft workers."""
    colocated: dict[int, Outcome] = {}
    for groups in sorted({groups for _, groups in sizes}):
        spec = whole_spec(cell, groups + 1)
        colocated[groups] = run(spec)
        plain[groups] = run(replace(spec, kind="undrafted", controller=fixed(0)))
    fewest = min(colocated)
    on_one = run(whole_spec(cell, fewest + 1, drafts_on_one=True))
    apart = []
    for (mode, groups), width in itertools.product(sizes, plan.widths):
        outcome = run(apart_spec(cell, mode, groups, width))
        apart.append(
            {
                "mode": mode,
                "groups": groups,
                "width": width,
                "is_by_rule": groups == plan.groups_by_rule(cell, mode, x),
                "outcome": outcome,
                "vs_colocated": _ratio(outcome, colocated[groups]),
                "vs_plain": _ratio(outcome, plain[groups]),
            }
        )
    plain_per_gpu, colocated_per_gpu = _per_gpu(plain), _per_gpu(colocated)
    return {
        "drafter": cell.drafter,
        "trace": cell.trace,
        "batch": cell.batch,
        "has_all_sizes": cell in plan.all_sizes,
        "colocated_width": spec.hardware.draft.num_gpus,
        "plain_per_gpu": plain_per_gpu,
        "colocated_vs_plain": colocated_per_gpu / plain_per_gpu,
        "on_one_vs_colocated": _ratio(on_one, colocated[fewest]),
        "plain": plain,
        "colocated": colocated,
        "colocated_on_one": on_one,
        "apart": apart,
    }


def _ratio(outcome: Outcome, other: Outcome) -> float:
    assert outcome.num_gpus == other.num_gpus, "not as many GPUs"
    return outcome.goodput / other.goodput


def _per_gpu(outcomes: Mapping[int, Outcome]) -> float:
    return sum(one.goodput for one in outcomes.values()) / sum(one.num_gpus for one in outcomes.values())
