"""An allocator that remembers what is in the blocks it takes back, until it needs their memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NewType

from specdec.core.ids import BlockId
from specdec.kv.block_allocator import BlockAllocator

BlockKey = NewType("BlockKey", bytes)
"""Names the content of a full block: its tokens and all tokens before them (see `kv.prefix_cache`)."""


class CachingBlockAllocator(BlockAllocator):
    """A `BlockAllocator` whose blocks may have names.

    A named block that nobody holds any more is idle: it counts as free, and can be found by its name and
    held again until its memory is needed. Then the block that has been idle for the longest time loses its
    name first. Blocks of a sequence are freed from its end on, so that of one prefix the end goes first.
    """

    __slots__ = ("_block_by_key", "_idle", "_key_by_block")

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._block_by_key: dict[BlockKey, BlockId] = {}
        self._key_by_block: dict[BlockId, BlockKey] = {}
        self._idle: OrderedDict[BlockId, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def num_named(self) -> int:
        """Blocks that can be found by their name."""
        return len(self._block_by_key)

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Hand out blocks; idle ones only when there are no others."""
        for _ in range(num_blocks - len(self._free)):
            assert self._idle, f"{num_blocks} blocks asked for, {self.num_free} free"
            block, _ = self._idle.popitem(last=False)
            del self._block_by_key[self._key_by_block.pop(block)]
            self._free.append(block)
        return super().allocate(num_blocks)

    def name(self, block: BlockId, key: BlockKey) -> None:
        """Let a held block be found by `key` from now on. Where another one is, that one stays the one."""
        assert self._reference_counts[block] > 0, f"block {block} is free and cannot get a name"
        assert block not in self._key_by_block, f"block {block} has a name already"
        if key not in self._block_by_key:
            self._block_by_key[key] = block
            self._key_by_block[block] = key

    def find(self, keys: Iterable[BlockKey]) -> list[BlockId]:
        """Return the blocks of these names, up to the first that there is none for."""
        blocks: list[BlockId] = []
        for key in keys:
            block = self._block_by_key.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add a holder to each of these named blocks, held or idle."""
        for block in blocks:
            assert block in self._key_by_block, f"block {block} has no name"
            if self._reference_counts[block] == 0:
                del self._idle[block]
            self._reference_counts[block] += 1

    def forget(self, blocks: Iterable[BlockId]) -> None:
        """Take the names of these blocks away, from those that have one."""
        for block in blocks:
            key = self._key_by_block.pop(block, None)
            if key is not None:
                del self._block_by_key[key]
                if self._reference_counts[block] == 0:
                    del self._idle[block]
                    self._free.append(block)

    def forget_all(self) -> None:
        """Take all names away."""
        self.forget(list(self._key_by_block))

    def check_integrity(self) -> None:
        """Assert also that names and blocks belong together, and that just the named are idle."""
        super().check_integrity()
        assert {block: key for key, block in self._block_by_key.items()} == self._key_by_block
        assert self._idle.keys() <= self._key_by_block.keys(), "an idle block has no name"
        assert not self._key_by_block.keys() & set(self._free), "a block with a name is not idle but free"

    def _take_back(self, block: BlockId) -> None:
        if block in self._key_by_block:
            self._idle[block] = None
        else:
            self._free.append(block)

    def _unheld(self) -> list[BlockId]:
        return [*self._free, *self._idle]
