"""How large a model's KV pool becomes, by what is left of the memory beside the largest forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from specdec.core.errors import ResourceError
from specdec.kv.config import CacheConfig
from specdec.kv.pool import KvPool, KvShape, bytes_per_block
from specdec.model import pool_sizing
from specdec.model.batch import SequenceSlice
from specdec.model.loader import LoadedModel
from specdec.model.pool_sizing import PoolDemand, make_pool
from specdec.model.runner import ModelRunner
from tests.specdec.model.conftest import Pair

MIB = 1 << 20
HUNGRY_BYTES = 96 * MIB
"""What the forward of `Hungry` takes for a moment."""


class Hungry:
    """A forward that takes much memory, and remembers what it was given."""

    def __init__(self) -> None:
        self.batches: list[Sequence[SequenceSlice]] = []

    def __call__(self, slices: Sequence[SequenceSlice], pool: KvPool) -> torch.Tensor:
        self.batches.append(slices)
        return torch.ones(HUNGRY_BYTES // 4).sum()


@pytest.fixture
def loaded(pair_of: Callable[[str], Pair]) -> LoadedModel:
    return pair_of("llama").loaded


def block_bytes(loaded: LoadedModel, block_size: int) -> int:
    shapes = [KvShape(num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim) for layer in loaded.layers]
    return bytes_per_block(shapes, block_size, loaded.dtype)


def leave(monkeypatch: pytest.MonkeyPatch, num_bytes: int | None) -> None:
    monkeypatch.setattr(pool_sizing, "available_bytes", lambda: num_bytes)


def test_the_largest_forward_is_measured_and_left_room_for(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 200 * MIB)
    forward = Hungry()
    config = CacheConfig(block_size=4, memory_fraction=1.0)
    demand = PoolDemand(max_num_seqs=4096, max_num_batched_tokens=300, reserved_bytes=40 * MIB)
    pool = make_pool(loaded, config, demand, forward)
    assert pool.num_bytes == pytest.approx(200 * MIB - HUNGRY_BYTES - 40 * MIB, abs=8 * MIB)
    (batch,) = forward.batches
    assert sum(len(piece.token_ids) for piece in batch) == 300
    assert all(piece.num_logit_rows == len(piece.token_ids) for piece in batch)
    assert max(piece.start + len(piece.token_ids) for piece in batch) == loaded.max_model_len


def test_half_of_it_is_taken_where_nobody_says_how_much(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 200 * MIB)
    pool = make_pool(loaded, CacheConfig(block_size=4), PoolDemand(max_num_seqs=4096), Hungry())
    assert pool.num_bytes == pytest.approx((200 * MIB - HUNGRY_BYTES) / 2, abs=4 * MIB)


def test_what_will_never_be_needed_is_not_taken_nor_measured(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 1 << 40)
    forward = Hungry()
    pool = make_pool(loaded, CacheConfig(block_size=4), PoolDemand(max_num_seqs=2), forward)
    assert pool.num_blocks == 1 + 2 * loaded.max_model_len // 4
    assert not forward.batches


def test_no_room_is_said_at_once(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, HUNGRY_BYTES // 2)
    with pytest.raises(ResourceError, match=r"not one request fits.*after the largest forward"):
        make_pool(loaded, CacheConfig(block_size=4), PoolDemand(max_num_seqs=4096), Hungry())


def test_a_forward_that_does_not_fit_is_said_at_once(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(slices: Sequence[SequenceSlice], pool: KvPool) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    leave(monkeypatch, 1 << 20)
    demand = PoolDemand(max_num_seqs=4096, max_num_batched_tokens=900)
    with pytest.raises(ResourceError, match=r"of 900 rows does not fit.*max_num_batched_tokens"):
        make_pool(loaded, CacheConfig(block_size=4), demand, too_large)


@pytest.mark.parametrize("size", [{"num_blocks": 1000}, {"memory_bytes": 4 * MIB}])
def test_more_than_there_is_is_refused(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, size: dict[str, int]
) -> None:
    """A CPU's memory is taken as it is written to: the process would die later, under load."""
    config = CacheConfig(block_size=4, **size)  # type: ignore[arg-type]
    demand = PoolDemand(max_num_seqs=4096)
    num_bytes = make_pool(loaded, config, demand, Hungry()).num_bytes
    leave(monkeypatch, num_bytes)
    make_pool(loaded, config, demand, Hungry())
    leave(monkeypatch, num_bytes - 1)
    with pytest.raises(ResourceError, match=r"of memory are left: lower cache\.num_blocks"):
        make_pool(loaded, config, demand, Hungry())
    packed = replace(demand, reserved_bytes=3 * MIB)  # the copy that a compiled forward reads is made later
    leave(monkeypatch, num_bytes + 3 * MIB)
    make_pool(loaded, config, packed, Hungry())
    leave(monkeypatch, num_bytes + 3 * MIB - 1)
    with pytest.raises(ResourceError, match=r"of memory are left: lower cache\.num_blocks"):
        make_pool(loaded, config, packed, Hungry())


def test_memory_that_cannot_be_had_is_a_clear_error(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, None)
    num_blocks = (1 << 60) // block_bytes(loaded, 4)
    with pytest.raises(ResourceError, match=r"which cpu does not have"):
        make_pool(
            loaded, CacheConfig(block_size=4, num_blocks=num_blocks), PoolDemand(max_num_seqs=1), Hungry()
        )


def test_a_system_that_says_nothing_gets_a_moderate_pool(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, None)
    pool = make_pool(loaded, CacheConfig(block_size=16), PoolDemand(max_num_seqs=1 << 20), Hungry())
    assert 0.99 * (1 << 30) < pool.num_bytes <= 1 << 30


def test_measuring_leaves_the_model_as_it_was(
    pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real forward, over more rows than one sequence can have."""
    pair = pair_of("mistral")
    prompt = SequenceSlice(token_ids=[5, 6, 7], start=0, block_table=[1], num_logit_rows=3)
    expected = pair.runner().forward([prompt])
    leave(monkeypatch, 300 * MIB)
    runner = ModelRunner(
        pair.loaded, CacheConfig(block_size=4), max_num_seqs=4096, max_num_batched_tokens=700
    )
    assert runner.max_model_len == pair.loaded.max_model_len
    assert runner.pool.num_bytes <= 150 * MIB
    assert torch.equal(runner.forward([prompt]), expected)
