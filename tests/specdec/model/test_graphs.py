"""The compiled forward against the eager one, and everything that may keep it from being compiled."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable, load_library
from specdec.attention.sdpa import SdpaAttention
from specdec.model import compile_work, graphs, native_compile
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel, load_model
from specdec.model.lowering import Norm, Operation
from specdec.model.runner import ForwardInputs, ModelRunner
from specdec.model.trace import Value
from tests.architectures import CORE_ARCHITECTURES, LOWERED, VARIED_ARCHITECTURES, VOCAB_SIZE, save_model
from tests.pairwise import mostly_full
from tests.specdec.model.compiled_runners import compiled_runner, make_batches, make_runner, run

pytestmark = pytest.mark.usefixtures("one_thread_each")
LoadedOf = Callable[..., LoadedModel]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def loaded_of(tmp_path_factory: pytest.TempPathFactory) -> LoadedOf:
    """Loads a tiny model; skips where nothing can be compiled."""
    try:
        CpuPagedAttention()
    except NativeUnavailable as error:
        pytest.skip(f"no compiled forward here: {error}")

    @cache
    def make(architecture: str, dtype: str = "float32") -> LoadedModel:
        folder: Path = tmp_path_factory.mktemp(architecture)
        save_model(folder, architecture)
        return load_model(ModelConfig.model_validate({"model": str(folder), "dtype": dtype}))

    return make


@pytest.fixture
def forgotten_libraries() -> Iterator[None]:
    """Libraries are looked for anew within the test."""
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.mark.cover(1)
@pytest.mark.parametrize("architecture", mostly_full(LOWERED, VARIED_ARCHITECTURES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_the_eager_forward(loaded_of: LoadedOf, architecture: str, dtype: str) -> None:
    loaded = loaded_of(architecture, dtype)
    eager, runner = make_runner(loaded), compiled_runner(loaded)
    assert isinstance(eager.backend, SdpaAttention)
    assert isinstance(runner.backend, CpuPagedAttention)
    batches = make_batches(runner)
    tolerance = 2e-5 if dtype == "float32" else 5e-2
    for logits, expected in zip(run(runner, batches), run(eager, batches), strict=True):
        scale = float(expected.abs().max()) if expected.numel() else 1.0
        torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance * scale)
        if dtype == "float32":
            assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("architecture", CORE_ARCHITECTURES)
def test_greedy_decoding_is_that_of_transformers(
    loaded_of: LoadedOf, architecture: str, tmp_path: Path
) -> None:
    runner = compiled_runner(loaded_of(architecture))
    prompt = random.Random(1).choices(range(2, VOCAB_SIZE), k=9)
    with torch.inference_mode():
        expected = save_model(tmp_path, architecture).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=40,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens = list(prompt)
    while len(tokens) < expected.shape[1]:
        done = 0 if len(tokens) == len(prompt) else len(tokens) - 1
        logits = runner.forward(
            [
                SequenceSlice(
                    token_ids=tokens[done:], start=done, block_table=list(range(1, 20)), num_logit_rows=1
                )
            ]
        )
        tokens.append(int(logits[0].argmax()))
    assert tokens == expected[0].tolist()


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_its_batch_or_on_threads(
    loaded_of: LoadedOf, architecture: str, dtype: str
) -> None:
    """Bitwise: every slice alone and row by row gives what it gave in its batch, on any number of threads."""
    runner = compiled_runner(loaded_of(architecture, dtype))
    batches = make_batches(runner)
    together = run(runner, batches)
    for num_threads in (2, 3, 1):
        torch.set_num_threads(num_threads)
        for _ in range(5):
            assert all(map(torch.equal, run(runner, batches), together))
    for batch, expected in zip(batches, together, strict=True):
        rows = [row for piece in batch for row in _one_by_one(runner, piece)]
        assert torch.equal(torch.cat(rows) if rows else expected, expected)


def test_forwards_of_several_threads_do_not_disturb_each_other(loaded_of: LoadedOf) -> None:
    """They share one pool of threads, of changing size; forwards come and go meanwhile."""
    names = ["llama", "qwen3", "gpt2"]
    runners = {name: compiled_runner(loaded_of(name)) for name in names}
    batches = {name: make_batches(runner) for name, runner in runners.items()}
    expected = {name: run(runners[name], batches[name]) for name in names}

    def work(name: str) -> bool:
        torch.set_num_threads(2 + names.index(name))
        equal = True
        for _ in range(8):
            equal &= all(map(torch.equal, run(runners[name], batches[name]), expected[name]))
            del runners[name]
            runners[name] = compiled_runner(loaded_of(name))
        return equal

    with ThreadPoolExecutor(len(names)) as executor:
        assert all(executor.map(work, names))


def _one_by_one(runner: ModelRunner, piece: SequenceSlice) -> list[torch.Tensor]:
    rows = []
    for index, token_id in enumerate(piece.token_ids):
        single = replace(piece, token_ids=[token_id], start=piece.start + index, num_logit_rows=1)
        rows.append(runner.forward([single]).clone())
    return rows[len(rows) - piece.num_logit_rows :]


def test_trees(loaded_of: LoadedOf) -> None:
    loaded = loaded_of("llama")
    eager, runner = make_runner(loaded), compiled_runner(loaded)
    table = list(range(1, 20))
    prompt = SequenceSlice(token_ids=[5, 6, 7, 8, 9], start=0, block_table=table, num_logit_rows=1)
    tree = SequenceSlice(
        token_ids=[11, 12, 13, 14, 15],
        start=5,
        block_table=table,
        num_logit_rows=5,
        parents=[-1, 0, 0, 1, 2],
    )
    for logits, expected in zip(run(runner, [[prompt], [tree]]), run(eager, [[prompt], [tree]]), strict=True):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3)
    chain = replace(tree, parents=None)
    assert (runner.forward([chain]) - expected).abs().max() > 0.1, "negative control"


def test_padding_changes_nothing(loaded_of: LoadedOf) -> None:
    runner = compiled_runner(loaded_of("llama"))
    assert runner.graphs is not None
    for batch in make_batches(runner):
        inputs = runner.pack(batch)
        num_rows = inputs.metadata.num_rows
        logits = runner.graphs.try_run(inputs)
        assert logits is not None
        expected = logits.clone()
        padded = ForwardInputs(
            input_ids=torch.cat([inputs.input_ids, torch.full((1, 3), 9)], dim=1),
            logit_rows=inputs.logit_rows,
            metadata=inputs.metadata.padded(num_rows=num_rows + 3, num_sequences=6, num_blocks=40),
        )
        logits = runner.graphs.try_run(padded)
        assert logits is not None
        assert torch.equal(logits, expected)


def test_a_token_outside_the_vocabulary_is_an_error(loaded_of: LoadedOf) -> None:
    runner = compiled_runner(loaded_of("llama"))
    for token_id in (VOCAB_SIZE, -1):
        wrong = SequenceSlice(token_ids=[token_id], start=0, block_table=[1], num_logit_rows=1)
        with pytest.raises(IndexError, match="out of range"):
            runner.forward([wrong])


def test_pieces_are_done_one_at_a_time_and_the_eager_forward_serves_meanwhile(loaded_of: LoadedOf) -> None:
    runner = make_runner(loaded_of("llama"))
    forward = CompiledForward(runner, CompileConfig())
    runner.graphs = forward
    piece = SequenceSlice(token_ids=[7], start=0, block_table=[3], num_logit_rows=1)
    expected = runner.forward([piece]).clone()
    num_pieces = 0
    done = [-1]
    while forward.pending():
        assert forward.state == "pending"
        done.append(forward.progress().done)
        assert done[-2] <= done[-1] < forward.progress().total
        torch.testing.assert_close(runner.forward([piece]), expected, rtol=0, atol=1e-3)
        forward.run_next()
        num_pieces += 1
    assert forward.state == "ready"
    assert num_pieces > 5
    assert forward.progress().done + 1 == forward.progress().total
    forward.run_next()
    assert forward.state == "ready"


def check_falls_back(runner: ModelRunner, config: CompileConfig, reason: str, caplog: Any) -> None:
    """The state is failed, exactly one warning names the reason, and the runner runs as before."""
    batches = make_batches(runner)
    expected = run(runner, batches)
    forward = CompiledForward(runner, config)
    runner.graphs = forward
    with caplog.at_level(logging.WARNING):
        assert forward.warm_up() == "failed"
    assert not forward.pending()
    (record,) = [entry for entry in caplog.records if entry.name == compile_work.__name__]
    assert reason in record.getMessage()
    for logits, eager in zip(run(runner, batches), expected, strict=True):
        torch.testing.assert_close(logits, eager, rtol=0, atol=1e-3)


@pytest.mark.usefixtures("forgotten_libraries")
def test_without_a_compiler_one_line_says_so(
    loaded_of: LoadedOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner(loaded_of("llama"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    config = CompileConfig(cache_dir=str(tmp_path))
    check_falls_back(runner, config, "runs eagerly, which is slower: no C++ compiler found", caplog)
    assert isinstance(runner.backend, SdpaAttention)


def test_what_depends_on_the_data_stays_eager(
    loaded_of: LoadedOf, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts whose own loop is recorded: which rows go where depends on the data."""
    monkeypatch.setattr(graphs, "recorded_experts", lambda _: nullcontext())
    check_falls_back(make_runner(loaded_of("qwen3_moe")), CompileConfig(), "depends on the batch", caplog)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_bytes", [0, 30_000])
def test_weights_beyond_the_bound_are_read_in_place(loaded_of: LoadedOf, dtype: str, max_bytes: int) -> None:
    loaded = loaded_of("qwen2", dtype)
    runner, bounded = compiled_runner(loaded), make_runner(loaded)
    bounded.graphs = forward = CompiledForward(bounded, CompileConfig(max_frozen_bytes=max_bytes))
    assert forward.warm_up() == "ready"
    assert forward.num_packed_bytes <= max_bytes
    batches = make_batches(runner)
    assert all(map(torch.equal, run(bounded, batches), run(runner, batches)))


def test_weights_that_must_be_packed_are_bounded(
    loaded_of: LoadedOf, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner(loaded_of("gpt2"))
    check_falls_back(runner, CompileConfig(max_frozen_bytes=1000), "max_frozen_bytes = 1000", caplog)


def test_a_wrong_forward_is_not_used(
    loaded_of: LoadedOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fuse = native_compile.fuse

    def spoiled(operations: Sequence[Operation], results: Sequence[Value]) -> list[Operation]:
        return [
            replace(operation, epsilon=0.5) if isinstance(operation, Norm) else operation
            for operation in fuse(operations, results)
        ]

    monkeypatch.setattr(native_compile, "fuse", spoiled)
    check_falls_back(make_runner(loaded_of("llama")), CompileConfig(), "differ from the eager ones", caplog)


def test_an_unforeseen_error_is_named(
    loaded_of: LoadedOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("as it happens")

    monkeypatch.setattr(native_compile, "schedule", broken)
    runner = make_runner(loaded_of("llama"))
    check_falls_back(runner, CompileConfig(), "ZeroDivisionError: as it happens", caplog)


def test_compilation_can_be_switched_off(loaded_of: LoadedOf) -> None:
    runner = make_runner(loaded_of("llama"))
    forward = CompiledForward(runner, CompileConfig(mode="off"))
    assert not forward.pending()
    assert forward.warm_up() == forward.state == "off"
    assert forward.try_run(runner.pack(make_batches(runner)[0])) is None
