"""Sizing and copying of the KV pool."""

from __future__ import annotations

import pytest
import torch

from specdec.core.errors import ResourceError
from specdec.kv.budget import MemoryBudget
from specdec.kv.config import CacheConfig
from specdec.kv.pool import KvPool, KvShape, bytes_per_block, plan_num_blocks

SHAPES = [KvShape(num_kv_heads=2, head_dim=8), KvShape(num_kv_heads=1, head_dim=16)]


def make_pool(num_blocks: int = 6) -> KvPool:
    return KvPool(
        SHAPES, num_blocks=num_blocks, block_size=4, dtype=torch.bfloat16, device=torch.device("cpu")
    )


def test_layout_and_size() -> None:
    pool = make_pool()
    assert [tuple(tensor.shape) for tensor in pool.keys] == [(6, 2, 4, 8), (6, 1, 4, 16)]
    assert pool.num_bytes == 6 * bytes_per_block(SHAPES, 4, torch.bfloat16)
    assert bytes_per_block(SHAPES, 4, torch.bfloat16) == 2 * (2 * 8 + 16) * 4 * 2


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    assert plan_num_blocks(CacheConfig(num_blocks=7), SHAPES, torch.float32, max_tokens=10) == 7


def test_two_sizes_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="give one of num_blocks and memory_bytes, not both"):
        CacheConfig(num_blocks=7, memory_bytes=1 << 16)
    with pytest.raises(ValueError, match="give one of memory_bytes and memory_fraction, not both"):
        CacheConfig(memory_bytes=1 << 16, memory_fraction=0.5)


def test_what_was_measured_decides_where_nothing_is_said() -> None:
    config = CacheConfig(block_size=4)
    block = bytes_per_block(SHAPES, 4, torch.float32)
    budget = MemoryBudget(num_bytes=10 * block + 1, origin="measured")
    assert plan_num_blocks(config, SHAPES, torch.float32, max_tokens=10**9, measured=budget) == 10
    none = MemoryBudget(num_bytes=block, origin="0.5 of nothing")
    with pytest.raises(ResourceError, match=r"not one request fits.*0\.5 of nothing"):
        plan_num_blocks(config, SHAPES, torch.float32, max_tokens=10**9, measured=none)


def test_memory_decides_how_many_blocks() -> None:
    config = CacheConfig(block_size=4, memory_bytes=100_000)
    block = bytes_per_block(SHAPES, 4, torch.float32)
    assert plan_num_blocks(config, SHAPES, torch.float32, max_tokens=10**9) == 100_000 // block


def test_no_more_blocks_than_all_sequences_can_fill_and_the_scratch_block() -> None:
    config = CacheConfig(block_size=4, memory_bytes=1 << 30)
    assert plan_num_blocks(config, SHAPES, torch.float32, max_tokens=41) == 1 + 11


def test_memory_for_no_usable_block_is_refused() -> None:
    shapes = [KvShape(num_kv_heads=64, head_dim=256)]
    with pytest.raises(
        ResourceError, match=r"65536 bytes \(cache.memory_bytes\), which hold 0 blocks of \d+"
    ):
        plan_num_blocks(CacheConfig(memory_bytes=1 << 16), shapes, torch.float32, max_tokens=100)


def test_copy_blocks_copies_both_halves_of_all_layers() -> None:
    pool = make_pool()
    for index, tensor in enumerate((*pool.keys, *pool.values)):
        tensor.copy_(torch.arange(6).view(6, 1, 1, 1) + 10 * index)
    pool.copy_blocks([1, 2], [5, 4])
    for index, tensor in enumerate((*pool.keys, *pool.values)):
        assert [int(tensor[block].float().mean()) - 10 * index for block in range(6)] == [0, 1, 2, 3, 2, 1]
