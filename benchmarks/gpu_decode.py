"""Decoding and verification steps of an 8 B Llama on one GPU, against reading its weights and its K/V once.

    python -m benchmarks.gpu_decode --json benchmarks/results/gpu-decode.json
    python -m benchmarks.gpu_decode --quick                                     # under four minutes

The model has the shape of Llama 3.1 8 B and random weights in bf16, over a paged cache of random K/V. A step
is what the engine runs (`ModelRunner.forward` on slices): decoding has 1 row per sequence, verifying 1 + k.

    device_ms   the replayed CUDA graph alone, by the device's clock
    step_ms     from slices to token ids on the host, greedily, by the host's clock: with packing and the copy
    eager_ms    the same without graphs (first shapes only)
    floor_ms    weights and K/V of all sequences over the bandwidth measured in the same run

The draft loop is k steps and choices in one graph, of a 1 B shape; its floor is k times that of a step.

Choosing is the token function on the logits of a step: greedily, at temperature 0.8, and with top-p 0.95 as
well; the floor is reading the logits once.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress
from transformers import LlamaConfig

from benchmarks.floor import bytes_per_step
from benchmarks.gpu_device import bandwidth, device_facts, device_seconds, require_cuda
from benchmarks.gpu_models import GIB, LLAMA_1B, LLAMA_8B, random_model
from benchmarks.report import progress_bar, report_headlines, write_results
from specdec.core.sampling_params import SamplingParams
from specdec.kv.config import CacheConfig
from specdec.kv.pool import KvShape, bytes_per_block
from specdec.model.acceleration import attention_of
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig
from specdec.model.cuda_graphs import CudaForward
from specdec.model.fused_norms import fuse_norms
from specdec.model.fused_rotary import fuse_rotary
from specdec.model.loader import LoadedModel
from specdec.model.runner import ModelRunner
from specdec.proposers.draft_graph import GraphedDraftLoop
from specdec.proposers.draft_loop import ChainStart
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import Sampler

_BLOCK_SIZE = 16
_MAX_CONTEXT = 16384 + 64
_CHOOSING = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.8),
    "cut": SamplingParams(temperature=0.8, top_p=0.95),
}
BYTES_LEFT = 12 * GIB
"""Of the device's memory, for graphs and what a step needs, beside weights and cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    shapes: tuple[tuple[int, int], ...]
    """Batch size and context."""
    eager_shapes: tuple[tuple[int, int], ...]
    draft_shapes: tuple[tuple[int, int], ...]
    choosing_rows: tuple[int, ...]
    k: int = 4
    repeats: int


FULL = Plan(
    shapes=tuple(itertools.product((1, 8, 32, 128), (512, 2048, 4096, 16384))),
    eager_shapes=((1, 512), (32, 512)),
    draft_shapes=((1, 512), (8, 512), (32, 4096)),
    choosing_rows=(1, 5, 32, 160, 640),
    repeats=40,
)
QUICK = Plan(
    shapes=((1, 512), (1, 16384), (8, 2048), (32, 4096), (128, 512)),
    eager_shapes=((1, 512),),
    draft_shapes=((1, 512),),
    choosing_rows=(5, 160),
    repeats=20,
)


class Subject:
    """A random model with its cache and its graphs."""

    def __init__(
        self,
        config: LlamaConfig,
        num_tokens: int,
        max_rows: int,
        device: torch.device,
        max_model_len: int = _MAX_CONTEXT,
    ) -> None:
        self.loaded = random_model(config, device, max_model_len=max_model_len)
        self.runner = ModelRunner(
            self.loaded,
            CacheConfig(block_size=_BLOCK_SIZE, num_blocks=1 + -(-num_tokens // _BLOCK_SIZE)),
            max_num_seqs=128,
            backend=attention_of(self.loaded, "triton", CompileConfig()),
        )
        for pool in (*self.runner.pool.keys, *self.runner.pool.values):
            pool.normal_()
        fuse_norms(self.loaded.model)
        fuse_rotary(self.loaded.model)
        self.config = CompileConfig(cuda_graph_max_rows=max_rows)
        self.graphs = CudaForward(self.runner, self.config)
        self.num_weight_bytes = bytes_of_weights(self.loaded)

    def record(self) -> float:
        """Record all graphs; return the seconds that it took."""
        started_s = time.perf_counter()
        state = self.graphs.warm_up()
        if state != "ready":
            raise SystemExit(f"CUDA graphs: {state}; a log line says why")
        return time.perf_counter() - started_s

    def slices(self, batch: int, context: int, rows: int) -> list[SequenceSlice]:
        """A step of `rows` tokens of each sequence, over blocks in random order."""
        order = self._blocks(batch, context + rows)
        return [
            SequenceSlice(
                token_ids=[(7 * row + 1) % self.runner.vocab_size for row in range(rows)],
                start=context,
                block_table=table,
                num_logit_rows=rows,
            )
            for table in order
        ]

    def starts(self, batch: int, context: int, k: int) -> list[ChainStart]:
        """Chains of k draft tokens behind one token each."""
        params = SamplingParams(temperature=0.0)
        return [
            ChainStart([1], context, table, k, params, seed)
            for seed, table in enumerate(self._blocks(batch, context + k))
        ]

    def _blocks(self, batch: int, num_tokens: int) -> list[array[int]]:
        """As the engine keeps them."""
        num_blocks = -(-num_tokens // _BLOCK_SIZE)
        order = torch.randperm(batch * num_blocks).add(1).view(batch, num_blocks)
        return [array("i", table) for table in order.tolist()]


def bytes_of_weights(loaded: LoadedModel) -> int:
    """Bytes of weights that a step reads: of embeddings a few rows, unless they are the head as well."""
    config: Any = loaded.config
    return sum(
        parameter.nbytes
        for name, parameter in loaded.model.named_parameters()
        if config.tie_word_embeddings or "embed_tokens" not in name
    )


def tokens_that_fit(loaded: LoadedModel, device: torch.device) -> int:
    """Tokens of K/V that the device's memory holds beside the model."""
    shapes = [KvShape(num_kv_heads=one.num_kv_heads, head_dim=one.head_dim) for one in loaded.layers]
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, (int(free) - BYTES_LEFT) // bytes_per_block(shapes, 1, loaded.dtype))


def free_memory() -> None:
    """Give back what nobody refers to any more."""
    gc.collect()
    torch.cuda.empty_cache()


def host_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of `run`, which ends with something on the host."""
    for _ in range(3):
        run()
    seconds = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def measure_step(
    subject: Subject, shape: tuple[int, int], rows: int, plan: Plan, bytes_per_s: float
) -> dict[str, Any]:
    """One cell: ms on the device, on the host, and of the floor."""
    batch, context = shape
    runner, graphs = subject.runner, subject.graphs
    slices = subject.slices(batch, context, rows)
    inputs = runner.pack(slices)
    replay = graphs.prepare(inputs)
    if replay is None:
        raise SystemExit(f"no CUDA graph holds {inputs.metadata.num_rows} rows")
    device_s = device_seconds(replay, repeats=plan.repeats).median
    runner.graphs = graphs
    step_s = host_seconds(lambda: runner.forward(slices).argmax(-1).tolist(), plan.repeats)
    ms = {"device": 1e3 * device_s, "step": 1e3 * step_s}
    if shape in plan.eager_shapes:
        runner.graphs = None
        ms["eager"] = 1e3 * host_seconds(lambda: runner.forward(slices).argmax(-1).tolist(), plan.repeats)
    floor_s = step_floor_s(subject, batch, context, bytes_per_s)
    return {
        "batch": batch,
        "context": context,
        "rows": rows,
        "ms": {**ms, "floor": 1e3 * floor_s},
        "device_times_floor": device_s / floor_s,
        "step_times_floor": step_s / floor_s,
    }


def step_floor_s(subject: Subject, batch: int, context: int, bytes_per_s: float) -> float:
    """Seconds to read what a step must read."""
    num_bytes = bytes_per_step(subject.loaded, subject.num_weight_bytes, batch=batch, context=context)
    return num_bytes / bytes_per_s


def measure_draft(
    subject: Subject, loop: GraphedDraftLoop, shape: tuple[int, int], plan: Plan, bytes_per_s: float
) -> dict[str, Any]:
    """One batch of chains, from committed tokens to token ids on the host."""
    batch, context = shape
    starts = subject.starts(batch, context, plan.k)

    def run() -> None:
        if loop.try_draft(starts) is None:
            raise SystemExit("the draft loop was not recorded")

    loop_s = host_seconds(run, plan.repeats)
    floor_s = plan.k * step_floor_s(subject, batch, context, bytes_per_s)
    return {
        "batch": batch,
        "context": context,
        "k": plan.k,
        "ms": {"loop": 1e3 * loop_s, "floor": 1e3 * floor_s},
        "times_floor": loop_s / floor_s,
    }


def measure_choosing(
    num_rows: int, vocab_size: int, plan: Plan, bytes_per_s: float, device: torch.device
) -> dict[str, Any]:
    """The token function on so many rows of bf16 logits."""
    logits_RV = torch.randn(num_rows, vocab_size, device=device).mul_(3.0).bfloat16()
    ms = {"floor": 1e3 * logits_RV.nbytes / bytes_per_s}
    for name, params in _CHOOSING.items():
        rows = SamplingRows.build([RowSpec(params, seed, seed, 1) for seed in range(num_rows)], device)
        seconds = device_seconds(partial(Sampler().sample, logits_RV, rows), repeats=plan.repeats)
        ms[name] = 1e3 * seconds.median
    return {"rows": num_rows, "vocab_size": vocab_size, "ms": ms}


def headlines(
    steps: Sequence[dict[str, Any]],
    drafts: Sequence[dict[str, Any]],
    choices: Sequence[dict[str, Any]],
    bytes_per_s: float,
) -> dict[str, float]:
    """Times of the floor at batch 1 and at the largest product of batch and context that fitted."""
    first = [cell for cell in steps if cell["batch"] == 1]
    by_rows = {cell["rows"]: cell for cell in reversed(first)}
    decode, verify = by_rows[min(by_rows)], by_rows[max(by_rows)]
    largest = max(
        (cell for cell in steps if cell["rows"] == decode["rows"]),
        key=lambda cell: cell["batch"] * cell["context"],
    )
    numbers = {
        "gpu_bandwidth_tb_s": bytes_per_s / 1e12,
        "gpu_decode_ms_b1": decode["ms"]["step"],
        "gpu_decode_times_floor_b1": decode["step_times_floor"],
        "gpu_verify_over_decode_b1": verify["ms"]["step"] / decode["ms"]["step"],
        "gpu_decode_times_floor_largest": largest["step_times_floor"],
    }
    if "eager" in decode["ms"]:
        numbers["gpu_graphs_speedup_b1"] = decode["ms"]["eager"] / decode["ms"]["step"]
    if drafts:
        numbers["gpu_draft_loop_times_floor_b1"] = drafts[0]["times_floor"]
    of_rows = {cell["rows"]: cell["ms"]["sampled"] for cell in choices}
    numbers["gpu_choosing_ms_160_rows"] = of_rows[160]
    return numbers


def run_steps(
    plan: Plan, bytes_per_s: float, device: torch.device, progress: Progress
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """All steps of the large model that fit, and what its making took."""
    started_s = time.perf_counter()
    empty = random_model(LLAMA_8B, device, max_model_len=_MAX_CONTEXT)
    limit = tokens_that_fit(empty, device)
    del empty
    free_memory()
    rows = (1, 1 + plan.k)
    wanted = [shape for shape in plan.shapes if shape[0] * (shape[1] + 64) <= limit]
    num_tokens = max(batch * (context + 64) for batch, context in wanted)
    subject = Subject(LLAMA_8B, num_tokens, max(batch for batch, _ in wanted) * rows[-1], device)
    facts = {"tokens_that_fit": float(limit), "make_s": time.perf_counter() - started_s}
    facts["record_s"] = subject.record()
    cells = [
        measure_step(subject, shape, count, plan, bytes_per_s)
        for shape, count in progress.track(list(itertools.product(wanted, rows)), description="steps of 8 B")
    ]
    return cells, facts


def run_drafts(
    plan: Plan, bytes_per_s: float, device: torch.device, progress: Progress
) -> list[dict[str, Any]]:
    """All draft loops of the small model."""
    num_tokens = max(batch * (context + 64) for batch, context in plan.draft_shapes)
    subject = Subject(LLAMA_1B, num_tokens, 64, device)
    loop = GraphedDraftLoop(
        subject.runner,
        subject.config,
        vocab_size=subject.runner.vocab_size,
        num_draft_tokens=plan.k,
        max_num_seqs=max(batch for batch, _ in plan.draft_shapes),
    )
    if loop.warm_up() != "ready":
        raise SystemExit("the draft loop cannot be recorded; a log line says why")
    shapes = progress.track(plan.draft_shapes, description="draft loops of 1 B")
    return [measure_draft(subject, loop, shape, plan, bytes_per_s) for shape in shapes]


def main(
    quick: Annotated[bool, typer.Option(help="Five batches, fewer repeats.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
) -> None:
    """Measure decoding, verification and draft loops.

    Example: python -m benchmarks.gpu_decode --quick --json runs/gpu-decode.json
    """
    device = require_cuda()
    plan = QUICK if quick else FULL
    speeds = bandwidth(device)
    bytes_per_s = max(speeds.values())
    free_memory()
    with torch.inference_mode(), progress_bar() as progress:
        steps, facts = run_steps(plan, bytes_per_s, device, progress)
        free_memory()
        drafts = run_drafts(plan, bytes_per_s, device, progress)
        free_memory()
        choices = [
            measure_choosing(num_rows, LLAMA_8B.vocab_size, plan, bytes_per_s, device)
            for num_rows in progress.track(plan.choosing_rows, description="choosing tokens")
        ]
    numbers = headlines(steps, drafts, choices, bytes_per_s)
    results = {
        "device": device_facts(device),
        "plan": plan,
        "bandwidth": speeds,
        "facts": facts,
        "steps": steps,
        "drafts": drafts,
        "choices": choices,
    }
    write_results(json_file, {**results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
