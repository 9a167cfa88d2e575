"""The blocks of one sequence, and how much of them the other end of a channel knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.core.ids import BlockId
from specdec.kv.block_allocator import BlockAllocator


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class TableUpdate(NamedTuple):
    """What a block table looks like from entry `start` on."""

    start: int
    block_ids: tuple[BlockId, ...]


class BlockTable:
    """Grows and shrinks with its sequence; block i holds positions i * block_size and following.

    Blocks may be dropped from its middle (a draft model that attends to a window needs them no more): numbers
    of tokens go on counting theirs, while the blocks behind them move up in `block_ids`.

    Whoever reads the table elsewhere (the target) is sent only what changed: see `take_update`.
    """

    __slots__ = ("_allocator", "_block_ids", "_num_dropped", "_num_known", "block_size")

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self.block_size = block_size
        self._block_ids: list[BlockId] = []
        self._num_dropped = 0
        self._num_known = 0

    @property
    def block_ids(self) -> Sequence[BlockId]:
        """The blocks in order of position; do not write to it."""
        return self._block_ids

    @property
    def num_dropped(self) -> int:
        """Tokens of the blocks that were dropped."""
        return self._num_dropped * self.block_size

    def index_of(self, position: int) -> int:
        """Return where in `block_ids` the block of a position behind all that was dropped is, or would be."""
        return position // self.block_size - self._num_dropped

    @property
    def num_blocks(self) -> int:
        """Number of blocks held."""
        return len(self._block_ids)

    @property
    def capacity(self) -> int:
        """Tokens that fit into the blocks held, those of dropped blocks included."""
        return (len(self._block_ids) + self._num_dropped) * self.block_size

    def num_missing(self, num_tokens: int) -> int:
        """Return how many more blocks `num_tokens` tokens need (0 when they fit already)."""
        return max(0, num_blocks_for(num_tokens, self.block_size) - self._num_dropped - len(self._block_ids))

    def begin_with(self, block_ids: Sequence[BlockId]) -> None:
        """Begin with blocks of which this table, empty so far, has been made a holder."""
        assert not self._block_ids
        self._block_ids.extend(block_ids)

    def skip(self, num_tokens: int) -> None:
        """Begin with so many tokens (whole blocks) dropped, of which there never were blocks."""
        assert not self._block_ids
        assert num_tokens % self.block_size == 0
        self._num_dropped = num_tokens // self.block_size

    def fork(self, num_tokens: int) -> BlockTable:
        """Return a table that holds those of these blocks, too, that the first `num_tokens` tokens fill.

        What is behind them in the last of their blocks is not in it: to be copied, if it shall be.
        """
        shared = self._block_ids[: self.index_of(num_tokens)]
        self._allocator.share(shared)
        other = BlockTable(self._allocator, self.block_size)
        other._block_ids.extend(shared)
        other._num_dropped = self._num_dropped
        return other

    def grow(self, num_tokens: int) -> None:
        """Hold blocks for at least `num_tokens` tokens. The caller has looked at `num_missing`."""
        missing = num_blocks_for(num_tokens, self.block_size) - self._num_dropped - len(self._block_ids)
        if missing > 0:
            self._block_ids.extend(self._allocator.allocate(missing))

    def drop(self, first: int, num_blocks: int) -> None:
        """Free `num_blocks` blocks from index `first` on; those behind them stay. Never of a table that is
        sent elsewhere.
        """
        assert first + num_blocks <= len(self._block_ids), "blocks are dropped that the table does not hold"
        assert self._num_known == 0, "whoever knows the table would not learn of it"
        self._allocator.free(reversed(self._block_ids[first : first + num_blocks]))
        del self._block_ids[first : first + num_blocks]
        self._num_dropped += num_blocks

    def trim(self, num_tokens: int) -> None:
        """Free the blocks that hold nothing of the first `num_tokens` tokens."""
        kept = max(0, num_blocks_for(num_tokens, self.block_size) - self._num_dropped)
        if kept < len(self._block_ids):
            self._allocator.free(reversed(self._block_ids[kept:]))
            del self._block_ids[kept:]
            self._num_known = min(self._num_known, kept)

    def release(self) -> None:
        """Free all blocks; whoever reads the table elsewhere is taken to have forgotten it."""
        self.trim(0)
        self._num_dropped = 0

    def take_update(self) -> TableUpdate:
        """Return the entries that changed since the last call. The reader keeps those before."""
        start = self._num_known
        self._num_known = len(self._block_ids)
        return TableUpdate(start, tuple(self._block_ids[start:]))

    def check_integrity(self) -> None:
        """Assert that every block is held, and only once by this table."""
        assert 0 <= self._num_known <= len(self._block_ids)
        assert len(set(self._block_ids)) == len(self._block_ids), "a block is in the table twice"
        for block in self._block_ids:
            assert self._allocator.reference_count(block) > 0, f"block {block} of a table is free"
