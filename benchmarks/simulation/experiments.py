"""What is simulated: modes, pools, sizes, loads and failures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.report import PairedRatio
from benchmarks.simulation.clock import ThinkingClock
from benchmarks.simulation.cluster import Cluster, ClusterSpec, Failure, MakeController, Outcome
from benchmarks.simulation.group import GroupLimits, PlainController
from benchmarks.simulation.hardware import LLAMA_1B, LLAMA_3B, LLAMA_8B, Hardware, ModelShape, llama_pair
from benchmarks.simulation.pool_rule import Situation, bare_times, fewest_workers, fitted_x
from benchmarks.simulation.traffic import CHAT, CODE, LONG, LoadStep, Trace
from specdec.scheduling.speculation.cost_profile import CostProfile
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.speculation.settings import ControllerSettings

Tick = Callable[[], None]
MODES: tuple[OverlapMode, ...] = ("lockstep", "ping_pong", "draft_ahead")
DRAFTERS: Mapping[str, ModelShape] = {"1B": LLAMA_1B, "3B": LLAMA_3B, "8B": LLAMA_8B}
TRACES: Mapping[str, Trace] = {"chat": CHAT, "code": CODE, "long": LONG}
DRAFT_TOKENS = 4
"""Where k is fixed."""
_WARM_UP_S = 1.0
THINKING_S = 0.5e-3
"""What a controller takes to learn from a round, or for either part of a decision. It does both as seldom as
that asks.
"""


def fixed(k: int, mode: OverlapMode = "lockstep") -> MakeController:
    """Make controllers that always do the same."""
    return lambda: PlainController(k, mode)


def goodput(
    hardware: Hardware,
    limits: GroupLimits,
    modes: tuple[OverlapMode, ...] = MODES,
    *,
    thinking_s: float = THINKING_S,
) -> MakeController:
    """Make controllers that choose, with a profile measured at start."""
    settings = ControllerSettings(
        max_draft_tokens=8,
        modes=modes,
        is_target_elsewhere=True,
        max_branches=limits.max_branches,
        max_rows=limits.max_num_batched_tokens,
        max_sequences=limits.max_num_seqs,
    )
    profile: CostProfile = hardware.profile(settings.max_rows)
    return lambda: GoodputController(settings, profile, ThinkingClock(thinking_s))


# ---------------------------------------------------------------------------------------------- modes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModesPlan:
    """Every mode in one group that has draft workers to spare."""

    drafters: Sequence[str]
    batches: Sequence[int]
    traces: Sequence[str] = ("chat",)
    workers: int = 2
    seconds: float = 6.0


def compare_modes(plan: ModesPlan, tick: Tick) -> list[dict[str, Any]]:
    """Return goodput by situation and mode."""
    rows = []
    for trace, drafter, batch in itertools.product(plan.traces, plan.drafters, plan.batches):
        spec = ClusterSpec(
            hardware=llama_pair(DRAFTERS[drafter]),
            controller=fixed(0),
            trace=TRACES[trace],
            workers_per_pool=plan.workers,
        )
        outcomes: dict[str, Outcome] = {"plain": _full(spec, batch, plan.seconds)}
        for mode in MODES:
            outcomes[mode] = _full(replace(spec, controller=fixed(DRAFT_TOKENS, mode)), batch, plan.seconds)
            tick()
        lockstep = outcomes["lockstep"]
        rows.append(
            {
                "trace": trace,
                "drafter": drafter,
                "batch": batch,
                "draft_over_verify": lockstep.draft_ms / lockstep.verify_ms,
                "outcomes": outcomes,
                "vs_lockstep": {mode: one.goodput / lockstep.goodput for mode, one in outcomes.items()},
                "vs_plain": {mode: one.goodput / outcomes["plain"].goodput for mode, one in outcomes.items()},
            }
        )
    return rows


def _full(
    spec: ClusterSpec, batch: int, seconds: float, warm_up_s: float = _WARM_UP_S, seed: int = 0
) -> Outcome:
    """Run groups that always have so many requests."""
    cluster = Cluster(spec, seed)
    cluster.keep_busy(batch)
    return cluster.measure(warm_up_s, seconds)


# ---------------------------------------------------------------------------------------------- pools


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """Pools of several sizes in several situations."""

    drafters: Sequence[str]
    lengths: Sequence[int]
    batches: Sequence[int]
    traces: Sequence[str]
    shares: Sequence[tuple[int, int]] = ((1, 8), (1, 4), (1, 2), (1, 1), (2, 1), (4, 1))
    """(draft workers, target groups)"""
    group_seconds: float = 12.0
    """Seconds of all groups of a run together, at least 3 each."""


def size_pools(plan: PoolPlan, tick: Tick) -> dict[str, Any]:
    """Return how many workers each situation needs, and the rule that says so from bare times."""
    rows = []
    for trace, drafter, k, batch, mode in itertools.product(
        plan.traces, plan.drafters, plan.lengths, plan.batches, MODES
    ):
        hardware = llama_pair(DRAFTERS[drafter])
        spec = ClusterSpec(hardware=hardware, controller=fixed(k, mode), trace=TRACES[trace])
        measured = []
        for workers, groups in plan.shares:
            sized = replace(spec, workers_per_pool=workers, groups_per_pool=groups)
            one = _full(sized, batch, max(3.0, plan.group_seconds / groups))
            measured.append((workers / groups, one.goodput_per_group, one.draft_load))
        times = bare_times(
            hardware, TRACES[trace], Situation(mode=mode, num_draft_tokens=k, num_sequences=batch)
        )
        rows.append(
            {
                "trace": trace,
                "drafter": drafter,
                "k": k,
                "batch": batch,
                "mode": mode,
                "bare": times,
                "load": times.load,
                "measured": measured,
                "workers": fewest_workers([(share, value) for share, value, _ in measured]),
            }
        )
        tick()
    return {"rows": rows, **rule_of(rows)}


def rule_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Fit X, and say how wrong L / X is, and where."""
    loads = np.array([row["load"] for row in rows])
    workers = np.array([row["workers"] for row in rows])
    x = fitted_x(loads.tolist(), workers.tolist())
    errors = np.abs(loads / x / workers - 1.0)
    by_mode = {
        mode: float(np.median([e for e, row in zip(errors, rows, strict=True) if row["mode"] == mode]))
        for mode in MODES
    }
    worst = sorted(zip(errors.tolist(), rows, strict=True), key=lambda pair: -pair[0])[:6]
    names = ("trace", "drafter", "k", "batch", "mode", "load", "workers")
    return {
        "x": x,
        "median_error": float(np.median(errors)),
        "p90_error": float(np.percentile(errors, 90)),
        "median_error_by_mode": by_mode,
        "worst": [{"error": error, **{name: row[name] for name in names}} for error, row in worst],
        "goodput_by_rule": _goodput_by_rule(rows, x),
    }


def _goodput_by_rule(rows: Sequence[Mapping[str, Any]], x: float) -> dict[str, float]:
    """Return what groups have, of what they could have, with as many workers as the rule says."""
    kept = []
    for row in rows:
        shares, values = np.array([one[:2] for one in row["measured"]]).T
        at = float(np.clip(row["load"] / x, shares[0], shares[-1]))
        kept.append(float(np.interp(np.log(at), np.log(shares), values) / values.max()))
    low, median = np.percentile(kept, (10, 50))
    return {"worst": min(kept), "p10": float(low), "median": float(median)}


# ---------------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """Clusters of several sizes."""

    groups: Sequence[int]
    one_pool: Sequence[int]
    """Numbers of groups that share all their draft workers."""
    batch: int = 32
    seconds: float = 2.0
    warm_up_s: float = 0.5


def scale(plan: ScalingPlan, tick: Tick) -> list[dict[str, Any]]:
    """Return goodput by number of groups: in pools of two groups and a worker, and in one pool."""
    rows = []
    layouts = [(groups // 2, 2, 1) for groups in plan.groups]
    layouts += [(1, groups, groups // 2) for groups in plan.one_pool]
    kinds: dict[str, MakeController] = {"plain": fixed(0)} | {
        mode: fixed(DRAFT_TOKENS, mode) for mode in MODES
    }
    for (pools, groups, workers), (kind, controller) in itertools.product(layouts, kinds.items()):
        spec = ClusterSpec(
            hardware=llama_pair(),
            controller=controller,
            num_pools=pools,
            groups_per_pool=groups,
            workers_per_pool=workers,
        )
        cluster = Cluster(spec)
        cluster.keep_busy(plan.batch, through_door=True)
        outcome = cluster.measure(plan.warm_up_s, plan.seconds)
        rows.append(
            {"kind": kind, "pools": pools, "groups_per_pool": groups, "workers": workers, "outcome": outcome}
        )
        tick()
    return rows


# ---------------------------------------------------------------------------------------------- loads


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The controller beside fixed choices."""

    batches: Sequence[int]
    lengths: Sequence[int]
    drafters: Sequence[str] = ("1B",)
    pools: int = 2
    groups: int = 2
    """Of each pool, with one draft worker."""
    seconds: float = 12.0
    learning_s: float = 8.0
    """Before anything of the controller is measured,"""
    learning_s_per_request: float = 0.0
    """and this for each of a group's requests: with many of them rounds are longer."""
    most_learning_s: float = 30.0
    seeds: int = 5
    """Of the controller beside plain decoding and the best fixed choice, each with the same requests."""

    def num_runs(self) -> int:
        """Return how many clusters are simulated, at most."""
        num_loads = len(self.drafters) * len(self.batches)
        return num_loads * (len(MODES) * len(self.lengths) + 1 + 3 * self.seeds)


def compare_controller(plan: LoadPlan, tick: Tick) -> list[dict[str, Any]]:
    """Return goodput of plain decoding, of fixed choices and of the controller, by requests at a time.

    Which fixed choice is the best is found with requests of their own: the highest of many is above its mean.
    """
    rows = []
    plain: dict[int, list[float]] = {}
    """By requests at a time: of seed 0, of which choices are found, and of those that are measured."""
    for drafter, batch in itertools.product(plan.drafters, plan.batches):
        hardware, limits = llama_pair(DRAFTERS[drafter]), GroupLimits()
        spec = ClusterSpec(
            hardware=hardware, controller=fixed(0), num_pools=plan.pools, groups_per_pool=plan.groups
        )
        learning_s = min(plan.most_learning_s, plan.learning_s + plan.learning_s_per_request * batch)
        if batch not in plain:
            plain[batch] = [_full(spec, batch, plan.seconds).goodput]
            for seed in range(1, plan.seeds + 1):
                plain[batch].append(_full(spec, batch, plan.seconds, learning_s, seed).goodput)
        for _ in range(1 + plan.seeds):
            tick()
        values = {"plain": plain[batch][0]}
        measured = {"plain": plain[batch][1:]}
        choices = {f"{mode}, k = {k}": fixed(k, mode) for k, mode in itertools.product(plan.lengths, MODES)}
        for name, controller in choices.items():
            values[name] = _full(replace(spec, controller=controller), batch, plan.seconds).goodput
            tick()
        best = max(values, key=lambda name: values[name])
        variants = {"controller": goodput(hardware, limits)}
        if best == "plain":
            measured["best_fixed"] = measured["plain"]
        else:
            variants["best_fixed"] = choices[best]
        for name, controller in variants.items():
            measured[name] = []
            for seed in range(1, plan.seeds + 1):
                its = replace(spec, controller=controller)
                measured[name].append(_full(its, batch, plan.seconds, learning_s, seed).goodput)
                tick()
        rows.append(
            {
                "drafter": drafter,
                "batch": batch,
                "goodput": values,
                "best_fixed": best,
                "measured": measured,
                "best_fixed_vs_plain": _ratio(measured, "best_fixed", "plain"),
                "controller_vs_best_fixed": _ratio(measured, "controller", "best_fixed"),
                "controller_vs_plain": _ratio(measured, "controller", "plain"),
            }
        )
    return rows


def _ratio(measured: Mapping[str, Sequence[float]], of: str, over: str) -> PairedRatio:
    return PairedRatio(tuple(a / b for a, b in zip(measured[of], measured[over], strict=True)))


# ---------------------------------------------------------------------------------------------- failures


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePlan:
    """A cluster in traffic, in which draft workers and then target groups die."""

    pools: int
    period_s: float
    """Failures begin at 1, 3 and 5 periods and last one."""
    rate_per_group: float = 8.0


def endure(plan: FailurePlan, tick: Tick, *, is_controlled: bool = False) -> dict[str, Any]:
    """Return tokens per second over time, and what became of every request, with k fixed or controlled."""
    hardware = llama_pair()
    spec = ClusterSpec(
        hardware=hardware,
        controller=goodput(hardware, GroupLimits()) if is_controlled else fixed(DRAFT_TOKENS),
        num_pools=plan.pools,
        groups_per_pool=4,
        workers_per_pool=2,
    )
    cluster, period_s = Cluster(spec), plan.period_s
    cluster.send_traffic(
        [LoadStep(start_s=0.0, rate=plan.rate_per_group * spec.num_groups)], end_s=7.0 * period_s
    )
    one_of_two = [
        Failure(what="draft_worker", index=2 * pool, at_s=period_s, down_s=period_s)
        for pool in range(plan.pools)
    ]
    all_workers = [
        Failure(what="draft_worker", index=index, at_s=3.0 * period_s, down_s=period_s)
        for index in range(2 * plan.pools)
    ]
    groups = [
        Failure(what="target_group", index=index, at_s=5.0 * period_s, down_s=period_s)
        for index in range(0, spec.num_groups, 4)
    ]
    cluster.fail([*one_of_two, *all_workers, *groups])
    cluster.run(7.0 * period_s)
    tick()
    cluster.drain(limit_s=30.0 * period_s)
    tick()
    ledger = cluster.ledger
    finished = ledger.finished.values()
    phases = {}
    names = ("before", "half of the drafters", "back", "no drafters", "back again", "a quarter of the groups")
    for number, name in enumerate((*names, "after")):
        start_s, end_s = number * period_s, (number + 1) * period_s
        own = [one for one in finished if start_s <= one.arrived_s < end_s]
        streams = [
            (ledger.finished_s[one.request_id] - one.first_token_s) / (one.num_to_generate - 1)
            for one in own
            if one.first_token_s is not None and one.num_to_generate > 1
        ]
        waits = [one.first_token_s - one.arrived_s for one in own if one.first_token_s is not None]
        phases[name] = {
            "requests": len(own),
            "ttft_p95_ms": 1e3 * float(np.percentile(waits, 95)),
            "token_p50_ms": 1e3 * float(np.percentile(streams, 50)),
            "token_p95_ms": 1e3 * float(np.percentile(streams, 95)),
        }
    return {
        "phases": phases,
        "arrived": ledger.num_arrived,
        "finished": len(ledger.finished),
        "replayed": ledger.num_replays,
        "tokens_by_second": ledger.tokens_by_second,
        "period_s": period_s,
    }
