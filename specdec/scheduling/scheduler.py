"""The plan of one round: `{request: number of tokens}`, as a pure function of plain state.

Order of service is by priority, then arrival. In one round

1. every decoding sequence gets one row; where its next block is missing and none is free, sequences
   behind it are preempted (`preemption.choose_victim`);
2. draft rows are added, as far as rows and blocks go round evenly: they never cost anyone a block, and
   leave a quarter of the rows to prompts that wait to be read;
3. prompts that are being read get the rows that are left, in order;
4. waiting requests are admitted in order, never past one that does not fit, and get the blocks of all
   their tokens at once, those that the prefix cache has first. Where somebody was preempted, nobody is
   admitted. A request whose next block is just being computed by one before it waits until it can be
   found, and lets others pass: of many requests with one long beginning, one computes it.

So a stream of short requests cannot keep a long prompt out: it is passed by nobody while it waits, and
preempted for nobody behind it while it runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain

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
) -> RoundPlan:
    """Decide who runs in the next round.

    Args:
        running: admitted requests, in any order; each holds blocks for all its computed tokens.
        waiting: requests in the queue, in order of service.
        limits: what the round may use.
        controller: says how many draft tokens each decoding sequence should have.
        sharing: knows about shared and cached blocks; None: there are none.
    """
    return _Planner(running, limits, sharing).plan(waiting, controller)


class _Planner:
    """The plan in the making."""

    def __init__(
        self, running: Sequence[Schedulable], limits: RoundLimits, sharing: BlockSharing | None
    ) -> None:
        self._limits = limits
        self._sharing = sharing
        self._running = sorted(running, key=lambda request: request.service_key)
        self._num_tokens: dict[RequestId, int] = {}
        self._num_draft_tokens: dict[RequestId, int] = {}
        self._preempted: dict[RequestId, Schedulable] = {}
        self._num_free_blocks = limits.num_free_blocks
        self._num_freed_blocks = 0
        self._num_free_rows = limits.max_num_batched_tokens
        self._admitted: list[RequestId] = []
        self._num_cached: dict[RequestId, int] = {}

    def plan(self, waiting: Iterable[Schedulable], controller: SpeculationController) -> RoundPlan:
        decoding: list[Schedulable] = []
        prefilling: list[Schedulable] = []
        for request in self._running:
            is_decoding = request.num_computed == request.committed_len - 1
            (decoding if is_decoding else prefilling).append(request)
        decoding = self._give_rows(decoding)
        queue = iter(waiting)
        first_waiting = next(queue, None)
        self._give_draft_rows(decoding, bounded_choice(controller, decoding), [*prefilling, first_waiting])
        for request in prefilling:
            if request.request_id not in self._preempted:
                self._give_chunk(request, request.num_computed)
        if first_waiting is not None and not self._preempted:
            self._admit_from(chain((first_waiting,), queue), prefilling)
        return RoundPlan(
            num_tokens=self._num_tokens,
            num_draft_tokens=self._num_draft_tokens,
            preempted=tuple(self._preempted),
            admitted=tuple(self._admitted),
            num_cached=self._num_cached,
        )

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
        self._num_free_blocks -= max(missing, 0)
        return True

    def _num_lost(self, request: Schedulable) -> int:
        return request.num_computed if self._sharing is None else self._sharing.num_lost(request.request_id)

    def _preempt(self, victim: Schedulable) -> None:
        self._preempted[victim.request_id] = victim
        if self._sharing is None:
            self._num_free_blocks += victim.num_blocks
            return
        num_freed = self._sharing.num_freed(self._preempted.keys())
        self._num_free_blocks += num_freed - self._num_freed_blocks
        self._num_freed_blocks = num_freed

    def _give_draft_rows(
        self, decoding: list[Schedulable], wanted: list[int], unread: list[Schedulable | None]
    ) -> None:
        if not any(wanted):
            return
        num_unread = sum(
            request.committed_len - request.num_computed for request in unread if request is not None
        )
        num_kept = min(num_unread, self._limits.max_num_batched_tokens // _PREFILL_SHARE)
        fair_share = max(0, self._num_free_rows - num_kept) // len(decoding)
        block_size = self._limits.block_size
        for request, wanted_tokens in zip(decoding, wanted, strict=True):
            held = max(request.num_blocks, self._num_blocks_for(request.committed_len))
            num_rows_with_block = (held + self._num_free_blocks) * block_size - request.committed_len
            num_drafts = min(wanted_tokens, fair_share, num_rows_with_block)
            if num_drafts > 0:
                extra_blocks = self._num_blocks_for(request.committed_len + num_drafts) - held
                self._num_free_blocks -= max(extra_blocks, 0)
                self._num_tokens[request.request_id] += num_drafts
                self._num_draft_tokens[request.request_id] = num_drafts
                self._num_free_rows -= num_drafts

    def _give_chunk(self, request: Schedulable, num_computed: int) -> None:
        num_rows = min(request.committed_len - num_computed, self._num_free_rows)
        if num_rows > 0:
            self._num_tokens[request.request_id] = num_rows
            self._num_free_rows -= num_rows

    def _admit_from(self, waiting: Iterable[Schedulable], prefilling: Iterable[Schedulable]) -> None:
        """Admit in order, up to the first request that there is no room for."""
        coming: set[Hashable] | None = None
        num_passed = 0
        for request in waiting:
            if not self._has_place() or num_passed > self._limits.max_num_seqs:
                return
            cached = CachedPrefix()
            if self._sharing is not None:
                cached = self._sharing.cached_prefix(request.request_id)
                if coming is None:
                    coming = self._unread(one for one in prefilling if one.service_key < request.service_key)
                if cached.next_block in coming:
                    num_passed += 1
                    continue
            if not self._try_admit(request, cached):
                return
            if self._sharing is not None and coming is not None:
                coming.update(self._sharing.unread_blocks(request.request_id))

    def _try_admit(self, request: Schedulable, cached: CachedPrefix) -> bool:
        num_blocks = self._num_blocks_for(request.committed_len) - cached.num_held_blocks
        num_running = len(self._running) + len(self._admitted)
        spare = max(1, self._limits.num_usable_blocks // _SPARE_SHARE) if num_running else 0
        if num_blocks + spare > self._num_free_blocks:
            return False
        self._num_free_blocks -= num_blocks
        self._admitted.append(request.request_id)
        if cached.num_tokens:
            self._num_cached[request.request_id] = cached.num_tokens
        self._give_chunk(request, cached.num_tokens)
        return True

    def _has_place(self) -> bool:
        num_running = len(self._running) + len(self._admitted)
        return self._num_free_rows > 0 and num_running < self._limits.max_num_seqs

    def _unread(self, requests: Iterable[Schedulable]) -> set[Hashable]:
        """Names of the blocks that these requests are about to compute."""
        if self._sharing is None:
            return set()
        return {name for one in requests for name in self._sharing.unread_blocks(one.request_id)}

    def _num_blocks_for(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self._limits.block_size)
