"""The plan of one round: `{request: number of tokens}`, as a pure function of plain state.

Order of service is by priority, then arrival. In one round

1. every decoding sequence gets one row; where its next block is missing and none is free, sequences
   behind it are preempted (`preemption.choose_victim`);
2. draft rows are added, and the rows that go beside them (all of a sequence's, with one draft row at least,
   or none), as far as rows and blocks go round evenly: they never cost anyone a block, and leave a quarter of
   the rows to prompts that wait to be read, and as many as there is use for to prompts of requests that want
   their first token soon (`slo.ttft_ms`). Where half of the time for that is over, and the controller minds,
   nobody gets any: the round is shorter by the drafting;
3. prompts that are being read get the rows that are left, in order;
4. waiting requests are admitted in order, never past one that does not fit, and get the blocks of all
   their tokens at once, those that the prefix cache has first. Where somebody was preempted, nobody is
   admitted. A request whose next block is just being computed by one before it waits until it can be
   found, and lets others pass: of many requests with one long beginning, one computes it.

A waiting request of a more urgent priority than some that run does not wait for their end: it is admitted
right after 1, and those less urgent give up their places and blocks, as many as it takes, and only if that
makes room. Prompts are then read in order of service, whether they were running or have just been admitted.

So a stream of short requests cannot keep a long prompt out: it is passed by nobody of its priority while it
waits, and preempted for nobody behind it while it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence

from specdec.core.ids import RequestId
from specdec.kv.block_table import num_blocks_for
from specdec.scheduling.preemption import choose_victim
from specdec.scheduling.speculation.controller import SpeculationController, bounded_choice
from specdec.scheduling.state import BlockSharing, CachedPrefix, RoundLimits, RoundPlan, Schedulable

_PREFILL_SHARE = 4
"""One row in so many is kept from draft tokens while prompts wait to be read."""
_SPARE_SHARE = 50
"""One block in so many stays free on admission, so that running sequences can grow for a while."""


def plan_round(
    running: Sequence[Schedulable],
    waiting: Iterable[Schedulable],
    limits: RoundLimits,
    controller: SpeculationController,
    sharing: BlockSharing | None = None,
    elsewhere: Sequence[Schedulable] = (),
    coming: Iterable[Hashable] = (),
) -> RoundPlan:
    """Decide who runs in the next round.

    Args:
        running: admitted requests, in any order; each holds blocks for all its computed tokens. Those of a
            round that is still being verified are not among them.
        waiting: requests in the queue, in order of service.
        limits: what the round may use.
        controller: says how many draft tokens each decoding sequence should have.
        sharing: knows about shared and cached blocks; None: there are none.
        elsewhere: sequences that decode in another flight meanwhile. Nothing is planned for them, but the
            controller takes them into account.
        coming: names of blocks that are being computed elsewhere.
    """
    return _Planner(running, limits, sharing, coming).plan(waiting, controller, elsewhere)


class _Planner:
    """The plan in the making."""

    def __init__(
        self,
        running: Sequence[Schedulable],
        limits: RoundLimits,
        sharing: BlockSharing | None,
        coming: Iterable[Hashable],
    ) -> None:
        self._limits = limits
        self._sharing = sharing
        self._running = sorted(running, key=lambda request: request.service_key)
        self._num_tokens: dict[RequestId, int] = {}
        self._num_draft_tokens: dict[RequestId, int] = {}
        self._num_rows_beside: dict[RequestId, int] = {}
        self._preempted: dict[RequestId, Schedulable] = {}
        self._num_free_blocks = limits.num_free_blocks
        self._num_freed_blocks = 0
        self._num_free_rows = limits.max_num_batched_tokens
        self._growth: dict[RequestId, int] = {}
        """Blocks that decoding requests get for their next row."""
        self._reading: deque[Schedulable] = deque()
        """Prompts being read, in order, whose blocks are not among those below yet."""
        self._coming: set[Hashable] = set(coming)
        """Names of blocks that are about to be computed."""
        self._admitted: list[RequestId] = []
        self._num_cached: dict[RequestId, int] = {}

    def plan(
        self,
        waiting: Iterable[Schedulable],
        controller: SpeculationController,
        elsewhere: Sequence[Schedulable],
    ) -> RoundPlan:
        decoding: list[Schedulable] = []
        prefilling: list[Schedulable] = []
        for request in self._running:
            is_decoding = request.num_computed == request.committed_len - 1
            (decoding if is_decoding else prefilling).append(request)
        self._reading.extend(prefilling)
        decoding = self._give_rows(decoding)
        queue = _Queue(waiting)
        unread = self._admit_urgent(queue)
        if self._preempted:
            decoding = [request for request in decoding if request.request_id not in self._preempted]
            prefilling = [request for request in prefilling if request.request_id not in self._preempted]
        unread += prefilling
        wanted = bounded_choice(controller, decoding, elsewhere)
        if controller.minds_targets and self._reads_pressed(unread):
            wanted = [0] * len(decoding)
        self._give_draft_rows(decoding, wanted, [*unread, *self._coming_next(queue)])
        for request in sorted(unread, key=lambda one: one.service_key):
            self._give_chunk(request, self._num_cached.get(request.request_id, request.num_computed))
        if not self._preempted:
            self._admit_from(queue)
        return RoundPlan(
            num_tokens=self._num_tokens,
            num_draft_tokens=self._num_draft_tokens,
            num_rows_beside=self._num_rows_beside,
            preempted=tuple(self._preempted),
            admitted=tuple(self._admitted),
            num_cached=self._num_cached,
        )

    def _reads_pressed(self, unread: Sequence[Schedulable]) -> bool:
        """Whether the first token of one of these would come later by drafting."""
        return any(request.request_id in self._limits.pressed for request in unread)

    def _coming_next(self, queue: _Queue) -> Sequence[Schedulable]:
        """Return the head of the queue, if there is room for it: rows are kept for nobody else."""
        request = queue.head
        if request is None or self._preempted or not self._has_place():
            return ()
        cached = self._cached_prefix(request)
        return () if cached is None or not self._has_blocks(request, cached) else (request,)

    def _give_rows(self, decoding: list[Schedulable]) -> list[Schedulable]:
        """Give each decoding sequence its one row; return those that were not preempted."""
        kept = []
        for request in decoding:
            if request.request_id not in self._preempted and self._has_block(request):
                self._num_tokens[request.request_id] = 1
                kept.append(request)
        self._num_free_rows -= len(kept)
        return kept

    def _has_block(self, request: Schedulable) -> bool:
        """Find the block of the request's next row, by preemption if need be."""
        missing = self._num_blocks_for(request.committed_len) - request.num_blocks
        while missing > self._num_free_blocks:
            victim = choose_victim(
                request,
                (other for other in self._running if other.request_id not in self._preempted),
                self._num_lost,
            )
            self._preempt(victim)
            if victim is request:
                return False
        if missing > 0:
            self._growth[request.request_id] = missing
            self._num_free_blocks -= missing
        return True

    def _admit_urgent(self, queue: _Queue) -> list[Schedulable]:
        """Admit those who are more urgent than somebody who runs, if need be in their place."""
        admitted: list[Schedulable] = []
        least_urgent = self._running[-1].service_key.priority if self._running else None
        while (
            least_urgent is not None
            and (request := queue.head) is not None
            and request.service_key.priority < least_urgent
        ):
            cached = self._cached_prefix(request)
            if cached is not None:
                if not self._make_way(request):
                    break
                # Blocks that it shares are counted in full: who holds them may yet have to give them up.
                self._admit(request, cached, self._num_blocks_for(request.committed_len))
                admitted.append(request)
            queue.advance()
        return admitted

    def _make_way(self, request: Schedulable) -> bool:
        """Preempt who is less urgent until there is room; nobody, and False, when that does not suffice."""
        priority = request.service_key.priority
        if any(one.service_key.priority <= priority for one in self._preempted.values()):
            return False
        if self._has_room(request, ()):
            return True
        behind = [
            one
            for one in self._running
            if one.service_key.priority > priority and one.request_id not in self._preempted
        ]
        if not self._has_room(request, behind):
            return False
        while not self._has_room(request, ()):
            victim = choose_victim(request, behind, self._num_lost)
            behind.remove(victim)
            self._preempt(victim)
        return True

    def _has_room(self, request: Schedulable, without: Sequence[Schedulable]) -> bool:
        """Whether a request fits when these running ones have gone."""
        num_running = self._num_running - len(self._preempted) - len(without)
        if num_running >= self._limits.max_num_seqs:
            return False
        num_blocks = self._num_blocks_for(request.committed_len) + self._num_spare_blocks(num_running)
        return num_blocks <= self._num_free_blocks + self._num_given_back(without)

    def _num_lost(self, request: Schedulable) -> int:
        return request.num_computed if self._sharing is None else self._sharing.num_lost(request.request_id)

    def _preempt(self, victim: Schedulable) -> None:
        num_given_back = self._num_given_back((victim,))
        self._preempted[victim.request_id] = victim
        self._num_free_blocks += num_given_back
        self._num_freed_blocks += num_given_back - self._growth.pop(victim.request_id, 0)
        self._num_free_rows += self._num_tokens.pop(victim.request_id, 0)

    def _num_given_back(self, victims: Sequence[Schedulable]) -> int:
        """Blocks that become free when these are preempted too."""
        if not victims:
            return 0
        num_planned = sum(self._growth.get(one.request_id, 0) for one in victims)
        if self._sharing is None:
            return num_planned + sum(one.num_blocks for one in victims)
        all_victims = [*self._preempted, *(one.request_id for one in victims)]
        return num_planned + self._sharing.num_freed(all_victims) - self._num_freed_blocks

    def _give_draft_rows(
        self, decoding: list[Schedulable], wanted: list[int], unread: list[Schedulable]
    ) -> None:
        if not any(wanted):
            return
        num_unread = num_awaited = 0
        for request in unread:
            num_rows = request.committed_len - request.num_computed
            num_unread += num_rows
            num_awaited += num_rows if request.ttft_s is not None else 0
        num_kept = min(num_unread, self._limits.max_num_batched_tokens // _PREFILL_SHARE)
        num_kept = max(num_kept, num_awaited)
        fair_share = max(0, self._num_free_rows - num_kept) // len(decoding)
        block_size = self._limits.block_size
        for request, wanted_tokens in zip(decoding, wanted, strict=True):
            held = max(request.num_blocks, self._num_blocks_for(request.committed_len))
            num_rows_with_block = (held + self._num_free_blocks) * block_size - request.committed_len
            most = min(fair_share, num_rows_with_block)
            num_drafts, num_beside = self._split(request, wanted_tokens, most)
            if num_drafts > 0:
                num_rows = num_drafts + num_beside
                extra_blocks = self._num_blocks_for(request.committed_len + num_rows) - held
                self._num_free_blocks -= max(extra_blocks, 0)
                self._num_tokens[request.request_id] += num_rows
                self._num_draft_tokens[request.request_id] = num_drafts
                if num_beside:
                    self._num_rows_beside[request.request_id] = num_beside
                self._num_free_rows -= num_rows

    def _split(self, request: Schedulable, wanted_tokens: int, most: int) -> tuple[int, int]:
        """Return rows for a request's drafts and rows beside them, given the most for both."""
        limits = self._limits
        num_beside, most_of_both = limits.num_rows_beside, most
        if limits.max_sequence_len is not None:
            most_of_both = min(most, limits.max_sequence_len - request.committed_len)
        if 0 < num_beside < most_of_both and wanted_tokens > 0:
            return min(wanted_tokens, most_of_both - num_beside), num_beside
        return min(wanted_tokens, most), 0

    def _give_chunk(self, request: Schedulable, num_computed: int) -> None:
        num_rows = min(request.committed_len - num_computed, self._num_free_rows)
        if request.max_chunk_tokens is not None:
            num_rows = min(num_rows, request.max_chunk_tokens)
        if num_rows > 0:
            self._num_tokens[request.request_id] = num_rows
            self._num_free_rows -= num_rows

    def _admit_from(self, queue: _Queue) -> None:
        """Admit in order, up to the first request that there is no room for."""
        num_passed = 0
        while (request := queue.head) is not None and self._has_place():
            cached = self._cached_prefix(request)
            if cached is not None:
                if not self._try_admit(request, cached):
                    return
                self._give_chunk(request, cached.num_tokens)
            elif (num_passed := num_passed + 1) > self._limits.max_num_seqs:
                return
            queue.advance()

    def _try_admit(self, request: Schedulable, cached: CachedPrefix) -> bool:
        if not self._has_blocks(request, cached):
            return False
        self._admit(request, cached, self._num_new_blocks(request, cached))
        return True

    def _has_blocks(self, request: Schedulable, cached: CachedPrefix) -> bool:
        """Whether a waiting request's blocks are there, with some to spare for those that run."""
        num_blocks = self._num_new_blocks(request, cached) + self._num_spare_blocks(self._num_running)
        return num_blocks <= self._num_free_blocks

    def _num_new_blocks(self, request: Schedulable, cached: CachedPrefix) -> int:
        return self._num_blocks_for(request.committed_len) - cached.num_held_blocks

    def _admit(self, request: Schedulable, cached: CachedPrefix, num_blocks: int) -> None:
        self._num_free_blocks -= num_blocks
        self._admitted.append(request.request_id)
        if cached.num_tokens:
            self._num_cached[request.request_id] = cached.num_tokens
        if self._sharing is not None:
            self._coming.update(self._sharing.unread_blocks(request.request_id))

    def _cached_prefix(self, request: Schedulable) -> CachedPrefix | None:
        """Return what the cache has of a waiting request; None: it gets more if it waits for those before.

        Asked for in order of service.
        """
        if self._sharing is None:
            return CachedPrefix()
        while self._reading and self._reading[0].service_key < request.service_key:
            before = self._reading.popleft()
            if before.request_id not in self._preempted:
                self._coming.update(self._sharing.unread_blocks(before.request_id))
        cached = self._sharing.cached_prefix(request.request_id)
        return None if cached.next_block in self._coming else cached

    def _num_spare_blocks(self, num_running: int) -> int:
        """Blocks that admission leaves free beside so many running requests."""
        return max(1, self._limits.num_usable_blocks // _SPARE_SHARE) if num_running else 0

    def _has_place(self) -> bool:
        return self._num_free_rows > 0 and self._num_running < self._limits.max_num_seqs

    @property
    def _num_running(self) -> int:
        """Running requests, those that are elsewhere and those just admitted included."""
        return self._limits.num_elsewhere + len(self._running) + len(self._admitted)

    def _num_blocks_for(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self._limits.block_size)


class _Queue:
    """The waiting requests, looked at one by one."""

    def __init__(self, waiting: Iterable[Schedulable]) -> None:
        self._rest = iter(waiting)
        self.head = next(self._rest, None)

    def advance(self) -> None:
        """Go on to the next."""
        self.head = next(self._rest, None)
