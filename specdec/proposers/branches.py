"""Branches: prefixes that may come to be committed, what is drafted behind them, and the K/V of both.

A branch of a sequence holds the blocks that are full of what it has in common with the sequence's own table,
by counting references, and blocks of its own behind them; only the block that is partly full is copied. When
it turns out to be true its table becomes the sequence's.

Owners (`core.ids.owner_of`) share what branches may hold: each has an equal part of it for certain, and what
the others leave is for whoever comes first.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from specdec.core.distributions import TokenDistribution
from specdec.core.ids import BlockId, RequestId
from specdec.kv.block_allocator import BlockAllocator
from specdec.kv.block_table import BlockTable, num_blocks_for

Wanted = TypeVar("Wanted")

_SHARE_OF_POOL = 4
"""Branches hold one of so many blocks of the pool at most, beside those that they share."""


class Branch(NamedTuple):
    """An assumed verdict."""

    num_kept: int
    """Pending tokens that stand (a)."""
    token_id: int
    """The target's own token behind them (b)."""
    assumed: tuple[int, ...]
    """Both: what is committed by it."""
    budget: int
    """Tokens to draft behind it."""
    rank: int
    """How many more promising tokens there are behind the same pending ones."""
    promise: tuple[int, ...]
    """Orders branches: the smaller, the more promising."""


class BlockCopy(NamedTuple):
    """K/V to copy before a branch is read."""

    source: BlockId
    destination: BlockId


@dataclass(slots=True)
class HeldBranch:
    """A branch with its blocks."""

    branch: Branch
    table: BlockTable
    num_own_blocks: int
    """Blocks that no other branch and not the sequence itself holds."""
    owner: str = ""
    copy: BlockCopy | None = None
    """What has to be done before it is read."""
    chain: Sequence[int] = ()
    """What was drafted."""
    q_rows: list[TokenDistribution] = field(default_factory=list)

    @property
    def read(self) -> tuple[int, ...]:
        """Tokens behind the committed ones whose K/V are in the table."""
        return (*self.branch.assumed, *self.chain[:-1])


class BranchStore:
    """The branches of all sequences of one pool, until their verdicts are known."""

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._most_own_blocks = max(1, allocator.num_usable // _SHARE_OF_POOL)
        self._num_own_blocks: Counter[str] = Counter()
        """By owner."""
        self._held: OrderedDict[RequestId, list[HeldBranch]] = OrderedDict()

    def __len__(self) -> int:
        """Sequences that have branches."""
        return len(self._held)

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether a sequence has branches."""
        return request_id in self._held

    def __iter__(self) -> Iterator[HeldBranch]:
        """Give all branches."""
        for branches in self._held.values():
            yield from branches

    @property
    def num_own_blocks(self) -> Mapping[str, int]:
        """Blocks that branches hold beside those that they share, by owner."""
        return self._num_own_blocks

    def in_turns(self, queues: Mapping[str, Sequence[Wanted]]) -> Iterator[Wanted]:
        """Give the next of the owner who holds least at that moment, each owner's in their order.

        Args:
            queues: of each owner, what branches are wanted for.
        """
        if len(queues) == 1:
            yield from next(iter(queues.values()))
            return
        line = [
            (self._num_own_blocks[owner], turn, owner, iter(queue))
            for turn, (owner, queue) in enumerate(queues.items())
        ]
        heapq.heapify(line)
        while line:
            _, turn, owner, queue = heapq.heappop(line)
            for wanted in queue:
                yield wanted  # whether it is held now shows in the counter
                heapq.heappush(line, (self._num_own_blocks[owner], turn, owner, queue))
                break

    def try_hold(
        self,
        request_id: RequestId,
        owner: str,
        table: BlockTable,
        num_committed: int,
        branch: Branch,
        in_use: Collection[RequestId],
    ) -> HeldBranch | None:
        """Hold blocks for a branch and its draft, but for the last token.

        Only blocks that nobody holds are taken, and no more of them than all branches may have. Older
        branches make room: they have been answered, and what is lost with them can be read again. They are
        the owner's own, or of those who have more than their share, as long as this owner has not.

        Args:
            request_id: the sequence's.
            owner: whose it is.
            table: its own blocks; K/V of the pending tokens that the branch keeps are there.
            num_committed: its committed tokens.
            branch: what is assumed.
            in_use: sequences whose branches are not given up for it.

        Returns:
            None, when there is no room.
        """
        num_common = num_committed + branch.num_kept
        num_shared = num_common // self._block_size
        num_tokens = num_common + branch.budget  # b and the draft, without its last token
        num_own = num_blocks_for(num_tokens, self._block_size) - num_shared
        if num_own > self._most_own_blocks:
            return None
        while num_own > min(self._allocator.num_free, self._most_own_blocks - self._num_own_blocks.total()):
            if not self._make_room(owner, num_own, in_use):
                return None
        forked = table.fork(num_common)
        forked.grow(num_tokens)
        held = HeldBranch(branch, forked, num_own, owner)
        if num_common % self._block_size:
            index = table.index_of(num_common)
            held.copy = BlockCopy(table.block_ids[index], forked.block_ids[index])
        self._held.setdefault(request_id, []).append(held)
        if num_own:
            self._num_own_blocks[owner] += num_own
        return held

    def take(self, request_id: RequestId, committed: Sequence[int] | None) -> HeldBranch | None:
        """End all branches of a sequence; return the one that turned out true, whose table is the caller's.

        Args:
            request_id: the sequence's.
            committed: what has been committed since they were made; None: the text is another one.
        """
        true: HeldBranch | None = None
        for held in self._held.pop(request_id, ()):
            assumed = held.branch.assumed
            # Without a draft it was never read: the call that was to do it has failed.
            if held.chain and committed is not None and tuple(committed[: len(assumed)]) == assumed:
                true = held
                self._give_back(held)
            else:
                self._free(held)
        return true

    def drop(self, request_id: RequestId) -> None:
        """End all branches of a sequence."""
        self.take(request_id, None)

    def drop_oldest(
        self, kept: Collection[RequestId] = (), may_go: Callable[[str], bool] | None = None
    ) -> bool:
        """End the branches of the sequence that has had them for longest, those of `kept` left out.

        Return whether there were any. With `may_go`, of owners of whom it says so.
        """
        oldest = next(
            (
                one
                for one, branches in self._held.items()
                if one not in kept and (may_go is None or may_go(branches[0].owner))
            ),
            None,
        )
        if oldest is None:
            return False
        self.drop(oldest)
        return True

    def drop_empty(self, request_id: RequestId) -> list[HeldBranch]:
        """End those branches of a sequence behind which nothing was drafted; return the others."""
        branches = self._held.pop(request_id, [])
        kept = [held for held in branches if held.chain]
        for held in branches:
            if not held.chain:
                self._free(held)
        if kept:
            self._held[request_id] = kept
        return kept

    def check_integrity(self, known: Collection[RequestId]) -> None:
        """Assert that only `known` sequences have branches, that blocks of their own are held by one alone,
        and all others by more.
        """
        assert self._held.keys() <= set(known)
        by_owner: Counter[str] = Counter()
        for held in self:
            by_owner[held.owner] += held.num_own_blocks
        assert dict(+by_owner) == dict(self._num_own_blocks)
        assert by_owner.total() <= self._most_own_blocks
        for held in self:
            held.table.check_integrity()
            num_shared = held.table.num_blocks - held.num_own_blocks
            for index, block in enumerate(held.table.block_ids):
                assert (self._allocator.reference_count(block) > 1) == (index < num_shared)

    def _make_room(self, asking: str, num_blocks: int, in_use: Collection[RequestId]) -> bool:
        """End the oldest branches that have to give way to those of one owner; return whether any did.

        Somebody who has none may have one even if it is greater than a share.
        """
        held = self._num_own_blocks
        share = self._most_own_blocks // len({*held, asking})
        is_entitled = held[asking] == 0 or held[asking] + num_blocks <= share
        return self.drop_oldest(in_use, lambda one: one == asking or (is_entitled and held[one] > share))

    def _free(self, held: HeldBranch) -> None:
        self._give_back(held)
        held.table.release()

    def _give_back(self, held: HeldBranch) -> None:
        """Count the blocks of a branch no more. Owners without any are not kept: they do not share."""
        left = self._num_own_blocks[held.owner] - held.num_own_blocks
        if left:
            self._num_own_blocks[held.owner] = left
        else:
            del self._num_own_blocks[held.owner]
