"""What a forward over paged K/V costs by itself, and what of that is reading them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.floor import fastest_read
from specdec.kv.block_table import num_blocks_for
from specdec.kv.pool import FIRST_BLOCK
from specdec.model.batch import SequenceSlice
from specdec.model.runner import ForwardInputs, ModelRunner

_SCRATCH_BLOCK = 0


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
    inputs = inputs_of(runner, step)
    return _median_seconds(lambda: runner.forward_packed(inputs), repeats)


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


@torch.inference_mode()
def _median_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    seconds = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)
