"""Who holds which block of a KV pool. Bookkeeping only: the memory itself is in `kv.pool`."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.core.ids import BlockId

SCRATCH_BLOCK = BlockId(0)
"""Never handed out: padding rows of a batch write there."""


class BlockAllocator:
    """Hands out the block ids 1 .. num_blocks - 1 of one pool and counts who holds each.

    A block that several sequences share goes back to the pool when the last of them frees it. The block
    freed last is handed out first: its memory is the likeliest to be in a cache.
    """

    __slots__ = ("_free", "_reference_counts", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        """Manage a pool of `num_blocks` blocks, the scratch block included.

        Raises:
            ValueError: fewer than 2, which leaves nothing to hand out.
        """
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is scratch), got {num_blocks}")
        self.num_blocks = num_blocks
        self._free: list[BlockId] = [BlockId(block) for block in range(num_blocks - 1, 0, -1)]
        self._reference_counts = [0] * num_blocks

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at most."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_usable - self.num_free

    def reference_count(self, block: BlockId) -> int:
        """Return how many holders a block has."""
        return self._reference_counts[block]

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Hand out blocks, each with one holder. The caller has looked at `num_free`."""
        assert 0 <= num_blocks <= len(self._free), f"{num_blocks} blocks asked for, {len(self._free)} free"
        if num_blocks == 0:
            return []
        blocks = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        blocks.reverse()
        for block in blocks:
            self._reference_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[BlockId]) -> None:
        """Add a holder to each of these blocks, all of which have one already."""
        for block in blocks:
            assert self._reference_counts[block] > 0, f"block {block} is free and cannot be shared"
            self._reference_counts[block] += 1

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Take one holder from each of these blocks; those without any go back to the pool."""
        for block in blocks:
            count = self._reference_counts[block] - 1
            assert count >= 0, f"block {block} is freed once too often"
            self._reference_counts[block] = count
            if count == 0:
                self._take_back(block)

    def _take_back(self, block: BlockId) -> None:
        """The last holder has gone."""
        self._free.append(block)

    def _unheld(self) -> list[BlockId]:
        """Blocks that can be handed out, for the integrity check."""
        return self._free

    def check_integrity(self) -> None:
        """Assert that every block is either free, once, or held. Costs time linear in the pool."""
        assert self._reference_counts[SCRATCH_BLOCK] == 0, "the scratch block was handed out"
        unheld = self._unheld()
        free = set(unheld)
        assert len(free) == len(unheld), "a block is free twice"
        assert SCRATCH_BLOCK not in free, "the scratch block is in the free list"
        for block in range(1, self.num_blocks):
            held = self._reference_counts[block]
            assert held >= 0, f"block {block} has {held} holders"
            assert (held == 0) == (block in free), f"block {block} has {held} holders, free: {block in free}"
