"""The floor of a step that is bound by memory: reading its weights and its cached keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from specdec.kv.huge_pages import huge_zeros
from specdec.model.loader import LoadedModel

_STEPS_IN_TURN = 8
_WARM_STEPS = 3


def bytes_per_step(loaded: LoadedModel, num_weight_bytes: int, *, batch: int, context: int) -> int:
    """Bytes that one step of `batch` sequences of `context` cached tokens reads at least once."""
    cached = sum(2 * context * layer.num_kv_heads * layer.head_dim for layer in loaded.layers)
    return num_weight_bytes + batch * cached * loaded.dtype.itemsize


def fastest_read(num_bytes: int) -> Callable[[], torch.Tensor]:
    """Return the reduction of PyTorch that reads a buffer of this size, on huge pages, fastest."""
    buffer = huge_zeros([num_bytes // 4], torch.float32).fill_(1.0)  # memory is there once written
    reads: list[Callable[[], torch.Tensor]] = [buffer.sum, buffer.max, lambda: torch.dot(buffer, buffer)]
    seconds = in_turn({str(number): read for number, read in enumerate(reads)}, turns=2)
    return reads[min(range(len(reads)), key=lambda number: min(seconds[str(number)]))]


def in_turn(ways: Mapping[str, Callable[[], torch.Tensor]], turns: int) -> dict[str, list[float]]:
    """Seconds of every step of each way: some steps each in turn, in alternating order."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(turns):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            for _ in range(_WARM_STEPS):
                ways[name]()
            for _ in range(_STEPS_IN_TURN):
                started_s = time.perf_counter()
                ways[name]()
                seconds[name].append(time.perf_counter() - started_s)
    return seconds
