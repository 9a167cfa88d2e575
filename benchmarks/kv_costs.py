"""What a forward over paged K/V costs by itself, and what of that is reading them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.floor import fastest_read
from specdec.kv.block_table import num_blocks_for
from specdec.kv.pool import FIRST_BLOCK
from specdec.model.batch import SequenceSlice
from specdec.model.runner import ForwardInputs, ModelRunner

_SCRATCH_BLOCK = 0
_TURNS = 4
"""Blocks that each of several forwards is timed in; even, for ABBA."""
_WARM_S, _COUNTED_S = 0.005, 0.0125
"""Of a block, at least: until caches hold what this one reads, and what counts (50 ms of each in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward: `rows` new tokens of each of `batch` sequences behind `context` cached ones."""

    batch: int
    rows: int
    context: int


def inputs_of(runner: ModelRunner, step: Step) -> ForwardInputs:
    """Lay a step out over the runner's pool, whatever lies there. New rows are written to the scratch block.

    The context is cut to whole blocks.
    """
    num_blocks = step.context // runner.block_size
    tail = [_SCRATCH_BLOCK] * num_blocks_for(step.rows, runner.block_size)
    slices = []
    for index in range(step.batch):
        first = FIRST_BLOCK + index * num_blocks
        slices.append(
            SequenceSlice(
                token_ids=list(range(1, step.rows + 1)),
                start=num_blocks * runner.block_size,
                block_table=[*range(first, first + num_blocks), *tail],
                num_logit_rows=step.rows,
            )
        )
    return runner.pack(slices)


def forward_seconds(runner: ModelRunner, step: Step, repeats: int) -> float:
    """Seconds of the forward alone: inputs are laid out already, nothing is chosen."""
    return _median_seconds(_forward_of(runner, step), repeats)


def forwards_in_turn(forwards: Mapping[str, tuple[ModelRunner, Step]]) -> dict[str, float]:
    """Seconds of several forwards alone, measured so that it does not matter what ran before."""
    return seconds_in_turn({name: _forward_of(runner, step) for name, (runner, step) in forwards.items()})


def _forward_of(runner: ModelRunner, step: Step) -> Callable[[], None]:
    """Lay a step out; what is returned runs it to its end."""
    inputs = inputs_of(runner, step)

    def run() -> None:
        logits = runner.forward_packed(inputs)
        if logits.device.type == "cuda":  # it has only been told what to do
            torch.cuda.synchronize(logits.device)

    return run


@torch.inference_mode()
def seconds_in_turn(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each: in blocks that take turns (ABBA), each of which warms up first.

    Of engines beside each other the one that ran last has its weights in the caches; one after the other,
    with a single run to warm up, they would not be measured alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(_TURNS):
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            _seconds_within(runs[name], _WARM_S)
            seconds[name] += _seconds_within(runs[name], _COUNTED_S)
    return {name: statistics.median(each) for name, each in seconds.items()}


def kv_bytes(runner: ModelRunner, step: Step) -> int:
    """Bytes of K and V that a step has to read."""
    loaded = runner.loaded
    context = step.context // runner.block_size * runner.block_size
    entries = sum(2 * layer.num_kv_heads * layer.head_dim for layer in loaded.layers)
    return step.batch * context * entries * loaded.dtype.itemsize


class Stream:
    """Reads more than any cache holds, one address after the other: as fast as memory gives anything here."""

    num_bytes = 512 << 20

    def __init__(self) -> None:
        self._read = fastest_read(self.num_bytes)

    def seconds(self, repeats: int) -> float:
        """Seconds of one reading, by as many threads as everything has."""
        return _median_seconds(self._read, repeats)


def _seconds_within(run: Callable[[], object], least_s: float) -> list[float]:
    """Run once at least, and until it took so long."""
    seconds: list[float] = []
    while sum(seconds) < least_s:
        started_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_s)
    return seconds


@torch.inference_mode()
def _median_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)
