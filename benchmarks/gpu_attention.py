"""The Triton attention of one layer on a GPU, against reading its K/V once.

    python -m benchmarks.gpu_attention --json benchmarks/results/gpu-attention.json
    python -m benchmarks.gpu_attention --quick                                       # under two minutes

One layer of an 8 B Llama in bf16 (32 query heads, 8 of keys and values, 128 lanes), decoding (1 row) and
verifying 4 drafts (5 rows), over pages in random order, with nothing in the L2 cache. The floor is the K/V of
all sequences over the bandwidth measured in the same run. Beside it: PyTorch's own attention over the same
K/V, contiguous and unpaged, FlashInfer where it is installed and agrees with the reference, and what other
lengths of splits would give (`specdec/attention/triton_work.py` has the one that is used).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.gpu_device import bandwidth, device_facts, device_seconds, require_cuda
from benchmarks.report import progress_bar, report_headlines, write_results
from specdec.attention.base import AttentionBackend, LayerAttention
from specdec.attention.metadata import build_metadata
from specdec.attention.registry import choose_backend
from specdec.attention.triton import TritonPagedAttention
from specdec.core.errors import UserError
from specdec.model.batch import SequenceSlice

_BLOCK_SIZE = 16
_MAX_CONTEXT = 16384 + _BLOCK_SIZE
_DTYPE = torch.bfloat16
_LAYER = LayerAttention(layer_idx=0, num_heads=32, num_kv_heads=8, head_dim=128, scaling=128**-0.5)
_BYTES_PER_KEY = 2 * _LAYER.num_kv_heads * _LAYER.head_dim * _DTYPE.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    shapes: tuple[tuple[int, int], ...]
    """Batch size and context."""
    rows: tuple[int, ...] = (1, 5)
    split_keys: tuple[int, ...]
    """Lengths of splits that are tried beside the one in use."""
    repeats: int


FULL = Plan(
    shapes=tuple(itertools.product((1, 8, 32, 128), (512, 2048, 4096, 16384))),
    split_keys=(256, 512, 1024, 2048),
    repeats=40,
)
QUICK = Plan(shapes=((1, 512), (1, 16384), (32, 4096), (128, 512)), split_keys=(), repeats=20)


class Cell:
    """One batch, with its pages and inputs."""

    def __init__(self, batch: int, context: int, rows: int, device: torch.device) -> None:
        self.context, self.rows = context, rows
        num_blocks = -(-(context + rows) // _BLOCK_SIZE)
        order = torch.randperm(batch * num_blocks).add(1).view(batch, num_blocks).tolist()
        slices = [
            SequenceSlice(token_ids=[0] * rows, start=context, block_table=table, num_logit_rows=rows)
            for table in order
        ]
        self.metadata = build_metadata(slices, block_size=_BLOCK_SIZE, device=device)
        pool = (1 + batch * num_blocks, _LAYER.num_kv_heads, _BLOCK_SIZE, _LAYER.head_dim)
        self.keys, self.values = (torch.randn(pool, dtype=_DTYPE, device=device) for _ in range(2))
        shapes = (_LAYER.num_heads, _LAYER.num_kv_heads, _LAYER.num_kv_heads)
        self.inputs = [
            torch.randn((batch * rows, heads, _LAYER.head_dim), dtype=_DTYPE, device=device)
            for heads in shapes
        ]
        self.num_bytes = batch * (context + rows) * _BYTES_PER_KEY

    def paged(self, backend: AttentionBackend) -> Callable[[], torch.Tensor]:
        """A paged attention, recorded: a launch from Python takes longer than a small kernel.

        What a backend does once per step, FlashInfer's planning say, is left out.
        """
        query, key, value = self.inputs
        plan = backend.begin(self.metadata)

        def run() -> torch.Tensor:
            return backend.attend(
                query,
                key,
                value,
                key_cache=self.keys,
                value_cache=self.values,
                metadata=self.metadata,
                plan=plan,
                layer=_LAYER,
            )

        return Recorded(run)

    def dense(self) -> Callable[[], torch.Tensor]:
        """PyTorch's attention over contiguous K/V of the same size, every row seeing all of it."""
        query = self.inputs[0].view(-1, self.rows, _LAYER.num_heads, _LAYER.head_dim).transpose(1, 2)
        shape = (query.shape[0], _LAYER.num_kv_heads, self.context + self.rows, _LAYER.head_dim)
        keys, values = (torch.randn(shape, dtype=_DTYPE, device=query.device) for _ in range(2))
        return Recorded(
            lambda: torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        )


class Recorded:
    """What runs again as a CUDA graph. The graph reads memory of `run`'s, which is therefore kept."""

    def __init__(self, run: Callable[[], torch.Tensor]) -> None:
        self._run = run
        run()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = run()

    def __call__(self) -> torch.Tensor:
        """Replay it; the result is written over by the next replay."""
        self._graph.replay()
        return self._result


def flashinfer(device: torch.device) -> AttentionBackend | None:
    """Return FlashInfer's attention, or None and one line that says why not."""
    try:
        return choose_backend(
            "flashinfer", device=device, dtype=_DTYPE, layers=[_LAYER], max_context=_MAX_CONTEXT
        )
    except UserError as error:
        Console(stderr=True).print(f"left out: {error}", markup=False)
        return None


def measure(
    cell: Cell, shape: tuple[int, int], plan: Plan, bytes_per_s: float, other: AttentionBackend | None
) -> dict[str, Any]:
    """Ours, other splits, PyTorch's and (`other`) FlashInfer's for one batch."""
    batch, context = shape
    device = cell.keys.device
    ways = {
        "ours": cell.paged(TritonPagedAttention(device, max_context=_MAX_CONTEXT)),
        "torch_sdpa_dense": cell.dense(),
    }
    if other is not None:
        ways[other.name] = cell.paged(other)
    for split_keys in plan.split_keys:
        backend = TritonPagedAttention(device, max_context=_MAX_CONTEXT)
        backend.split_keys = split_keys
        backend.max_splits = -(-_MAX_CONTEXT // split_keys)
        ways[f"split_{split_keys}"] = cell.paged(backend)
    seconds = {
        name: device_seconds(run, repeats=plan.repeats, cold=True).median for name, run in ways.items()
    }
    floor_s = cell.num_bytes / bytes_per_s
    return {
        "batch": batch,
        "context": context,
        "rows": cell.rows,
        "us": {name: 1e6 * value for name, value in seconds.items()},
        "floor_us": 1e6 * floor_s,
        "times_floor": seconds["ours"] / floor_s,
    }


def headlines(cells: list[dict[str, Any]], bytes_per_s: float) -> dict[str, float]:
    """How far decoding and verifying are from the floor where K/V weigh most; five rows against one."""
    largest = max(cells, key=lambda cell: (cell["batch"] * cell["context"], cell["rows"]))
    of_size = {
        cell["rows"]: cell["us"]["ours"]
        for cell in cells
        if (cell["batch"], cell["context"]) == (largest["batch"], largest["context"])
    }
    numbers = {
        "gpu_bandwidth_tb_s": bytes_per_s / 1e12,
        "gpu_attention_times_floor_long": largest["times_floor"],
        "gpu_attention_verify_over_decode": of_size[max(of_size)] / of_size[min(of_size)],
        "gpu_attention_times_torch_median": statistics.median(
            cell["us"]["ours"] / cell["us"]["torch_sdpa_dense"] for cell in cells
        ),
    }
    ratios = [cell["us"]["ours"] / cell["us"]["flashinfer"] for cell in cells if "flashinfer" in cell["us"]]
    if ratios:
        numbers["gpu_attention_times_flashinfer_median"] = statistics.median(ratios)
    return numbers


def main(
    quick: Annotated[bool, typer.Option(help="Four batches, no other splits.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
) -> None:
    """Measure the attention of one layer.

    Example: python -m benchmarks.gpu_attention --quick --json runs/gpu-attention.json
    """
    device = require_cuda()
    plan = QUICK if quick else FULL
    speeds = bandwidth(device)
    bytes_per_s = max(speeds.values())
    cells: list[dict[str, Any]] = []
    other = flashinfer(device)
    with torch.inference_mode(), progress_bar() as progress:
        for shape, rows in progress.track(
            list(itertools.product(plan.shapes, plan.rows)), description="attention"
        ):
            cells.append(measure(Cell(*shape, rows, device), shape, plan, bytes_per_s, other))
            torch.cuda.empty_cache()
    numbers = headlines(cells, bytes_per_s)
    results = {"device": device_facts(device), "plan": plan, "bandwidth": speeds, "cells": cells}
    write_results(json_file, {**results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
