"""Who waits, who runs, and which blocks they hold."""

from __future__ import annotations

from collections.abc import Iterator

from specdec.core.ids import RequestId
from specdec.engine.live_request import LiveRequest
from specdec.kv.block_allocator import BlockAllocator
from specdec.kv.block_table import BlockTable
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.queue import WaitingQueue
from specdec.scheduling.scheduler import plan_round
from specdec.scheduling.speculation.controller import SpeculationController
from specdec.scheduling.state import RoundLimits, RoundPlan


class Roster:
    """The requests of one engine and the target's KV blocks. All changes of either go through here."""

    def __init__(self, *, num_blocks: int, block_size: int, config: SchedulerConfig) -> None:
        self.block_size = block_size
        self.waiting: WaitingQueue[LiveRequest] = WaitingQueue()
        self.running: dict[RequestId, LiveRequest] = {}
        self._config = config
        self._allocator = BlockAllocator(num_blocks)
        self._to_forget: list[RequestId] = []

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

    def new_table(self) -> BlockTable:
        """Return an empty block table over the target's pool."""
        return BlockTable(self._allocator, self.block_size)

    def plan(self, controller: SpeculationController) -> RoundPlan:
        """Decide who runs in the next round."""
        limits = RoundLimits(
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            block_size=self.block_size,
            num_free_blocks=self._allocator.num_free,
            num_usable_blocks=self._allocator.num_usable,
        )
        return plan_round(tuple(self.running.values()), self.waiting, limits, controller)

    def apply(self, plan: RoundPlan, now_s: float) -> int:
        """Preempt, admit and hand out blocks as planned; return the number of computed tokens given up."""
        num_lost = 0
        for request_id in plan.preempted:
            live = self.running.pop(request_id)
            num_lost += live.num_computed
            live.preempt()
            self._forget(live)
            self.waiting.push(live)
        for request_id in plan.admitted:
            admitted = self.waiting.remove(request_id)
            assert admitted is not None
            admitted.table.grow(admitted.committed_len)
            if admitted.stats.first_scheduled_s is None:
                admitted.stats.first_scheduled_s = now_s
            self.running[request_id] = admitted
        for request_id, num_tokens in plan.num_tokens.items():
            live = self.running[request_id]
            live.table.grow(live.num_computed + num_tokens)
        return num_lost

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
        held = 0
        for live in self:
            live.table.check_integrity()
            held += live.num_blocks
            assert live.num_computed <= live.table.capacity
            assert live.finish is None, f"{live.request_id} has ended but is still here"
        assert all(live.num_blocks == 0 for live in self.waiting), "a waiting request holds blocks"
        assert held == self._allocator.num_used, "blocks are held by nobody here"

    def _forget(self, live: LiveRequest) -> None:
        if live.is_known_to_target:
            live.is_known_to_target = False
            self._to_forget.append(live.request_id)
