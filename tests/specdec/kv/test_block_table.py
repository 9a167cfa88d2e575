"""Block tables: growth, trimming, and what the reader at the other end knows."""

from __future__ import annotations

import random

import pytest

from specdec.kv.block_allocator import BlockAllocator
from specdec.kv.block_table import BlockTable, num_blocks_for


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_num_blocks_for(num_tokens: int, expected: int) -> None:
    assert num_blocks_for(num_tokens, 4) == expected


def test_grows_only_when_needed() -> None:
    table = BlockTable(BlockAllocator(10), 4)
    assert table.num_missing(5) == 2
    table.grow(5)
    blocks = list(table.block_ids)
    table.grow(8)
    assert list(table.block_ids) == blocks
    table.grow(9)
    assert list(table.block_ids)[:2] == blocks
    assert table.capacity == 12
    assert table.num_missing(3) == 0


def test_trim_frees_what_holds_nothing() -> None:
    allocator = BlockAllocator(10)
    table = BlockTable(allocator, 4)
    table.grow(17)
    table.trim(5)
    assert table.num_blocks == 2
    assert allocator.num_used == 2
    table.trim(100)
    assert table.num_blocks == 2
    table.release()
    assert allocator.num_used == 0


def test_updates_name_only_what_changed() -> None:
    table = BlockTable(BlockAllocator(10), 4)
    table.grow(8)
    assert table.take_update() == (0, tuple(table.block_ids))
    assert table.take_update() == (2, ())
    table.grow(12)
    table.trim(4)
    table.grow(12)
    assert table.take_update() == (1, tuple(table.block_ids[1:]))


@pytest.mark.parametrize("seed", range(10))
def test_reader_always_has_the_table(seed: int) -> None:
    """Whatever happens between updates, applying each to a copy gives the table."""
    generator = random.Random(seed)
    allocator = BlockAllocator(30)
    tables = [BlockTable(allocator, 3) for _ in range(3)]
    copies: list[list[int]] = [[], [], []]
    for _ in range(300):
        which = generator.randrange(3)
        table = tables[which]
        operation = generator.choice(["grow", "grow", "trim", "release", "update"])
        if operation == "grow":
            num_tokens = generator.randint(0, 40)
            if table.num_missing(num_tokens) <= allocator.num_free:
                table.grow(num_tokens)
                assert table.capacity >= num_tokens
        elif operation == "trim":
            table.trim(generator.randint(0, 40))
        elif operation == "release":
            table.release()
            copies[which] = []
        else:
            update = table.take_update()
            assert update.start <= len(copies[which])
            copies[which][update.start :] = update.block_ids
            assert copies[which] == list(table.block_ids)
        for one in tables:
            one.check_integrity()
        allocator.check_integrity()
        assert allocator.num_used == sum(one.num_blocks for one in tables)


def test_dropped_blocks_go_on_counting() -> None:
    allocator = BlockAllocator(20)
    table = BlockTable(allocator, 4)
    table.grow(30)
    blocks = list(table.block_ids)
    table.drop(1, 3)
    assert list(table.block_ids) == [blocks[0], *blocks[4:]]
    assert (table.num_dropped, table.capacity, allocator.num_used) == (12, 32, 5)
    assert (table.num_missing(32), table.num_missing(33)) == (0, 1)
    assert table.block_ids[table.index_of(17)] == blocks[4]
    table.grow(33)
    assert table.num_blocks == 6
    forked = table.fork(23)
    assert list(forked.block_ids) == [blocks[0], blocks[4]]
    forked.grow(25)
    assert (forked.num_dropped, forked.capacity) == (12, 28)
    forked.release()
    assert (forked.num_dropped, forked.capacity) == (0, 0)
    table.trim(20)
    assert list(table.block_ids) == [blocks[0], blocks[4]]
    table.check_integrity()
    table.release()
    assert allocator.num_used == 0
