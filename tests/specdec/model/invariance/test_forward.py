"""Eager forwards under `batch_invariant`: equal bits whatever the rows' number, order and company.

Models are tiny and random, of every architecture. The controls run the same comparison without the flag.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import pytest
import torch

from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.kv.config import CacheConfig
from specdec.model.acceleration import accelerate, attention_of
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.invariance.native import NativeOperations
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from tests.architectures import (
    ARCHITECTURES,
    VARIED_ARCHITECTURES,
    VOCAB_SIZE,
    save_model,
    save_wide_model,
)
from tests.pairwise import mostly_full
from tests.quantizer import some_quantizer
from tests.specdec.model.invariance.nodes import check_nodes

DTYPES = ("float32", "bfloat16")
NUM_TOKENS = 70
BLOCK_SIZE = 4
NUM_BLOCKS = 200
EAGER = CompileConfig(mode="off")
Load = Callable[..., LoadedModel]
WIDE = "wide llama"


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Loads tiny models; skips where nothing can be compiled."""
    try:
        NativeOperations()
    except NativeUnavailable as error:
        pytest.skip(f"no C++ kernels here: {error}")

    @cache
    def folder_of(architecture: str) -> Path:
        folder: Path = tmp_path_factory.mktemp(architecture)
        if architecture == WIDE:
            save_wide_model(folder)
        else:
            save_model(folder, architecture)
        return folder

    @cache
    def make(architecture: str, dtype: str, **settings: object) -> LoadedModel:
        values = {"model": str(folder_of(architecture)), "dtype": dtype, "batch_invariant": True, **settings}
        with some_quantizer():
            return load_model(ModelConfig.model_validate(values))

    return make


@pytest.fixture(
    autouse=True, params=[1, pytest.param(3, marks=pytest.mark.full)], ids=["1 thread", "3 threads"]
)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def make_runner(loaded: LoadedModel, compile_config: CompileConfig = EAGER) -> ModelRunner:
    runner = ModelRunner(
        loaded,
        CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        max_num_seqs=16,
        backend=attention_of(loaded, "auto", CompileConfig()),
    )
    accelerate(runner, compile_config)
    return runner


class Cut:
    """Runs sequences in pieces, in random company and order, and keeps every row's logits."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self._runner = runner
        self._rng = random.Random(seed)
        blocks = list(range(1, NUM_BLOCKS))
        self._rng.shuffle(blocks)
        self._tables = [blocks[24 * index : 24 * (index + 1)] for index in range(4)]
        lengths = (NUM_TOKENS, 23, 40, 9)
        tokens = random.Random(1)
        length = min(NUM_TOKENS, runner.max_model_len)
        self._tokens = [tokens.choices(range(2, VOCAB_SIZE), k=min(one, length)) for one in lengths]
        self.logits: list[list[torch.Tensor]] = [[] for _ in self._tokens]

    def run(self, size: Callable[[random.Random], int]) -> list[torch.Tensor]:
        """Each step takes `size(rng)` more tokens of some of the sequences; 0: nothing of this one."""
        while any(self._left(index) for index in range(len(self._tokens))):
            order = list(range(len(self._tokens)))
            self._rng.shuffle(order)
            sizes = {index: min(self._left(index), size(self._rng)) for index in order}
            pieces = [self._slice(index, rows) for index, rows in sizes.items() if rows]
            if not pieces:
                continue
            rows = iter(self._runner.forward(pieces).clone())
            for index, taken in sizes.items():
                self.logits[index] += [next(rows) for _ in range(taken)]
        return [torch.stack(rows) for rows in self.logits]

    def _left(self, index: int) -> int:
        return len(self._tokens[index]) - len(self.logits[index])

    def _slice(self, index: int, rows: int) -> SequenceSlice:
        start = len(self.logits[index])
        return SequenceSlice(
            token_ids=self._tokens[index][start : start + rows],
            start=start,
            block_table=self._tables[index],
            num_logit_rows=rows,
        )


def in_many_ways(runner: ModelRunner) -> list[list[torch.Tensor]]:
    """All at once; one by one; k + 1 at a time; anything from nothing to 70 rows at a time."""
    return [
        Cut(runner, 0).run(lambda _: NUM_TOKENS),
        Cut(runner, 1).run(lambda _: 1),
        Cut(runner, 2).run(lambda _: 5),
        Cut(runner, 3).run(lambda rng: rng.choice((0, 0, 1, 3, rng.randint(1, NUM_TOKENS)))),
    ]


def are_equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", mostly_full([*ARCHITECTURES, WIDE], [*VARIED_ARCHITECTURES, WIDE]))
def test_every_architecture(load: Load, architecture: str, dtype: str) -> None:
    first, *others = in_many_ways(make_runner(load(architecture, dtype)))
    for other in others:
        assert are_equal(first, other)


def test_control_without_the_flag_rows_differ(load: Load) -> None:
    """The comparison sees what eager PyTorch does, also where its attention is ours."""
    runner = make_runner(load(WIDE, "float32", batch_invariant=False))
    runner.backend = CpuPagedAttention()
    first, *others = in_many_ways(runner)
    assert not all(are_equal(first, other) for other in others)


def test_control_in_bf16(load: Load) -> None:
    """The same: PyTorch's products of few rows in bf16 are cut otherwise where sums are long."""
    runner = make_runner(load(WIDE, "bfloat16", batch_invariant=False))
    runner.backend = CpuPagedAttention()
    torch.set_num_threads(2)
    if are_equal(Cut(runner, 0).run(lambda _: NUM_TOKENS), Cut(runner, 1).run(lambda _: 1)):
        pytest.skip("PyTorch's bf16 products are the same for 1 and for 70 rows on this machine")


def test_control_sums_that_follow_the_batch(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever PyTorch does here: sums of one row that are added up in two halves show, in bf16 too."""
    whole = NativeOperations.linear

    def in_halves(
        self: NativeOperations, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.numel() > x.shape[-1]:
            return whole(self, x, weight, bias)
        half = x.shape[-1] // 2
        return whole(self, x[..., :half], weight[:, :half], bias) + whole(
            self, x[..., half:], weight[:, half:]
        )

    loaded = load("llama", "bfloat16")
    expected = Cut(make_runner(loaded), 0).run(lambda _: NUM_TOKENS)
    monkeypatch.setattr(NativeOperations, "linear", in_halves)
    monkeypatch.setattr(loaded.invariant, "_known", dict(loaded.invariant.operations.replacements()))
    assert not are_equal(expected, Cut(make_runner(loaded), 1).run(lambda _: 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "falcon", "mixtral"])
def test_close_to_the_models_own_numbers(load: Load, architecture: str, dtype: str) -> None:
    plain = load(architecture, "float32", batch_invariant=False)
    expected = Cut(make_runner(plain), 0).run(lambda _: NUM_TOKENS)
    got = Cut(make_runner(load(architecture, dtype)), 0).run(lambda _: NUM_TOKENS)
    scale = max(float(rows.abs().max()) for rows in expected)
    difference = max(float((a - b).abs().max()) for a, b in zip(expected, got, strict=True)) / scale
    assert difference < (1e-4 if dtype == "float32" else 0.2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3_moe"])
def test_compiled(load: Load, architecture: str, dtype: str) -> None:
    """Ready when it is made: a request never sees an eager forward first."""
    runner = make_runner(load(architecture, dtype), CompileConfig())
    assert runner.graphs is not None
    assert runner.graphs.is_ready
    first, *others = in_many_ways(runner)
    for other in others:
        assert are_equal(first, other)


def test_what_has_no_table_for_every_prompt_stays_eager(load: Load) -> None:
    runner = make_runner(load("llama_dynamic_ntk", "bfloat16"), CompileConfig())
    assert runner.graphs is not None
    assert not runner.graphs.is_ready
    tabulated = make_runner(load("phi3_longrope", "bfloat16"), CompileConfig())
    assert tabulated.graphs is not None
    assert tabulated.graphs.is_ready


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized(load: Load, quantization: str, compiled: bool) -> None:
    loaded = load("llama", "bfloat16", quantization=quantization)
    first, *others = in_many_ways(make_runner(loaded, CompileConfig() if compiled else EAGER))
    for other in others:
        assert are_equal(first, other)


def test_weights_that_find_no_room_give_the_same(load: Load) -> None:
    first = Cut(make_runner(load("gpt2", "bfloat16")), 0).run(lambda _: 5)
    unpacked = make_runner(load("gpt2", "bfloat16"), CompileConfig(mode="off", max_frozen_bytes=0))
    assert are_equal(first, Cut(unpacked, 0).run(lambda _: 5))


def test_trees_do_not_change_their_company(load: Load) -> None:
    """A tree of drafts is verified beside a chain; the chain's rows are those it has alone."""
    runner = make_runner(load("llama", "bfloat16"))
    chain = SequenceSlice(token_ids=[5, 6, 7], start=0, block_table=[1], num_logit_rows=3)
    tree = SequenceSlice(
        token_ids=[9, 10, 11, 12], start=0, block_table=[2], num_logit_rows=4, parents=(-1, 0, 0, 1)
    )
    alone = runner.forward([chain]).clone()
    assert torch.equal(runner.forward([tree, chain])[4:], alone)


@pytest.mark.parametrize("mode", ["off", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mixtral"])
def test_nodes_of_trees(load: Load, architecture: str, dtype: str, mode: Literal["off", "auto"]) -> None:
    check_nodes(make_runner(load(architecture, dtype), CompileConfig(mode=mode)))
