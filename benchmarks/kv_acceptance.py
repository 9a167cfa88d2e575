"""How often drafts are accepted that attend to a part of the K/V, by policy, budget and length.

    python -m benchmarks.kv_acceptance --json benchmarks/results/kv-acceptance.json --plots docs/images
    python -m benchmarks.kv_acceptance --quick

The demo target in bf16 continues pieces of held-out files, sampled at temperature 1 with the same seeds for
every drafter: what it writes does not depend on who drafts, so all of them draft the same texts. Nothing here
is a time. `acceptance` is that of the first token of a draft, `tokens_per_round` that of k = 4.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.figures import new_figure, prepare_figures, save_figure
from benchmarks.in_process import batch_requests
from benchmarks.long_context_engines import BLOCK_SIZE, Drafter, LongEngine, Room
from benchmarks.long_texts import LongTexts
from benchmarks.report import progress_bar, report_headlines, write_results
from specdec.core.sampling_params import SamplingParams
from specdec.kv.selection import KvPolicyName
from specdec.proposers.config import Method

LONG = 3840
LARGER = 256
"""Budget of the solid lines over the length; dotted: the smallest one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is drafted."""

    drafters: tuple[Drafter, ...]
    lengths: tuple[int, ...]
    num_texts: int
    num_tokens: int = 128
    k: int = 4
    temperature: float = 1.0


def _drafters(budgets: Sequence[int | float], methods: Sequence[Method]) -> tuple[Drafter, ...]:
    """Return every policy that there is for each method, with every budget, and everything."""
    found = []
    for method in methods:
        for policy in get_args(KvPolicyName):
            found += [Drafter(method=method, policy=policy, budget=budget) for budget in budgets]
    distinct = dict.fromkeys(Drafter(method=one.method) if one.policy == "full" else one for one in found)
    return tuple(one for one in distinct if one.is_supported)


FULL = Plan(
    drafters=_drafters((64, 128, 256, 512, 1024, 0.05), ("self", "draft_model")),
    lengths=(512, 1024, 2048, LONG),
    num_texts=16,
)
QUICK = Plan(drafters=_drafters((64, 256), ("self",)), lengths=(512, LONG), num_texts=8, num_tokens=64)


def accepted(
    engine: LongEngine, drafter: Drafter, texts: LongTexts, length: int, plan: Plan
) -> dict[str, Any]:
    """Have every text continued; return what was accepted of the drafts, and a digest of what was written."""
    if drafter.policy != "full":
        engine.engine.set_kv_budget(drafter.budget)
    prompts = texts.prompts(plan.num_texts, length)
    params = SamplingParams(temperature=plan.temperature, max_tokens=plan.num_tokens, ignore_eos=True)
    engine.read(prompts)
    before = list(engine.engine.metrics().num_accepted_tokens_per_pos)
    record = engine.run(batch_requests(prompts, params, plan.k, f"{length}"))
    after = engine.engine.metrics().num_accepted_tokens_per_pos
    return {
        "drafter": drafter,
        "name": drafter.name,
        "length": length,
        "acceptance": (after[0] - (before[0] if before else 0)) / record.num_drafts,
        "tokens_per_round": record.mean_acceptance_length,
        "num_drafts": record.num_drafts,
        "text": _digest(record.token_ids),
    }


def _digest(texts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()[:16]


def measure(plan: Plan, models: Path, tick: Callable[[str, int], Callable[[], None]]) -> list[dict[str, Any]]:
    """Measure all drafters at all lengths; `tick` names what begins and returns what counts its steps."""
    num_threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    room = Room(
        max_num_seqs=plan.num_texts,
        num_tokens=plan.num_texts * (max(plan.lengths) + plan.num_tokens + 2 * BLOCK_SIZE),
        max_draft_tokens=plan.k,
        num_threads=num_threads,
    )
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "target"
        target.symlink_to((models / "target").absolute())
        for drafters in _by_engine(plan.drafters):
            name = drafters[0].name if len(drafters) == 1 else f"{drafters[0].method}, {drafters[0].policy}"
            advance = tick(name, len(plan.lengths) * len(drafters))
            with contextlib.closing(LongEngine(drafters[0], target, models / "draft", room)) as engine:
                texts = LongTexts.read(engine.engine.tokenizer)
                for length, drafter in itertools.product(plan.lengths, drafters):
                    results.append(accepted(engine, drafter, texts, length, plan))
                    advance()
    return results


def _by_engine(drafters: Sequence[Drafter]) -> list[list[Drafter]]:
    """Return who can use one engine: a target that drafts for itself has all K/V, and any budget of a policy.

    So it reads every text once for all of them, which is what takes longest. A draft model has freed what its
    budget left behind.
    """
    engines: dict[object, list[Drafter]] = {}
    for drafter in drafters:
        key = drafter.policy if drafter.method == "self" else drafter
        engines.setdefault(key, []).append(drafter)
    return list(engines.values())


def headlines_of(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the acceptance of self-speculation at the longest texts, and how far texts agree."""
    longest = max(cell["length"] for cell in cells)
    headlines = {}
    for cell in cells:
        drafter: Drafter = cell["drafter"]
        if drafter.policy != "full" and (drafter.method, drafter.budget, cell["length"]) == (
            "self",
            256,
            longest,
        ):
            headlines[f"acceptance_{drafter.policy}_256_at_{longest}"] = cell["acceptance"]
    lengths = {cell["length"] for cell in cells}
    same = sum(len({cell["text"] for cell in cells if cell["length"] == length}) == 1 for length in lengths)
    return {**headlines, "share_of_lengths_with_one_text": same / len(lengths)}


def draw(cells: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw acceptance over the budget at the longest texts, and over the length for two budgets."""
    figure, (left, right) = new_figure(2)
    longest = max(cell["length"] for cell in cells)
    series: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for cell in cells:
        drafter: Drafter = cell["drafter"]
        if cell["length"] == longest and drafter.policy != "full" and isinstance(drafter.budget, int):
            who = (drafter.method, drafter.policy)
            series.setdefault(who, []).append((drafter.budget, cell["acceptance"]))
    for (method, policy), points in series.items():
        left.plot(*zip(*sorted(points), strict=True), "o-", label=f"{method}, {policy}")
    left.set(xscale="log", xlabel=f"budget (tokens), {longest} cached", ylabel="acceptance", ylim=(0, 1))
    left.legend(frameon=False, fontsize=7)
    smallest = min(one.budget for one in (cell["drafter"] for cell in cells) if isinstance(one.budget, int))
    shown = {
        cell["name"]: cell["drafter"]
        for cell in cells
        if cell["drafter"].policy != "full" and cell["drafter"].budget in (smallest, LARGER)
    }
    for name, drafter in shown.items():
        own = sorted((cell["length"], cell["acceptance"]) for cell in cells if cell["name"] == name)
        line = "o-" if drafter.budget == LARGER else "o:"
        color = f"C{list(series).index((drafter.method, drafter.policy))}"
        right.plot(*zip(*own, strict=True), line, label=name, color=color)
    lengths = sorted({cell["length"] for cell in cells})
    right.set(xscale="log", xlabel="cached tokens", ylim=(0, 1))
    right.set_xticks(lengths, [str(length) for length in lengths])
    right.minorticks_off()
    right.legend(frameon=False, fontsize=7, ncols=2)
    return save_figure(figure, path)


def table_of(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out acceptance, a row for each drafter and a column for each length."""
    lengths = sorted({cell["length"] for cell in cells})
    table = Table("drafter", *(f"{length}" for length in lengths))
    for name in dict.fromkeys(cell["name"] for cell in cells):
        own = {cell["length"]: cell for cell in cells if cell["name"] == name}
        table.add_row(
            name,
            *(f"{own[one]['acceptance']:.3f} ({own[one]['tokens_per_round']:.2f})" for one in lengths),
        )
    return table


def main(
    quick: Annotated[bool, typer.Option(help="Two budgets, two lengths.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write raw results here.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for a picture.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/ and draft/.")] = Path("models/demo"),
) -> None:
    """Count what is accepted of sparse-K/V drafts.

    Example: python -m benchmarks.kv_acceptance --quick --json runs/kv-acceptance.json
    """
    if plots is not None:
        prepare_figures()
    plan = QUICK if quick else FULL
    with progress_bar() as progress:

        def tick(name: str, total: int) -> Callable[[], None]:
            return partial(progress.advance, progress.add_task(name, total=total))

        cells = measure(plan, models, tick)
    headlines = headlines_of(cells)
    write_results(json, {"plan": plan, "cells": cells, "headlines": headlines})
    if plots is not None:
        draw(cells, plots / "kv-acceptance.svg")
    Console(highlight=False, width=160).print(table_of(cells))
    report_headlines(headlines)


if __name__ == "__main__":
    typer.run(main)
