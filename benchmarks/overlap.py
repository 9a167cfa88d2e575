"""Draft and target group on cores of their own: what overlapping them brings, and what it leaves.

    python -m benchmarks.overlap --json benchmarks/results/overlap.json    # about 20 minutes
    python -m benchmarks.overlap --json benchmarks/results/overlap.json --resume    # the rest of a run
    python -m benchmarks.overlap --quick                                   # under five minutes

All runs on two cores: the draft group and the target group have one each, the coordinator is on either. The
target has 100 million parameters (bf16), the draft models have what each ratio of T_draft to T_verify asks
for; weights are random and proportions those of real models (`benchmarks.random_models`). What is accepted
is made up (`specdec.engine.synthetic`), kernels and messages are not.

Modes are measured in turn (ABBA), with another batch of prompts in every round of the benchmark, beside plain
decoding by the target group alone and, at equal device count, both models in one process with both cores.
T_draft and T_verify are the bare compiled forwards of the two processes, alone and while both run. Runs that
others on the same machine have disturbed are made again (`benchmarks.stolen`).
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.progress import Progress

from benchmarks.cores import keep_to_cores
from benchmarks.deployments import ExchangedController
from benchmarks.groups import BareForwards, ChosenController, Role, TwoGroups
from benchmarks.in_process import RunRecord, batch_requests, engine_config, open_engine, run_batch
from benchmarks.kept_cells import KeptCells
from benchmarks.overlap_tables import quoted_draft
from benchmarks.random_models import WIDE, Shape, write_random_model
from benchmarks.report import Spread, progress_bar, report_headlines, run_paired, to_plain, write_results
from benchmarks.stolen import least_stolen
from benchmarks.workload import read_prompts, window
from specdec.core.sampling_params import SamplingParams
from specdec.engine.build import build_parts
from specdec.engine.config import EngineConfig
from specdec.engine.controllers import controller_for, cost_profile_of, modes_of
from specdec.engine.engine import Engine
from specdec.engine.synthetic import SyntheticTarget
from specdec.proposers.synthetic_config import SyntheticAcceptance
from specdec.scheduling.speculation.modes import OverlapMode

_NUM_CORES = 2
_SMALLEST, _LARGEST = 1, 64
"""Batches for which the coordinator's time is quoted."""
_WARM_RUNS, _COUNTED_RUNS = 4, 3
"""A controller thinks in every round at first."""
MODES: tuple[OverlapMode, ...] = ("lockstep", "ping_pong", "draft_ahead")
_BARE_S = 0.4
_BARE_STARTS = 5
_SURE = SyntheticAcceptance(acceptance=(1.0,), bonus_after_miss=(1.0,), bonus_after_all=(1.0,))
"""Everything stands, and the token behind it is the drafter's first guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One situation."""

    batch: int
    temperature: float
    acceptance: float

    @property
    def num_branches(self) -> int:
        """Verdicts of a request that are drafted behind; a forward of few rows has room for more of them."""
        return max(1, 4 // self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """A draft model, and the situations that it is measured in."""

    shape: Shape
    cells: tuple[Cell, ...]


What = Literal["hits", "cell", "coordinator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is measured at a time with a draft model."""

    shape: Shape
    what: What
    where: int | Cell
    """A batch, or of a cell the cell."""

    @property
    def key(self) -> str:
        """As results name where."""
        return "cell" if isinstance(self.where, Cell) else "batch"

    @property
    def name(self) -> str:
        """For people."""
        if isinstance(self.where, Cell):
            cell = self.where
            return f"batch {cell.batch}, temperature {cell.temperature:g}, acceptance {cell.acceptance:g}"
        what = "rounds on hits" if self.what == "hits" else "the coordinator's time"
        return f"{what}, batch {self.where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    drafts: tuple[DraftPlan, ...]
    rounds: int
    num_tokens: int
    target: Shape = WIDE
    k: int = 4
    prompt_tokens: int = 64
    coordinator_prompt_tokens: int = 8
    """Where it is the coordinator's time that counts: reading prompts is the target's."""
    coordinator_num_tokens: int = 64
    max_model_len: int = 320


def _grid(batches: Sequence[int], temperatures: Sequence[float], rates: Sequence[float]) -> tuple[Cell, ...]:
    return tuple(
        Cell(batch=batch, temperature=temperature, acceptance=rate)
        for batch in batches
        for temperature in temperatures
        for rate in rates
    )


def _draft(hidden_size: int, num_layers: int) -> Shape:
    return Shape(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_layers=num_layers,
        num_kv_heads=hidden_size // 256,
    )


_EQUAL = _draft(768, 9)
"""At batch 16 four of its forwards cost about one of the target's; at batch 1, two."""
_FEW = _grid((1, 4, 16), (0.0,), (0.8, 0.95))
FULL = Plan(
    drafts=(
        DraftPlan(shape=_draft(256, 6), cells=_FEW),
        DraftPlan(shape=_draft(512, 9), cells=_FEW),
        DraftPlan(shape=_EQUAL, cells=_grid((1, 4, 16, 32), (0.0, 1.0), (0.5, 0.8, 0.95))),
    ),
    rounds=4,
    num_tokens=64,
)
QUICK = Plan(
    drafts=(DraftPlan(shape=_EQUAL, cells=_grid((1, 16), (0.0,), (0.95,))),),
    rounds=2,
    num_tokens=32,
    coordinator_num_tokens=24,
)

_MISS_HITS = (0.35, 0.51, 0.63, 0.68, 0.72, 0.75, 0.78, 0.81)
"""Given that the drafter's first guess is wrong: how often the right token is among the next 1, 2, ... ones.
About what a trained pair shows at temperature 1."""


def acceptance_of(rate: float) -> SyntheticAcceptance:
    """Return a drafter whose first guess is right at this rate, wherever it is asked."""
    after_all = (rate, *(rate + (1.0 - rate) * hit for hit in _MISS_HITS))
    return SyntheticAcceptance(acceptance=(rate,), bonus_after_miss=_MISS_HITS, bonus_after_all=after_all)


class Colocated:
    """Both models in this process, with all its cores: the same devices, not divided."""

    def __init__(self, config: EngineConfig) -> None:
        parts = build_parts(config, is_measuring=True)
        assert isinstance(parts.target, SyntheticTarget)
        self.synthetic = parts.target
        self.engine = open_engine(parts)


class Bench:
    """One draft model beside the target, in groups and colocated."""

    def __init__(
        self, plan: Plan, target: Path, draft: Path, texts: Sequence[str], cores: Sequence[int]
    ) -> None:
        self._plan = plan
        config = _config(plan, target, draft, num_threads=1)
        keys = {"controller": "goodput", "profile_dir": str(draft.parent / "profiles")}
        speculative = config.speculative_config.model_copy(update=keys)
        self._goodput = config.model_copy(update={"speculative_config": speculative})
        self._chosen = ChosenController()
        self._exchanged = ExchangedController()
        self._exchanged.current = self._chosen
        self._groups = TwoGroups(
            config, target_cores=cores[:1], draft_cores=cores[1:], controller=self._exchanged
        )
        self._costs = cost_profile_of(self._goodput, self._groups.target, self._groups.proposer)
        torch.set_num_threads(len(cores))
        self._colocated = Colocated(_config(plan, target, draft, num_threads=len(cores)))
        tokenizer = self._groups.engine.tokenizer
        self._text = [token for text in texts for token in tokenizer.encode(text)]
        self._num_runs = 0

    def close(self) -> None:
        """End everything."""
        self._groups.close()
        self._colocated.engine.close()

    def cell(self, cell: Cell, tick: Callable[[], None]) -> dict[str, Any]:
        """Measure every mode in one situation."""
        made_up = acceptance_of(cell.acceptance)
        records: dict[str, list[RunRecord]] = {}
        stolen: list[float] = []
        variants: dict[str, Callable[[int], RunRecord]] = {
            "plain": partial(self._run_groups, cell, made_up, "lockstep", 0),
            "colocated": partial(self._run_colocated, cell, made_up, self._plan.k),
            "colocated_plain": partial(self._run_colocated, cell, made_up, 0),
        }
        for mode in MODES:
            variants[mode] = partial(self._run_groups, cell, made_up, mode, self._plan.k)

        def run(name: str) -> None:
            # The same prompts for all, other ones in every round.
            its = records.setdefault(name, [])
            measured = least_stolen(partial(variants[name], len(its)))
            its.append(measured.result)
            stolen.append(measured.stolen)

        run_paired({name: partial(run, name) for name in variants}, self._plan.rounds, tick)
        return {"cell": cell, **summarise(records), "most_stolen": max(stolen)}

    def round_on_hits(self, batch: int, tick: Callable[[], None]) -> dict[str, Any]:
        """Measure rounds of draft_ahead whose every prediction is right, and the bare forwards in them."""
        cell = Cell(batch=batch, temperature=0.0, acceptance=1.0)
        rounds_ms, lockstep_ms = [], []
        for number in range(self._plan.rounds + 1):
            run = partial(self._run_groups, cell, _SURE)
            ahead = least_stolen(partial(run, "draft_ahead", self._plan.k, number, num_branches=1)).result
            lockstep = least_stolen(partial(run, "lockstep", self._plan.k, number)).result
            rounds_ms.append(1e3 * ahead.decode_round_s)
            lockstep_ms.append(1e3 * lockstep.decode_round_s)
            tick()
        k = self._plan.k
        verify = ((batch, k + 1),)
        # In lockstep the last accepted token and the target's own are read together. Ahead, the token behind
        # a chain that stands is drafted before what follows it.
        bare = self._bare(target=verify, draft=((batch, 1),) * (k + 1), batch=batch)
        bare_lockstep = self._bare(target=verify, draft=((batch, 2), *((batch, 1),) * (k - 1)), batch=batch)
        return {
            "batch": batch,
            "round_ms": Spread(tuple(rounds_ms[1:])),
            "lockstep_round_ms": Spread(tuple(lockstep_ms[1:])),
            "bare_ms": bare,
            "bare_lockstep_ms": bare_lockstep,
            "draft_over_verify": bare_lockstep["alone"]["draft"] / bare_lockstep["alone"]["target"],
            "round_over_max": statistics.median(rounds_ms[1:]) / max(bare["overlapped"].values()),
            "lockstep_over_sum": statistics.median(lockstep_ms[1:]) / sum(bare_lockstep["alone"].values()),
        }

    def coordinator_ms(self, batch: int) -> float:
        """Return what is neither draft nor verify of a round, in lockstep with a fixed k."""
        cell = _accepted_often(batch)
        assert self._groups.synthetic is not None
        self._groups.synthetic.acceptance = acceptance_of(cell.acceptance)
        self._chosen.set(self._plan.k, "lockstep", cell.num_branches, cell.acceptance)
        run = partial(self._run_short, cell, self._plan.k)
        runs = [least_stolen(partial(run, number)).result for number in range(1 + _COUNTED_RUNS)]
        return _coordinator_ms(runs[1:])

    def coordinator_goodput_ms(self, batch: int) -> float:
        """Return the same under the goodput controller, which thinks in that time.

        In the mode that it chooses, once it has learnt what rounds cost.
        """
        assert self._groups.synthetic is not None
        cell = _accepted_often(batch)
        self._groups.synthetic.acceptance = acceptance_of(cell.acceptance)
        modes = modes_of(self._groups.proposer.capabilities)
        self._exchanged.current = controller_for(
            self._goodput, self._costs, modes, is_target_elsewhere=self._groups.target.is_elsewhere
        )
        runs = [
            least_stolen(partial(self._run_short, cell, None, number)).result
            for number in range(_WARM_RUNS + _COUNTED_RUNS)
        ]
        self._exchanged.current = self._chosen
        return _coordinator_ms(runs[_WARM_RUNS:])

    def _bare(
        self, *, target: tuple[tuple[int, int], ...], draft: tuple[tuple[int, int], ...], batch: int
    ) -> dict[str, dict[Role, float]]:
        context = self._plan.prompt_tokens + self._plan.num_tokens // 2
        orders: dict[Role, BareForwards] = {
            "target": BareForwards(target, context, _BARE_S),
            "draft": BareForwards(draft, context, _BARE_S),
        }
        alone = {
            role: seconds
            for one in orders
            for role, seconds in least_stolen(partial(self._groups.bare_s, {one: orders[one]})).result.items()
        }
        # How much two groups are in each other's way differs from start to start.
        together = [least_stolen(partial(self._groups.bare_s, orders)).result for _ in range(_BARE_STARTS)]
        both = {role: [seconds for one in together for seconds in one[role]] for role in orders}
        return {
            name: {role: 1e3 * statistics.median(seconds) for role, seconds in measured.items()}
            for name, measured in (("alone", alone), ("overlapped", both))
        }

    def _run_groups(
        self,
        cell: Cell,
        made_up: SyntheticAcceptance,
        mode: OverlapMode,
        k: int,
        number: int,
        num_branches: int | None = None,
    ) -> RunRecord:
        assert self._groups.synthetic is not None
        self._groups.synthetic.acceptance = made_up
        self._chosen.set(k, mode, num_branches or cell.num_branches, cell.acceptance)
        return self._run(self._groups.engine, cell, k, number)

    def _run_colocated(self, cell: Cell, made_up: SyntheticAcceptance, k: int, number: int) -> RunRecord:
        self._colocated.synthetic.acceptance = made_up
        return self._run(self._colocated.engine, cell, k, number)

    def _run_short(self, cell: Cell, k: int | None, number: int) -> RunRecord:
        plan = self._plan
        lengths = plan.coordinator_prompt_tokens, plan.coordinator_num_tokens
        return self._run(self._groups.engine, cell, k, number, lengths)

    def _run(
        self, engine: Engine, cell: Cell, k: int | None, number: int, lengths: tuple[int, int] | None = None
    ) -> RunRecord:
        prompt_tokens, num_tokens = lengths or (self._plan.prompt_tokens, self._plan.num_tokens)
        self._num_runs += 1
        prompts = window(self._text, cell.batch, prompt_tokens, number)
        params = SamplingParams(temperature=cell.temperature, max_tokens=num_tokens, ignore_eos=True)
        requests = batch_requests(prompts, params, k, f"run-{self._num_runs}")
        return run_batch(engine, requests, reads_text=engine is not self._groups.engine)


def _accepted_often(batch: int) -> Cell:
    return Cell(batch=batch, temperature=0.0, acceptance=0.8)


def _coordinator_ms(runs: Sequence[RunRecord]) -> float:
    return statistics.median(1e3 * run.coordinator_s / run.num_rounds for run in runs)


def _config(plan: Plan, target: Path, draft: Path, *, num_threads: int) -> EngineConfig:
    most = max(_LARGEST, *(cell.batch for draft in plan.drafts for cell in draft.cells))
    return engine_config(
        target,
        draft,
        "bfloat16",
        max_num_seqs=most,
        num_draft_tokens=plan.k,
        num_threads=num_threads,
        max_model_len=plan.max_model_len,
        made_up=_SURE,
    )


def summarise(records: Mapping[str, list[RunRecord]]) -> dict[str, Any]:
    """Compare runs of the same prompts; the first of each variant is not counted."""
    counted = {name: runs[1:] for name, runs in records.items()}
    speeds = {name: [run.decode_tokens_per_s for run in runs] for name, runs in counted.items()}

    def ratio(fast: str, slow: str) -> Spread:
        return Spread(tuple(a / b for a, b in zip(speeds[fast], speeds[slow], strict=True)))

    best = max(MODES, key=lambda mode: statistics.median(speeds[mode]))
    return {
        "tokens_per_s": {name: Spread(tuple(its)) for name, its in speeds.items()},
        "vs_lockstep": {mode: ratio(mode, "lockstep") for mode in MODES[1:]},
        "vs_plain": {mode: ratio(mode, "plain") for mode in MODES},
        "best_mode": best,
        "vs_colocated": ratio(best, "colocated"),
        "vs_colocated_plain": ratio(best, "colocated_plain"),
        "rounds": {name: _per_round(runs) for name, runs in counted.items()},
    }


def _per_round(runs: Sequence[RunRecord]) -> dict[str, float]:
    return {name: statistics.median(run.summary()[name] for run in runs) for name in runs[0].summary()}


def main(
    quick: Annotated[bool, typer.Option(help="One draft model, two situations, two rounds.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
    resume: Annotated[
        bool, typer.Option(help="Go on with a run to the same --json FILE that was cut.")
    ] = False,
) -> None:
    """Measure lockstep, ping_pong and draft_ahead over two groups of one core each.

    Example: python -m benchmarks.overlap --quick --json runs/overlap.json
    """
    plan = QUICK if quick else FULL
    cores = keep_to_cores(_NUM_CORES)
    kept = KeptCells(json, {**to_plain(plan), "drafts": None}, resume=resume)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        progress = stack.enter_context(progress_bar())
        target = folder / "target"
        write_random_model(models / "target", target, plan.target)
        texts = read_prompts(models / "prompts.jsonl")
        for number, one in enumerate(plan.drafts):
            missing = [part for part in parts_of(one) if not kept.is_kept(part)]
            if not missing:
                continue
            draft = folder / f"draft-{number}"
            num_parameters = write_random_model(models / "target", draft, one.shape)
            starting = progress.add_task(f"starting, draft of {num_parameters / 1e6:.0f} M", total=1)
            with contextlib.closing(Bench(plan, target, draft, texts, cores)) as bench:
                progress.advance(starting)
                for part in missing:
                    measured = _measure(bench, plan, part, progress)
                    kept.keep(part, {"num_parameters": num_parameters, **measured})
    results = [together(one, kept) for one in plan.drafts]
    headlines = headlines_of(results)
    write_results(json, {"plan": plan, "drafts": results, "headlines": headlines})
    kept.forget()
    report_headlines(headlines)


def parts_of(draft: DraftPlan) -> list[Part]:
    """Return what is measured with a draft model, in order."""
    batches = sorted({cell.batch for cell in draft.cells})
    pairs: list[tuple[What, int | Cell]] = [
        *(("hits", batch) for batch in batches),
        *(("cell", cell) for cell in draft.cells),
        *(("coordinator", batch) for batch in (_SMALLEST, _LARGEST)),
    ]
    return [Part(shape=draft.shape, what=what, where=where) for what, where in pairs]


def _measure(bench: Bench, plan: Plan, part: Part, progress: Progress) -> dict[str, Any]:
    turns = plan.rounds + 1
    if isinstance(part.where, Cell):
        task = progress.add_task(part.name, total=6 * turns)
        return bench.cell(part.where, partial(progress.advance, task))
    if part.what == "hits":
        task = progress.add_task(part.name, total=turns)
        return bench.round_on_hits(part.where, partial(progress.advance, task))
    task = progress.add_task(part.name, total=2)
    fixed_ms = bench.coordinator_ms(part.where)
    progress.advance(task)
    goodput_ms = bench.coordinator_goodput_ms(part.where)
    progress.advance(task)
    return {"fixed_ms": fixed_ms, "goodput_ms": goodput_ms}


def together(draft: DraftPlan, kept: KeptCells) -> dict[str, Any]:
    """Return all that was measured with a draft model."""
    by_what: dict[What, list[dict[str, Any]]] = {"hits": [], "cell": [], "coordinator": []}
    for part in parts_of(draft):
        measured = kept.result(part)
        del measured["cell"]  # of a part that is no cell, too
        by_what[part.what].append({**measured, part.key: part.where})
    coordinator = by_what["coordinator"]
    return {
        "shape": draft.shape,
        "num_parameters": coordinator[0]["num_parameters"],
        "on_hits": by_what["hits"],
        "cells": by_what["cell"],
        "coordinator_ms": {one["batch"]: one["fixed_ms"] for one in coordinator},
        "coordinator_goodput_ms": {one["batch"]: one["goodput_ms"] for one in coordinator},
        "coordinator_measured": [one["measured"] for one in coordinator],
    }


def headlines_of(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Quote the draft model that costs about what the target does (`quoted_draft`), mostly accepted."""
    nearest = quoted_draft(results)
    quoted = Cell(batch=16, temperature=0.0, acceptance=0.95)
    cell = next(one for one in nearest["cells"] if one["cell"] == quoted)
    return {
        "round_over_max_hit": max(hits["round_over_max"] for hits in nearest["on_hits"]),
        "draft_ahead_vs_lockstep": cell["vs_lockstep"]["draft_ahead"].median,
        "ping_pong_vs_lockstep_b16": cell["vs_lockstep"]["ping_pong"].median,
        "vs_colocated_equal_devices": cell["vs_colocated"].median,
        "round_over_max_hit_worst": max(
            hits["round_over_max"] for result in results for hits in result["on_hits"]
        ),
        "coordinator_ms_b1": nearest["coordinator_ms"][_SMALLEST],
        "coordinator_ms_b64": nearest["coordinator_ms"][_LARGEST],
        "coordinator_goodput_ms_b1": nearest["coordinator_goodput_ms"][_SMALLEST],
        "coordinator_goodput_ms_b64": nearest["coordinator_goodput_ms"][_LARGEST],
    }


if __name__ == "__main__":
    typer.run(main)
