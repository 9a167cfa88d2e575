"""The controller beside plain decoding and beside the best fixed setting, everywhere.

    python -m benchmarks.never_slower --json benchmarks/results/never-slower.json    # about an hour
    python -m benchmarks.never_slower --quick                                       # under five minutes
    python -m benchmarks.never_slower --only '64 x .*0.5'                            # some cells of the grid

Batch x context x acceptance, in both ways to run two models on two cores: colocated (one process, two
threads) and in two groups with a core each. The target is the demo target made as costly as 26 million
parameters (bf16), the draft model is the demo's. What is accepted is made up (`specdec.engine.synthetic`);
kernels and messages are not.

In each cell every fixed setting is tried for a moment, and the best of them is measured again: choosing
the best by the same numbers that it is compared by would favour it. Then plain decoding, that setting and
the controller take turns (ABBA, each as often in the middle). The controller begins each cell anew, with the
costs that a start has measured and knowing nothing of acceptance; its first seconds are reported apart
(`cold`, in two parts: the headline is the worst one of all cells), and then it runs for a while before it is
measured. Only decoding counts: prompts lie in the cache.

The fixed settings are k = 0, 1, 2, 4, 8 in lockstep, and in two groups ping_pong with k = 2, 4, 8 and
draft_ahead with k = 2, 4 and one or four continuations prepared. A cell fails where the ratio is below 0.97
with 95 % confidence, which is to say that its upper bound is. The pairs of one controller share what it
happened to learn: a cell that would fail is measured with up to two more controllers that begin anew, and
all pairs count. All variants of a turn draw verdicts from the same seeds, other ones in each turn: which of
some twenty drafts stand is luck, and should favour nobody. Turns that others on the same machine have
disturbed are taken again (`benchmarks.stolen`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.cores import keep_to_cores
from benchmarks.deployments import Deployment, Scale, Setting, start_apart, start_colocated
from benchmarks.inflate import inflate, layers_for_parameters
from benchmarks.kept_cells import KeptCells
from benchmarks.load_step import StepPlan, play
from benchmarks.load_step import summarise as summarise_step
from benchmarks.overlap import acceptance_of
from benchmarks.report import PairedRatio, progress_bar, report_headlines, to_plain, write_results
from benchmarks.steady import SPARE_TOKENS, Batch, Counted, decode_for, read
from benchmarks.stolen import least_stolen
from benchmarks.turns import Turns, fails
from benchmarks.workload import read_prompts, window
from specdec.scheduling.speculation.controller import SpeculationController
from specdec.scheduling.speculation.explanation import ControllerState

_PLAIN = Setting(num_draft_tokens=0)
_NUM_CORES = 2
"""As many in one process as in two groups of one each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One situation."""

    deployment: str
    batch: int
    context: int
    acceptance: float

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.deployment}, {self.batch} x {self.context}, acceptance {self.acceptance:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and for how long."""

    cells: tuple[Cell, ...]
    steps: tuple[tuple[str, StepPlan], ...]
    """By deployment."""
    pairs: int
    block_s: float
    """Decoding of one variant, in one pair."""
    try_s: float
    """Decoding of one fixed setting, twice, to find the best."""
    cold_s: tuple[float, float]
    """The first seconds of the controller, and those after them."""
    warm_s: float
    """Decoding of the controller before it is measured."""
    most_controllers: int = 3
    """That begin anew in a cell, one after the other, as long as it would fail."""
    num_tokens: int = 192
    target_parameters: float = 26e6

    @property
    def deployments(self) -> Sequence[str]:
        """Their names, in order."""
        used = (*(cell.deployment for cell in self.cells), *(where for where, _ in self.steps))
        return tuple(dict.fromkeys(used))

    @property
    def scale(self) -> Scale:
        """What has to fit."""
        batches = [
            *((cell.batch, cell.context + self.num_tokens) for cell in self.cells),
            *((step.high, step.prompt_tokens + step.num_tokens) for _, step in self.steps),
        ]
        tokens = max(batch * (length + SPARE_TOKENS + 16) for batch, length in batches)
        return Scale(
            max_num_seqs=max(batch for batch, _ in batches),
            max_model_len=max(512, *(length + SPARE_TOKENS for _, length in batches)),
            lengths=(1, 2, 4, 8),
            target_cache_bytes=(tokens + 4096) * 20_000,
            draft_cache_bytes=(tokens + 4096) * 1_000 + (64 << 20),
        )


def _grid(
    deployment: str, batches: Sequence[int], contexts: Sequence[int], rates: Sequence[float]
) -> tuple[Cell, ...]:
    return tuple(
        Cell(deployment=deployment, batch=batch, context=context, acceptance=rate)
        for context, batch, rate in itertools.product(contexts, batches, rates)
    )


_LONG = 3840
"""4k is where sequences end."""
_BATCHES, _CONTEXTS, _RATES = (1, 4, 16, 64), (128, 1024, _LONG), (0.2, 0.5, 0.8, 0.95)
_COLOCATED, _APART = "colocated", "two groups"
FULL = Plan(
    cells=(
        *_grid(_COLOCATED, _BATCHES, _CONTEXTS, _RATES),
        *_grid(_APART, _BATCHES, _CONTEXTS, _RATES),
    ),
    steps=((_COLOCATED, StepPlan()), (_APART, StepPlan())),
    pairs=6,
    block_s=0.6,
    try_s=0.15,
    cold_s=(1.0, 1.5),
    warm_s=4.0,
)
QUICK = Plan(
    cells=(
        *_grid(_COLOCATED, (1,), (128, _LONG), (0.2, 0.95)),
        *_grid(_COLOCATED, (64,), (128,), (0.2, 0.95)),
    ),
    steps=((_COLOCATED, StepPlan(repeats=1)),),
    pairs=6,
    block_s=0.5,
    try_s=0.15,
    cold_s=(1.0, 1.0),
    warm_s=2.0,
)


def only(plan: Plan, pattern: str) -> Plan:
    """Return what is left of a plan.

    Raises:
        typer.BadParameter: nothing is.
    """
    cells = tuple(cell for cell in plan.cells if re.search(pattern, cell.name))
    steps = tuple((where, step) for where, step in plan.steps if re.search(pattern, _step_name(where)))
    if not cells and not steps:
        known = [*(cell.name for cell in plan.cells[:2]), *(_step_name(where) for where, _ in plan.steps)]
        raise typer.BadParameter(
            f"--only {pattern!r} finds none of {len(plan.cells)} cells and {len(plan.steps)} load steps "
            f"({'; '.join(known)}; ...)"
        )
    return replace(plan, cells=cells, steps=steps)


class Bench:
    """One deployment, cell after cell."""

    def __init__(self, plan: Plan, deployment: Deployment, text: Sequence[int]) -> None:
        self._plan = plan
        self._deployment = deployment
        self._text = text
        self._num_read: dict[int, int] = {}
        """By context: prompts that are in the cache."""

    def cell(self, cell: Cell, tick: Callable[[], None]) -> dict[str, Any]:
        """Measure one situation."""
        plan, deployment = self._plan, self._deployment
        deployment.synthetic.acceptance = acceptance_of(cell.acceptance)
        batch = Batch(prompts=self._prompts(cell), num_tokens=plan.num_tokens)
        tried = self._try(batch)
        best = max(tried, key=lambda setting: tried[setting])
        tick()
        colds: list[dict[str, Any]] = []
        chosen: list[dict[str, Any]] = []
        turns = Turns()
        while not colds or (len(colds) < plan.most_controllers and fails_anywhere(summarise(turns))):
            controller = deployment.controller()
            colds.append(self._cold(batch, controller))
            self._decode(batch, controller, plan.warm_s)
            tick()
            for _ in range(plan.pairs):
                turns.take(self._variants(replace(batch, seed=turns.number), best, controller))
                tick()
            chosen.append(_summary_of(controller.state))
        return {
            "tried": {setting.name: rate for setting, rate in tried.items()},
            "best": best.name,
            "cold": colds[0],
            "chosen": chosen[-1],
            "others_chosen": chosen[:-1],
            **summarise(turns),
        }

    def step(self, step: StepPlan, tick: Callable[[], None]) -> dict[str, Any]:
        """Play the load step with plain decoding and with controllers that are new each time."""
        deployment = self._deployment
        deployment.synthetic.acceptance = acceptance_of(step.acceptance)
        prompts = window(self._text, 256, step.prompt_tokens, 1)
        runs: dict[str, list[list[float]]] = {"plain": [], "controller": []}
        for name in (["plain", "controller", "controller", "plain"] * step.repeats)[: 2 * step.repeats]:
            deployment.exchanged.current = (
                deployment.controller() if name == "controller" else _PLAIN.controller()
            )
            runs[name].append(play(deployment.engine, step, prompts))
            tick()
        self._num_read.clear()
        return {"deployment": deployment.name, **summarise_step(step, runs)}

    def _prompts(self, cell: Cell) -> Sequence[tuple[int, ...]]:
        """Return the prompts of a cell: those of a larger batch of the same context begin with them."""
        prompts = window(self._text, cell.batch, cell.context, 0)
        if self._num_read.get(cell.context, 0) < cell.batch:
            self._deployment.exchanged.current = _PLAIN.controller()
            read(self._deployment.engine, prompts, lambda: None)
            self._num_read = {cell.context: cell.batch}
        return prompts

    def _try(self, batch: Batch) -> dict[Setting, float]:
        settings = self._deployment.settings
        rates = dict.fromkeys(settings, 0.0)
        for setting in (*settings, *reversed(settings)):
            tried = least_stolen(partial(self._decode, batch, setting.controller(), self._plan.try_s))
            rates[setting] += 0.5 * tried.result.rate
        return rates

    def _cold(self, batch: Batch, controller: SpeculationController) -> dict[str, Any]:
        """Measure the first seconds of a new controller, and as many of plain decoding."""
        first_s, second_s = self._plan.cold_s
        plain, ratios = _PLAIN.controller(), []
        for seconds, is_cold in ((first_s, True), (second_s, False)):
            beside = self._decode(batch, plain, seconds, is_cold=is_cold)
            ratios.append(self._decode(batch, controller, seconds, is_cold=is_cold).rate / beside.rate)
        return {"seconds": (first_s, second_s), "vs_plain": tuple(ratios)}

    def _variants(
        self, batch: Batch, best: Setting, controller: SpeculationController
    ) -> dict[str, Callable[[], Counted]]:
        controllers = {"plain": _PLAIN.controller(), "controller": controller}
        if best != _PLAIN:
            controllers["best"] = best.controller()
        return {
            name: partial(self._decode, batch, one, self._plan.block_s) for name, one in controllers.items()
        }

    def _decode(
        self, batch: Batch, controller: SpeculationController, seconds: float, *, is_cold: bool = False
    ) -> Counted:
        self._deployment.exchanged.current = controller
        return decode_for(self._deployment.engine, batch, seconds, is_cold=is_cold)


def summarise(turns: Turns) -> dict[str, Any]:
    """Compare the controller, pair by pair, with plain decoding and with the best fixed setting."""
    return {
        "tokens_per_s": turns.rates("plain", "best", "controller"),
        "vs_plain": turns.ratio("controller", "plain"),
        "vs_best_fixed": turns.ratio("controller", "best" if "best" in turns.counted else "plain"),
        "most_stolen": turns.most_stolen,
    }


def _summary_of(state: ControllerState) -> dict[str, Any]:
    return {
        "mode": state.mode,
        "reason": state.reason,
        "mean_num_draft_tokens": state.mean_num_draft_tokens,
        "num_switches": state.num_switches,
        "num_probe_rounds": state.num_probe_rounds,
        "num_audit_rounds": state.num_audit_rounds,
        "num_stretch_rounds": state.num_stretch_rounds,
    }


def headlines_of(cells: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the smallest upper bounds, the smallest medians beside them, the worst part of the first
    seconds, and the load step.
    """
    headlines: dict[str, float] = {}
    if cells:
        for name in ("vs_plain", "vs_best_fixed"):
            headlines[f"worst_{name}"] = min(cell[name].upper for cell in cells)
            headlines[f"worst_{name}_median"] = min(cell[name].median for cell in cells)
        headlines["cold_vs_plain"] = min(min(cell["cold"]["vs_plain"]) for cell in cells)
    if steps:
        headlines["load_step_worst_phase"] = min(step["worst_phase"] for step in steps)
        headlines["load_step_worst_second"] = min(step["worst_bin"] for step in steps)
    return headlines


def fails_anywhere(cell: Mapping[str, Any]) -> bool:
    """Whether a cell is below the limit beside plain decoding, or beside the best fixed setting."""
    return any(fails(cell[name]) for name in ("vs_plain", "vs_best_fixed"))


def failures_of(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the cells that fail, and by what."""
    return [
        f"{cell['cell'].name}: {name} {cell[name].median:.3f}, at most {cell[name].upper:.3f}"
        for cell in cells
        for name in ("vs_plain", "vs_best_fixed")
        if fails(cell[name])
    ]


def table_of(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out all cells for people."""
    table = Table("cell", "plain tok/s", "best fixed", "vs best", "", "vs plain", "", "cold", "chosen")
    for cell in cells:
        columns = [
            cell["cell"].name,
            f"{PairedRatio(cell['tokens_per_s']['plain']).median:.0f}",
            cell["best"],
        ]
        for name in ("vs_best_fixed", "vs_plain"):
            ratio: PairedRatio = cell[name]
            columns += [f"{ratio.median:.3f}", f"{ratio.lower:.3f}-{ratio.upper:.3f}"]
        columns.append(" ".join(f"{value:.2f}" for value in cell["cold"]["vs_plain"]))
        chosen = cell["chosen"]
        columns.append(f"{chosen['mode']} {chosen['mean_num_draft_tokens']:.1f} ({chosen['reason']})")
        table.add_row(*columns)
    return table


def _in_short(cell: Mapping[str, Any]) -> str:
    best, plain = cell["vs_best_fixed"].median, cell["vs_plain"].median
    return f"{best:.3f} of {cell['best']}, {plain:.3f} of plain decoding"


@contextlib.contextmanager
def _models(plan: Plan, models: Path) -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target"
        inflate(models / "target", target, layers_for_parameters(models / "target", plan.target_parameters))
        yield target, models / "draft"


def measure(
    plan: Plan, models: Path, progress: Progress, kept: KeptCells
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure all cells and steps that are not kept, one deployment after the other; return all."""
    texts = read_prompts(models / "prompts.jsonl")
    with _models(plan, models) as (target, draft):
        for name in plan.deployments:
            cells = [cell for cell in plan.cells if cell.deployment == name and not kept.is_kept(cell)]
            steps = [
                step
                for where, step in plan.steps
                if where == name and not kept.is_kept(_step_key(name, step))
            ]
            if not cells and not steps:
                continue
            starting = progress.add_task(f"starting: {name}", total=1)
            deployment: Deployment
            if name == _COLOCATED:
                num_threads = len(os.sched_getaffinity(0))
                deployment = start_colocated(target, draft, plan.scale, num_threads)
            else:
                deployment = start_apart(target, draft, plan.scale)
            progress.advance(starting)
            with contextlib.closing(deployment):
                text = [token for one in texts for token in deployment.engine.tokenizer.encode(one)]
                bench = Bench(plan, deployment, text)
                for cell in cells:
                    task = progress.add_task(cell.name, total=plan.pairs + 2)
                    result = bench.cell(cell, partial(progress.advance, task))
                    kept.keep(cell, result)
                    progress.update(task, description=f"{cell.name}: {_in_short(result)}")
                for step in steps:
                    task = progress.add_task(_step_name(name), total=2 * step.repeats)
                    kept.keep(_step_key(name, step), bench.step(step, partial(progress.advance, task)))
    return [kept.result(cell) for cell in plan.cells], [
        kept.result(_step_key(name, step)) for name, step in plan.steps
    ]


def _step_name(deployment: str) -> str:
    return f"load step: {deployment}"


def _step_key(deployment: str, step: StepPlan) -> Mapping[str, Any]:
    return {"deployment": deployment, "step": step}


def main(
    quick: Annotated[bool, typer.Option(help="Six corner cells, one load step.")] = False,
    names: Annotated[
        str | None,
        typer.Option("--only", help="Cells and load steps with names that this regular expression finds."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
    resume: Annotated[
        bool, typer.Option(help="Go on with a run to the same --json FILE that was cut.")
    ] = False,
) -> None:
    """Compare the controller with plain decoding and with fixed settings.

    Example: python -m benchmarks.never_slower --quick --json runs/never-slower.json
    """
    plan = whole = QUICK if quick else FULL
    keep_to_cores(_NUM_CORES)
    if names is not None:
        plan = only(plan, names)
    kept = KeptCells(json, {**to_plain(plan), "cells": None, "steps": None}, resume=resume)
    with progress_bar() as progress:
        cells, steps = measure(plan, models, progress, kept)
    headlines, failures = headlines_of(cells, steps), failures_of(cells)
    write_results(
        json, {"plan": plan, "cells": cells, "steps": steps, "failures": failures, "headlines": headlines}
    )
    if all(map(kept.is_kept, [*whole.cells, *itertools.starmap(_step_key, whole.steps)])):
        kept.forget()
    console = Console(highlight=False, width=180)
    if cells:
        console.print(table_of(cells))
    for failure in failures:
        console.print(f"fails: {failure}")
    report_headlines(headlines)


if __name__ == "__main__":
    typer.run(main)
