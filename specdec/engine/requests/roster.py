"""Who waits, who runs, and which blocks they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from specdec.core.ids import BlockId, RequestId
from specdec.core.plan import SlotMove
from specdec.engine.requests.live_request import LiveRequest
from specdec.kv.block_allocator import BlockAllocator
from specdec.kv.block_table import BlockTable
from specdec.kv.moves import moves_of_path
from specdec.kv.prefix_cache import PrefixCache
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.fairness import FairTurns
from specdec.scheduling.queue import WaitingQueue
from specdec.scheduling.scheduler import plan_round
from specdec.scheduling.speculation.controller import SpeculationController
from specdec.scheduling.state import CachedPrefix, RoundLimits, RoundPlan


class Applied(NamedTuple):
    """What a plan has brought about, for the counters. In tokens."""

    num_recomputed: int
    """Lost by preemption, and not found again by requests that go on now."""
    num_queried: int
    """Looked up in the prefix cache for requests that run for the first time."""
    num_hit: int
    """Of these, found."""


class Roster:
    """The requests of one engine and the target's KV blocks. All changes of either go through here.

    With a prefix cache, it is what scheduling calls `BlockSharing`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        config: SchedulerConfig,
        prefix_caching: bool,
        num_rows_beside: int = 0,
        max_sequence_len: int | None = None,
    ) -> None:
        """Begin without requests; the last two are as in `RoundLimits`."""
        self.block_size = block_size
        self._num_rows_beside = num_rows_beside
        self._max_sequence_len = max_sequence_len
        self.waiting: WaitingQueue[LiveRequest] = WaitingQueue()
        self.running: dict[RequestId, LiveRequest] = {}
        self.turns = FairTurns()
        self._config = config
        self._cache = PrefixCache(num_blocks, block_size) if prefix_caching else None
        self._allocator = BlockAllocator(num_blocks) if self._cache is None else self._cache.allocator
        self._to_forget: list[RequestId] = []
        self._moves: list[SlotMove] = []

    def __iter__(self) -> Iterator[LiveRequest]:
        """Iterate over all requests, running ones first."""
        yield from self.running.values()
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that are held, 0 to 1."""
        return self._allocator.num_used / self._allocator.num_usable

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at once, at most."""
        return self._config.max_num_seqs

    @property
    def cohort_size(self) -> int:
        """Half of the running requests, rounded up: what one of two rounds in flight takes."""
        return -(-len(self.running) // 2)

    def new_table(self) -> BlockTable:
        """Return an empty block table over the target's pool."""
        return BlockTable(self._allocator, self.block_size)

    def plan(self, controller: SpeculationController, now_s: float, most: int | None = None) -> RoundPlan:
        """Decide who runs in the next round, of those whose last round is over, at most so many of them."""
        present = [live for live in self.running.values() if not live.is_in_flight]
        if most is not None and len(present) > most:
            present = sorted(present, key=lambda live: live.service_key)[:most]
        num_elsewhere = len(self.running) - len(present)
        limits = RoundLimits(
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            block_size=self.block_size,
            num_free_blocks=self._allocator.num_free,
            num_usable_blocks=self._allocator.num_usable,
            num_elsewhere=num_elsewhere,
            num_rows_beside=self._num_rows_beside,
            max_sequence_len=self._max_sequence_len,
            pressed=frozenset(live.request_id for live in present if live.is_pressed(now_s)),
        )
        elsewhere: list[LiveRequest] = []
        if num_elsewhere:
            here = {live.request_id for live in present}
            elsewhere = [live for live in self.running.values() if live.request_id not in here]
        return plan_round(
            present,
            self.waiting,
            limits,
            controller,
            None if self._cache is None else self,
            elsewhere=[live for live in elsewhere if live.sequence.is_decoding],
            coming=self._coming(elsewhere),
        )

    def _coming(self, elsewhere: Sequence[LiveRequest]) -> set[Hashable]:
        """Names of the blocks of prompts that rounds in flight are reading."""
        if self._cache is None:
            return set()
        reading = [live for live in elsewhere if live.is_in_flight and not live.sequence.is_decoding]
        return {name for live in reading for name in self.unread_blocks(live.request_id)}

    def apply(self, plan: RoundPlan, now_s: float) -> Applied:
        """Preempt, admit and hand out blocks as planned."""
        for request_id in plan.preempted:
            self.send_back(request_id)
        # Every cached block that the plan counts on is held before any other block is handed out.
        admitted = [self._admit(request_id, plan.num_cached) for request_id in plan.admitted]
        applied = self._count_admissions(admitted)
        for live in admitted:
            live.table.grow(live.committed_len)
            if live.stats.first_scheduled_s is None:
                live.stats.first_scheduled_s = now_s
                self.turns.note_start(live.service_key.turn, live.service_key.priority)
        for request_id, num_tokens in plan.num_tokens.items():
            live = self.running[request_id]
            live.table.grow(live.num_computed + num_tokens)
        return applied

    def settle_turn(self, live: LiveRequest) -> None:
        """Let the owner of a request that has run, and ends, pay for the tokens that it was alone."""
        request = live.request
        num_tokens = live.num_prompt_tokens + live.sequence.num_generated - len(request.delivered_token_ids)
        self.turns.settle(request.owner, num_tokens - live.num_expected_tokens, request.priority)

    def note_computed(self, live: LiveRequest) -> None:
        """Take note that a request has advanced: its full blocks may be found from now on."""
        if self._cache is not None:
            self._cache.offer(live.trail, live.table, live.token_ids, live.num_computed)

    def note_path(self, live: LiveRequest, first_place: int, nodes: Sequence[int]) -> int:
        """Take note that these nodes of a tree, which begins at `first_place`, are committed.

        Their K/V are moved at the beginning of the next step: before anybody reads the blocks, or writes to
        those that are given away meanwhile. To be called with the table as it was for the round.

        Returns:
            how many have to be moved. Of one that has ended, only what others may find is.
        """
        end_place = None if live.finish is None else live.trail.num_offered * self.block_size
        moves = moves_of_path(live.table, first_place, nodes, end_place=end_place)
        self._moves.extend(moves)
        return len(moves)

    def take_moves(self) -> tuple[SlotMove, ...]:
        """Return what the next step has to move, once."""
        moves = tuple(self._moves)
        self._moves.clear()
        return moves

    def withdraw(self, live: LiveRequest) -> None:
        """Let nobody find the blocks of a request that went wrong."""
        if self._cache is not None:
            self._cache.withdraw(live.trail, live.table)

    def drop_cache(self) -> None:
        """Let nobody find any block that has been computed so far."""
        if self._cache is not None:
            self._cache.allocator.forget_all()
            for live in self.running.values():
                live.trail.is_closed = True

    def cached_prefix(self, request_id: RequestId) -> CachedPrefix:
        """See `BlockSharing`."""
        live = self.waiting.get(request_id)
        assert live is not None
        blocks, next_key = self._find(live)
        num_held = sum(self._allocator.reference_count(block) > 0 for block in blocks)
        return CachedPrefix(len(blocks) * self.block_size, num_held, next_key)

    def unread_blocks(self, request_id: RequestId) -> Sequence[Hashable]:
        """See `BlockSharing`."""
        live = self.running.get(request_id) or self.waiting.get(request_id)
        assert live is not None
        if live.trail.is_closed:
            return ()
        keys = live.trail.keys(live.token_ids, live.committed_len, self.block_size)
        return keys[live.trail.num_offered : live.committed_len // self.block_size]

    def num_freed(self, request_ids: Collection[RequestId]) -> int:
        """See `BlockSharing`."""
        holders: Counter[BlockId] = Counter()
        for request_id in request_ids:
            holders.update(self.running[request_id].table.block_ids)
        count = self._allocator.reference_count
        return sum(count(block) == num_holders for block, num_holders in holders.items())

    def num_lost(self, request_id: RequestId) -> int:
        """See `BlockSharing`."""
        live = self.running[request_id]
        count = self._allocator.reference_count
        num_shared = sum(count(block) > 1 for block in live.table.block_ids)
        return max(0, live.num_computed - num_shared * self.block_size)

    def send_back(self, request_id: RequestId) -> None:
        """Let a running request wait again, without its blocks."""
        live = self.running.pop(request_id)
        live.preempt()
        self._forget(live)
        self.waiting.push(live)

    def remove(self, request_id: RequestId) -> LiveRequest | None:
        """Take a request out and free its blocks; None when it is not here."""
        live = self.running.pop(request_id, None) or self.waiting.remove(request_id)
        if live is not None:
            live.table.release()
            self._forget(live)
        return live

    def take_forgotten(self) -> tuple[RequestId, ...]:
        """Return the requests whose state the target has to forget, once."""
        forgotten = tuple(self._to_forget)
        self._to_forget.clear()
        return forgotten

    def check_integrity(self) -> None:
        """Assert that queue, tables and allocator agree. Costs time linear in the pool."""
        self.waiting.check_integrity()
        self._allocator.check_integrity()
        assert not self.running.keys() & {live.request_id for live in self.waiting}
        holders: Counter[BlockId] = Counter()
        for live in self:
            live.table.check_integrity()
            holders.update(live.table.block_ids)
            assert live.trail.num_offered * self.block_size <= live.num_computed
            assert live.num_computed <= live.table.capacity
            assert live.finish is None, f"{live.request_id} has ended but is still here"
        assert all(live.num_blocks == 0 for live in self.waiting), "a waiting request holds blocks"
        assert len(holders) == self._allocator.num_used, "blocks are held by nobody here"
        for block, num_holders in holders.items():
            assert self._allocator.reference_count(block) == num_holders, f"holders of block {block}"

    def _find(self, live: LiveRequest) -> tuple[list[BlockId], Hashable | None]:
        """Return the cached blocks of a waiting request, and the name of the first one that is missing."""
        assert self._cache is not None
        if live.scores_prompt:
            return [], None  # logits of all its rows are wanted
        keys = self._cache.findable_keys(live.trail, live.token_ids)
        blocks = self._cache.allocator.find(keys)
        return blocks, keys[len(blocks)] if len(blocks) < len(keys) else None

    def _admit(self, request_id: RequestId, num_cached: Mapping[RequestId, int]) -> LiveRequest:
        """Let a waiting request run, with the cached blocks that the plan has found for it."""
        live = self.waiting.remove(request_id)
        assert live is not None
        self.running[request_id] = live
        num_tokens = num_cached.get(request_id, 0)
        if num_tokens:
            assert self._cache is not None
            blocks, _ = self._find(live)
            assert len(blocks) * self.block_size == num_tokens, "the plan found other blocks"
            self._cache.lend(blocks, live.trail, live.table)
            live.sequence.advance_computed(num_tokens)
        return live

    def _count_admissions(self, admitted: Sequence[LiveRequest]) -> Applied:
        num_recomputed = num_queried = num_hit = 0
        for live in admitted:
            num_recomputed += max(0, live.num_given_up - live.num_computed)
            live.num_given_up = 0
            is_looked_up = self._cache is not None and not live.scores_prompt
            if is_looked_up and live.stats.first_scheduled_s is None:
                num_queried += live.committed_len
                num_hit += live.num_computed
                live.stats.num_cached_prompt_tokens = min(live.num_computed, live.num_prompt_tokens)
        return Applied(num_recomputed, num_queried, num_hit)

    def _forget(self, live: LiveRequest) -> None:
        if live.is_known_to_target:
            live.is_known_to_target = False
            self._to_forget.append(live.request_id)
