"""The management of CUDA graphs, with a recorder that does on a CPU what CUDA does on a GPU.

Real graphs are recorded in tests/gpu.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specdec.kv.config import CacheConfig
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig
from specdec.model.cuda_graphs import CudaForward
from specdec.model.runner import ModelRunner
from specdec.model.static_batch import PackedArrays
from tests.architectures import VOCAB_SIZE
from tests.specdec.model.conftest import Pair
from tests.specdec.model.replaying_recorder import ReplayingRecorder
from tests.triton_interpreter import FAILURE, needs_interpreter

PairOf = Callable[[str], Pair]


def make_runner(
    pair: Pair, attention: str = "triton", hidden_layers: tuple[int, ...] = (), *, in_order: bool = False
) -> ModelRunner:
    from specdec.attention.sdpa import SdpaAttention
    from specdec.attention.triton import TritonPagedAttention

    loaded = pair.loaded
    backend = (
        TritonPagedAttention(loaded.device, max_context=loaded.max_model_len, batch_invariant=in_order)
        if attention == "triton"
        else SdpaAttention()
    )
    cache = CacheConfig(num_blocks=100, block_size=4)
    return ModelRunner(loaded, cache, max_num_seqs=8, backend=backend, hidden_layers=hidden_layers)


def batch(shapes: list[tuple[int, int]], seed: int) -> list[SequenceSlice]:
    """(start, rows) of each sequence, anywhere in the pool."""
    rng = random.Random(seed)
    free = list(range(1, 100))
    rng.shuffle(free)
    return [
        SequenceSlice(
            token_ids=rng.choices(range(VOCAB_SIZE), k=rows),
            start=start,
            block_table=[free.pop() for _ in range(-(-(start + rows) // 4))],
            num_logit_rows=rng.randint(0, rows),
            num_dropped=4 * rng.randrange(3),
        )
        for start, rows in shapes
    ]


def test_rows_are_padded_where_steps_can_be_recorded(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, config = make_runner(pair_of("llama"), "sdpa"), CompileConfig(cuda_graph_max_rows=11)
    assert CudaForward(runner, config).row_buckets == ()
    monkeypatch.setattr("specdec.model.cuda_graphs.recordable", lambda runner, config: runner.backend)
    assert CudaForward(runner, config).row_buckets == (1, 2, 3, 4, 5, 6, 7, 8, 10, 11)


@needs_interpreter
@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma2", marks=pytest.mark.full)])
def test_a_replay_is_the_eager_forward_of_whatever_batch(
    pair_of: PairOf, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(architecture)
    plain = make_runner(pair, "sdpa")
    recorded = make_runner(pair)
    recorder = ReplayingRecorder(monkeypatch)
    forward = recorded.graphs = CudaForward(recorded, CompileConfig(cuda_graph_max_rows=4), recorder)
    assert forward.pending()
    assert forward.warm_up() == "ready"
    assert forward.progress().done == forward.progress().total == 4
    assert forward.row_buckets == (1, 2, 3, 4)
    for pool in (*recorded.pool.keys, *recorded.pool.values):
        pool[0] = float("nan")  # what recording left in the scratch block must not matter
    shapes = [[(0, 4)], [(3, 1)], [(9, 1), (30, 1), (0, 1)], [(40, 3)], [(2, 1), (11, 2)], [(5, 2)]]
    for number, shape in enumerate(shapes):
        slices = batch(shape, seed=number)
        for runner in (plain, recorded):  # equal K/V of what came before
            for index, tensor in enumerate((*runner.pool.keys, *runner.pool.values)):
                generator = torch.Generator().manual_seed(1000 * number + index)
                tensor[1:] = torch.randn(tensor[1:].shape, generator=generator)
        expected = plain.forward(slices)
        assert forward.try_run(recorded.pack(slices)) is not None
        torch.testing.assert_close(recorded.forward(slices), expected, rtol=0, atol=3e-5)
        for ours, theirs in zip(recorded.pool.keys, plain.pool.keys, strict=True):
            torch.testing.assert_close(ours[1:], theirs[1:], rtol=0, atol=3e-5)


def grown(slices: list[SequenceSlice], seed: int) -> list[SequenceSlice]:
    """Every other sequence of more than one row as a tree."""
    rng = random.Random(seed)
    trees = []
    for number, piece in enumerate(slices):
        parents = tuple(rng.randrange(-1, row) for row in range(len(piece.token_ids)))
        is_tree = number % 2 == 0 and piece.start > 0
        trees.append(replace(piece, parents=parents) if is_tree else piece)
    return trees


@needs_interpreter
@pytest.mark.parametrize("in_order", [False, True], ids=["as they lie", "in order"])
@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma2", marks=pytest.mark.full)])
def test_a_replay_is_the_eager_forward_of_trees_and_chains(
    pair_of: PairOf, architecture: str, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In gemma2 the window of half of the layers reaches less far behind than the sequences are long."""
    pair = pair_of(architecture)
    plain, recorded = make_runner(pair, "sdpa"), make_runner(pair, in_order=in_order)
    config, recorder = CompileConfig(cuda_graph_max_rows=8), ReplayingRecorder(monkeypatch)
    forward = recorded.graphs = CudaForward(recorded, config, recorder, takes_trees=True)
    assert forward.warm_up() == "ready"
    shapes = [[(3, 5)], [(0, 4)], [(9, 3), (30, 4), (5, 1)], [(40, 6)], [(2, 1), (11, 3)], [(70, 2), (9, 4)]]
    for number, shape in enumerate(shapes):
        slices = batch(shape, seed=number)
        trees = grown(slices, seed=number)
        for runner in (plain, recorded):
            for index, tensor in enumerate((*runner.pool.keys, *runner.pool.values)):
                generator = torch.Generator().manual_seed(1000 * number + index)
                tensor[1:] = torch.randn(tensor[1:].shape, generator=generator)
        for pieces in (trees, slices, trees):  # masks of the step before must not be seen
            expected = plain.forward(pieces)
            assert forward.try_run(recorded.pack(pieces)) is not None
            torch.testing.assert_close(recorded.forward(pieces), expected, rtol=0, atol=3e-5)


@needs_interpreter
def test_a_replay_keeps_the_hidden_states_of_its_batch(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = make_runner(pair_of("llama"), "sdpa", hidden_layers=(1, -1))
    recorded = make_runner(pair_of("llama"), hidden_layers=(1, -1))
    forward = CudaForward(recorded, CompileConfig(cuda_graph_max_rows=4), ReplayingRecorder(monkeypatch))
    assert forward.warm_up() == "ready"
    for number, shape in enumerate([[(0, 4)], [(0, 1)], [(0, 2), (0, 1)]]):
        slices = batch(shape, seed=number)
        plain.forward(slices)
        assert forward.try_run(recorded.pack(slices)) is not None
        assert plain.hidden is not None
        assert recorded.hidden is not None
        theirs = plain.hidden.rows[4:]  # without the scratch block
        assert theirs.abs().max() > 0
        torch.testing.assert_close(recorded.hidden.rows[4:], theirs, rtol=0, atol=3e-5)


@needs_interpreter
def test_what_no_graph_holds_runs_eagerly(pair_of: PairOf, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(pair_of("llama"))
    forward = CudaForward(runner, CompileConfig(cuda_graph_max_rows=2), ReplayingRecorder(monkeypatch))
    small = runner.pack(batch([(0, 1)], seed=0))
    assert forward.try_run(small) is None, "nothing is recorded yet"
    forward.run_next()
    assert forward.try_run(small) is not None, "the bucket of two rows holds one"
    assert forward.warm_up() == "ready"
    assert forward.try_run(runner.pack(batch([(0, 3)], seed=0))) is None
    tree = SequenceSlice(token_ids=[5, 6], start=1, block_table=[1], num_logit_rows=2, parents=(-1, -1))
    assert forward.try_run(runner.pack([tree])) is None


@needs_interpreter
def test_a_forward_that_waits_for_the_device_stays_eager(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = make_runner(pair_of("llama"))
    own = runner.call_model

    def waits(*args: torch.Tensor) -> torch.Tensor:
        logits = own(*args)
        assert logits.sum().item() != 0
        return logits

    monkeypatch.setattr(runner, "call_model", waits)
    forward = CudaForward(runner, CompileConfig(cuda_graph_max_rows=2), ReplayingRecorder(monkeypatch))
    with caplog.at_level(logging.WARNING):
        assert forward.warm_up() == "failed"
    assert "runs eagerly, which is slower: WaitsForDevice" in caplog.text
    assert forward.try_run(runner.pack(batch([(0, 1)], seed=0))) is None


@needs_interpreter
def test_a_replay_that_differs_is_not_used(
    pair_of: PairOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Negative control: a recorder that loses the work of the device."""

    class Forgetful(ReplayingRecorder):
        def record(self, run: Callable[[], None]) -> Callable[[], None]:
            return lambda: None

    runner = make_runner(pair_of("llama"))
    forward = CudaForward(runner, CompileConfig(cuda_graph_max_rows=2), Forgetful(monkeypatch))
    with caplog.at_level(logging.WARNING):
        assert forward.warm_up() == "failed"
    assert "its logits differ from the eager ones" in caplog.text


@pytest.mark.parametrize("reason", ["mode", "rows", "attention"])
def test_switched_off(pair_of: PairOf, reason: str) -> None:
    if reason != "attention" and FAILURE is not None:
        pytest.skip(FAILURE)
    runner = make_runner(pair_of("llama"), "sdpa" if reason == "attention" else "triton")
    config = CompileConfig(
        mode="off" if reason == "mode" else "auto", cuda_graph_max_rows=0 if reason == "rows" else 8
    )
    forward = CudaForward(runner, config)
    assert forward.state == "off"
    assert not forward.pending()
    assert not forward.is_ready
    assert forward.try_run(runner.pack(batch([(0, 1)], seed=0))) is None


def test_arrays_travel_together_and_some_in_part() -> None:
    import numpy as np

    arrays = PackedArrays(
        {
            "wide": (np.int64, (3,)),
            "long": (np.int32, (90, 2)),
            "odd": (np.int32, (5,)),
            "table": (np.int32, (4, 2)),
        },
        torch.device("cpu"),
    )
    arrays.host["wide"][:] = [1, -2, 3]
    arrays.host["long"][:] = 5
    arrays.host["odd"][:] = 7
    arrays.host["table"][:] = 9
    assert not arrays.device["wide"].any()
    arrays.send(long=80, table=1)
    assert arrays.device["wide"].tolist() == [1, -2, 3]
    assert arrays.device["long"].sum(1).tolist() == [10] * 80 + [0] * 10
    assert arrays.device["odd"].tolist() == [7] * 5
    assert arrays.device["table"].tolist() == [[9, 9], [0, 0], [0, 0], [0, 0]]
    arrays.send(long=0, table=3)
    assert arrays.device["long"].sum(1).tolist() == [10] * 80 + [0] * 10
    arrays.send()
    assert arrays.device["long"].eq(5).all()
    assert arrays.device["table"].eq(9).all()
    assert all(tensor.data_ptr() % 64 == 0 for tensor in arrays.device.values())
