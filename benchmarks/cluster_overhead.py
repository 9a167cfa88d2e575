"""What the cluster adds to a round: the same pair behind channels and in this process, in turn.

    python -m benchmarks.cluster_overhead --json runs/overhead.json      # about five minutes
    python -m benchmarks.cluster_overhead --quick                        # under two

In both, requests go through asyncio streams; in the cluster they cross from this process to the coordinator
and the two workers and back. Greedy, bfloat16, k = 4. `added_ms_per_round` is the difference of the times
after the first token, per round, pair by pair; `added_ms_first_token` that of the times before it.
The engines' own counters say where it goes; draft and verification are what the engine waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.progress import Progress

from benchmarks.in_process import InProcess, engine_config
from benchmarks.inflate import inflate, layers_for_parameters
from benchmarks.report import Spread, progress_bar, report_headlines, write_results
from benchmarks.streams import StreamedRun, run_batch
from benchmarks.workload import read_prompts
from deploy.local_ray import RaySession
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.service import GenerationService

if TYPE_CHECKING:
    from benchmarks.cluster_path import ClusterPath

_SETTLE_S = 0.6
"""Longer than a coordinator takes to publish its counters."""
_PARTS = {
    "draft": "draft_time_seconds",
    "verify": "verify_time_seconds",
    "forward": "target_forward_time_seconds",
    "rest": "coordinator_time_seconds",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    targets: tuple[str, ...]
    batches: tuple[int, ...]
    num_pairs: int
    num_tokens: int
    first_prompt: int = 4
    k: int = 4
    num_threads: int = 2
    inflated_parameters: float = 100e6


FULL = Plan(targets=("demo", "inflated"), batches=(1, 8), num_pairs=24, num_tokens=96)
QUICK = Plan(targets=("inflated",), batches=(1,), num_pairs=16, num_tokens=48)


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompts both ways, one right after the other."""

    local: StreamedRun
    cluster: StreamedRun

    @property
    def added_ms_per_round(self) -> float:
        """After the first token."""
        added_s = self.cluster.decode_s - self.local.decode_s
        return 1e3 * added_s / max(1, self.local.num_outputs - 1)

    @property
    def added_ms_first_token(self) -> float:
        """Until every stream has its first token."""
        return 1e3 * (self.cluster.first_token_s - self.local.first_token_s)


def summarise(pairs: list[Pair], rounds: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Medians and extremes of pairs; `rounds` are milliseconds of a round by path and part."""
    num_outputs = pairs[-1].local.num_outputs
    return {
        "cluster_vs_inprocess": Spread(tuple(pair.local.seconds / pair.cluster.seconds for pair in pairs)),
        "added_ms_per_round": Spread(tuple(pair.added_ms_per_round for pair in pairs)),
        "added_ms_first_token": Spread(tuple(pair.added_ms_first_token for pair in pairs)),
        "ms_per_round": {
            "in_process": Spread(tuple(1e3 * pair.local.decode_s / (num_outputs - 1) for pair in pairs)),
            "cluster": Spread(tuple(1e3 * pair.cluster.decode_s / (num_outputs - 1) for pair in pairs)),
        },
        "parts_ms_per_round": rounds,
        "seconds": {
            "in_process": [pair.local.seconds for pair in pairs],
            "cluster": [pair.cluster.seconds for pair in pairs],
        },
        "num_outputs": num_outputs,
        "same_text": all(pair.local.token_ids == pair.cluster.token_ids for pair in pairs),
    }


def headlines(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers to watch."""
    numbers: dict[str, float] = {}
    for cell in results["cells"]:
        suffix = f"b{cell['batch']}" if cell["target"] == "inflated" else f"{cell['target']}_b{cell['batch']}"
        for name in ("cluster_vs_inprocess", "added_ms_per_round", "added_ms_first_token"):
            numbers[f"{name}_{suffix}"] = cell[name].median
    return numbers


class Bench:
    """Runs a plan target by target."""

    def __init__(self, plan: Plan, family: Path, folder: Path, progress: Progress) -> None:
        self._plan = plan
        self._family = family
        self._progress = progress
        self._targets = {"demo": family / "target", "inflated": folder / "target-inflated"}
        if "inflated" in plan.targets:
            num_layers = layers_for_parameters(self._targets["demo"], plan.inflated_parameters)
            with torch.inference_mode():
                inflate(self._targets["demo"], self._targets["inflated"], num_layers)

    def run(self) -> dict[str, Any]:
        """Measure everything."""
        cells: list[dict[str, Any]] = []
        with contextlib.ExitStack() as stack:
            session = RaySession(address=None, num_cpus=2, show_logs=False)
            stack.callback(session.close)
            session.open()
            for target in self._plan.targets:
                cells.extend(self._measure(target))
        return {"plan": self._plan, "cells": cells}

    def _measure(self, target: str) -> list[dict[str, Any]]:
        from benchmarks.cluster_path import ClusterPath  # Ray must run before it is imported

        plan = self._plan
        config = engine_config(
            self._targets[target],
            self._family / "draft",
            "bfloat16",
            max_num_seqs=max(plan.batches),
            num_draft_tokens=plan.k,
            num_threads=plan.num_threads,
        )
        with contextlib.ExitStack() as stack:
            pair = InProcess(config)
            local = AsyncEngine(pair.engine)
            stack.callback(local.close)
            path = ClusterPath(config)
            stack.callback(path.close)
            texts = read_prompts(self._family / "prompts.jsonl")[plan.first_prompt :][: max(plan.batches)]
            prompts = [tuple(pair.engine.tokenizer.encode(text)) for text in texts]
            return [
                {
                    "target": target,
                    "batch": batch,
                    **asyncio.run(self._compare(local, path, prompts[:batch], f"{target}, batch {batch}")),
                }
                for batch in plan.batches
            ]

    async def _compare(
        self, local: AsyncEngine, path: ClusterPath, prompts: list[tuple[int, ...]], title: str
    ) -> dict[str, Any]:
        """Both paths in turn; the first pairs are not counted."""
        plan = self._plan
        remote = await path.service()
        services: dict[str, GenerationService] = {"in_process": local, "cluster": remote}
        pairs: list[Pair] = []
        before: dict[str, Mapping[str, float]] = {}
        task = self._progress.add_task(title, total=plan.num_pairs + 2)
        for number in range(-2, plan.num_pairs):
            if number == 0:
                before = await _counters(services)
            runs: dict[str, StreamedRun] = {}
            for name in services if number % 2 else reversed(services):
                runs[name] = await run_batch(
                    services[name], prompts, plan.num_tokens, plan.k, f"{name}-{title}-{number}"
                )
            if number >= 0:
                pairs.append(Pair(runs["in_process"], runs["cluster"]))
            self._progress.advance(task)
        after = await _counters(services)
        await remote.close()
        return summarise(pairs, {name: _per_round(before[name], after[name]) for name in services})


async def _counters(services: Mapping[str, GenerationService]) -> dict[str, Mapping[str, float]]:
    await asyncio.sleep(_SETTLE_S)
    return {name: dict(await service.metrics()) for name, service in services.items()}


def _per_round(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of a mean round by part, prompts included."""
    num_rounds = after["rounds"] - before["rounds"]
    return {part: 1e3 * (after[name] - before[name]) / num_rounds for part, name in _PARTS.items()}


def main(
    quick: Annotated[bool, typer.Option(help="The inflated target at batch 1 only.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Measure what the cluster adds to a round and to the first token.

    Example: python -m benchmarks.cluster_overhead --quick
    """
    plan = QUICK if quick else FULL
    torch.set_num_threads(plan.num_threads)
    with (
        tempfile.TemporaryDirectory() as folder,
        progress_bar() as progress,
    ):
        results = Bench(plan, models, Path(folder), progress).run()
    numbers = headlines(results)
    write_results(json_file, {**results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
