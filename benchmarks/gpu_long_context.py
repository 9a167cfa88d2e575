"""Self-speculation of an 8 B Llama over long contexts on one GPU, against its roofline.

    python -m benchmarks.gpu_long_context --json benchmarks/results/gpu-long-context.json
    python -m benchmarks.gpu_long_context --quick                                   # under five minutes

The model has the shape of Llama 3.1 8 B and random weights in bf16, over a paged cache of random K/V; batch
16 to 128 and contexts of 4k to 64k, as far as the memory goes. A round is what the target does in the engine
(`LocalTarget`): packing, k drafts through a selected block table, the verification of all of them, and every
choice of a token, by the host's clock, with the CUDA graphs that the engine has. What random weights accept
means nothing, so acceptance is made up: each draft token stands with probability 0.8. Then

    speedup = Omega t(plain) / t(k),    Omega = (1 - .8^(k+1)) / (1 - .8),    the best k

The bound is that of MagicDec (Chen et al., arXiv 2408.11049),

    Omega T(1) / (k T_draft + T(k + 1)),

where T is the time to read weights or to multiply by them, whichever is longer, and the same for K/V; with
the bandwidth and the speed of a large bf16 product that this device shows in the same run.

MagicDec's own figures for this model are of batches whose K/V (128 GiB and more) it had eight GPUs for. They
are compared with the same batch and context in a model of the same shape with as many of its layers as fit:
what every layer costs is the same, and what does not follow the layers (the head, choosing tokens, the host)
is paid k + 1 times in a round, so that fewer layers gain less than all of them would.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from transformers import LlamaConfig

from benchmarks.gpu_decode import BYTES_LEFT, Subject, free_memory, host_seconds, tokens_that_fit
from benchmarks.gpu_device import bandwidth, device_facts, device_seconds, require_cuda
from benchmarks.gpu_models import LLAMA_8B, random_model
from benchmarks.report import progress_bar, report_headlines, write_results
from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetStep, TargetWork
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.local_target import LocalTarget
from specdec.kv.block_table import num_blocks_for
from specdec.kv.pool import FIRST_BLOCK
from specdec.kv.selection import KvSelectionConfig
from specdec.model.runner import ModelRunner
from specdec.proposers.draft_graph import GraphedDraftLoop
from specdec.proposers.draft_loop import FusedDraftLoop
from specdec.sampling.sampler import Sampler

_MAX_CONTEXT = 65536
_SPARE = 64
_PUBLISHED = {(32, 32768): 1.22, (64, 32768): 1.38, (128, 32768): 1.47}
"""MagicDec's own figures for Llama 3.1 8 B drafting for itself, by batch and context, on 8 A100s (PG-19)."""
_FEWEST_LAYERS = 8
"""Of a model that stands for all of them: with fewer, its head weighs as much as they do."""
_BYTES_PER_NUMBER = 2
_PRODUCT = 8192
"""Rows and columns of the product that the device's speed is taken from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    shapes: tuple[tuple[int, int], ...]
    """Batch size and context."""
    lengths: tuple[int, ...]
    """k."""
    budgets: tuple[int, ...]
    """Tokens that drafts attend to."""
    repeats: int
    published: tuple[tuple[int, int], ...] = ()
    """Batch size and context of others' figures, with fewer layers where all of them do not fit."""
    acceptance: float = 0.8

    @property
    def max_rows(self) -> int:
        """Of the largest step."""
        return max(batch for batch, _ in (*self.shapes, *self.published)) * (1 + max(self.lengths))


FULL = Plan(
    shapes=tuple(itertools.product((16, 32, 64, 128), (4096, 8192, 16384, 32768, _MAX_CONTEXT))),
    lengths=(1, 2, 3, 4, 6),
    budgets=(256, 512),
    repeats=15,
    published=tuple(_PUBLISHED),
)
QUICK = Plan(
    shapes=((16, 4096), (32, 4096), (128, 4096), (32, 16384), (16, 32768)),
    lengths=(2, 4),
    budgets=(512,),
    repeats=8,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a device can do at best."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Least seconds of steps of a model on a machine."""

    machine: Machine
    num_weights: int
    """That a step multiplies by: without embeddings."""
    weight_bytes: int
    kv_bytes: int
    """Of a token."""
    attention_width: int
    """Query heads times head size, over all layers."""

    def step_s(self, batch: int, rows: int, context: int) -> float:
        """Return the least time of `rows` rows of each sequence over `context` cached tokens."""
        weights = self._longest(self.weight_bytes, 2 * self.num_weights * batch * rows)
        attention = self._longest(
            batch * context * self.kv_bytes, 4 * batch * rows * context * self.attention_width
        )
        return weights + attention

    def speedup(self, batch: int, context: int, *, k: int, budget: int, acceptance: float) -> float:
        """Return the most that k drafts over `budget` tokens can bring."""
        drafts_s = k * self.step_s(batch, 1, min(budget, context))
        omega = tokens_per_round(acceptance, k)
        return omega * self.step_s(batch, 1, context) / (drafts_s + self.step_s(batch, k + 1, context))

    def _longest(self, num_bytes: int, num_operations: int) -> float:
        return max(num_bytes / self.machine.bytes_per_s, num_operations / self.machine.operations_per_s)


def tokens_per_round(acceptance: float, k: int) -> float:
    """Return Omega: the tokens that a round brings where each draft token stands at this rate."""
    return sum(acceptance**i for i in range(k + 1))


def roofline_of(runner: ModelRunner, weight_bytes: int, machine: Machine) -> Roofline:
    """Return the roofline of a loaded model."""
    loaded = runner.loaded
    entries = sum(2 * layer.num_kv_heads * layer.head_dim for layer in loaded.layers)
    return Roofline(
        machine=machine,
        num_weights=weight_bytes // loaded.dtype.itemsize,
        weight_bytes=weight_bytes,
        kv_bytes=entries * loaded.dtype.itemsize,
        attention_width=sum(layer.num_heads * layer.head_dim for layer in loaded.layers),
    )


class Rounds:
    """A batch of one shape in the target, whose rounds can be repeated: each begins where the others did."""

    def __init__(
        self,
        runner: ModelRunner,
        batch: int,
        context: int,
        budget: int,
        loop: FusedDraftLoop | None = None,
    ) -> None:
        kv = KvSelectionConfig.model_validate({"policy": "streaming", "budget": budget})
        self._target = LocalTarget(
            runner, Sampler(), self_drafting=kv.make(runner.block_size), self_loop=loop
        )
        self._ids = [RequestId(f"long-{index}") for index in range(batch)]
        self._context = context
        self._num_steps = itertools.count()
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        blocks = _tables(batch, num_blocks_for(context + _SPARE, runner.block_size))
        works = [self._work(one, 0, table) for one, table in zip(self._ids, blocks, strict=True)]
        admitted = [AdmittedSequence(request_id=one, seed=1, params=params) for one in self._ids]
        self._run(TargetStep(step_id=-1, works=tuple(works), admitted=tuple(admitted)))
        self._num_blocks = len(blocks[0])

    def round(self, k: int) -> int:
        """Draft k tokens for each sequence and verify them, or decode one; return how many were drafted."""
        works = tuple(self._work(one, k, None) for one in self._ids)
        return self._run(TargetStep(step_id=next(self._num_steps), works=works))

    def _work(self, request_id: RequestId, k: int, table: tuple[int, ...] | None) -> TargetWork:
        return TargetWork(
            request_id=request_id,
            token_ids=(1,),
            start=self._context,
            num_sampled_rows=1,
            table_start=0 if table is not None else self._num_blocks,
            block_ids=table or (),
            num_self_drafted=k,
        )

    def _run(self, step: TargetStep) -> int:
        self._target.submit(step)
        results = self._target.collect().results
        assert all(result.error is None for result in results)
        return sum(len(result.drafted) for result in results)


def _tables(batch: int, num_blocks: int) -> list[tuple[int, ...]]:
    """Blocks in random order, as a server has them after a while."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(batch * num_blocks, generator=generator).add(FIRST_BLOCK).view(batch, num_blocks)
    return [tuple(table) for table in order.tolist()]


def measure_cell(
    runner: ModelRunner,
    roofline: Roofline,
    shape: tuple[int, int],
    budget: int,
    plan: Plan,
    loop: FusedDraftLoop | None = None,
) -> dict[str, Any]:
    """Measure one batch, context and budget: plain rounds, and those of every k."""
    batch, context = shape
    rounds = Rounds(runner, batch, context, budget, loop)
    seconds: dict[int, float] = {}
    for k in (0, *plan.lengths):
        if rounds.round(k) != k * batch:
            raise SystemExit("the target does not draft: its logits are not finite")
        seconds[k] = host_seconds(partial(rounds.round, k), plan.repeats)
    speedups = {k: tokens_per_round(plan.acceptance, k) * seconds[0] / seconds[k] for k in plan.lengths}
    bounds = {
        k: roofline.speedup(batch, context, k=k, budget=budget, acceptance=plan.acceptance)
        for k in plan.lengths
    }
    speedup, bound = max(speedups.values()), max(bounds.values())
    return {
        "batch": batch,
        "context": context,
        "budget": budget,
        "num_layers": len(runner.loaded.layers),
        "ms": {str(k): 1e3 * one for k, one in seconds.items()},
        "plain_times_roofline": seconds[0] / roofline.step_s(batch, 1, context),
        "k": max(speedups, key=lambda k: speedups[k]),
        "speedup": speedup,
        "speedups": {str(k): one for k, one in speedups.items()},
        "bound": bound,
        "share_of_bound": speedup / bound,
    }


def headlines(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return speedups and shares of the bound, of the better budget in each cell of the whole model."""
    num_layers = max(cell["num_layers"] for cell in cells)
    best = _best_of_shapes([cell for cell in cells if cell["num_layers"] == num_layers])
    largest = max(best, key=lambda shape: (shape[0] * shape[1], shape[0]))
    numbers = {
        "gpu_long_speedup_largest": best[largest]["speedup"],
        "gpu_long_speedup_best": max(cell["speedup"] for cell in best.values()),
        "gpu_long_share_of_bound": min(cell["share_of_bound"] for cell in best.values()),
        "gpu_long_plain_times_roofline_largest": best[largest]["plain_times_roofline"],
    }
    # What fits with all layers was not measured with fewer.
    compared = {shape: cell for shape, cell in _best_of_shapes(cells).items() if shape in _PUBLISHED}
    if compared:
        over = {shape: cell["speedup"] / _PUBLISHED[shape] for shape, cell in compared.items()}
        worst = min(over, key=lambda shape: over[shape])
        numbers["gpu_long_over_published"] = over[worst]
        numbers["gpu_long_over_published_layers"] = float(compared[worst]["num_layers"])
    return numbers


def _best_of_shapes(cells: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], Mapping[str, Any]]:
    """The better budget, by batch and context."""
    best: dict[tuple[int, int], Mapping[str, Any]] = {}
    for cell in cells:
        shape = (cell["batch"], cell["context"])
        if shape not in best or cell["speedup"] > best[shape]["speedup"]:
            best[shape] = cell
    return best


def product_operations_per_s(device: torch.device) -> float:
    """Operations per second of a large bf16 product."""
    left = torch.randn(_PRODUCT, _PRODUCT, dtype=torch.bfloat16, device=device)
    right = torch.randn(_PRODUCT, _PRODUCT, dtype=torch.bfloat16, device=device)
    seconds = device_seconds(lambda: left @ right, repeats=20).median
    return float(2 * _PRODUCT**3 / seconds)


def shapes_that_fit(plan: Plan, num_tokens: int) -> list[tuple[int, int]]:
    """Return the plan's shapes whose K/V fit.

    Raises:
        SystemExit: none does.
    """
    shapes = [shape for shape in plan.shapes if shape[0] * (shape[1] + 2 * _SPARE) <= num_tokens]
    if not shapes:
        raise SystemExit(f"no batch fits: the device's memory holds the K/V of {num_tokens} tokens")
    return shapes


def layers_that_fit(config: LlamaConfig, shape: tuple[int, int], num_bytes: int) -> int:
    """Return how many layers of a model fit into so much memory with the K/V of a batch."""
    batch, context = shape
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    kv_width = (config.num_key_value_heads or config.num_attention_heads) * head_dim
    projections = 2 * config.hidden_size * (config.num_attention_heads * head_dim + kv_width)
    weights = projections + 3 * config.hidden_size * config.intermediate_size
    cached = batch * (context + 2 * _SPARE) * 2 * kv_width
    fixed = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    left = num_bytes - BYTES_LEFT - _BYTES_PER_NUMBER * fixed
    return max(0, min(config.num_hidden_layers, left // (_BYTES_PER_NUMBER * (weights + cached))))


def with_layers(config: LlamaConfig, num_layers: int) -> LlamaConfig:
    """Return the shape of a model with fewer layers."""
    shorter = copy.deepcopy(config)
    shorter.num_hidden_layers = num_layers
    return shorter


def shorter_models(
    plan: Plan, config: LlamaConfig, shapes: Sequence[tuple[int, int]], num_bytes: int
) -> list[tuple[LlamaConfig, tuple[int, int]]]:
    """Return models that stand for the whole one in published batches that it does not fit with."""
    missing = [shape for shape in plan.published if shape not in shapes]
    layers = {shape: layers_that_fit(config, shape, num_bytes) for shape in missing}
    return [(with_layers(config, number), one) for one, number in layers.items() if number >= _FEWEST_LAYERS]


def run(
    plan: Plan, config: LlamaConfig, machine: Machine, device: torch.device, progress: Progress
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All cells that fit, and what their making took."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    empty = random_model(config, device, max_model_len=_MAX_CONTEXT + _SPARE)
    limit = tokens_that_fit(empty, device)
    del empty
    free_memory()
    shapes = shapes_that_fit(plan, limit)
    cells, record_s = run_shapes(plan, config, shapes, machine, device, progress)
    for shorter, shape in shorter_models(plan, config, shapes, int(free_bytes)):
        free_memory()
        more, its_record_s = run_shapes(plan, shorter, [shape], machine, device, progress)
        cells, record_s = cells + more, record_s + its_record_s
    return cells, {"tokens_that_fit": float(limit), "record_s": record_s}


def run_shapes(
    plan: Plan,
    config: LlamaConfig,
    shapes: Sequence[tuple[int, int]],
    machine: Machine,
    device: torch.device,
    progress: Progress,
) -> tuple[list[dict[str, Any]], float]:
    """Measure all budgets in batches that fit; return the cells, and the seconds that recording took."""
    num_tokens = max(batch * (context + 2 * _SPARE) for batch, context in shapes)
    subject = Subject(config, num_tokens, plan.max_rows, device, _MAX_CONTEXT + _SPARE)
    record_s = subject.record()
    subject.runner.graphs = subject.graphs
    loop = GraphedDraftLoop(
        subject.runner,
        subject.config,
        vocab_size=subject.runner.vocab_size,
        num_draft_tokens=max(plan.lengths),
        max_num_seqs=max(batch for batch, _ in shapes),
        max_read=1,
    )
    if loop.warm_up() != "ready":
        raise SystemExit("the draft loop cannot be recorded; a log line says why")
    roofline = roofline_of(subject.runner, subject.num_weight_bytes, machine)
    cells = list(itertools.product(shapes, plan.budgets))
    return [
        measure_cell(subject.runner, roofline, shape, budget, plan, loop)
        for shape, budget in progress.track(cells, description=f"rounds, {config.num_hidden_layers} layers")
    ], record_s


def main(
    quick: Annotated[bool, typer.Option(help="Five batches, two k, fewer repeats.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
) -> None:
    """Measure self-speculation over long contexts.

    Example: python -m benchmarks.gpu_long_context --quick --json runs/gpu-long-context.json
    """
    device = require_cuda()
    plan = QUICK if quick else FULL
    speeds = bandwidth(device)
    machine = Machine(bytes_per_s=max(speeds.values()), operations_per_s=product_operations_per_s(device))
    free_memory()
    with torch.inference_mode(), progress_bar() as progress:
        cells, facts = run(plan, LLAMA_8B, machine, device, progress)
    numbers = headlines(cells)
    results = {
        "device": device_facts(device),
        "plan": plan,
        "bandwidth": speeds,
        "machine": machine,
        "facts": facts,
        "cells": cells,
    }
    write_results(json_file, {**results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
