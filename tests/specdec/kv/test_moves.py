"""Moves of the path that stands: afterwards the cache is that of a chain."""

from __future__ import annotations

import random

import pytest
import torch

from specdec.core.plan import SlotMove
from specdec.kv.block_allocator import BlockAllocator
from specdec.kv.block_table import BlockTable
from specdec.kv.moves import moves_of_path
from specdec.kv.pool import KvPool, KvShape

NUM_BLOCKS = 40


def table_of(rng: random.Random, num_tokens: int, block_size: int) -> BlockTable:
    """A table whose blocks are in no order."""
    allocator = BlockAllocator(NUM_BLOCKS)
    blocks = allocator.allocate(NUM_BLOCKS - 1)
    rng.shuffle(blocks)
    allocator.free(blocks)
    table = BlockTable(allocator, block_size)
    table.grow(num_tokens)
    return table


def random_path(rng: random.Random, num_nodes: int) -> list[int]:
    return sorted(rng.sample(range(num_nodes), rng.randint(0, num_nodes)))


def contents(pool: KvPool, table: BlockTable, num_places: int) -> list[torch.Tensor]:
    """K and V of all layers, by place."""
    size = table.block_size
    where = [(table.block_ids[place // size], place % size) for place in range(num_places)]
    return [
        torch.cat([layer[block, :, offset].flatten() for layer in (*pool.keys, *pool.values)])
        for block, offset in where
    ]


@pytest.mark.parametrize("seed", range(40))
def test_afterwards_the_cache_is_that_of_a_chain(seed: int) -> None:
    """Several sequences at once, layers of two shapes; what lies before the trees is left alone."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 16])
    shapes = [KvShape(num_kv_heads=2, head_dim=3), KvShape(num_kv_heads=1, head_dim=4)] * 2
    pool = KvPool(
        shapes, num_blocks=NUM_BLOCKS, block_size=block_size, dtype=torch.float32, device=torch.device("cpu")
    )
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.rand_like(tensor))
    allocator = BlockAllocator(NUM_BLOCKS)
    moves: list[SlotMove] = []
    expected = []
    for _ in range(rng.randint(1, 3)):
        first, num_nodes = rng.randint(0, 3 * block_size), rng.randint(1, 8)
        table = BlockTable(allocator, block_size)
        if table.num_missing(first + num_nodes) > allocator.num_free:
            continue
        table.grow(first + num_nodes)
        path = random_path(rng, num_nodes)
        moves += moves_of_path(table, first, path)
        before = contents(pool, table, first + num_nodes)
        expected.append((table, [*before[:first], *(before[first + node] for node in path)]))
    if moves:
        pool.move_slots(moves)
    for table, places in expected:
        for ours, theirs in zip(contents(pool, table, len(places)), places, strict=True):
            assert torch.equal(ours, theirs)


def test_all_are_read_before_any_is_written() -> None:
    """Places 1 and 2 of a path are each other's neighbours: written first, place 1 would be read too late."""
    pool = KvPool(
        [KvShape(num_kv_heads=1, head_dim=1)],
        num_blocks=3,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool.keys[0][1, 0, :, 0] = torch.arange(4.0)
    pool.move_slots([SlotMove(5, 4), SlotMove(6, 5), SlotMove(7, 6)])
    assert pool.keys[0][1, 0, :, 0].tolist() == [1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("seed", range(10))
def test_what_lies_in_order_is_not_moved(seed: int) -> None:
    rng = random.Random(seed)
    table = table_of(rng, 40, 4)
    assert moves_of_path(table, 7, range(12)) == []
    num_in_order = rng.randint(0, 5)
    path = [*range(num_in_order), *(node + num_in_order + 1 for node in range(4))]
    assert len(moves_of_path(table, 7, path)) == 4


def test_what_nobody_wants_is_not_moved() -> None:
    """Behind `end_place`: tokens of a request that has ended, in a block that is not full."""
    table = table_of(random.Random(0), 24, 4)
    path = [2, 3, 5, 6, 9]
    whole = moves_of_path(table, 6, path)
    assert moves_of_path(table, 6, path, end_place=8) == whole[:2]
    assert moves_of_path(table, 6, path, end_place=0) == []
