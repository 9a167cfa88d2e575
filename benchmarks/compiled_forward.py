"""One forward three ways: eager PyTorch, torch.compile with frozen weights, and ours, recorded and lowered.

    python -m benchmarks.compiled_forward --json benchmarks/results/compiled-forward.json    # some minutes
    python -m benchmarks.compiled_forward --quick                                            # about a minute

All three run the same steps (rows of one sequence with `context` cached tokens) with the same paged attention
kernel, in turn, in one process. torch.compile gets static shapes, constants for weights, and one compilation
for each number of rows; it calls the attention through a custom operation written in Python. The floor is the
time in which a reduction of PyTorch reads as many bytes as the step must, in turn with the others.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.floor import bytes_per_step, fastest_read, in_turn
from benchmarks.report import Spread, report_headlines, write_results
from specdec.attention.base import PagedBatch
from specdec.attention.native import load_library
from specdec.kv.config import CacheConfig
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import load_model
from specdec.model.runner import ForwardInputs, ModelRunner

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    rows: tuple[int, ...]
    turns: int
    """How often each way takes its turn."""
    context: int = 200


FULL = Plan(models=("26m", "demo-draft"), dtypes=("bfloat16", "float32"), rows=(1, 5), turns=12)
QUICK = Plan(models=("26m",), dtypes=("bfloat16",), rows=(1,), turns=8)


class _OpAttention:
    """What a compiler sees of the attention: one operation per layer."""

    current: PagedBatch | None = None

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        rows: torch.Tensor = torch.ops.drafthouse_benchmark.attend(layer_idx, query, key, value)
        return rows


@torch.library.custom_op("drafthouse_benchmark::attend", mutates_args=())
def _attend(layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    assert _OpAttention.current is not None
    return _OpAttention.current.attend(layer_idx, query, key, value).contiguous()


@_attend.register_fake
def _(layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_empty(query.shape)


class Subject:
    """A model, and the ways to run it."""

    def __init__(self, folder: Path, dtype: str, kernels: Path) -> None:
        config = ModelConfig.model_validate({"model": str(folder), "dtype": dtype, "max_model_len": 1024})
        self.runner = ModelRunner(
            load_model(config), CacheConfig(block_size=_BLOCK_SIZE, num_blocks=96), max_num_seqs=1
        )
        self.num_parameters = sum(parameter.numel() for parameter in self.runner.loaded.model.parameters())
        self.compile_seconds: dict[str, float] = {}
        """Of our forward, with an empty and with a filled folder of kernels."""
        settings = CompileConfig(cache_dir=str(kernels))
        for kind in ("warm",) if any(kernels.iterdir()) else ("cold", "warm"):
            load_library.cache_clear()
            started_s = time.perf_counter()
            self.forward = CompiledForward(self.runner, settings)
            if self.forward.warm_up() != "ready":
                raise RuntimeError(f"{folder} cannot be compiled here")
            self.compile_seconds[kind] = time.perf_counter() - started_s

    def inputs(self, rows: int, context: int) -> ForwardInputs:
        """A step of `rows` tokens."""
        blocks = range(1, 2 + (context + rows) // _BLOCK_SIZE)
        piece = SequenceSlice(
            token_ids=list(range(1, rows + 1)), start=context, block_table=list(blocks), num_logit_rows=rows
        )
        return self.runner.pack([piece])

    def ours(self, inputs: ForwardInputs) -> Callable[[], torch.Tensor]:
        """The lowered forward."""

        def run() -> torch.Tensor:
            logits = self.forward.try_run(inputs)
            assert logits is not None
            return logits

        return run

    def eager(self, inputs: ForwardInputs) -> Callable[[], torch.Tensor]:
        """The model's own code."""
        return lambda: self.runner.forward_eager(inputs)

    def torch_compiled(self, inputs: ForwardInputs) -> tuple[Callable[[], torch.Tensor], dict[str, float]]:
        """What torch.compile makes of the model's code, and how long that takes, first and once more."""
        runner, metadata = self.runner, inputs.metadata
        attention = _OpAttention()

        def forward(input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return runner.call_model(input_ids, positions, rows, attention)

        seconds = {}
        for kind in ("cold", "warm"):  # the second time from the compiler's own caches
            torch._dynamo.reset()
            compiled = torch.compile(forward, dynamic=False, fullgraph=True)

            def run(compiled: Callable[..., torch.Tensor] = compiled) -> torch.Tensor:
                _OpAttention.current = PagedBatch(
                    backend=runner.backend,
                    layers=runner.loaded.layers,
                    caches=runner.pool,
                    metadata=metadata,
                    plan=runner.backend.begin(metadata),
                )
                return compiled(inputs.input_ids, metadata.positions[None], inputs.logit_rows)

            started_s = time.perf_counter()
            run()
            seconds[kind] = time.perf_counter() - started_s
        return run, seconds


def make_llama_26m(folder: Path) -> Path:
    """Write a Llama of 26 million random parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def measure(subject: Subject, rows: int, plan: Plan) -> dict[str, Any]:
    """All ways of one step."""
    inputs = subject.inputs(rows, plan.context)
    compiled, compile_seconds = subject.torch_compiled(inputs)
    ways = {"eager": subject.eager(inputs), "torch_compile": compiled, "ours": subject.ours(inputs)}
    num_bytes = bytes_per_step(
        subject.runner.loaded, subject.forward.num_packed_bytes, batch=1, context=plan.context
    )
    expected = ways["eager"]().float()
    differences = {
        name: float((run().float() - expected).abs().max() / expected.abs().max())
        for name, run in ways.items()
    }
    seconds = in_turn({**ways, "floor": fastest_read(num_bytes)}, plan.turns)
    return {
        "rows": rows,
        "ms": {name: Spread(tuple(1e3 * value for value in values)) for name, values in seconds.items()},
        "difference_from_eager": differences,
        "torch_compile_seconds": compile_seconds,
        "megabytes_per_step": num_bytes / 1e6,
        "raw_seconds": seconds,
    }


def headlines(cells: list[dict[str, Any]]) -> dict[str, float]:
    """How much faster ours is, by the medians of the largest model's single rows, in the first dtype."""
    ms = cells[0]["ms"]
    return {
        "forward_vs_eager_b1": ms["eager"].median / ms["ours"].median,
        "forward_vs_torch_compile_b1": ms["torch_compile"].median / ms["ours"].median,
        "forward_over_floor_b1": ms["ours"].median / ms["floor"].median,
        "compile_seconds_warm": statistics.median(cell["compile_seconds"]["warm"] for cell in cells),
    }


@torch.inference_mode()
def main(
    quick: Annotated[bool, typer.Option(help="One model, one dtype, one row.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only these: 26m, demo-draft.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only these: bfloat16, float32.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every way.")] = 1,
) -> None:
    """Measure eager, compiled by PyTorch, and our forward, step by step.

    Example: python -m benchmarks.compiled_forward --quick --json runs/compiled-forward.json
    """
    plan = QUICK if quick else FULL
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    cells: list[dict[str, Any]] = []
    torch.set_num_threads(threads)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as name, Progress(console=console, transient=True) as progress:
        folder = Path(name)
        kernels = folder / "kernels"
        kernels.mkdir()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        import torch._inductor.config as inductor  # reads the environment

        inductor.freezing = True
        models = {"26m": make_llama_26m(folder / "26m"), "demo-draft": Path("models/demo/draft")}
        wanted = [(key, kind) for key in model or plan.models for kind in dtype or plan.dtypes]
        task = progress.add_task("steps", total=len(wanted) * len(plan.rows))
        for key, kind in wanted:
            subject = Subject(models[key], kind, kernels)
            about = {
                "model": key,
                "dtype": kind,
                "num_parameters": subject.num_parameters,
                "compile_seconds": subject.compile_seconds,
            }
            for rows in plan.rows:
                cell = {**about, **measure(subject, rows, plan)}
                cells.append(cell)
                progress.advance(task)
                console.print(_line(cell))
    numbers = headlines(cells)
    write_results(json_file, {"plan": plan, "threads": threads, "cells": cells, "headlines": numbers})
    report_headlines(numbers)


def _line(cell: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {spread.median:.3f}" for name, spread in cell["ms"].items())
    return f"{cell['model']} {cell['dtype']} {cell['rows']} rows: {times} ms"


if __name__ == "__main__":
    typer.run(main)
