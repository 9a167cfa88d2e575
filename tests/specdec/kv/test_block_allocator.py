"""The allocator against a slow model that keeps a plain dictionary of holders."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from specdec.core.ids import BlockId
from specdec.kv.block_allocator import SCRATCH_BLOCK, BlockAllocator


def test_hands_out_every_block_but_scratch_once() -> None:
    allocator = BlockAllocator(8)
    blocks = allocator.allocate(7)
    assert sorted(blocks) == [1, 2, 3, 4, 5, 6, 7]
    assert allocator.num_free == 0
    assert allocator.num_used == allocator.num_usable == 7
    allocator.check_integrity()


def test_last_freed_is_first_handed_out() -> None:
    allocator = BlockAllocator(8)
    first, second = allocator.allocate(2)
    allocator.free([first])
    assert allocator.allocate(1) == [first]
    assert second not in allocator.allocate(5)


def test_shared_block_stays_until_its_last_holder_frees_it() -> None:
    allocator = BlockAllocator(3)
    (block,) = allocator.allocate(1)
    allocator.share([block])
    allocator.free([block])
    assert allocator.num_free == 1
    allocator.free([block])
    assert allocator.num_free == 2


@pytest.mark.parametrize(
    "misuse",
    [
        lambda allocator: allocator.allocate(4),
        lambda allocator: allocator.allocate(-1),
        lambda allocator: allocator.free([BlockId(1), BlockId(1)]),
        lambda allocator: allocator.share([BlockId(2)]),
        lambda allocator: allocator.free([SCRATCH_BLOCK]),
    ],
    ids=["too many", "negative", "double free", "share a free one", "scratch"],
)
def test_misuse_is_caught(misuse: Callable[[BlockAllocator], object]) -> None:
    allocator = BlockAllocator(4)
    assert allocator.allocate(1) == [1]
    with pytest.raises(AssertionError):
        misuse(allocator)


def test_pool_too_small() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockAllocator(1)


@pytest.mark.parametrize("seed", range(20))
def test_random_operations(seed: int) -> None:
    generator = random.Random(seed)
    num_blocks = generator.randint(2, 40)
    allocator = BlockAllocator(num_blocks)
    holders: Counter[BlockId] = Counter()
    for _ in range(300):
        held = [block for block, count in holders.items() if count]
        operation = generator.choice(["allocate", "share", "free", "free"])
        if operation == "allocate":
            blocks = allocator.allocate(generator.randint(0, allocator.num_free))
            assert all(holders[block] == 0 for block in blocks)
            assert len(set(blocks)) == len(blocks)
            holders.update(blocks)
        elif held:
            chosen = generator.sample(held, generator.randint(1, len(held)))
            if operation == "share":
                allocator.share(chosen)
                holders.update(chosen)
            else:
                allocator.free(chosen)
                holders.subtract(chosen)
        allocator.check_integrity()
        assert allocator.num_used == sum(count > 0 for count in holders.values())
        assert all(allocator.reference_count(block) == count for block, count in holders.items())


def test_integrity_check_notices_corruption() -> None:
    allocator = BlockAllocator(4)
    (block,) = allocator.allocate(1)
    allocator._free.append(block)
    with pytest.raises(AssertionError):
        allocator.check_integrity()
