"""Plain requests and a tiny executor of plans, to watch the scheduler without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.core.ids import RequestId
from specdec.kv.block_table import num_blocks_for
from specdec.scheduling.queue import WaitingQueue
from specdec.scheduling.scheduler import plan_round
from specdec.scheduling.speculation.controller import FixedController, SpeculationController
from specdec.scheduling.state import RoundLimits, RoundPlan, ServiceKey


@dataclass
class FakeRequest:
    """A request that generates `num_to_generate` tokens, whatever they are."""

    request_id: RequestId
    service_key: ServiceKey
    committed_len: int
    num_to_generate: int = 1
    num_computed: int = 0
    num_blocks: int = 0
    requested_draft_tokens: int | None = None
    max_chunk_tokens: int | None = None
    class_name: str = "other"
    itl_s: float | None = None
    ttft_s: float | None = None
    num_generated: int = 0
    num_preemptions: int = 0
    kv_budget: int = 0
    """Tokens that its drafts attend to; 0: all."""
    has_own_kv_budget: bool = True
    own_drafter: int | None = None
    first_round: int | None = None

    @property
    def draft_context(self) -> int:
        return min(self.kv_budget or self.committed_len, self.committed_len)

    @property
    def max_draft_tokens(self) -> int:
        return max(0, self.num_to_generate - self.num_generated - 1)


def fake_request(
    name: str, length: int, *, arrival: int = 0, priority: int = 0, generate: int = 1000, computed: int = 0
) -> FakeRequest:
    return FakeRequest(
        request_id=RequestId(name),
        service_key=ServiceKey(priority, 0, arrival),
        committed_len=length,
        num_to_generate=generate,
        num_computed=computed,
    )


@dataclass
class Simulation:
    """Runs plans as an engine would; every draft is accepted up to `num_accepted` tokens."""

    num_blocks: int = 16
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    controller: SpeculationController = field(default_factory=lambda: FixedController(0))
    num_accepted: int = 0
    num_rows_beside: int = 0
    max_sequence_len: int | None = None
    pressed: frozenset[RequestId] = frozenset()
    running: dict[RequestId, FakeRequest] = field(default_factory=dict)
    waiting: WaitingQueue[FakeRequest] = field(default_factory=WaitingQueue)
    finished: list[FakeRequest] = field(default_factory=list)
    round_number: int = 0

    def limits(self) -> RoundLimits:
        held = sum(request.num_blocks for request in self.running.values())
        return RoundLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            num_free_blocks=self.num_blocks - held,
            num_usable_blocks=self.num_blocks,
            num_rows_beside=self.num_rows_beside,
            max_sequence_len=self.max_sequence_len,
            pressed=self.pressed,
        )

    def plan(self) -> RoundPlan:
        return plan_round(tuple(self.running.values()), self.waiting, self.limits(), self.controller)

    def run_round(self) -> RoundPlan:
        plan = self.plan()
        check_plan(plan, self)
        for request_id in plan.preempted:
            request = self.running.pop(request_id)
            request.num_computed = request.num_blocks = 0
            request.num_preemptions += 1
            self.waiting.push(request)
        for request_id in plan.admitted:
            request = self.waiting.remove(request_id)
            assert request is not None
            request.num_blocks = num_blocks_for(request.committed_len, self.block_size)
            if request.first_round is None:
                request.first_round = self.round_number
            self.running[request_id] = request
        for request_id, num_tokens in plan.num_tokens.items():
            num_drafted = plan.num_draft_tokens.get(request_id, 0)
            num_beside = plan.num_rows_beside.get(request_id, 0)
            self._advance(self.running[request_id], num_tokens, num_drafted, num_beside)
        self.waiting.check_integrity()
        self.round_number += 1
        return plan

    def _advance(self, request: FakeRequest, num_tokens: int, num_drafted: int, num_beside: int) -> None:
        needed = num_blocks_for(request.num_computed + num_tokens, self.block_size)
        request.num_blocks = max(request.num_blocks, needed)
        request.num_computed += num_tokens - num_drafted - num_beside
        if request.num_computed == request.committed_len:
            num_new = 1 + min(num_drafted, self.num_accepted)
            request.committed_len += num_new
            request.num_generated += num_new
            request.num_computed = request.committed_len - 1
            request.num_blocks = min(
                request.num_blocks, num_blocks_for(request.committed_len, self.block_size)
            )
        if request.num_generated >= request.num_to_generate:
            self.finished.append(self.running.pop(request.request_id))

    def run_until_finished(self, max_rounds: int = 5000) -> None:
        while self.running or len(self.waiting):
            assert self.round_number < max_rounds, "somebody starves"
            self.run_round()


def check_plan(plan: RoundPlan, simulation: Simulation) -> None:
    """Assert what every plan promises."""
    limits = simulation.limits()
    assert plan.num_tokens, "a round without work"
    assert len(plan.num_tokens) <= limits.max_num_seqs
    assert sum(plan.num_tokens.values()) <= limits.max_num_batched_tokens
    assert all(num_tokens > 0 for num_tokens in plan.num_tokens.values())
    assert not set(plan.preempted) & set(plan.num_tokens)
    waiting = {request.request_id: request for request in simulation.waiting}
    for given_up in plan.preempted:
        for request_id in plan.admitted:
            urgency = simulation.running[given_up].service_key.priority
            assert waiting[request_id].service_key.priority < urgency, "no place is taken from equals"
    assert len(simulation.running) - len(plan.preempted) + len(plan.admitted) <= limits.max_num_seqs
    needed = 0
    for request_id, request in simulation.running.items():
        if request_id in plan.preempted:
            continue
        rows = plan.num_tokens.get(request_id, 0)
        needed += max(request.num_blocks, num_blocks_for(request.num_computed + rows, limits.block_size))
        drafted = plan.num_draft_tokens.get(request_id, 0)
        assert drafted <= request.max_draft_tokens
        beside = plan.num_rows_beside.get(request_id, 0)
        assert beside in (0, limits.num_rows_beside)
        assert drafted > 0 or not beside
        if beside and limits.max_sequence_len is not None:
            assert request.committed_len + drafted + beside <= limits.max_sequence_len
        if drafted:
            assert request.num_computed == request.committed_len - 1
    for request_id in plan.admitted:
        needed += num_blocks_for(waiting[request_id].committed_len, limits.block_size)
    assert needed <= limits.num_usable_blocks, "the plan needs more blocks than there are"
