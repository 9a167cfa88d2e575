"""The allocator that keeps what it frees, against a slow model of it, checked after every operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from specdec.core.ids import BlockId
from specdec.kv.caching_allocator import BlockKey, CachingBlockAllocator


def key(text: str) -> BlockKey:
    return BlockKey(text.encode())


def named(allocator: CachingBlockAllocator, *texts: str) -> list[BlockId]:
    """Allocate, name and free one block per text, in this order."""
    blocks = allocator.allocate(len(texts))
    for block, text in zip(blocks, texts, strict=True):
        allocator.name(block, key(text))
        allocator.free([block])
    return blocks


def test_a_freed_block_is_found_until_its_memory_is_needed() -> None:
    allocator = CachingBlockAllocator(5)
    blocks = named(allocator, "a", "b")
    assert allocator.num_free == 4
    assert allocator.find([key("a"), key("b"), key("c")]) == blocks
    others = allocator.allocate(3)  # two that have no name, then the one idle for longest
    assert blocks[0] in others
    assert allocator.find([key("a")]) == []
    assert allocator.find([key("b")]) == [blocks[1]]
    allocator.check_integrity()


def test_what_is_held_again_is_idle_anew() -> None:
    allocator = CachingBlockAllocator(4)
    first, second, third = named(allocator, "a", "b", "c")
    allocator.hold([first])
    assert allocator.num_free == 2
    allocator.free([first])
    assert allocator.allocate(3) == [first, third, second], "the last to go comes first out of the free list"


def test_a_name_that_is_taken_stays_where_it_is() -> None:
    allocator = CachingBlockAllocator(4)
    one, other = allocator.allocate(2)
    allocator.name(one, key("a"))
    allocator.name(other, key("a"))
    allocator.free([other, one])
    assert allocator.find([key("a")]) == [one]
    assert allocator.num_named == 1
    allocator.check_integrity()


def test_forgotten_blocks_are_free_and_unknown() -> None:
    allocator = CachingBlockAllocator(6)
    idle = named(allocator, "a", "b")
    (held,) = allocator.allocate(1)
    allocator.name(held, key("c"))
    allocator.forget([idle[0], held, held])
    assert allocator.find([key("a")]) == allocator.find([key("c")]) == []
    allocator.check_integrity()
    allocator.forget_all()
    assert allocator.num_named == 0
    assert allocator.num_free == 4
    allocator.check_integrity()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda allocator: allocator.name(BlockId(3), key("x")),
        lambda allocator: allocator.name(BlockId(1), key("x")),
        lambda allocator: allocator.hold([BlockId(2)]),
        lambda allocator: allocator.hold([BlockId(3)]),
        lambda allocator: allocator.allocate(3),
    ],
    ids=["name a free one", "name twice", "hold without a name", "hold a free one", "too many"],
)
def test_misuse_is_caught(misuse: Callable[[CachingBlockAllocator], object]) -> None:
    allocator = CachingBlockAllocator(5)
    assert allocator.allocate(2) == [1, 2]
    allocator.name(BlockId(1), key("a"))
    with pytest.raises(AssertionError):
        misuse(allocator)


def test_integrity_check_notices_corruption() -> None:
    allocator = CachingBlockAllocator(5)
    (block,) = named(allocator, "a")
    allocator.check_integrity()
    del allocator._key_by_block[block]
    with pytest.raises(AssertionError):
        allocator.check_integrity()


class SlowModel:
    """What the allocator is to do, as lists that are searched from end to end."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holders: list[tuple[BlockId, int]] = []
        """(block, number of a holding)"""
        self.names: list[tuple[BlockKey, BlockId]] = []
        self.idle: list[BlockId] = []
        """Longest idle first."""

    def count(self, block: BlockId) -> int:
        return sum(held == block for held, _ in self.holders)

    def name_of(self, block: BlockId) -> BlockKey | None:
        return next((name for name, named in self.names if named == block), None)

    def find(self, name: BlockKey) -> BlockId | None:
        return next((block for known, block in self.names if known == name), None)

    def unnamed_free(self) -> set[BlockId]:
        blocks = {BlockId(block) for block in range(1, self.num_blocks)}
        return {block for block in blocks if not self.count(block) and self.name_of(block) is None}

    def drop_name(self, block: BlockId) -> None:
        self.names = [(name, named) for name, named in self.names if named != block]
        self.idle = [one for one in self.idle if one != block]

    def free(self, holding: tuple[BlockId, int]) -> None:
        self.holders.remove(holding)
        if not self.count(holding[0]) and self.name_of(holding[0]) is not None:
            self.idle.append(holding[0])


NAMES = st.integers(0, 11).map(lambda number: key(f"k{number}"))


class AllocatorMachine(RuleBasedStateMachine):
    """Any sequence of operations; both sides must agree after each."""

    @initialize(num_blocks=st.integers(2, 12))
    def make(self, num_blocks: int) -> None:
        self.allocator = CachingBlockAllocator(num_blocks)
        self.model = SlowModel(num_blocks)
        self.num_holdings = 0

    def add_holding(self, block: BlockId) -> None:
        self.num_holdings += 1
        self.model.holders.append((block, self.num_holdings))

    @rule(wanted=st.integers(0, 12))
    def allocate(self, wanted: int) -> None:
        self.take(wanted)

    @rule(names=st.lists(NAMES, min_size=1, max_size=5, unique=True))
    def come_and_go(self, names: list[BlockKey]) -> None:
        """What a sequence does: take blocks, name them, free them from the end on."""
        blocks = self.take(len(names))
        for block, name in zip(blocks, names, strict=False):
            self.allocator.name(block, name)
            if self.model.find(name) is None:
                self.model.names.append((name, block))
        self.allocator.free(reversed(blocks))
        for holding in self.model.holders[: -len(blocks) - 1 : -1]:
            self.model.free(holding)

    def take(self, wanted: int) -> list[BlockId]:
        unnamed, idle = self.model.unnamed_free(), list(self.model.idle)
        count = min(wanted, len(unnamed) + len(idle))
        blocks = self.allocator.allocate(count)
        assert len(set(blocks)) == len(blocks) == count
        evicted = idle[: max(0, count - len(unnamed))]
        assert set(blocks) <= unnamed | set(evicted), "a block was taken before its turn"
        assert set(evicted) <= set(blocks)
        for block in evicted:
            self.model.drop_name(block)
        for block in blocks:
            self.add_holding(block)
        return blocks

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.model.holders), min_size=1, unique=True))
        self.allocator.free([block for block, _ in chosen])
        for holding in chosen:
            self.model.free(holding)

    @precondition(lambda self: any(self.model.name_of(block) is None for block, _ in self.model.holders))
    @rule(data=st.data(), name=NAMES)
    def name(self, data: st.DataObject, name: BlockKey) -> None:
        unnamed = [block for block, _ in self.model.holders if self.model.name_of(block) is None]
        block = data.draw(st.sampled_from(unnamed))
        self.allocator.name(block, name)
        if self.model.find(name) is None:
            self.model.names.append((name, block))

    @rule(names=st.lists(NAMES, max_size=4), holds=st.booleans())
    def find(self, names: list[BlockKey], holds: bool) -> None:
        expected: list[BlockId] = []
        for name in names:
            block = self.model.find(name)
            if block is None:
                break
            expected.append(block)
        found = self.allocator.find(names)
        assert found == expected
        if holds:
            self.allocator.hold(found)
            for block in found:
                self.model.idle = [one for one in self.model.idle if one != block]
                self.add_holding(block)

    @precondition(lambda self: self.model.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block, _ = data.draw(st.sampled_from(self.model.holders))
        self.allocator.share([block])
        self.add_holding(block)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        every = [BlockId(block) for block in range(1, self.model.num_blocks)]
        chosen = data.draw(st.lists(st.sampled_from(every), max_size=3))
        self.allocator.forget(chosen)
        for block in chosen:
            self.model.drop_name(block)

    @rule()
    def forget_all(self) -> None:
        self.allocator.forget_all()
        self.model.names, self.model.idle = [], []

    @invariant()
    def agrees(self) -> None:
        allocator, model = self.allocator, self.model
        allocator.check_integrity()
        assert allocator.num_free == len(model.unnamed_free()) + len(model.idle)
        assert allocator.num_used == len({block for block, _ in model.holders})
        assert allocator.num_named == len(model.names)
        for block in range(1, model.num_blocks):
            assert allocator.reference_count(BlockId(block)) == model.count(BlockId(block))
        for name, block in model.names:
            assert allocator.find([name]) == [block]


TestAgainstSlowModel = AllocatorMachine.TestCase


def test_the_machine_notices_a_wrong_order_of_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the block that became idle last goes first."""

    def take_back(self: CachingBlockAllocator, block: BlockId) -> None:
        if block in self._key_by_block:
            self._idle[block] = None
            self._idle.move_to_end(block, last=False)
        else:
            self._free.append(block)

    monkeypatch.setattr(CachingBlockAllocator, "_take_back", take_back)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(AllocatorMachine, settings=settings(phases=[Phase.generate]))
