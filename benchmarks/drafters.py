"""Every family of drafters side by side, on one target, in one engine, beside plain decoding.

    python -m benchmarks.drafters --json benchmarks/results/drafters.json             # some hours
    python -m benchmarks.drafters --json benchmarks/results/drafters.json --resume    # the rest of a run
    python -m benchmarks.drafters --json FILE --resume --minutes 30                   # a piece of it
    python -m benchmarks.drafters --family eagle3 --family medusa                     # some of them
    python -m benchmarks.drafters --quick                                             # some minutes
    python -m benchmarks.drafters --costs                                             # drafting alone
    python -m benchmarks.drafters --device cuda --json FILE                           # a table of a GPU

The target is the demo target in bf16, as it is and made as costly as 100 million parameters
(`benchmarks.inflate`: the same function, so that drafts stand as often). A cell is a target, a family, a
batch size and a temperature. In it every draft length of the family is tried for a moment on all classes of
text together, and the best of them is measured again: class by class, in turn (ABBA) with plain decoding by
an engine of its own that has no drafter. Both decode as many tokens of the same texts, drawn with the same
seeds; only decoding counts, prompts are read before. Numbers over classes are geometric means. Where a cell
would take too long, fewer tokens are decoded, and the end says so (`benchmarks/drafters_plan.py`).

    tokens_per_pass   tokens that a forward of the target brings each sequence
    reached           [i]: share of these passes in which draft token i stands
    possible          tokens_per_pass T(1) / (T_draft + T(n + 1))
    share_of_possible speedup over plain decoding / possible, pair by pair
    possible_if_free  tokens_per_pass T(1) / T(n + 1)

T are bare forwards of the target at this batch, with nothing around them, timed amid the turns and in turn,
so that it does not matter which engine ran last (`benchmarks/kv_costs.py`): of one row for each sequence, and
of the n + 1 rows that a round has on average (between those of no draft and of a whole one), with the rows
beside drafts that lookahead has. T_draft is what drafting takes in a round, by the engine's clock: a drafter
that is slow makes little possible, and `draft_cost`, T_draft / T(1), shows it, as does how far `possible` is
below `possible_if_free`. So the share is what planning, sampling, committing and moving K/V leave of a
speedup. It may exceed 1: plain rounds pay for sampling and planning for each token. The worst of all,
`worst_share_of_possible`, is of those cells whose bounds tell the goal, 0.85, from 1; the others are named.

`memory_bytes` is what is there beside the target and its K/V, on the device that it is on: weights, packed
ones included, and K/V and hidden states for as many tokens as the target has room for. Families whose heads
were not trained yet (`scripts/train_demo_heads.py`) are left out and named.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json as json_format
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.draft_costs import DraftCost, all_heads, cost_headlines, cost_table, costs_of
from benchmarks.drafter_families import EVALUATION, FAMILIES, PLAIN, Family, Places, families_of
from benchmarks.drafter_texts import AT_ONCE, Prompts, choose_prompts
from benchmarks.drafters_cell import Bench
from benchmarks.drafters_plan import AS_IT_IS, BLOCK_SIZE, FULL, INFLATED, ON_GPU, QUICK, Cell, Plan, rest_of
from benchmarks.drafters_summary import GOAL, headlines_of, short_of, shortened_of, table_of
from benchmarks.drafters_tables import unsure_of
from benchmarks.inflate import inflate, layers_for_parameters
from benchmarks.kept_cells import KeptCells
from benchmarks.measured_engine import MeasuredEngine
from benchmarks.report import progress_bar, report_headlines, to_plain, write_results
from benchmarks.steady import SPARE_TOKENS
from benchmarks.tensor_memory import live_tensor_bytes
from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig
from specdec.model.devices import device_name, resolve_device
from training.corpus import load_corpus

_LARGEST_ROUND = 32
"""Rows of a sequence, rounded up: what graphs are recorded for."""
_COST_BATCHES = (2, 8)
"""Of `--costs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What engines run on."""

    num_threads: int
    device: str = "cpu"
    """`cpu` or `cuda`."""

    @classmethod
    def here(cls, device: str) -> Machine:
        """Return this one, with all of its cores.

        Raises:
            ResourceError: `device` (`auto`: a GPU where there is one) cannot be used.
        """
        return cls(num_threads=len(os.sched_getaffinity(0)), device=resolve_device(device).type)

    @property
    def settings(self) -> dict[str, str]:
        """What parts of a run have in common beside the plan; of a CPU nothing, as in files of before."""
        return {} if self.device == "cpu" else {"device": self.device}

    @property
    def gpu(self) -> str | None:
        """The name of what models run on; None: a CPU."""
        return None if self.device == "cpu" else device_name(torch.device(self.device))


def engine_config(
    plan: Plan,
    target: Path,
    speculative_config: Mapping[str, Any],
    machine: Machine,
    graph_rows: int | None = None,
) -> EngineConfig:
    """Return the configuration of an engine: all have caches of the same number of blocks.

    ``graph_rows``: on a GPU, most rows that CUDA graphs are recorded for; None: the engine's own default.
    """
    cache = {"block_size": BLOCK_SIZE, "num_blocks": plan.num_blocks}
    # Everything else that drafts is where the target is, and refuses to be told.
    compiled = {} if graph_rows is None else {"compile": {"cuda_graph_max_rows": graph_rows}}
    own_device = {"device": machine.device} if speculative_config["method"] == "draft_model" else {}
    return EngineConfig.model_validate(
        {
            "target": {
                "model": str(target),
                "dtype": "bfloat16",
                "device": machine.device,
                "max_model_len": plan.longest,
                "num_threads": machine.num_threads,
                **compiled,
            },
            "speculative_config": {
                "controller": "fixed",
                "num_threads": machine.num_threads,
                "cache": cache,
                **own_device,
                **speculative_config,
            },
            "cache": cache,
            "scheduler": {"max_num_seqs": max(plan.batches), "max_num_batched_tokens": 2048},
        }
    )


class Held:
    """An engine, and how much memory of its device came with it."""

    def __init__(self, config: EngineConfig) -> None:
        before = live_tensor_bytes()
        self.engine = MeasuredEngine(config)
        device = self.engine.target.runner.loaded.device.type
        self.num_bytes = live_tensor_bytes()[device] - before[device]

    def close(self) -> None:
        """Free it."""
        self.engine.close()


def training_of(family: Family, places: Places) -> dict[str, Any] | None:
    """Return what the making of its weights took, as it was noted beside them; None: it has none."""
    folder = family.folder(places)
    if folder is None:
        return None
    name = EVALUATION if family.needs == "heads" else "recipe.json"
    noted = json_format.loads((folder / name).read_text())
    kept = ("elapsed_s", "trained_tokens", "parameters", "acceptance")
    return {key: noted[key] for key in kept if key in noted}


@contextlib.contextmanager
def _places(plan: Plan, models: Path, heads: Path) -> Iterator[tuple[dict[str, Path], Places]]:
    """Make what has to be made: the inflated target, by name of the target, and the corpus."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        targets = {AS_IT_IS: models / "target"}
        if INFLATED in plan.targets:
            targets[INFLATED] = folder / "target"
            num_layers = layers_for_parameters(models / "target", plan.inflated_parameters)
            inflate(models / "target", targets[INFLATED], num_layers)
        corpus = folder / "corpus.jsonl"
        files = load_corpus().train[: plan.num_corpus_files]
        corpus.write_text("".join(json_format.dumps({"text": one.text}) + "\n" for one in files))
        yield (
            targets,
            Places(draft=models / "draft", heads=heads, corpus=corpus, index=folder / "index"),
        )


def _prompts(plan: Plan, models: Path, machine: Machine, kept: KeptCells) -> Prompts:
    """Return what is decoded; chosen once for all parts of a run."""
    key = {"prompts": plan.num_prompts}
    if not kept.is_kept(key):
        roomy = dataclasses.replace(plan, batches=(AT_ONCE,))
        config = engine_config(roomy, models / "target", {"method": PLAIN}, machine)
        with contextlib.closing(MeasuredEngine(config)) as plain:
            chosen = choose_prompts(
                plain.engine, models / "target", plan.num_prompts, plan.text_tokens + SPARE_TOKENS
            )
        kept.keep(key, {"chosen": chosen})
    return {
        name: [tuple(prompt) for prompt in prompts] for name, prompts in kept.result(key)["chosen"].items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Goes through cells, one engine after the other, until it is time to end."""

    plan: Plan
    places: Places
    prompts: Prompts
    machine: Machine
    kept: KeptCells
    progress: Progress
    end_s: float
    """By `time.monotonic`."""

    def target(self, path: Path, batch: int, cells: Sequence[Cell], families: Mapping[str, Family]) -> None:
        """Measure cells of one batch size on one target; those of one family follow each other."""
        if self._is_over():
            return
        open_it = partial(self._open, path, batch)
        with contextlib.closing(open_it({"method": PLAIN})) as plain:
            for name, own in itertools.groupby(cells, key=lambda cell: cell.family):
                if not self._is_over():
                    self._family(families[name], list(own), open_it, plain)

    def _family(
        self,
        family: Family,
        cells: Sequence[Cell],
        open_it: Callable[[Mapping[str, Any]], Held],
        plain: Held,
    ) -> None:
        task = self.progress.add_task(cells[0].name, total=len(cells) * (self.plan.pairs + 1))
        started_s = time.monotonic()
        with contextlib.closing(open_it(family.config(self.places))) as own:
            facts = {
                "memory_bytes": own.num_bytes - plain.num_bytes,
                "training": training_of(family, self.places),
                "gpu": self.machine.gpu,
            }
            bench = Bench(self.plan, family, plain.engine, own.engine, self.prompts)
            for cell in cells:
                if self._is_over():
                    break
                self.progress.update(task, description=cell.name)
                result = bench.cell(cell, partial(self.progress.advance, task))
                now_s = time.monotonic()
                self.kept.keep(cell, {**facts, **result, "taken_s": now_s - started_s})
                started_s = now_s
        self.progress.remove_task(task)

    def _open(self, path: Path, batch: int, speculative_config: Mapping[str, Any]) -> Held:
        largest = None if self.machine.gpu is None else batch * _LARGEST_ROUND
        return Held(engine_config(self.plan, path, speculative_config, self.machine, graph_rows=largest))

    def _is_over(self) -> bool:
        return time.monotonic() >= self.end_s


def measure(
    plan: Plan,
    families: Sequence[Family],
    models: Path,
    heads: Path,
    progress: Progress,
    kept: KeptCells,
    machine: Machine,
    end_s: float = math.inf,
) -> None:
    """Measure all cells of these families that are not kept, or those that there is time for."""
    left = [cell for cell in plan.cells(families) if not kept.is_kept(cell)]
    if not left or time.monotonic() >= end_s:
        return
    torch.set_num_threads(machine.num_threads)
    prompts = _prompts(plan, models, machine, kept)
    with _places(plan, models, heads) as (targets, places):
        by_name = {family.name: family.with_heads_of(places) for family in families}
        comparison = Comparison(
            plan=plan,
            places=places,
            prompts=prompts,
            machine=machine,
            kept=kept,
            progress=progress,
            end_s=end_s,
        )
        for (batch, target), cells in itertools.groupby(left, key=lambda cell: (cell.batch, cell.target)):
            comparison.target(targets[target], batch, list(cells), by_name)


def main(
    family: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeatable; without it, all: {', '.join(one.name for one in FAMILIES)}."),
    ] = None,
    quick: Annotated[
        bool, typer.Option(help="The inflated target, one request at a time, greedily.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write raw results here.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Go on with a run to the same --json FILE that was cut.")
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help="Begin no cell after so long; --resume goes on another time.")
    ] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/ and draft/.")] = Path("models/demo"),
    heads: Annotated[
        Path | None, typer.Option(help="Folder with a folder of heads for each family; MODELS/heads.")
    ] = None,
    costs: Annotated[
        bool, typer.Option(help="Only what drafting with heads costs; those not trained are random.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda; auto: a GPU where there is one.")] = "auto",
) -> None:
    """Measure all families of drafters on one target.

    With --family and --resume, families can be measured one after the other into the same FILE; what
    belongs to the others stays.

    Example: python -m benchmarks.drafters --quick --json runs/drafters.json
    """
    end_s = math.inf if minutes is None else time.monotonic() + 60 * minutes
    heads = heads or models / "heads"
    try:
        asked = families_of(tuple(family or ()))
    except ValueError as error:
        raise typer.BadParameter(f"--family: {error}") from error
    machine = _machine(device, is_for_costs=costs)
    plan = QUICK if quick else FULL if machine.gpu is None else ON_GPU
    places = Places(draft=models / "draft", heads=heads, corpus=Path(), index=Path())
    if costs:
        _report_costs(plan, [one for one in asked if _has_weights(one)], models, places, machine, json)
        return
    there = [one for one in FAMILIES if one.is_there(places)]
    missing = [one.name for one in FAMILIES if one not in there]
    wanted = [name for name in family or () if name in missing]
    if wanted:
        raise typer.BadParameter(
            f"--family {wanted[0]}: its heads are not in {heads}: scripts/train_demo_heads.py makes them"
        )
    kept = KeptCells(json, to_plain(plan) | machine.settings, resume=resume)
    with progress_bar() as progress:
        measure(plan, [one for one in asked if one in there], models, heads, progress, kept, machine, end_s)
    planned = plan.cells(there)
    cells = [kept.result(cell) for cell in planned if kept.is_kept(cell)]
    rest = rest_of(
        [cell for cell in planned if not kept.is_kept(cell)], {one["cell"]: one["taken_s"] for one in cells}
    )
    headlines, short = headlines_of(cells), short_of(cells)
    shortened = shortened_of(cells, plan.tokens_per_prompt)
    results = {
        "plan": plan,
        "cells": cells,
        "missing": missing,
        "short": short,
        "shortened": shortened,
        "rest": rest,
        "headlines": headlines,
    }
    write_results(json, results)
    if not rest.num_cells:
        kept.forget()
    console = Console(highlight=False, width=200)
    console.print(table_of(cells))
    for line in short:
        console.print(f"short of {GOAL}: {line}")
    for line in unsure_of(to_plain(cells)):
        console.print(f"share too uncertain: {line}")
    if shortened:
        console.print(f"cut short: {shortened}")
    for name in missing:
        console.print(f"not trained yet: {name}")
    if rest.num_cells:
        console.print(f"not measured yet: {rest}")
    report_headlines(headlines)


def _machine(device: str, *, is_for_costs: bool) -> Machine:
    """Return what is asked for.

    Raises:
        typer.BadParameter: it cannot be used, or not for this.
    """
    try:
        machine = Machine.here(device)
    except ResourceError as error:
        raise typer.BadParameter(f"--device: {error}") from error
    if is_for_costs and machine.device != "cpu":
        raise typer.BadParameter("--costs compares native calls, which CPUs have: write --device cpu")
    return machine


def _report_costs(
    plan: Plan,
    families: Sequence[Family],
    models: Path,
    places: Places,
    machine: Machine,
    json: Path | None,
) -> None:
    """Measure and show what drafting costs on the demo target."""
    torch.set_num_threads(machine.num_threads)
    target = models / "target"
    measured: list[DraftCost] = []
    with all_heads(families, target, places) as made, progress_bar() as progress:
        for family in progress.track(families):
            config_of = partial(engine_config, plan, target, machine=machine)
            measured += costs_of(family, made, _COST_BATCHES, config_of)
    headlines = cost_headlines(measured)
    write_results(json, {"costs": measured, "threads": machine.num_threads, "headlines": headlines})
    Console(highlight=False, width=120).print(cost_table(measured))
    report_headlines(headlines)


def _has_weights(family: Family) -> bool:
    """Whether every draft of it reads weights beside the target's, which is what costs are of."""
    is_asked_first = "lookup_first" not in family.settings
    return is_asked_first and (family.needs == "heads" or family.method == "mtp")


if __name__ == "__main__":
    typer.run(main)
