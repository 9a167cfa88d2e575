"""The plan of one round: `{request: number of tokens}`, as a pure function of plain state.

Order of service is by priority, then arrival. In one round

1. every decoding sequence gets one row; where its next block is missing and none is free, sequences
   behind it are preempted (`preemption.choose_victim`);
2. draft rows are added, as far as rows and blocks go round evenly: they never cost anyone a block, and
   leave a quarter of the rows to prompts that wait to be read;
3. prompts that are being read get the rows that are left, in order;
4. waiting requests are admitted in order, never past one that does not fit, and get the blocks of all
   their tokens at once. Where somebody was preempted, nobody is admitted.

So a stream of short requests cannot keep a long prompt out: it is passed by nobody while it waits, and
preempted for nobody behind it while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdec.core.ids import RequestId
from specdec.kv.block_table import num_blocks_for
from specdec.scheduling.preemption import choose_victim
from specdec.scheduling.speculation.controller import SpeculationController, bounded_choice
from specdec.scheduling.state import RoundLimits, RoundPlan, Schedulable

_PREFILL_SHARE = 4
"""One row in so many is kept from draft tokens while prompts wait to be read."""
_SPARE_SHARE = 50
"""One block in so many stays free on admission, so that running sequences can grow for a while."""


def plan_round(
    running: Sequence[Schedulable],
    waiting: Iterable[Schedulable],
    limits: RoundLimits,
    controller: SpeculationController,
) -> RoundPlan:
    """Decide who runs in the next round.

    Args:
        running: admitted requests, in any order; each holds blocks for all its computed tokens.
        waiting: requests in the queue, in order of service.
        limits: what the round may use.
        controller: says how many draft tokens each decoding sequence should have.
    """
    return _Planner(running, limits).plan(waiting, controller)


class _Planner:
    """The plan in the making."""

    def __init__(self, running: Sequence[Schedulable], limits: RoundLimits) -> None:
        self._limits = limits
        self._running = sorted(running, key=lambda request: request.service_key)
        self._num_tokens: dict[RequestId, int] = {}
        self._num_draft_tokens: dict[RequestId, int] = {}
        self._preempted: dict[RequestId, Schedulable] = {}
        self._num_free_blocks = limits.num_free_blocks
        self._num_free_rows = limits.max_num_batched_tokens

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
                self._give_chunk(request)
        admitted: list[RequestId] = []
        while first_waiting is not None and self._admits(first_waiting, len(admitted)):
            self._num_free_blocks -= self._num_blocks_for(first_waiting.committed_len)
            self._give_chunk(first_waiting)
            admitted.append(first_waiting.request_id)
            first_waiting = next(queue, None)
        return RoundPlan(
            num_tokens=self._num_tokens,
            num_draft_tokens=self._num_draft_tokens,
            preempted=tuple(self._preempted),
            admitted=tuple(admitted),
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
                request, (other for other in self._running if other.request_id not in self._preempted)
            )
            self._preempted[victim.request_id] = victim
            self._num_free_blocks += victim.num_blocks
            if victim is request:
                return False
        self._num_free_blocks -= max(missing, 0)
        return True

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

    def _give_chunk(self, request: Schedulable) -> None:
        num_rows = min(request.committed_len - request.num_computed, self._num_free_rows)
        if num_rows > 0:
            self._num_tokens[request.request_id] = num_rows
            self._num_free_rows -= num_rows

    def _admits(self, request: Schedulable, num_admitted: int) -> bool:
        num_running = len(self._running) + num_admitted
        if self._preempted or self._num_free_rows <= 0 or num_running >= self._limits.max_num_seqs:
            return False
        spare = max(1, self._limits.num_usable_blocks // _SPARE_SHARE) if num_running else 0
        return self._num_blocks_for(request.committed_len) + spare <= self._num_free_blocks

    def _num_blocks_for(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens, self._limits.block_size)
