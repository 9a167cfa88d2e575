"""What `batch_invariant` costs: bare steps with and without it, eager and compiled, on a CPU.

    python -m benchmarks.batch_invariance --json benchmarks/results/batch-invariance.json    # some minutes
    python -m benchmarks.batch_invariance --quick                                            # about a minute

Decode steps of 1, 8 and 32 requests behind 130 tokens each, and a chunk of a prompt, of a Llama of 26 million
random parameters and of the demo target, all ways in turn in one process, in alternating order. `eager` is
the model's own code with the portable attention (what a model runs with that is not compiled); `eager_cpp`
the same with the attention in C++; `eager_invariant` under `batch_invariant`. `compiled` and
`compiled_invariant` are the same forward, which keeps the promise anyway.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers.utils.logging import disable_progress_bar

from benchmarks.compiled_forward import make_llama_26m
from benchmarks.report import Paired, report_headlines, run_paired, write_results
from specdec.attention.cpu import CpuPagedAttention
from specdec.kv.config import CacheConfig
from specdec.model.acceleration import accelerate, attention_of
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner

_BLOCK_SIZE = 16
_BLOCKS_PER_SEQUENCE = 18
_CONTEXT = 130
_CHUNK_ROWS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    subjects: tuple[tuple[str, str], ...]
    """(model, dtype)"""
    batches: tuple[int, ...] = (1, 8, 32)
    rounds: int
    steps: int = 6
    """Steps of one sample."""


FULL = Plan(
    subjects=(("26m", "bfloat16"), ("26m", "float32"), ("demo", "bfloat16"), ("demo", "float32")), rounds=20
)
QUICK = Plan(subjects=(("26m", "bfloat16"),), rounds=5, steps=4)


def make_ways(folder: Path, dtype: str) -> dict[str, ModelRunner]:
    """Return a runner for each way to run a model."""
    loaded = {
        promised: load_model(
            ModelConfig.model_validate({"model": str(folder), "dtype": dtype, "batch_invariant": promised})
        )
        for promised in (False, True)
    }
    eager = CompileConfig(mode="off")
    ways = {
        "eager": _runner(loaded[False]),
        "eager_cpp": _runner(loaded[False]),
        "eager_invariant": _runner(loaded[True], eager),
        "compiled": _runner(loaded[False]),
        "compiled_invariant": _runner(loaded[True], CompileConfig()),
    }
    ways["eager_cpp"].backend = CpuPagedAttention()
    ways["compiled"].graphs = forward = CompiledForward(ways["compiled"], CompileConfig())
    if forward.warm_up() != "ready":
        raise RuntimeError(f"{folder} cannot be compiled here")
    return ways


def _runner(loaded: LoadedModel, compile_config: CompileConfig | None = None) -> ModelRunner:
    runner = ModelRunner(
        loaded,
        CacheConfig(block_size=_BLOCK_SIZE, num_blocks=1 + 32 * _BLOCKS_PER_SEQUENCE),
        max_num_seqs=32,
        backend=attention_of(loaded, "auto", CompileConfig()),
    )
    if compile_config is not None:
        accelerate(runner, compile_config)
    return runner


def decoding(batch: int) -> list[SequenceSlice]:
    """One token each, behind whatever the cache holds."""
    return [_slice(index, rows=1, start=_CONTEXT) for index in range(batch)]


def reading() -> list[SequenceSlice]:
    """A chunk of one prompt."""
    return [_slice(0, rows=_CHUNK_ROWS, start=0)]


def _slice(index: int, rows: int, start: int) -> SequenceSlice:
    first = 1 + index * _BLOCKS_PER_SEQUENCE
    return SequenceSlice(
        token_ids=[7 + (index + row) % 100 for row in range(rows)],
        start=start,
        block_table=range(first, first + _BLOCKS_PER_SEQUENCE),
        num_logit_rows=1,
    )


def measure(
    ways: dict[str, ModelRunner], batch: Sequence[SequenceSlice], plan: Plan, tick: Callable[[], None]
) -> dict[str, Any]:
    """All ways of one batch."""

    def run(runner: ModelRunner) -> None:
        for _ in range(plan.steps):
            runner.forward(batch)

    variants = {name: partial(run, runner) for name, runner in ways.items()}
    paired = run_paired(variants, plan.rounds, tick)
    return {"seconds": paired, **ratios(paired)}


def ratios(paired: Paired) -> dict[str, Any]:
    """How many times longer a step takes for the promise."""
    return {
        "eager_cost": paired.ratio("eager_invariant", "eager"),
        "eager_cost_same_attention": paired.ratio("eager_invariant", "eager_cpp"),
        "compiled_cost": paired.ratio("compiled_invariant", "compiled"),
    }


def headlines(cells: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians of the first model and dtype: 1 is no cost, 2 takes twice as long."""
    first = cells[0]["model"], cells[0]["dtype"]
    found = {}
    for cell in cells:
        if (cell["model"], cell["dtype"]) == first:
            for form in ("eager", "compiled"):
                found[f"batch_invariant_{form}_cost_{cell['work']}"] = cell[f"{form}_cost"].median
    return found


def main(
    quick: Annotated[bool, typer.Option(help="One model, one dtype, few rounds.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every way.")] = 1,
    models: Annotated[Path, typer.Option(help="Folder with the demo's target/.")] = Path("models/demo"),
) -> None:
    """Measure steps with and without batch_invariant.

    Example: python -m benchmarks.batch_invariance --quick --json runs/batch-invariance.json
    """
    plan = QUICK if quick else FULL
    torch.set_num_threads(threads)
    disable_progress_bar()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, Progress(console=console, transient=True) as progress:
        folders = {"26m": make_llama_26m(Path(name) / "26m"), "demo": models / "target"}
        work = {f"b{batch}": decoding(batch) for batch in plan.batches} | {"prefill": reading()}
        total = len(plan.subjects) * len(work) * 5 * (plan.rounds + 1)
        task = progress.add_task("steps", total=total)
        for model, dtype in plan.subjects:
            ways = make_ways(folders[model], dtype)
            for kind, batch in work.items():
                measured = measure(ways, batch, plan, lambda: progress.advance(task))
                cells.append({"model": model, "dtype": dtype, "work": kind, **measured})
                console.print(_line(cells[-1], plan))
    numbers = headlines(cells)
    write_results(json_file, {"plan": plan, "threads": threads, "cells": cells, "headlines": numbers})
    report_headlines(numbers)


def _line(cell: dict[str, Any], plan: Plan) -> str:
    seconds: Paired = cell["seconds"]
    times = ", ".join(
        f"{name} {1e3 * seconds.spread(name).median / plan.steps:.3f}" for name in seconds.seconds
    )
    return f"{cell['model']} {cell['dtype']} {cell['work']}: {times} ms"


if __name__ == "__main__":
    typer.run(main)
