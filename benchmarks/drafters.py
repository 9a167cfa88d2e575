"""Every family of drafters side by side, on one target, in one engine, beside plain decoding.

    python -m benchmarks.drafters --json benchmarks/results/drafters.json             # some hours
    python -m benchmarks.drafters --json benchmarks/results/drafters.json --resume    # the rest of a run
    python -m benchmarks.drafters --family eagle3 --family medusa                     # some of them
    python -m benchmarks.drafters --quick                                             # some minutes
    python -m benchmarks.drafters --costs                                             # drafting alone

The target is the demo target in bf16, as it is and made as costly as 100 million parameters
(`benchmarks.inflate`: the same function, so that drafts stand as often). A cell is a target, a family, a
batch size and a temperature. In it every draft length of the family is tried for a moment on all classes of
text together, and the best of them is measured again: class by class, in turn (ABBA) with plain decoding by
an engine of its own that has no drafter. Both decode as many tokens of the same texts, drawn with the same
seeds; only decoding counts, prompts are read before. Numbers over classes are geometric means.

    tokens_per_pass   tokens that a forward of the target brings each sequence
    reached           [i]: share of these passes in which draft token i stands
    possible          tokens_per_pass T(1) / (T_draft + T(n + 1))
    share_of_possible speedup over plain decoding / possible, pair by pair
    possible_if_free  tokens_per_pass T(1) / T(n + 1)

T are bare forwards of the target at this batch, with nothing around them, timed amid the turns: of one row
for each sequence, and of the n + 1 rows that a round has on average (between those of no draft and of a whole
one), with the rows beside drafts that lookahead has. T_draft is what drafting takes in a round, by the
engine's clock: a drafter that is slow makes little possible, and `draft_cost`, T_draft / T(1), shows it, as
does how far `possible` is below `possible_if_free`. So the share is what planning, sampling, committing and
moving K/V leave of a speedup. It may exceed 1: plain rounds pay for sampling and planning for each token.

`memory_bytes` is what is there beside the target and its K/V: weights, packed ones included, and K/V and
hidden states for as many tokens as the target has room for. Families whose heads were not trained yet
(`scripts/train_demo_heads.py`) are left out and named.
"""

from __future__ import annotations

import contextlib
import itertools
import json as json_format
import os
import tempfile
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
from benchmarks.drafter_families import FAMILIES, PLAIN, Family, Places, families_of
from benchmarks.drafter_texts import Prompts, choose_prompts, mixed
from benchmarks.drafters_summary import (
    AS_IT_IS,
    GOAL,
    INFLATED,
    Cell,
    Runs,
    headlines_of,
    short_of,
    summarise,
    table_of,
)
from benchmarks.inflate import inflate, layers_for_parameters
from benchmarks.kept_cells import KeptCells
from benchmarks.kv_costs import Step, forward_seconds
from benchmarks.measured_engine import MeasuredEngine
from benchmarks.report import progress_bar, report_headlines, to_plain, write_results
from benchmarks.steady import SPARE_TOKENS, Batch, Counted
from benchmarks.tensor_memory import live_tensor_bytes
from benchmarks.turns import Turns
from specdec.engine.config import EngineConfig
from specdec.kv.block_table import num_blocks_for
from specdec.scheduling.speculation.controller import FixedController
from training.corpus import load_corpus
from training.prompts import MAX_TOKENS

_BLOCK_SIZE = 16
_COST_REPEATS = 3
_COST_BATCHES = (2, 8)
"""Of `--costs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and on how much."""

    targets: tuple[str, ...]
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    pairs: int
    num_prompts: int
    """Of each class."""
    prompts_per_turn: int
    """Of each class, at least: where batches are smaller, they come one after the other."""
    tokens_per_prompt: int
    """That are counted, on average."""
    try_tokens: int
    """The same, where a draft length is tried."""
    text_tokens: int = 128
    """Longest text behind a prompt."""
    num_corpus_files: int | None = None
    """Of the corpus that retrieval looks up in; None: all that the target was trained on."""
    inflated_parameters: float = 100e6

    def cells(self, families: Sequence[Family]) -> list[Cell]:
        """Return the cells of some families, those of one engine together."""
        return [
            Cell(target=target, family=family.name, batch=batch, temperature=temperature)
            for target, family, batch, temperature in itertools.product(
                self.targets, families, self.batches, self.temperatures
            )
        ]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, a draft behind it included."""
        return MAX_TOKENS + self.text_tokens + SPARE_TOKENS + 3 * _BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        """Blocks of every K/V cache."""
        return 2 + (1 + max(self.batches)) * num_blocks_for(self.longest, _BLOCK_SIZE)


FULL = Plan(
    targets=(AS_IT_IS, INFLATED),
    batches=(1, 8, 32),
    temperatures=(0.0, 0.7),
    pairs=4,
    num_prompts=32,
    prompts_per_turn=4,
    tokens_per_prompt=48,
    try_tokens=16,
)
QUICK = Plan(
    targets=(INFLATED,),
    batches=(1,),
    temperatures=(0.0,),
    pairs=2,
    num_prompts=4,
    prompts_per_turn=2,
    tokens_per_prompt=24,
    try_tokens=8,
    num_corpus_files=60,
    inflated_parameters=26e6,
)


class Bench:
    """Measures cells of one family on one target."""

    def __init__(
        self, plan: Plan, family: Family, plain: MeasuredEngine, engine: MeasuredEngine, prompts: Prompts
    ) -> None:
        self._plan = plan
        self._family = family
        self._plain = plain
        self._engine = engine
        self._prompts = prompts

    def cell(self, cell: Cell, tick: Callable[[], None]) -> dict[str, Any]:
        """Measure one situation."""
        tried = self._try(cell)
        best = max(tried, key=lambda length: tried[length])
        tick()
        runs = Runs()
        for number in range(self._plan.pairs):
            for name, prompts in self._prompts.items():
                batches = self._batches(cell, prompts, number)
                runs.turns.setdefault(name, Turns()).take(
                    {
                        "plain": partial(self._decode, self._plain, batches, 0),
                        "drafted": partial(self._decode, self._engine, batches, best),
                    }
                )
            runs.parts.append(self._parts(cell, best))
            tick()
        return {"tried": tried, "k": best, **summarise(cell.batch, best, runs)}

    def _try(self, cell: Cell) -> dict[int, float]:
        """Return the rate of every draft length; the first is decoded once more before."""
        batch = mixed(self._prompts, max(cell.batch, len(self._prompts)))
        batches = self._cut(cell, batch, 0)
        counted = {length: Counted() for length in self._family.lengths}
        self._decode(self._plain, batches, 0, self._plan.try_tokens)
        self._decode(self._engine, batches, self._family.lengths[0], self._plan.try_tokens)
        for length in (*counted, *reversed(counted)):
            counted[length].add(self._decode(self._engine, batches, length, self._plan.try_tokens))
        return {length: one.rate for length, one in counted.items()}

    def _batches(self, cell: Cell, prompts: Sequence[tuple[int, ...]], number: int) -> list[Batch]:
        """Return what is decoded in a pair: in each of them other texts, from the first after the last."""
        each = max(cell.batch, self._plan.prompts_per_turn)
        first = number * each % len(prompts)
        return self._cut(cell, list(itertools.islice(itertools.cycle(prompts), first, first + each)), number)

    def _cut(self, cell: Cell, prompts: Sequence[tuple[int, ...]], seed: int) -> list[Batch]:
        return [
            Batch(
                prompts=prompts[first : first + cell.batch],
                num_tokens=self._plan.text_tokens,
                temperature=cell.temperature,
                seed=seed * len(prompts) + first,
            )
            for first in range(0, len(prompts), cell.batch)
        ]

    def _decode(
        self,
        engine: MeasuredEngine,
        batches: Sequence[Batch],
        num_draft_tokens: int,
        num_tokens: int | None = None,
    ) -> Counted:
        num_tokens = num_tokens or self._plan.tokens_per_prompt
        total = Counted()
        for batch in batches:
            controller = FixedController(num_draft_tokens)
            total.add(engine.decode_tokens(batch, controller, num_tokens * len(batch.prompts)))
        return total

    def _parts(self, cell: Cell, num_draft_tokens: int) -> dict[str, float]:
        """Time the bare forwards at the middle of what is decoded."""
        lengths = [len(prompt) for prompts in self._prompts.values() for prompt in prompts]
        context = sum(lengths) // len(lengths) + self._plan.tokens_per_prompt // 2
        step = partial(Step, batch=cell.batch, context=context)
        plain, own = self._plain.target.runner, self._engine.target.runner
        rows = 1 + self._engine.proposer.capabilities.num_rows_beside
        plain_s = forward_seconds(plain, step(rows=1), _COST_REPEATS)
        return {
            "plain_s": plain_s,
            "undrafted_s": plain_s if rows == 1 else forward_seconds(own, step(rows=rows), _COST_REPEATS),
            "verify_s": forward_seconds(own, step(rows=rows + num_draft_tokens), _COST_REPEATS),
        }


def engine_config(
    plan: Plan, target: Path, speculative_config: Mapping[str, Any], num_threads: int
) -> EngineConfig:
    """Return the configuration of an engine: all have caches of the same number of blocks."""
    cache = {"block_size": _BLOCK_SIZE, "num_blocks": plan.num_blocks}
    return EngineConfig.model_validate(
        {
            "target": {
                "model": str(target),
                "dtype": "bfloat16",
                "max_model_len": plan.longest,
                "num_threads": num_threads,
            },
            "speculative_config": {
                "controller": "fixed",
                "num_threads": num_threads,
                "cache": cache,
                **speculative_config,
            },
            "cache": cache,
            "scheduler": {"max_num_seqs": max(plan.batches), "max_num_batched_tokens": 2048},
        }
    )


class Held:
    """An engine, and how much memory came with it."""

    def __init__(self, config: EngineConfig) -> None:
        before = live_tensor_bytes()
        self.engine = MeasuredEngine(config)
        self.num_bytes = live_tensor_bytes() - before

    def close(self) -> None:
        """Free it."""
        self.engine.close()


def training_of(family: Family, places: Places) -> dict[str, Any] | None:
    """Return what the making of its weights took, as it was noted beside them; None: it has none."""
    folder = family.folder(places)
    if folder is None:
        return None
    name = "acceptance.json" if family.needs == "heads" else "recipe.json"
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


def _prompts(plan: Plan, models: Path, num_threads: int, kept: KeptCells) -> Prompts:
    """Return what is decoded; chosen once for all parts of a run."""
    key = {"prompts": plan.num_prompts}
    if not kept.is_kept(key):
        config = engine_config(plan, models / "target", {"method": PLAIN}, num_threads)
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
    """Goes through cells, one engine after the other."""

    plan: Plan
    places: Places
    prompts: Prompts
    num_threads: int
    kept: KeptCells
    progress: Progress

    def target(self, path: Path, left: Mapping[Family, Sequence[Cell]]) -> None:
        """Measure cells on one target."""
        with contextlib.closing(self._open(path, {"method": PLAIN})) as plain:
            for family, cells in left.items():
                self._family(family, cells, path, plain)

    def _family(self, family: Family, cells: Sequence[Cell], path: Path, plain: Held) -> None:
        task = self.progress.add_task(cells[0].name, total=len(cells) * (self.plan.pairs + 1))
        with contextlib.closing(self._open(path, family.config(self.places))) as own:
            facts = {
                "memory_bytes": own.num_bytes - plain.num_bytes,
                "training": training_of(family, self.places),
            }
            bench = Bench(self.plan, family, plain.engine, own.engine, self.prompts)
            for cell in cells:
                self.progress.update(task, description=cell.name)
                result = bench.cell(cell, partial(self.progress.advance, task))
                self.kept.keep(cell, {**facts, **result})

    def _open(self, path: Path, speculative_config: Mapping[str, Any]) -> Held:
        return Held(engine_config(self.plan, path, speculative_config, self.num_threads))


def measure(
    plan: Plan, families: Sequence[Family], models: Path, heads: Path, progress: Progress, kept: KeptCells
) -> None:
    """Measure all cells of these families that are not kept."""
    left: dict[str, dict[Family, list[Cell]]] = {}
    for family in families:
        for cell in plan.cells([family]):
            if not kept.is_kept(cell):
                left.setdefault(cell.target, {}).setdefault(family, []).append(cell)
    if not left:
        return
    num_threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    prompts = _prompts(plan, models, num_threads, kept)
    with _places(plan, models, heads) as (targets, places):
        comparison = Comparison(
            plan=plan, places=places, prompts=prompts, num_threads=num_threads, kept=kept, progress=progress
        )
        for target in plan.targets:
            if target in left:
                comparison.target(targets[target], left[target])


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
    models: Annotated[Path, typer.Option(help="Folder with target/ and draft/.")] = Path("models/demo"),
    heads: Annotated[
        Path | None, typer.Option(help="Folder with a folder of heads for each family; MODELS/heads.")
    ] = None,
    costs: Annotated[
        bool, typer.Option(help="Only what drafting with heads costs; those not trained are random.")
    ] = False,
) -> None:
    """Measure all families of drafters on one target.

    With --family and --resume, families can be measured one after the other into the same FILE; what
    belongs to the others stays.

    Example: python -m benchmarks.drafters --quick --json runs/drafters.json
    """
    plan = QUICK if quick else FULL
    heads = heads or models / "heads"
    try:
        asked = families_of(tuple(family or ()))
    except ValueError as error:
        raise typer.BadParameter(f"--family: {error}") from error
    places = Places(draft=models / "draft", heads=heads, corpus=Path(), index=Path())
    if costs:
        _report_costs(plan, [one for one in asked if _has_weights(one)], models, places, json)
        return
    missing = [one.name for one in asked if not _is_there(one, places)]
    if family and missing:
        raise typer.BadParameter(
            f"--family {missing[0]}: its heads are not in {heads}: scripts/train_demo_heads.py makes them"
        )
    kept = KeptCells(json, to_plain(plan), resume=resume)
    with progress_bar() as progress:
        measure(plan, [one for one in asked if one.name not in missing], models, heads, progress, kept)
    there = [one for one in FAMILIES if _is_there(one, places)]
    cells = [kept.result(cell) for cell in plan.cells(there) if kept.is_kept(cell)]
    headlines, short = headlines_of(cells), short_of(cells)
    results = {"plan": plan, "cells": cells, "missing": missing, "short": short, "headlines": headlines}
    write_results(json, results)
    if len(cells) == len(plan.cells(there)):
        kept.forget()
    console = Console(highlight=False, width=200)
    console.print(table_of(cells))
    for line in short:
        console.print(f"short of {GOAL}: {line}")
    for name in missing:
        console.print(f"not trained yet: {name}")
    report_headlines(headlines)


def _report_costs(
    plan: Plan, families: Sequence[Family], models: Path, places: Places, json: Path | None
) -> None:
    """Measure and show what drafting costs on the demo target."""
    num_threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    target = models / "target"
    measured: list[DraftCost] = []
    with all_heads(families, target, places) as made, progress_bar() as progress:
        for family in progress.track(families):
            config_of = partial(engine_config, plan, target, num_threads=num_threads)
            measured += costs_of(family, made, _COST_BATCHES, config_of)
    headlines = cost_headlines(measured)
    write_results(json, {"costs": measured, "threads": num_threads, "headlines": headlines})
    Console(highlight=False, width=120).print(cost_table(measured))
    report_headlines(headlines)


def _has_weights(family: Family) -> bool:
    return family.needs == "heads" or family.name == "mtp"


def _is_there(family: Family, places: Places) -> bool:
    folder = family.folder(places)
    return folder is None or (folder / "config.json").is_file()


if __name__ == "__main__":
    typer.run(main)
