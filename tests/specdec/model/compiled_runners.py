"""Runners of tiny models, eager and compiled, and batches of every kind for them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from specdec.kv.config import CacheConfig
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel
from specdec.model.runner import ModelRunner
from tests.architectures import VOCAB_SIZE

WORK = [
    # (sequence, rows, logit rows) of each slice of a batch
    [(0, 20, 1), (1, 7, 7)],  # prefill
    [(0, 1, 1), (2, 33, 1), (1, 5, 5)],  # everything mixed, more rows than before
    [(0, 5, 5), (1, 5, 5), (2, 5, 5)],  # verification
    [(0, 4, 0)],  # a chunk without logits
    [(0, 1, 1), (1, 1, 1), (2, 1, 1)],  # decode
    [(1, 1, 1)],
]


def make_runner(loaded: LoadedModel) -> ModelRunner:
    return ModelRunner(loaded, CacheConfig(num_blocks=200, block_size=4), max_num_seqs=32)


def compiled_runner(loaded: LoadedModel) -> ModelRunner:
    runner = make_runner(loaded)
    forward = CompiledForward(runner, CompileConfig())
    assert forward.warm_up() == "ready"
    runner.graphs = forward
    return runner


def make_batches(runner: ModelRunner, seed: int = 0) -> list[list[SequenceSlice]]:
    """`WORK` as slices with random tokens and scattered blocks."""
    rng = random.Random(seed)
    blocks = list(range(1, runner.num_blocks))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(64 // runner.block_size)] for _ in range(3)]
    ends = [0, 0, 0]
    batches = []
    for work in WORK:
        batch = []
        for sequence, rows, num_logit_rows in work:
            batch.append(
                SequenceSlice(
                    token_ids=rng.choices(range(2, VOCAB_SIZE), k=rows),
                    start=ends[sequence],
                    block_table=tables[sequence],
                    num_logit_rows=num_logit_rows,
                )
            )
            ends[sequence] += rows
        batches.append(batch)
    return batches


def run(runner: ModelRunner, batches: Sequence[Sequence[SequenceSlice]]) -> list[torch.Tensor]:
    return [runner.forward(batch).clone() for batch in batches]
