"""What the matrix unit of Intel processors (AMX) brings: forwards in bf16 with it and without it.

    python -m benchmarks.matrix_unit --json benchmarks/results/matrix-unit.json    # four minutes
    python -m benchmarks.matrix_unit --quick                                       # about a minute

Two processes hold the demo target, with kernels that were built with the unit's instructions and without
them. They take turns (ABBA) at the same steps, alone: decoding, verifying, and reading chunks of a prompt.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.kv_costs import Step, forward_seconds
from benchmarks.report import (
    PairedRatio,
    Spread,
    progress_bar,
    report_headlines,
    run_in_turn,
    write_results,
)
from specdec.kv.block_table import num_blocks_for
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import load_model
from specdec.model.runner import ModelRunner

WITH, WITHOUT = "with", "without"
_INSTRUCTIONS = ("amx_tile", "amx_bf16")
"""As Linux names them."""
_BLOCK_SIZE = 16
_START_S = 300.0
_LONG = 3840


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    steps: tuple[Step, ...]
    pairs: int
    repeats: int
    """Forwards of one variant, in one pair; the middle one counts."""


VERIFYING = Step(batch=32, rows=5, context=512)
LONG_VERIFYING = Step(batch=32, rows=5, context=_LONG)
PROMPT = Step(batch=1, rows=512, context=2048)
FULL = Plan(
    steps=(
        *(Step(batch=1, rows=rows, context=512) for rows in (1, 5)),
        *(Step(batch=32, rows=rows, context=512) for rows in (1, 5)),
        *(Step(batch=32, rows=rows, context=_LONG) for rows in (1, 5)),
        Step(batch=1, rows=512, context=_BLOCK_SIZE),
        PROMPT,
    ),
    pairs=8,
    repeats=15,
)
QUICK = Plan(steps=(VERIFYING, LONG_VERIFYING, PROMPT), pairs=5, repeats=5)


class Variant:
    """A process with the demo target, and kernels of one kind."""

    def __init__(self, model: Path, plan: Plan, kernels: Path, compiler: Path | None) -> None:
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        num_threads = len(os.sched_getaffinity(0))
        arguments = (model, plan, kernels, compiler, num_threads, there)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        self._pipe = here

    def seconds(self, step: Step) -> float:
        """Seconds of a forward.

        Raises:
            RuntimeError: the process has ended; its output says why.
        """
        self._pipe.send(step)
        if not self._pipe.poll(_START_S):
            raise RuntimeError("a process of the benchmark does not answer")
        try:
            seconds: float = self._pipe.recv()
        except EOFError:
            raise RuntimeError("a process of the benchmark has ended") from None
        return seconds

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(
    model: Path, plan: Plan, kernels: Path, compiler: Path | None, num_threads: int, pipe: Connection
) -> None:
    if compiler is not None:
        os.environ["CXX"] = str(compiler)
    torch.set_num_threads(num_threads)
    loaded = load_model(ModelConfig.model_validate({"model": str(model), "dtype": "bfloat16"}))
    most = max(step.batch * num_blocks_for(step.context + step.rows, _BLOCK_SIZE) for step in plan.steps)
    cache = CacheConfig(block_size=_BLOCK_SIZE, num_blocks=most + 2)
    runner = ModelRunner(loaded, cache, max_num_seqs=max(step.batch for step in plan.steps))
    for tensor in (*runner.pool.keys, *runner.pool.values):
        tensor.fill_(0.01)  # pages that were never written all lie in one place
    forward = CompiledForward(runner, CompileConfig(cache_dir=str(kernels)))
    if forward.warm_up() != "ready":
        raise RuntimeError("the forward cannot be compiled here")
    runner.graphs = forward
    while (step := pipe.recv()) is not None:
        pipe.send(forward_seconds(runner, step, plan.repeats))


def require_matrix_unit(cpu_info: Path = Path("/proc/cpuinfo")) -> None:
    """Refuse processors without one.

    Raises:
        typer.BadParameter: says which instructions are missing.
    """
    words = cpu_info.read_text(encoding="utf-8", errors="replace").split()
    missing = [name for name in _INSTRUCTIONS if name not in words]
    if missing:
        raise typer.BadParameter(f"this processor has no matrix unit: {' and '.join(missing)} missing")


def compiler_without(folder: Path) -> Path:
    """Write a compiler that does not know the unit's instructions: what `$CXX` can be."""
    script = folder / "c++-without-matrix-unit"
    script.write_text('#!/bin/sh\nexec g++ "$@" -mno-amx-tile -mno-amx-bf16 -mno-amx-int8\n')
    script.chmod(0o755)
    return script


def table_of(plan: Plan, ratios: Sequence[PairedRatio], seconds: Sequence[dict[str, Spread]]) -> Table:
    """Lay out all steps for people."""
    table = Table(
        "requests", "rows of each", "cached tokens", "without (ms)", "with (ms)", "times as fast", ""
    )
    for step, ratio, its in zip(plan.steps, ratios, seconds, strict=True):
        table.add_row(
            *(str(number) for number in (step.batch, step.rows, step.context)),
            *(f"{1e3 * its[name].median:.2f}" for name in (WITHOUT, WITH)),
            f"{ratio.median:.2f}",
            f"{ratio.lower:.2f}-{ratio.upper:.2f}",
        )
    return table


def main(
    quick: Annotated[bool, typer.Option(help="Three steps, five pairs.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/.")] = Path("models/demo"),
) -> None:
    """Compare forwards with the processor's matrix unit with those without it.

    Example: python -m benchmarks.matrix_unit --quick --json runs/matrix-unit.json
    """
    require_matrix_unit()
    plan = QUICK if quick else FULL
    seconds: list[dict[str, Spread]] = []
    ratios: list[PairedRatio] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        progress = stack.enter_context(progress_bar())
        compilers = {WITHOUT: compiler_without(folder), WITH: None}
        variants = {
            name: stack.enter_context(
                contextlib.closing(Variant(models / "target", plan, folder / name, compiler))
            )
            for name, compiler in compilers.items()
        }
        task = progress.add_task("steps", total=len(plan.steps) * 2 * (plan.pairs + 1))
        for step in plan.steps:
            runs = {name: partial(variant.seconds, step) for name, variant in variants.items()}
            paired = run_in_turn(runs, plan.pairs, partial(progress.advance, task))
            seconds.append({name: paired.spread(name) for name in runs})
            ratios.append(PairedRatio(paired.ratio(WITHOUT, WITH).values))
    cells = [
        {"step": step, "seconds": its, "times_as_fast": ratio}
        for step, its, ratio in zip(plan.steps, seconds, ratios, strict=True)
    ]
    by_step = dict(zip(plan.steps, ratios, strict=True))
    headlines = {
        "matrix_unit_verify_b32": by_step[VERIFYING].median,
        "matrix_unit_verify_b32_4k": by_step[LONG_VERIFYING].median,
        "matrix_unit_prompt": by_step[PROMPT].median,
    }
    write_results(json, {"plan": plan, "cells": cells, "headlines": headlines})
    Console(highlight=False, width=120).print(table_of(plan, ratios, seconds))
    report_headlines(headlines)


if __name__ == "__main__":
    typer.run(main)
