"""Plain and speculative decoding against transformers, and the cluster path against this process.

    python -m benchmarks.offline --json benchmarks/results/offline.json      # everything; about half an hour
    python -m benchmarks.offline --quick                                     # under five minutes

Everything is greedy, so that all systems write the same text; every comparison is paired (systems in turn,
in one process, ABBA). Texts that loop, by the target's own greedy continuation, are measured apart.

Speedups are of whole runs, prompts included. `share_of_possible_speedup` alone is of the decoding after the
first token, since what it is compared with, bare forwards of 1 and k + 1 rows, says nothing about prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks.huggingface import HuggingFaceGenerator
from benchmarks.in_process import InProcess, RunRecord, bare_forward_s, engine_config, merge
from benchmarks.inflate import inflate, layers_for_parameters
from benchmarks.report import Paired, progress_bar, report_headlines, run_paired, write_results
from benchmarks.streams import run_batch
from benchmarks.workload import Workload, read_prompts, split_by_looping
from deploy.local_ray import RaySession
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.service import GenerationService

if TYPE_CHECKING:
    from benchmarks.cluster_path import ClusterPath

CLASSIFY_TOKENS = 256
SPREAD_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    targets: tuple[str, ...]
    dtypes: tuple[str, ...]
    batches: tuple[int, ...]
    inflated_batches: tuple[int, ...]
    workloads: tuple[str, ...]
    num_tokens: int
    k: int
    rounds: int
    num_threads: int
    num_classified: int
    cluster_batches: tuple[int, ...]
    cluster_rounds: int
    inflated_parameters: float
    inflated_rounds: tuple[int, ...]
    """Measured rounds of the inflated target by batch size: its slow peers take most of the time."""

    @property
    def num_cells(self) -> int:
        """Measured combinations."""
        num_batches = sum(len(self.batches_of(target)) for target in self.targets)
        return num_batches * len(self.dtypes) * len(self.workloads)

    def batches_of(self, target: str) -> tuple[int, ...]:
        """Batch sizes of one target."""
        return self.inflated_batches if target == "inflated" else self.batches

    def rounds_of(self, target: str, batch: int) -> int:
        """Measured rounds of one cell."""
        if target == "inflated":
            return self.inflated_rounds[self.inflated_batches.index(batch)]
        return self.rounds


FULL = Plan(
    targets=("demo", "inflated"),
    dtypes=("float32", "bfloat16"),
    batches=(1, 8, 32),
    inflated_batches=(1, 8, 32),
    workloads=("non_looping", "looping"),
    num_tokens=128,
    k=4,
    rounds=5,
    num_threads=2,
    num_classified=96,
    cluster_batches=(1, 8),
    cluster_rounds=9,
    inflated_parameters=100e6,
    inflated_rounds=(5, 3, 2),
)
QUICK = Plan(
    targets=("demo", "inflated"),
    dtypes=("bfloat16",),
    batches=(1, 8),
    inflated_batches=(1,),
    workloads=("non_looping",),
    num_tokens=128,
    k=4,
    rounds=3,
    num_threads=2,
    num_classified=32,
    cluster_batches=(1,),
    cluster_rounds=9,
    inflated_parameters=100e6,
    inflated_rounds=(5,),
)


class Bench:
    """Runs a plan cell by cell."""

    def __init__(self, plan: Plan, family: Path, folder: Path, progress: Progress) -> None:
        self._plan = plan
        self._draft = family / "draft"
        self._prompts = family / "prompts.jsonl"
        self._progress = progress
        self._targets = {"demo": family / "target", "inflated": folder / "target-inflated"}
        with torch.inference_mode():
            inflate(
                self._targets["demo"],
                self._targets["inflated"],
                layers_for_parameters(self._targets["demo"], plan.inflated_parameters),
            )

    def run(self) -> dict[str, Any]:
        """Measure everything."""
        workloads = self._classify()
        cells: list[dict[str, Any]] = []
        clusters: list[dict[str, Any]] = []
        task = self._progress.add_task("cells", total=self._plan.num_cells)
        for target, dtype in product(self._plan.targets, self._plan.dtypes):
            pair = self._open(target, dtype)
            peer = HuggingFaceGenerator(self._targets[target], SPREAD_DTYPE[dtype], self._draft)
            for batch, name in product(self._plan.batches_of(target), self._plan.workloads):
                rounds = self._plan.rounds_of(target, batch)
                cell = self._cell(pair, peer, workloads[name].batches(batch, rounds + 1))
                cells.append({"target": target, "dtype": dtype, "batch": batch, "workload": name, **cell})
                self._progress.advance(task)
            if target == "inflated" and dtype == "bfloat16":
                clusters = self._cluster(pair, workloads["non_looping"])
            else:
                pair.close()
        return {"plan": self._plan, "workloads": _sizes(workloads), "cells": cells, "cluster": clusters}

    def _open(self, target: str, dtype: str) -> InProcess:
        return InProcess(self._config(target, dtype))

    def _config(self, target: str, dtype: str) -> Any:
        return engine_config(
            self._targets[target],
            self._draft,
            dtype,
            max_num_seqs=max(self._plan.batches),
            num_draft_tokens=self._plan.k,
            num_threads=self._plan.num_threads,
        )

    def _classify(self) -> dict[str, Workload]:
        """Split the held-out prompts by whether the target's greedy continuation loops."""
        pair = self._open("demo", "float32")
        texts = read_prompts(self._prompts)[: self._plan.num_classified]
        prompts = [tuple(pair.engine.tokenizer.encode(text)) for text in texts]
        record = pair.run(prompts, CLASSIFY_TOKENS, self._plan.k)
        pair.close()
        workloads = split_by_looping(prompts, record.token_ids)
        return {workload.name: workload for workload in workloads}

    def _cell(
        self, pair: InProcess, peer: HuggingFaceGenerator, batches: Sequence[list[tuple[int, ...]]]
    ) -> dict[str, Any]:
        """All systems on one batch of prompts per round; the first is not measured."""
        plan = self._plan
        records: dict[str, list[RunRecord]] = {"plain": [], "speculative": []}
        texts: dict[str, list[list[list[int]]]] = {"huggingface": [], "assisted": []}
        bare: list[dict[str, float]] = []

        def ours(name: str, k: int) -> None:
            prompts = batches[len(records[name])]
            records[name].append(pair.run(prompts, plan.num_tokens, k))

        def theirs() -> None:
            prompts = batches[len(texts["huggingface"])]
            texts["huggingface"].append(peer.generate(prompts, plan.num_tokens))

        def theirs_assisted() -> None:
            prompts = batches[len(texts["assisted"])]
            texts["assisted"].append(peer.generate_assisted(prompts, plan.num_tokens, plan.k))

        variants: dict[str, Callable[[], None]] = {
            "plain": partial(ours, "plain", 0),
            # Amid the others: what is measured at another time is measured on another machine.
            "bare": lambda: bare.append(self._bare_forwards(pair, batches[len(bare)])),
            "speculative": partial(ours, "speculative", plan.k),
            "huggingface": theirs,
        }
        if len(batches[0]) == 1:
            variants["assisted"] = theirs_assisted
        task = self._progress.add_task(f"batch {len(batches[0])}", total=len(variants) * len(batches))
        paired = run_paired(variants, len(batches) - 1, lambda: self._progress.advance(task))
        self._progress.remove_task(task)
        del paired.seconds["bare"]
        medians = {name: statistics.median(times[name] for times in bare[1:]) for name in bare[0]}
        return _summarise(paired, records, texts, medians, plan)

    def _bare_forwards(self, pair: InProcess, prompts: list[tuple[int, ...]]) -> dict[str, float]:
        """Median seconds of the bare compiled forwards at this batch, in the middle of the generation."""
        plan = self._plan
        context = round(sum(map(len, prompts)) / len(prompts)) + plan.num_tokens // 2
        measure = partial(bare_forward_s, batch=len(prompts), context=context, repeats=20)
        return {
            "t_plain_s": measure(pair.target_runner, rows=1),
            "t_verify_s": measure(pair.target_runner, rows=plan.k + 1),
            "t_draft_s": measure(pair.draft_runner, rows=1),
        }

    def _cluster(self, pair: InProcess, workload: Workload) -> list[dict[str, Any]]:
        """The cluster path against an async engine in this process, speculative, paired."""
        with contextlib.ExitStack() as stack:
            local = AsyncEngine(pair.engine)
            stack.callback(local.close)
            session = RaySession(address=None, num_cpus=2, show_logs=False)
            stack.callback(session.close)
            session.open()
            from benchmarks.cluster_path import ClusterPath  # Ray must run before it is imported

            path = ClusterPath(self._config("inflated", "bfloat16"))
            stack.callback(path.close)
            results = []
            for batch in self._plan.cluster_batches:
                batches = workload.batches(batch, self._plan.cluster_rounds + 1)
                results.append(asyncio.run(self._compare(local, path, batches)))
            return results

    async def _compare(
        self, local: AsyncEngine, path: ClusterPath, batches: Sequence[list[tuple[int, ...]]]
    ) -> dict[str, Any]:
        """Both paths in turn, on the same prompts in each pair; the first pair is not counted."""
        plan = self._plan
        remote = await path.service()
        services: dict[str, GenerationService] = {"in_process": local, "cluster": remote}
        paired = Paired({name: [] for name in services})
        texts: dict[str, list[tuple[tuple[int, ...], ...]]] = {name: [] for name in services}
        size = len(batches[0])
        task = self._progress.add_task(f"cluster path, batch {size}", total=len(batches))
        for number, prompts in enumerate(batches):
            for name in services if number % 2 else reversed(services):
                run = await run_batch(
                    services[name], prompts, plan.num_tokens, plan.k, f"{name}-{size}-{number}"
                )
                texts[name].append(run.token_ids)
                if number:
                    paired.seconds[name].append(run.seconds)
            self._progress.advance(task)
        await remote.close()
        return {
            "batch": size,
            "cluster_vs_inprocess": paired.ratio("in_process", "cluster"),
            "seconds": paired,
            "same_text": _share_equal(texts["in_process"], texts["cluster"]),
        }


def _summarise(
    paired: Paired,
    records: dict[str, list[RunRecord]],
    texts: dict[str, list[list[list[int]]]],
    bare: dict[str, float],
    plan: Plan,
) -> dict[str, Any]:
    plain, speculative = (merge(records[name][1:]) for name in ("plain", "speculative"))
    num_tokens = len(records["plain"][0].token_ids) * plan.num_tokens
    ours = [run.token_ids for run in records["plain"]]
    decode = Paired({name: [run.decode_s for run in runs[1:]] for name, runs in records.items()})
    speedup, decode_speedup = paired.ratio("plain", "speculative"), decode.ratio("plain", "speculative")
    tokens_per_round = speculative.mean_acceptance_length
    ratio_of_costs = (plan.k * bare["t_draft_s"] + bare["t_verify_s"]) / bare["t_plain_s"]
    return {
        "tokens_per_s": {name: num_tokens / paired.spread(name).median for name in paired.seconds},
        "seconds": paired,
        "plain_vs_hf": paired.ratio("huggingface", "plain"),
        "speculative_speedup": speedup,
        "decode_seconds": decode,
        "decode_speedup": decode_speedup,
        "speculative_vs_hf": paired.ratio("huggingface", "speculative"),
        "speculative_vs_hf_assisted": (
            paired.ratio("assisted", "speculative") if "assisted" in paired.seconds else None
        ),
        "hf_assisted_speedup": (
            paired.ratio("huggingface", "assisted") if "assisted" in paired.seconds else None
        ),
        "mean_acceptance_length": tokens_per_round,
        "rounds": {"plain": plain.summary(), "speculative": speculative.summary()},
        "bare_forward_ms": {name.removesuffix("_s"): 1e3 * value for name, value in bare.items()},
        "possible_speedup": tokens_per_round / ratio_of_costs,
        "share_of_possible_speedup": decode_speedup.median * ratio_of_costs / tokens_per_round,
        "share_with_prefill": speedup.median * ratio_of_costs / tokens_per_round,
        "same_text": {
            "speculative": _share_equal([run.token_ids for run in records["speculative"]], ours),
            **{name: _share_equal(theirs, ours) for name, theirs in texts.items() if theirs},
        },
    }


def _share_equal(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """Share of the texts, over all batches, that are equal token for token."""
    pairs = [zip(mine, other, strict=True) for mine, other in zip(ours, theirs, strict=True)]
    equal = [tuple(a) == tuple(b) for pair in pairs for a, b in pair]
    return sum(equal) / len(equal)


def _sizes(workloads: dict[str, Workload]) -> dict[str, int]:
    return {name: len(workload.prompts) for name, workload in workloads.items()}


def headlines(results: dict[str, Any]) -> dict[str, float]:
    """The numbers to watch: bfloat16, texts that do not loop."""
    cells = {
        (cell["target"], cell["batch"]): cell
        for cell in results["cells"]
        if cell["dtype"] == "bfloat16" and cell["workload"] == "non_looping"
    }
    cluster = {entry["batch"]: entry for entry in results["cluster"]}
    return {
        "plain_vs_hf_b1": cells["demo", 1]["plain_vs_hf"].median,
        "plain_vs_hf_b8": cells["demo", 8]["plain_vs_hf"].median,
        "speculative_speedup_inflated_b1": cells["inflated", 1]["speculative_speedup"].median,
        "share_of_possible_speedup": cells["inflated", 1]["share_of_possible_speedup"],
        "cluster_vs_inprocess": cluster[1]["cluster_vs_inprocess"].median,
    }


def main(
    quick: Annotated[bool, typer.Option(help="A few cells, under five minutes on two cores.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Measure plain and speculative decoding against transformers, and the cluster against this process.

    Example: python -m benchmarks.offline --quick --json runs/offline.json
    """
    plan = QUICK if quick else FULL
    torch.set_num_threads(plan.num_threads)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder, progress_bar(console) as progress:
        results = Bench(plan, models, Path(folder), progress).run()
    numbers = headlines(results)
    write_results(json_file, {**results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
