"""Speculation where contexts are long and batches large: sparse-K/V drafts beside plain decoding.

    python -m benchmarks.long_context --json benchmarks/results/long-context.json    # about an hour
    python -m benchmarks.long_context --json benchmarks/results/long-context.json --resume    # the rest
    python -m benchmarks.long_context --quick                                        # under five minutes
    python -m benchmarks.long_context --only 'x 512$'                                # some cells

Batch x context, with the demo target in bf16, whose step is mostly the reading of K/V where both are large;
once as it is (two query heads share a K/V head: `gqa`) and once with K/V heads repeated (`mha`), the same
function with twice the K/V. Prompts are pieces of held-out files and are in the caches before anything is
measured; texts are sampled at temperature 1 and what is accepted is what is accepted. (Greedily this target
falls into loops, where anything is accepted; one cell is measured so.)

In each cell every k is tried for a moment, and the best of them is measured again: in turn (ABBA) with plain
decoding by the same engine (the fast path, the same kernels), with ordinary speculation (a draft model that
attends to everything, with its own best k), and with the goodput controller, which starts anew in each cell
and runs for a while before it is measured. A cell of the controller fails where its ratio to plain decoding
is below 0.97 with 95 % confidence: where its upper bound is.

Amid these turns the parts are timed alone. Predicted is

    Omega T(1) / (k T_draft + T(k + 1))        MagicDec, Chen et al., arXiv 2408.11049

with the bare forwards of the same batch and context (T), the drafter's own over what it attends to (T_draft),
and Omega = (1 - a^(k+1)) / (1 - a), the tokens per round, as they were counted; a is given beside them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.deployments import Setting
from benchmarks.kept_cells import KeptCells
from benchmarks.kv_costs import Step, Stream, forward_seconds, kv_bytes
from benchmarks.long_context_engines import BLOCK_SIZE, ORDINARY, Drafter, LongEngine, Room
from benchmarks.long_texts import LongTexts
from benchmarks.multi_head import repeat_kv_heads
from benchmarks.report import PairedRatio, Spread, progress_bar, report_headlines, to_plain, write_results
from benchmarks.steady import SPARE_TOKENS, Batch, Counted
from benchmarks.stolen import least_stolen
from benchmarks.turns import Turns, fails
from specdec.kv.selection import KvPolicyName
from specdec.scheduling.speculation.controller import SpeculationController

LONG = 3840
"""4k is where sequences end."""
_LARGE = 32
_PLAIN = Setting(num_draft_tokens=0)
_COST_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One situation."""

    heads: str
    """gqa or mha."""
    drafter: Drafter
    batch: int
    context: int
    temperature: float = 1.0
    with_controller: bool = False

    @property
    def name(self) -> str:
        """For people."""
        text = "" if self.temperature else ", greedy"
        return f"{self.heads}, {self.drafter.name}, {self.batch} x {self.context}{text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and for how long."""

    cells: tuple[Cell, ...]
    lengths: tuple[int, ...]
    """k that are tried."""
    pairs: int
    block_s: float
    """Decoding of one variant, in one pair."""
    try_s: float
    warm_s: float
    """Decoding of the controller before it is measured."""
    num_tokens: int = 192

    def room(self, cells: Sequence[Cell], num_threads: int) -> Room:
        """What has to fit for some of the cells."""
        spare = self.num_tokens + SPARE_TOKENS
        return Room(
            max_num_seqs=max(cell.batch for cell in cells),
            num_tokens=max(cell.batch * (cell.context + spare) + 4 * BLOCK_SIZE for cell in cells),
            max_draft_tokens=max(self.lengths),
            num_threads=num_threads,
        )


MAIN = Drafter(method="self", policy="streaming", budget=256)
_VERIFIED = Drafter(method="self", policy="verified", budget=256)
_STANDALONE = Drafter(method="draft_model", policy="streaming", budget=256)
_BATCHES, _CONTEXTS = (1, 4, 8, 16, _LARGE), (512, 1024, 2048, LONG)


def _policies() -> tuple[str, ...]:
    """All there are but `full`."""
    return tuple(name for name in get_args(KvPolicyName) if name != "full")


_BUDGETS: tuple[int | float, ...] = (64, 256, 0.05)


def _others() -> tuple[Drafter, ...]:
    """Every policy with several budgets, and everything as budget, where the target drafts for itself; and
    the window of a draft model, which has no other policy.
    """
    drafters = [
        *(Drafter(method="self", policy=one, budget=b) for one in _policies() for b in _BUDGETS),
        *(Drafter(method="draft_model", policy="streaming", budget=b) for b in _BUDGETS),
    ]
    return (*(one for one in drafters if one not in {MAIN, _STANDALONE}), Drafter(method="self"))


def _edges(drafter: Drafter, heads: str) -> tuple[Cell, ...]:
    """The longest contexts over batches, and the largest batch over contexts."""
    shapes = dict.fromkeys((*((batch, LONG) for batch in _BATCHES), *((_LARGE, one) for one in _CONTEXTS)))
    return tuple(
        Cell(heads=heads, drafter=drafter, batch=batch, context=context, with_controller=True)
        for batch, context in shapes
    )


FULL = Plan(
    cells=(
        *(
            Cell(heads="gqa", drafter=MAIN, batch=batch, context=context, with_controller=True)
            for batch, context in itertools.product(_BATCHES, _CONTEXTS)
        ),
        Cell(heads="gqa", drafter=MAIN, batch=_LARGE, context=LONG, temperature=0.0),
        *_edges(_STANDALONE, "gqa"),
        *(
            Cell(heads="gqa", drafter=drafter, batch=_LARGE, context=context, with_controller=True)
            for drafter in _others()
            for context in (1024, LONG)
        ),
        *_edges(MAIN, "mha"),
        Cell(heads="mha", drafter=_STANDALONE, batch=_LARGE, context=LONG, with_controller=True),
    ),
    lengths=(1, 2, 3, 4, 6),
    pairs=6,
    block_s=0.5,
    try_s=0.2,
    warm_s=1.5,
)
QUICK = Plan(
    cells=(
        *(
            Cell(heads="gqa", drafter=MAIN, batch=batch, context=context, with_controller=True)
            for batch, context in ((1, LONG), (_LARGE, LONG), (_LARGE, 512))
        ),
        Cell(heads="gqa", drafter=_VERIFIED, batch=_LARGE, context=LONG),
        Cell(heads="mha", drafter=MAIN, batch=_LARGE, context=LONG, with_controller=True),
    ),
    lengths=(2, 3, 4),
    pairs=5,
    block_s=0.4,
    try_s=0.15,
    warm_s=1.5,
)


@dataclass(slots=True)
class Runs:
    """Decoding in turns, and seconds of the parts, one entry for each pair."""

    turns: Turns = field(default_factory=Turns)
    parts: list[Mapping[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What all drafters of a target are measured beside."""

    ordinary: LongEngine
    texts: LongTexts
    stream: Stream


class Bench:
    """Measures cells of one drafter, with ordinary speculation beside it."""

    def __init__(self, plan: Plan, engine: LongEngine, beside: Beside, num_texts: int) -> None:
        """Take cells of up to `num_texts` requests; smaller batches take turns with as many texts."""
        self._plan = plan
        self._num_texts = num_texts
        self._engine = engine
        self._ordinary = beside.ordinary
        self._texts = beside.texts
        self._stream = beside.stream

    def cell(self, cell: Cell, tick: Callable[[], None]) -> dict[str, Any]:
        """Measure one situation."""
        plan = self._plan
        prompts = self._texts.prompts(self._num_texts, cell.context)
        batch = self._batch(cell, prompts, 0)
        tried, best = self._try(self._engine, batch)
        tried_ordinary, best_ordinary = self._try(self._ordinary, batch)
        tick()
        controller = self._engine.controller() if cell.with_controller else None
        if controller is not None:
            self._engine.decode(batch, controller, plan.warm_s)
        runs = Runs()
        for number in range(plan.pairs):
            # All variants of a turn write the same texts.
            batch = replace(self._batch(cell, prompts, number), seed=number)
            runs.turns.take(self._variants(batch, best, best_ordinary, controller))
            runs.parts.append(least_stolen(partial(self._parts, cell, best.num_draft_tokens)).result)
            tick()
        return {
            "tried": {str(setting.num_draft_tokens): rate for setting, rate in tried.items()},
            "tried_ordinary": {str(one.num_draft_tokens): rate for one, rate in tried_ordinary.items()},
            "k": best.num_draft_tokens,
            "k_ordinary": best_ordinary.num_draft_tokens,
            "chosen": None if controller is None else controller.state.mean_num_draft_tokens,
            **summarise(cell.batch, best.num_draft_tokens, runs),
        }

    def _batch(self, cell: Cell, prompts: Sequence[tuple[int, ...]], number: int) -> Batch:
        """Have the texts of a pair read: in each of them other ones, from the first again after the last."""
        first = number * cell.batch % len(prompts)
        its = [*prompts, *prompts][first : first + cell.batch]
        for engine in (self._engine, self._ordinary):
            engine.read(its)
        return Batch(prompts=its, num_tokens=self._plan.num_tokens, temperature=cell.temperature)

    def _try(self, engine: LongEngine, batch: Batch) -> tuple[dict[Setting, float], Setting]:
        """Return the rate of every k, and the best k above 0."""
        settings = [Setting(num_draft_tokens=k) for k in self._plan.lengths]
        rates = dict.fromkeys(settings, 0.0)
        for setting in (*settings, *reversed(settings)):
            tried = least_stolen(partial(engine.decode, batch, setting.controller(), self._plan.try_s))
            rates[setting] += 0.5 * tried.result.rate
        return rates, max(settings, key=lambda one: rates[one])

    def _variants(
        self,
        batch: Batch,
        best: Setting,
        best_ordinary: Setting,
        controller: SpeculationController | None,
    ) -> dict[str, Callable[[], Counted]]:
        settings: dict[str, tuple[LongEngine, SpeculationController]] = {
            "plain": (self._engine, _PLAIN.controller()),
            "best": (self._engine, best.controller()),
            "ordinary": (self._ordinary, best_ordinary.controller()),
        }
        if controller is not None:
            settings["controller"] = (self._engine, controller)
        return {
            name: partial(engine.decode, batch, one, self._plan.block_s)
            for name, (engine, one) in settings.items()
        }

    def _parts(self, cell: Cell, k: int) -> dict[str, float]:
        """Time the bare forwards at the middle of what is decoded, and what of them is reading K/V.

        That is what they take longer than with next to no context: so the kernel runs on the threads, and
        amid the work, that it has in the forward.
        """
        context = cell.context + self._plan.num_tokens // 2
        target, drafter = self._engine.target.runner, cell.drafter
        one = Step(batch=cell.batch, rows=1, context=context)
        several = Step(batch=cell.batch, rows=k + 1, context=context)
        drafting = Step(batch=cell.batch, rows=1, context=drafter.kept_tokens(context))
        draft = self._engine.draft_runner or target
        bare = {
            "plain": forward_seconds(target, one, _COST_REPEATS),
            "verify": forward_seconds(target, several, _COST_REPEATS),
            "draft": forward_seconds(draft, drafting, _COST_REPEATS),
        }
        without = {
            "plain": forward_seconds(target, replace(one, context=BLOCK_SIZE), _COST_REPEATS),
            "verify": forward_seconds(target, replace(several, context=BLOCK_SIZE), _COST_REPEATS),
        }
        return {
            **{f"{name}_s": seconds for name, seconds in bare.items()},
            **{f"{name}_kv_s": max(0.0, bare[name] - seconds) for name, seconds in without.items()},
            "stream_s": self._stream.seconds(_COST_REPEATS),
            "kv_bytes": kv_bytes(target, one) - kv_bytes(target, replace(one, context=BLOCK_SIZE)),
        }


def summarise(batch: int, k: int, runs: Runs) -> dict[str, Any]:
    """Compare the variants pair by pair, and what was measured with what its parts allow."""

    def part(name: str) -> Spread:
        return Spread(tuple(one[name] for one in runs.parts))

    turns = runs.turns
    rounds = sum(one.num_rounds for one in turns.counted["best"])
    omega = sum(one.num_tokens for one in turns.counted["best"]) / (rounds * batch)
    predicted = [omega * one["plain_s"] / (k * one["draft_s"] + one["verify_s"]) for one in runs.parts]
    vs_plain = turns.ratio("best", "plain")
    shares = [measured / its for measured, its in zip(vs_plain.values, predicted, strict=True)]
    results = {
        "tokens_per_s": turns.rates("plain", "best", "ordinary", "controller"),
        "vs_plain": vs_plain,
        "vs_ordinary": turns.ratio("best", "ordinary"),
        "most_stolen": turns.most_stolen,
        "tokens_per_round": omega,
        "acceptance": acceptance_of_tokens(omega, k),
        "parts": {name: part(name) for name in runs.parts[0]},
        "predicted": Spread(tuple(predicted)),
        "share_of_predicted": PairedRatio(tuple(shares)),
        "kv_share_of_plain": part("plain_kv_s").median / part("plain_s").median,
        "kernel_bytes_per_s": part("kv_bytes").median / part("plain_kv_s").median,
        "stream_bytes_per_s": Stream.num_bytes / part("stream_s").median,
        "round_ms": {
            name: 1e3 * sum(one.seconds for one in its) / sum(one.num_rounds for one in its)
            for name, its in turns.counted.items()
            if name in ("plain", "best")
        },
    }
    if "controller" in turns.counted:
        results["controller_vs_plain"] = turns.ratio("controller", "plain")
    return results


def acceptance_of_tokens(omega: float, k: int) -> float:
    """Return the rate `a` of each draft token at which a round gives `omega` = (1 - a^(k+1)) / (1 - a)."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**i for i in range(k + 1)) < omega:
            low = middle
        else:
            high = middle
    return high


def headlines_of(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what the tool's last lines say; of the drafters in a cell, the one that was best when tried."""
    headlines: dict[str, float] = {}
    largest: list[Mapping[str, Any]] = []
    for heads in ("gqa", "mha"):
        own = [
            one
            for one in cells
            if one["cell"].heads == heads
            and (one["cell"].batch, one["cell"].context) == (_LARGE, LONG)
            and one["cell"].temperature > 0.0
        ]
        if own:
            largest.append(max(own, key=lambda one: max(one["tried"].values())))
            headlines[f"speedup_b{_LARGE}_4k_{heads}"] = largest[-1]["vs_plain"].median
        growth = growth_with_batch([one for one in cells if one["cell"].heads == heads])
        if growth is not None:
            headlines[f"least_growth_4k_{heads}"] = growth
    controlled = [one["controller_vs_plain"] for one in cells if "controller_vs_plain" in one]
    if controlled:
        headlines["worst_vs_plain"] = min(one.upper for one in controlled)
        headlines["worst_vs_plain_median"] = min(one.median for one in controlled)
    if largest:
        headlines["share_of_predicted"] = min(one["share_of_predicted"].median for one in largest)
        headlines["kernel_gb_s_share_of_machine"] = (
            largest[0]["kernel_bytes_per_s"] / largest[0]["stream_bytes_per_s"]
        )
    headlines["share_of_predicted_worst"] = min(one["share_of_predicted"].median for one in cells)
    return headlines


def only(plan: Plan, pattern: str) -> Plan:
    """Return what is left of a plan.

    Raises:
        typer.BadParameter: nothing is.
    """
    cells = tuple(cell for cell in plan.cells if re.search(pattern, cell.name))
    if not cells:
        known = "; ".join(cell.name for cell in plan.cells[:2])
        raise typer.BadParameter(f"--only {pattern!r} finds none of {len(plan.cells)} cells ({known}; ...)")
    return replace(plan, cells=cells)


def growth_with_batch(cells: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the least ratio of speedups from one batch to the next larger one, at the longest contexts.

    Of the drafter that all batches are measured with; 1 or more: it rises. None: there is but one batch.
    """
    own = {
        one["cell"].batch: one["vs_plain"].median
        for one in cells
        if (one["cell"].drafter, one["cell"].context) == (MAIN, LONG) and one["cell"].temperature > 0.0
    }
    pairs = itertools.pairwise(sorted(own))
    return min((own[larger] / own[smaller] for smaller, larger in pairs), default=None)


def failures_of(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the cells where the controller is slower than plain decoding."""
    return [
        f"{cell['cell'].name}: {ratio.median:.3f} of plain decoding, at most {ratio.upper:.3f}"
        for cell in cells
        if (ratio := cell.get("controller_vs_plain")) is not None and fails(ratio)
    ]


def table_of(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out all cells for people."""
    table = Table(
        *("cell", "plain tok/s", "k", "tok/round", "vs plain", "", "predicted", "share"),
        *("vs ordinary", "controller", "", "K/V share", "GB/s", "of stream"),
    )
    for cell in cells:
        ratio, ordinary = cell["vs_plain"], cell["vs_ordinary"]
        controller = cell.get("controller_vs_plain")
        table.add_row(
            cell["cell"].name,
            f"{PairedRatio(cell['tokens_per_s']['plain']).median:.0f}",
            str(cell["k"]),
            f"{cell['tokens_per_round']:.2f}",
            f"{ratio.median:.2f}",
            f"{ratio.lower:.2f}-{ratio.upper:.2f}",
            f"{cell['predicted'].median:.2f}",
            f"{cell['share_of_predicted'].median:.2f}",
            f"{ordinary.median:.2f}",
            "" if controller is None else f"{controller.median:.3f}",
            "" if controller is None else f"{controller.lower:.3f}-{controller.upper:.3f}",
            f"{cell['kv_share_of_plain']:.2f}",
            f"{cell['kernel_bytes_per_s'] / 1e9:.1f}",
            f"{cell['kernel_bytes_per_s'] / cell['stream_bytes_per_s']:.2f}",
        )
    return table


@contextlib.contextmanager
def _targets(models: Path) -> Iterator[dict[str, Path]]:
    """Make the checkpoints, by heads."""
    with tempfile.TemporaryDirectory() as folder:
        targets = {"gqa": Path(folder) / "gqa", "mha": Path(folder) / "mha"}
        targets["gqa"].symlink_to((models / "target").absolute())
        repeat_kv_heads(models / "target", targets["mha"])
        yield targets


def measure(plan: Plan, models: Path, progress: Progress, kept: KeptCells) -> list[dict[str, Any]]:
    """Measure all cells that are not kept, one drafter after the other; return all."""
    num_threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    with _targets(models) as targets:
        for heads in dict.fromkeys(cell.heads for cell in plan.cells):
            of_heads = [cell for cell in plan.cells if cell.heads == heads and not kept.is_kept(cell)]
            if not of_heads:
                continue
            make = partial(LongEngine, target=targets[heads], draft=models / "draft")
            with contextlib.closing(make(ORDINARY, room=plan.room(of_heads, num_threads))) as ordinary:
                beside = Beside(
                    ordinary=ordinary, texts=LongTexts.read(ordinary.engine.tokenizer), stream=Stream()
                )
                for drafter in dict.fromkeys(cell.drafter for cell in of_heads):
                    cells = [cell for cell in of_heads if cell.drafter == drafter]
                    task = progress.add_task("", total=len(cells) * (plan.pairs + 1))
                    with contextlib.closing(make(drafter, room=plan.room(cells, num_threads))) as engine:
                        if any(cell.with_controller for cell in cells):
                            engine.measure_costs()
                        bench = Bench(plan, engine, beside, max(cell.batch for cell in cells))
                        for cell in cells:
                            progress.update(task, description=cell.name)
                            kept.keep(cell, bench.cell(cell, partial(progress.advance, task)))
    return [kept.result(cell) for cell in plan.cells]


def main(
    quick: Annotated[bool, typer.Option(help="Five corner cells.")] = False,
    names: Annotated[
        str | None,
        typer.Option("--only", help="Cells with names that this regular expression finds."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write raw results here.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on with a run to the same --json FILE that was cut.")
    ] = False,
    models: Annotated[Path, typer.Option(help="Folder with target/ and draft/.")] = Path("models/demo"),
) -> None:
    """Compare sparse-K/V speculation with plain decoding, with ordinary speculation and with its bound.

    Example: python -m benchmarks.long_context --quick --json runs/long-context.json
    """
    plan = whole = QUICK if quick else FULL
    if names is not None:
        plan = only(plan, names)
    kept = KeptCells(json, {**to_plain(plan), "cells": None}, resume=resume)
    with progress_bar() as progress:
        cells = measure(plan, models, progress, kept)
    headlines, failures = headlines_of(cells), failures_of(cells)
    write_results(json, {"plan": plan, "cells": cells, "failures": failures, "headlines": headlines})
    if all(map(kept.is_kept, whole.cells)):
        kept.forget()
    console = Console(highlight=False, width=200)
    console.print(table_of(cells))
    for failure in failures:
        console.print(f"fails: {failure}")
    report_headlines(headlines)


if __name__ == "__main__":
    typer.run(main)
