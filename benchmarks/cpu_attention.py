"""The C++ paged attention alone on a CPU, against what the machine reads and multiplies.

    python -m benchmarks.cpu_attention --json benchmarks/results/cpu-attention.json
    python -m benchmarks.cpu_attention --quick                                       # bf16, few shapes

Heads of the demo target (4 query heads of 64 over 2 of K/V: `gqa`), the same without groups (`mha`), both in
bf16 and fp32, and heads of Qwen2.5 7B (28 of 128 over 4: `gqa7`) in bf16, decoding (1 row of each sequence)
and verifying (2 and 5), over pages in random order. As many layers in turn as are more than any cache holds,
so that K/V come from memory, as in a forward.

    GB/s       K and V, read once, over the time of a layer
    GFLOP/s    products of queries with keys and of weights with values: 4 x rows x keys x heads x head size
    share      of the fastest stream of reads, or of the fastest large matrix product (fp32 or bf16; without
               bf16 instructions bf16 is widened first), that this machine shows in the same run and on the
               same threads
    bound      the time that the worse of the two would take, over the measured one

Beside it the portable attention (PyTorch's own operations), which the engine falls back to; and the nodes
of a tree, alone and in one step with a chunk of a prompt, against as many rows of a chain.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.kv_costs import Stream
from benchmarks.report import Spread, progress_bar, report_headlines, write_results
from benchmarks.stolen import least_stolen
from specdec.attention.base import AttentionBackend, LayerAttention
from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.metadata import build_metadata
from specdec.attention.sdpa import SdpaAttention
from specdec.kv.block_table import num_blocks_for
from specdec.kv.pool import FIRST_BLOCK, KvPool, KvShape
from specdec.model.batch import SequenceSlice

_BLOCK_SIZE = 16
_COLD_BYTES = 192 << 20
"""K/V of all layers of a cell: several times what the last cache holds."""
_MAX_LAYERS = 1024
"""Of batches without any K/V but those of their own rows."""
_PRODUCT = 2048
"""Rows and columns of the product that the machine's speed is taken from, where that is done at all soon."""
_SMALL_PRODUCT = 256
_LONGEST_PRODUCT_S = 1.0
"""PyTorch's products of bf16 on processors that do not know it take a hundred times as long as others."""
_ALONE = "alone"
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Heads(NamedTuple):
    """Of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


_HEADS = {"gqa": Heads(4, 2, 64), "mha": Heads(4, 4, 64), "gqa7": Heads(28, 4, 128)}


class Read(NamedTuple):
    """What one sequence has in a batch."""

    context: int
    """Tokens behind which its rows lie."""
    rows: int
    parents: tuple[int, ...] | None = None
    """Of a tree; see `SequenceSlice`."""


class Batch(Protocol):
    """What is attended to at once."""

    @property
    def heads(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def reads(self) -> Sequence[Read]: ...


def kv_bytes_of(batch: Batch) -> int:
    """Return the size of K and V of one layer, behind which the new rows lie."""
    heads = _HEADS[batch.heads]
    entries = 2 * heads.num_kv_heads * heads.head_dim
    return sum(read.context for read in batch.reads) * entries * _DTYPES[batch.dtype].itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Sequences of one kind."""

    heads: str
    """gqa, mha or gqa7."""
    dtype: str
    batch: int
    context: int
    rows: int

    @property
    def reads(self) -> Sequence[Read]:
        """All the same."""
        return [Read(self.context, self.rows)] * self.batch

    @property
    def kv_bytes(self) -> int:
        """Of one layer, behind which the new rows lie."""
        return kv_bytes_of(self)

    @property
    def num_operations(self) -> int:
        """Of one layer: a product and a sum count as two."""
        heads = _HEADS[self.heads]
        return 4 * self.batch * self.rows * self.context * heads.num_heads * heads.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Drafts that are verified, alone or in one step with a chunk of a prompt."""

    heads: str
    dtype: str
    context: int
    """Of both."""
    rows: int
    """Of the chunk; 0: there is none."""
    drafts: int
    drafts_are_a_tree: bool

    @property
    def reads(self) -> Sequence[Read]:
        """The chunk; the drafts, as a tree each node of which has two children."""
        parents = tuple((node - 1) // 2 if node else -1 for node in range(self.drafts))
        drafts = Read(self.context, self.drafts, parents if self.drafts_are_a_tree else None)
        return [Read(self.context, self.rows), drafts] if self.rows else [drafts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the machine does at best."""

    bytes_per_s: float
    operations_per_s: float

    def bound_s(self, cell: Cell) -> float:
        """Return the least time of a layer."""
        return max(cell.kv_bytes / self.bytes_per_s, cell.num_operations / self.operations_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    cells: tuple[Cell, ...]
    trees: tuple[Mixed, ...]
    """Drafts that are a tree; each is measured in turn with as long a chain."""
    repeats: int


def _cells(
    heads: Sequence[str], dtypes: Sequence[str], shapes: Sequence[tuple[int, int]]
) -> tuple[Cell, ...]:
    return tuple(
        Cell(heads=its, dtype=dtype, batch=batch, context=context, rows=rows)
        for its, dtype, (batch, context), rows in itertools.product(heads, dtypes, shapes, (1, 2, 5))
    )


def _trees(
    heads: Sequence[str], dtypes: Sequence[str], contexts: Sequence[int], rows: int
) -> tuple[Mixed, ...]:
    return tuple(
        Mixed(heads=its, dtype=dtype, context=context, rows=rows, drafts=16, drafts_are_a_tree=True)
        for its, dtype, context in itertools.product(heads, dtypes, contexts)
    )


FULL = Plan(
    cells=(
        *_cells(("gqa", "mha"), ("bf16", "fp32"), ((1, 4096), (8, 4096), (32, 1024), (32, 4096))),
        *_cells(("gqa7",), ("bf16",), ((1, 4096), (8, 4096))),
    ),
    trees=(
        *_trees(("gqa",), ("bf16", "fp32"), (0, 2048), 512),
        *_trees(("gqa", "mha"), ("bf16", "fp32"), (100, 500, 4000), 0),
    ),
    repeats=9,
)
QUICK = Plan(
    cells=(
        *_cells(("gqa", "mha"), ("bf16",), ((1, 4096), (32, 4096))),
        *_cells(("gqa7",), ("bf16",), ((8, 4096),)),
    ),
    trees=(*_trees(("gqa",), ("bf16",), (0,), 512), *_trees(("gqa", "mha"), ("bf16",), (500,), 0)),
    repeats=5,
)


class Layers:
    """A batch over several layers, none of which is in a cache when its turn comes."""

    def __init__(self, batch: Batch, cold_bytes: int = _COLD_BYTES) -> None:
        """Draw the numbers; there are layers for `cold_bytes`, at most `_MAX_LAYERS`."""
        self.num_layers = min(_MAX_LAYERS, max(1, -(-cold_bytes // max(1, kv_bytes_of(batch)))))
        (num_heads, num_kv_heads, head_dim), dtype = _HEADS[batch.heads], _DTYPES[batch.dtype]
        num_blocks = [num_blocks_for(read.context + read.rows, _BLOCK_SIZE) for read in batch.reads]
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(sum(num_blocks), generator=generator).add(FIRST_BLOCK)
        slices = [
            SequenceSlice(
                token_ids=[0] * read.rows,
                start=read.context,
                block_table=table.tolist(),
                num_logit_rows=read.rows,
                parents=read.parents,
            )
            for read, table in zip(batch.reads, order.split(num_blocks), strict=True)
        ]
        cpu = torch.device("cpu")
        self._metadata = build_metadata(slices, block_size=_BLOCK_SIZE, device=cpu)
        self._pool = KvPool(
            [KvShape(num_kv_heads=num_kv_heads, head_dim=head_dim)] * self.num_layers,
            num_blocks=FIRST_BLOCK + sum(num_blocks),
            block_size=_BLOCK_SIZE,
            dtype=dtype,
            device=cpu,
        )
        numbers = torch.randn(self._pool.keys[0].shape, generator=generator).to(dtype)
        for tensor in (*self._pool.keys, *self._pool.values):
            tensor.copy_(numbers)  # drawn once: that takes longer than attending to them
        self._layers = [
            LayerAttention(
                layer_idx=index,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scaling=head_dim**-0.5,
            )
            for index in range(self.num_layers)
        ]
        num_rows = sum(read.rows for read in batch.reads)
        self._query, self._key, self._value = (
            torch.randn(num_rows, heads, head_dim, generator=generator).to(dtype)
            for heads in (num_heads, num_kv_heads, num_kv_heads)
        )

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        """Attend in every layer; return what the last one gives."""
        plan = backend.begin(self._metadata)
        for layer, keys, values in zip(self._layers, self._pool.keys, self._pool.values, strict=True):
            output = backend.attend(
                self._query,
                self._key,
                self._value,
                key_cache=keys,
                value_cache=values,
                metadata=self._metadata,
                plan=plan,
                layer=layer,
            )
        return output


def measure_machine(repeats: int) -> dict[str, float]:
    """Bytes per second of the fastest stream, and operations per second of large products."""
    speeds = {"stream_bytes_per_s": Stream.num_bytes / Stream().seconds(repeats)}
    for name, dtype in _DTYPES.items():
        side = _SMALL_PRODUCT
        seconds = _product_seconds(side, dtype, 1)
        if seconds * (_PRODUCT / side) ** 3 <= _LONGEST_PRODUCT_S:
            side = _PRODUCT
        seconds = _product_seconds(side, dtype, repeats)
        speeds[f"product_{name}_operations_per_s"] = 2 * side**3 / seconds
    return speeds


def _product_seconds(side: int, dtype: torch.dtype, repeats: int) -> float:
    left, right = (torch.randn(side, side).to(dtype) for _ in range(2))
    return _seconds(partial(torch.matmul, left, right), repeats).median


def machine_of(speeds: Mapping[str, float]) -> Machine:
    """Return the machine that was measured."""
    products = [speeds[f"product_{name}_operations_per_s"] for name in _DTYPES]
    return Machine(bytes_per_s=speeds["stream_bytes_per_s"], operations_per_s=max(products))


def measure_cell(cell: Cell, backends: Mapping[str, AttentionBackend], repeats: int) -> dict[str, Any]:
    """Seconds of a layer, by backend."""
    layers = Layers(cell)
    seconds = {
        name: _seconds(partial(layers.attend, backend), repeats if name == "ours" else 1)
        for name, backend in backends.items()
    }
    return {
        "cell": cell,
        "num_layers": layers.num_layers,
        "layer_s": {
            name: Spread(tuple(one / layers.num_layers for one in its.values))
            for name, its in seconds.items()
        },
    }


def measure_tree(tree: Mixed, backend: AttentionBackend, repeats: int) -> dict[str, Any]:
    """Seconds of a layer with drafts that are a tree and with a chain, in turn, and their ratio."""
    ways = {
        "chain_s": Layers(replace(tree, drafts_are_a_tree=False)),
        "tree_s": Layers(tree),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, layers in ways.items():
            (found,) = _seconds(partial(layers.attend, backend), 1).values
            seconds[name].append(found / layers.num_layers)
    ratios = tuple(tree_s / chain_s for chain_s, tree_s in zip(*seconds.values(), strict=True))
    return {
        "mixed": tree,
        **{name: Spread(tuple(values)) for name, values in seconds.items()},
        "tree_over_chain": Spread(ratios),
    }


def costs_of_trees(measured: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many times as long steps take with drafts that are a tree as with a chain, by what they hold."""
    return {_name_of(one["mixed"]): one["tree_over_chain"].median for one in measured}


def _name_of(tree: Mixed) -> str:
    beside = f"beside_{tree.rows}" if tree.rows else _ALONE
    return f"{tree.heads}_{tree.dtype}_{beside}_at_{tree.context}"


def rated(measured: Mapping[str, Any], machine: Machine) -> dict[str, Any]:
    """Return a measured cell with what its times mean on a machine."""
    cell, seconds = measured["cell"], measured["layer_s"]["ours"].median
    bytes_per_s, operations_per_s = cell.kv_bytes / seconds, cell.num_operations / seconds
    return {
        **measured,
        "bytes_per_s": bytes_per_s,
        "share_of_stream": bytes_per_s / machine.bytes_per_s,
        "operations_per_s": operations_per_s,
        "share_of_product": operations_per_s / machine.operations_per_s,
        "share_of_bound": machine.bound_s(cell) / seconds,
        "times_faster_than_portable": measured["layer_s"]["portable"].median / seconds,
    }


def headlines_of(cells: Sequence[Mapping[str, Any]], costs_of_trees: Mapping[str, float]) -> dict[str, float]:
    """Shares of the machine, decoding and verifying, in the largest bf16 batch, and ratios."""
    decode, verify = _decode_and_verify(cells, "gqa")
    wide_decode, wide_verify = _decode_and_verify(cells, "gqa7")
    return {
        "cpu_attention_decode_gb_s_share": decode["share_of_stream"],
        "cpu_attention_verify_gflop_s_share": verify["share_of_product"],
        "cpu_attention_verify_over_decode": verify["layer_s"]["ours"].median
        / decode["layer_s"]["ours"].median,
        "cpu_attention_wide_group_verify_over_decode": wide_verify["layer_s"]["ours"].median
        / wide_decode["layer_s"]["ours"].median,
        **{
            f"cpu_attention_tree_over_chain_{name}": max(
                cost for tree, cost in costs_of_trees.items() if (_ALONE in tree) == is_alone
            )
            for name, is_alone in (("beside_chunk", False), (_ALONE, True))
        },
        "cpu_attention_times_portable_median": statistics.median(
            one["times_faster_than_portable"] for one in cells
        ),
    }


def _decode_and_verify(
    cells: Sequence[Mapping[str, Any]], heads: str
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    own = [one for one in cells if (one["cell"].heads, one["cell"].dtype) == (heads, "bf16")]
    size = max(one["cell"].kv_bytes for one in own)
    by_rows = {one["cell"].rows: one for one in own if one["cell"].kv_bytes == size}
    return by_rows[min(by_rows)], by_rows[max(by_rows)]


def table_of(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out all cells for people."""
    table = Table(
        *("heads", "dtype", "batch", "context", "rows", "us", "GB/s", "of stream"),
        *("GFLOP/s", "of product", "of bound", "portable / ours"),
    )
    for one in cells:
        cell = one["cell"]
        table.add_row(
            *(cell.heads, cell.dtype, str(cell.batch), str(cell.context), str(cell.rows)),
            f"{1e6 * one['layer_s']['ours'].median:.0f}",
            f"{one['bytes_per_s'] / 1e9:.1f}",
            f"{one['share_of_stream']:.2f}",
            f"{one['operations_per_s'] / 1e9:.1f}",
            f"{one['share_of_product']:.2f}",
            f"{one['share_of_bound']:.2f}",
            f"{one['times_faster_than_portable']:.1f}",
        )
    return table


def _seconds(run: Callable[[], object], repeats: int) -> Spread:
    """Seconds of single runs after one that is not counted; disturbed ones are taken again."""

    def once() -> float:
        started_s = time.perf_counter()
        run()
        return time.perf_counter() - started_s

    once()
    return Spread(tuple(least_stolen(once).result for _ in range(repeats)))


def main(
    quick: Annotated[bool, typer.Option(help="bf16 alone, few shapes, fewer repeats.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
) -> None:
    """Measure the paged attention kernel.

    Example: python -m benchmarks.cpu_attention --quick --json runs/cpu-attention.json
    """
    plan = QUICK if quick else FULL
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    backends: dict[str, AttentionBackend] = {"ours": CpuPagedAttention(), "portable": SdpaAttention()}
    with torch.inference_mode(), progress_bar() as progress:
        before = measure_machine(plan.repeats)
        measured = [
            measure_cell(cell, backends, plan.repeats)
            for cell in progress.track(plan.cells, description="attention")
        ]
        of_trees = [
            measure_tree(one, backends["ours"], plan.repeats)
            for one in progress.track(plan.trees, description="trees")
        ]
        after = measure_machine(plan.repeats)
    speeds = {name: max(before[name], after[name]) for name in before}
    machine = machine_of(speeds)
    cells = [rated(one, machine) for one in measured]
    trees = costs_of_trees(of_trees)
    headlines = headlines_of(cells, trees)
    write_results(
        json_file,
        {
            "plan": plan,
            "machine": speeds,
            "cells": cells,
            "trees": of_trees,
            "tree_over_chain": trees,
            "headlines": headlines,
        },
    )
    Console(highlight=False, width=140).print(table_of(cells))
    report_headlines(headlines)


if __name__ == "__main__":
    typer.run(main)
