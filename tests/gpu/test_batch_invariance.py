"""`batch_invariant` on a real device: equal bits for any number, order and company of rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from specdec.attention.triton import MAX_SPLIT_ROWS, TritonPagedAttention
from specdec.kv.config import CacheConfig
from specdec.model.acceleration import accelerate, attention_of
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.cuda_graphs import CudaForward
from specdec.model.invariance.on_gpu import GpuOperations
from specdec.model.invariance.operations import InvariantForward
from specdec.model.loader import load_model
from specdec.model.runner import ModelRunner
from tests.architectures import VOCAB_SIZE, save_model
from tests.specdec.model.invariance.nodes import check_nodes
from tests.specdec.model.invariance.operations_on_gpu import (
    OPERATIONS,
    TOLERANCE,
    relative_error,
    rows,
    run,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["fp32", "bf16", "fp16"]
NUM_ROWS = 300
NUM_BLOCKS = 400
LONGEST = MAX_SPLIT_ROWS + 60


@pytest.fixture
def forward() -> InvariantForward:
    return InvariantForward(GpuOperations(torch.device("cuda")))


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_any_rows_in_any_order(forward: InvariantForward, name: str, dtype: torch.dtype) -> None:
    for width in (7, 64, 300, 4096):
        x = rows(NUM_ROWS, width, dtype, "cuda")
        assert relative_error(forward, OPERATIONS[name], x) < TOLERANCE[dtype]
        everything = run(forward, OPERATIONS[name], x)
        for number in (1, 2, 5, 8, 16, 17, 63, 64, 65, 128, 200, 299):
            order = torch.randperm(NUM_ROWS)[:number].to("cuda")
            assert torch.equal(run(forward, OPERATIONS[name], x[order]), everything[order]), (width, number)


def test_control_cublas_follows_the_batch() -> None:
    """The comparison sees what PyTorch does by itself, in one of many shapes at least."""
    differ = False
    for width, columns in ((4096, 4096), (4096, 64), (14336, 4096), (8192, 1024)):
        weight = torch.randn(columns, width, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(NUM_ROWS, width, device="cuda", dtype=torch.bfloat16)
        everything = F.linear(x, weight)
        for number in (1, 2, 8, 64):
            differ |= not torch.equal(F.linear(x[:number].clone(), weight), everything[:number])
    assert differ


class Cut:
    """Runs sequences in pieces and keeps every row's logits."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self._runner = runner
        self._rng = random.Random(seed)
        blocks = list(range(1, NUM_BLOCKS))
        self._rng.shuffle(blocks)
        per_sequence = -(-LONGEST // runner.block_size)
        tokens = random.Random(1)
        self._tokens = [tokens.choices(range(2, VOCAB_SIZE), k=size) for size in (LONGEST, 23, 70)]
        self._tables = [
            blocks[per_sequence * index : per_sequence * (index + 1)] for index in range(len(self._tokens))
        ]
        self._logits: list[list[torch.Tensor]] = [[] for _ in self._tokens]

    def run(self, size: Callable[[random.Random], int]) -> list[torch.Tensor]:
        while any(len(done) < len(all_) for done, all_ in zip(self._logits, self._tokens, strict=True)):
            order = list(range(len(self._tokens)))
            self._rng.shuffle(order)
            pieces, taken = [], []
            for index in order:
                start = len(self._logits[index])
                count = min(len(self._tokens[index]) - start, size(self._rng))
                if count:
                    taken.append((index, count))
                    pieces.append(
                        SequenceSlice(
                            token_ids=self._tokens[index][start : start + count],
                            start=start,
                            block_table=self._tables[index],
                            num_logit_rows=count,
                        )
                    )
            if not pieces:
                continue
            found = iter(self._runner.forward(pieces).clone())
            for index, count in taken:
                self._logits[index] += [next(found) for _ in range(count)]
        return [torch.stack(one) for one in self._logits]


def make_runner(folder: Path, architecture: str, dtype: str, *, graphed: bool) -> ModelRunner:
    save_model(folder, architecture)
    config = {"model": str(folder), "device": "cuda", "dtype": dtype, "batch_invariant": True}
    loaded = load_model(ModelConfig.model_validate(config))
    runner = ModelRunner(
        loaded,
        CacheConfig(num_blocks=NUM_BLOCKS, block_size=4),
        max_num_seqs=8,
        backend=attention_of(loaded, "auto", CompileConfig()),
    )
    assert isinstance(runner.backend, TritonPagedAttention)
    compile_config = CompileConfig(mode="auto" if graphed else "off", cuda_graph_max_rows=24)
    forward = accelerate(runner, compile_config, takes_trees=True)
    if graphed:
        assert isinstance(forward, CudaForward)
        forward.warm_up()  # a mixture stays eager
    return runner


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2", "mixtral", "falcon", "phi3"])
def test_forwards(tmp_path: Path, architecture: str, dtype: str, graphed: bool) -> None:
    runner = make_runner(tmp_path, architecture, dtype, graphed=graphed)
    first = Cut(runner, 0).run(lambda _: LONGEST)
    for seed, size in enumerate(
        (lambda _: 1, lambda _: 5, lambda rng: rng.choice((0, 1, 3, rng.randint(1, LONGEST)))), start=1
    ):
        assert all(map(torch.equal, first, Cut(runner, seed).run(size)))


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mixtral"])
def test_nodes_of_trees(tmp_path: Path, architecture: str, dtype: str, graphed: bool) -> None:
    """What a node says is what the end of a chain of its path says, beside a chain and at any place."""
    check_nodes(make_runner(tmp_path, architecture, dtype, graphed=graphed))
