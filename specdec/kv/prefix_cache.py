"""K/V of a prefix, found again: who asks for the same tokens pays for them once.

Full blocks are named by a chain of SHA-256 digests: the name of block i is the digest of the name of block
i - 1 and the tokens of block i, and the chain begins with the request's salt (and, where equal tokens can
have other K/V, with their variant). So equal names mean equal tokens from position 0 on (two prefixes of one
name would be a collision of SHA-256), and requests with different salts never share anything.

Only verified tokens reach a name: whoever offers blocks says how many tokens are committed and computed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from specdec.core.ids import BlockId
from specdec.kv.block_table import BlockTable
from specdec.kv.caching_allocator import BlockKey, CachingBlockAllocator


class PrefixTrail:
    """The names of one sequence's full blocks, and how many of its own blocks the cache knows.

    Tokens are named once: a sequence may grow behind them, but not change.
    """

    __slots__ = ("_keys", "_salt", "_variant", "is_closed", "num_offered")

    def __init__(self, salt: str | None = None, variant: int = 0) -> None:
        """Sequences find each other's blocks only if they have the same `salt` and variant of K/V."""
        # Of another function than names: else a salt that spells a block would have that block's name.
        self._salt = b"" if salt is None else hashlib.blake2s(salt.encode(), person=b"salt").digest()
        self._variant = variant
        self._keys: list[BlockKey] = []
        self.num_offered = 0
        """Leading blocks of its table that the cache has been offered, or has lent."""
        self.is_closed = False
        """Whether its computed blocks are to stay unknown, until it gives all of them back."""

    def keys(self, token_ids: Sequence[int], num_tokens: int, block_size: int) -> Sequence[BlockKey]:
        """Return the names of the full blocks among the first `num_tokens` of its tokens, and maybe more."""
        keys = self._keys
        for start in range(len(keys) * block_size, num_tokens - block_size + 1, block_size):
            block = array("q", token_ids[start : start + block_size]).tobytes()
            parent = keys[-1] if keys else self._root
            keys.append(BlockKey(hashlib.sha256(parent + block).digest()))
        return keys

    @property
    def _root(self) -> bytes:
        return self._salt + self._variant.to_bytes(8, "little") if self._variant else self._salt

    def reset(self, variant: int = 0) -> None:
        """Its table is empty again; what comes into it are K/V of this variant."""
        if variant != self._variant:
            self._variant = variant
            self._keys.clear()
        self.num_offered = 0
        self.is_closed = False


class PrefixCache:
    """The named blocks of one KV pool, for sequences that come and go."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Manage a pool of `num_blocks` blocks, the scratch block included."""
        self.allocator = CachingBlockAllocator(num_blocks)
        self.block_size = block_size

    def find(self, trail: PrefixTrail, token_ids: Sequence[int]) -> list[BlockId]:
        """Return the blocks that hold the longest known prefix of these tokens.

        Never the last token's block: somebody has to compute that one to know what comes next.
        """
        return self.allocator.find(self.findable_keys(trail, token_ids))

    def findable_keys(self, trail: PrefixTrail, token_ids: Sequence[int]) -> Sequence[BlockKey]:
        """Return the names that `find` looks for."""
        num_tokens = len(token_ids) - 1
        return trail.keys(token_ids, num_tokens, self.block_size)[: num_tokens // self.block_size]

    def lend(self, blocks: Sequence[BlockId], trail: PrefixTrail, table: BlockTable) -> None:
        """Begin an empty table with blocks that were found."""
        self.allocator.hold(blocks)
        table.begin_with(blocks)
        trail.num_offered = len(blocks)

    def offer(
        self, trail: PrefixTrail, table: BlockTable, token_ids: Sequence[int], num_computed: int
    ) -> None:
        """Let others find the full blocks of the first `num_computed` tokens, all committed and computed."""
        num_full = num_computed // self.block_size
        if num_full <= trail.num_offered or trail.is_closed:
            return
        keys = trail.keys(token_ids, num_computed, self.block_size)
        for index in range(trail.num_offered, num_full):
            self.allocator.name(table.block_ids[index], keys[index])
        trail.num_offered = num_full

    def withdraw(self, trail: PrefixTrail, table: BlockTable) -> None:
        """Let nobody find the blocks of this table any more: there is something wrong with them."""
        self.allocator.forget(table.block_ids)
        trail.is_closed = True
