"""A target group with its coordinator: the loop of `specdec.engine.rounds.round`, as events.

Planning, k, mode, fan-out, order of service, memory and draft deadlines are the engine's own code; every
round of every group is planned and played. Left out: prefix caches, grammars, priorities, cancellation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.clock import EventQueue
from benchmarks.simulation.colocated import OwnDrafter
from benchmarks.simulation.drafter import DraftMessage, DraftReply, DraftWish, DraftWorker
from benchmarks.simulation.hardware import Hardware
from benchmarks.simulation.links import DraftLinks
from benchmarks.simulation.traffic import SimulatedRequest
from benchmarks.simulation.verdicts import Ints, VerdictRound, play_round
from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome
from specdec.engine.draft_pool.patience import DraftDeadlineConfig
from specdec.engine.draft_pool.placement import DraftPlacementConfig
from specdec.kv.block_table import num_blocks_for
from specdec.scheduling.queue import WaitingQueue
from specdec.scheduling.scheduler import plan_round
from specdec.scheduling.speculation.controller import (
    DraftOutcome,
    FixedController,
    RoundObservation,
    SpeculationController,
)
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.state import RoundLimits, RoundPlan
from specdec.transport.base import PeerId

_DEPTHS: Mapping[OverlapMode, int] = {"lockstep": 1, "ping_pong": 2, "draft_ahead": 1}

GroupKind = Literal["apart", "colocated", "undrafted"]
"""apart: coordinator, target and draft workers are processes of their own, with wire between them.

colocated: one process has all three, the draft model on GPUs of the target.

undrafted: one process without a draft model.
"""


class PlainController(FixedController):
    """A `FixedController` that remembers how it has shared out continuations."""

    def __init__(self, num_draft_tokens: int, mode: OverlapMode = "lockstep") -> None:
        super().__init__(num_draft_tokens, mode)
        self._shared: dict[tuple[int, int], tuple[int, ...]] = {}

    def fan_out(
        self, request: object, num_pending: int, max_branches: int, *, is_foreign: bool = False
    ) -> tuple[int, ...]:
        """As `FixedController`, whose answer depends on these two numbers only; nothing is foreign here."""
        key = (num_pending, max_branches)
        if key not in self._shared:
            self._shared[key] = super().fan_out(request, num_pending, max_branches)  # type: ignore[arg-type]
        return self._shared[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """What one group may use."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    max_branches: int = 4
    jitter: float = 0.02
    """Standard deviation of the logarithm of T_verify."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Flight:
    """A round on its way."""

    mode: OverlapMode
    plan: RoundPlan
    decoding: Sequence[SimulatedRequest]
    prompts: Sequence[SimulatedRequest]
    budgets: Ints
    launched_s: float
    num_elsewhere: int
    context_tokens: int
    is_drafted_here: NDArray[np.bool_] | None = None
    """colocated: [n], whose proposals are there."""
    num_behind: int = 0
    verdicts: VerdictRound | None = None
    verify_s: float = 0.0
    draft_wait_s: float = 0.0
    draft_ready_s: float | None = None
    draft_work_s: float = 0.0
    submitted_s: float = 0.0
    landing_s: float = 0.0

    @property
    def num_prompt_rows(self) -> int:
        return sum(self.plan.num_tokens[one.request_id] for one in self.prompts)

    @property
    def has_budgets(self) -> bool:
        return bool(self.budgets.any())


@dataclass(slots=True)
class GroupCounts:
    """What a group has done."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    draft_misses: int = 0
    draft_s: float = 0.0
    """From asking for drafts to the last answer, waited for or not,"""
    draft_rounds: int = 0
    """of so many rounds."""
    target_s: float = 0.0
    """From submission to commit."""
    rounds_by_kind: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Awaited:
    """Answers of one worker that are due."""

    num_proposals: dict[int, int] = field(default_factory=dict)
    """By message; several where some of its sequences were looked ahead for and others were not."""
    give_up_s: float = 0.0


class _Asked(NamedTuple):
    """A message on its way to a draft worker."""

    worker: PeerId
    token: int
    life: int
    asked_s: float
    num_entries: int
    num_new_tokens: int


class Group:
    """One coordinator and its target."""

    def __init__(
        self,
        name: str,
        hardware: Hardware,
        limits: GroupLimits,
        controller: SpeculationController,
        events: EventQueue,
        generator: np.random.Generator,
        on_finish: Callable[[Group, SimulatedRequest], None],
        deadlines: DraftDeadlineConfig | None = None,
        placement: DraftPlacementConfig | None = None,
        kind: GroupKind = "apart",
    ) -> None:
        if kind != "apart":
            hardware = hardware.in_one_process()
        self.name = name
        self.controller = controller
        self.limits = limits
        self.links = DraftLinks(
            name,
            events,
            hardware.wire_s,
            deadlines or DraftDeadlineConfig(),
            placement or DraftPlacementConfig(),
        )
        self.running: dict[RequestId, SimulatedRequest] = {}
        self.waiting: WaitingQueue[SimulatedRequest] = WaitingQueue()
        self.is_alive = True
        self.counts = GroupCounts()
        self.own_drafter = (
            OwnDrafter(hardware, limits.max_num_batched_tokens) if kind == "colocated" else None
        )
        self._hardware = hardware
        self._events = events
        self._generator = generator
        self._on_finish = on_finish
        kv_tokens = hardware.target.kv_tokens if kind != "colocated" else hardware.kv_tokens_beside_draft
        self._num_blocks = kv_tokens // limits.block_size
        self._num_free_blocks = self._num_blocks
        self._flights: deque[_Flight] = deque()
        self._is_busy = False
        self._life = 0
        self._target_free_s = 0.0
        self._landed_s: float | None = None
        self._launching: _Flight | None = None
        self._awaited: dict[PeerId, _Awaited] = {}
        """Answers that the launching flight, or the next one, waits for."""
        self._next_token = 0
        self._draft_ready_s: float | None = None
        self._draft_work_s = 0.0
        self._learns = not isinstance(controller, FixedController)

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self.running) + len(self.waiting)

    # ------------------------------------------------------------------------------------ from outside

    def add(self, request: SimulatedRequest) -> None:
        """Take a request in."""
        self.waiting.push(request)
        self._wake()

    def add_running(self, request: SimulatedRequest) -> None:
        """Take a request in that decodes already: a simulation need not begin empty."""
        request.num_blocks = num_blocks_for(request.committed_len, self.limits.block_size)
        self._num_free_blocks -= request.num_blocks
        self.running[request.request_id] = request
        self.links.assume_read(request)
        if self.own_drafter is not None:
            self.own_drafter.assume_read(request)
        self._wake()

    def set_workers(self, workers: Iterable[DraftWorker]) -> None:
        """Use exactly these draft workers."""
        self.links.set_workers(workers)

    def die(self) -> list[SimulatedRequest]:
        """Lose everything; return the requests, to go on elsewhere behind what has been delivered."""
        orphans = [*self.running.values(), *self.waiting]
        for one in orphans:
            one.num_computed = one.num_blocks = 0
            one.is_in_flight = one.has_drafts = one.was_looked_ahead = False
            one.num_replays += 1
            self._forget_drafts(one.request_id)
        self.running.clear()
        self.waiting = WaitingQueue()
        self._num_free_blocks = self._num_blocks
        self._flights.clear()
        self._awaited.clear()
        self._launching = None
        self._landed_s = self._draft_ready_s = None
        self._is_busy = self.is_alive = False
        self._life += 1
        return orphans

    def revive(self) -> None:
        """Begin anew, empty."""
        self.is_alive = True
        self._target_free_s = self._events.now_s
        self._wake()

    def check_integrity(self) -> None:
        """Assert that blocks add up."""
        held = sum(one.num_blocks for one in self.running.values())
        assert held + self._num_free_blocks == self._num_blocks, "blocks leak"

    # ------------------------------------------------------------------------------------ the loop

    def _later(self, time_s: float, callback: Callable[[], None]) -> None:
        """Call back at a time, unless the group has died before."""
        life = self._life

        def run() -> None:
            if life == self._life:
                callback()

        self._events.at(time_s, run)

    def _wake(self) -> None:
        if self.is_alive and not self._is_busy:
            self._is_busy = True
            self._later(self._events.now_s, self._go)

    def _go(self) -> None:
        mode = self._mode()
        if len(self._flights) < _DEPTHS[mode] and self._launch(mode):
            return
        if self._flights:
            self._later(max(self._events.now_s, self._flights[0].landing_s), self._land)
        else:
            self._is_busy = False
            self._landed_s = None

    def _decided(self, planned: OverlapMode) -> OverlapMode:
        if planned == "ping_pong":
            return planned
        decided = self._mode()
        return "lockstep" if decided == "ping_pong" else decided

    def _mode(self) -> OverlapMode:
        return self.controller.mode if self.links.links else "lockstep"

    def _launch(self, mode: OverlapMode) -> bool:
        plan = self._plan(mode)
        if plan is None:
            return False
        self._apply(plan)
        mode = self._decided(mode)
        requests = [self.running[one] for one in plan.num_tokens]
        decoding = [one for one in requests if one.is_decoding]
        prompts = [one for one in requests if not one.is_decoding]
        num_here = len(requests)
        budgets = np.array([plan.num_draft_tokens.get(one.request_id, 0) for one in decoding], dtype=np.int64)
        flight = _Flight(
            mode=mode,
            plan=plan,
            decoding=decoding,
            prompts=prompts,
            budgets=budgets,
            launched_s=self._events.now_s,
            num_elsewhere=sum(one.is_decoding for one in self.running.values() if one.is_in_flight),
            context_tokens=sum(one.committed_len for one in requests),
        )
        assert num_here, "a round without work"
        for one in requests:
            one.is_in_flight = True
        self._launching = flight
        if self.own_drafter is not None:
            self._draft_here(flight, self.own_drafter)
            return True
        self._ask(flight)
        if self._awaited:
            give_up_s = max(one.give_up_s for one in self._awaited.values())
            self._later(max(give_up_s, self._events.now_s), partial(self._give_up, flight))
        else:
            self._submit()
        return True

    def _plan(self, mode: OverlapMode) -> RoundPlan | None:
        most = -(-len(self.running) // 2) if mode == "ping_pong" else None
        if not self.running and not len(self.waiting):
            return None
        plan = self._plan_at_most(most)
        if self._flights and (plan.preempted or not plan.num_tokens):
            return None
        if plan.preempted or not plan.num_tokens:
            plan = self._plan_at_most(None)
        return plan if plan.num_tokens else None

    def _plan_at_most(self, most: int | None) -> RoundPlan:
        present = [one for one in self.running.values() if not one.is_in_flight]
        if most is not None and len(present) > most:
            present = sorted(present, key=lambda one: one.service_key)[:most]
        here = {one.request_id for one in present}
        elsewhere = [one for name, one in self.running.items() if name not in here]
        limits = RoundLimits(
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            block_size=self.limits.block_size,
            num_free_blocks=self._num_free_blocks,
            num_usable_blocks=self._num_blocks,
            num_elsewhere=len(elsewhere),
        )
        decoding_elsewhere = [one for one in elsewhere if one.is_decoding]
        return plan_round(present, self.waiting, limits, self.controller, elsewhere=decoding_elsewhere)

    def _apply(self, plan: RoundPlan) -> None:
        for request_id in plan.preempted:
            request = self.running.pop(request_id)
            self._num_free_blocks += request.num_blocks
            request.num_computed = request.num_blocks = 0
            self.counts.preemptions += 1
            self.waiting.push(request)
        for request_id in plan.admitted:
            admitted = self.waiting.remove(request_id)
            assert admitted is not None
            self.running[request_id] = admitted
            self._hold(admitted, admitted.committed_len)
        for request_id, num_tokens in plan.num_tokens.items():
            request = self.running[request_id]
            self._hold(request, max(request.num_computed + num_tokens, request.committed_len))

    def _hold(self, request: SimulatedRequest, num_tokens: int) -> None:
        number = num_blocks_for(num_tokens, self.limits.block_size)
        self._num_free_blocks -= number - request.num_blocks
        request.num_blocks = number

    # ------------------------------------------------------------------------------------ drafts

    def _draft_here(self, flight: _Flight, drafter: OwnDrafter) -> None:
        """Draft in this process, before the target's step."""
        drafts = drafter.propose(flight.decoding, flight.budgets, flight.prompts)
        flight.is_drafted_here, flight.num_behind = drafts.is_drafted, drafts.num_behind
        if flight.has_budgets:
            self.counts.draft_s += drafts.seconds
            self.counts.draft_rounds += 1
            self._draft_ready_s = drafts.seconds
        self._later(self._events.now_s + drafts.seconds, self._submit)

    def _forget_drafts(self, request_id: RequestId) -> None:
        self.links.release(request_id)
        if self.own_drafter is not None:
            self.own_drafter.release(request_id)

    def _ask(self, flight: _Flight) -> None:
        """Ask for drafts of those that were not looked ahead for, and let prompts be read."""
        unprepared: dict[RequestId, int] = {}
        for one, budget in zip(flight.decoding, flight.budgets.tolist(), strict=True):
            if budget > 0 and not one.was_looked_ahead:
                unprepared[one.request_id] = budget
        wanted = [self.running[one] for one in unprepared]
        for name, group in self.links.by_worker([*wanted, *flight.prompts], self._events.now_s).items():
            budgets = [unprepared.get(one.request_id, 0) for one in group]
            self._send(name, group, budgets)

    def _look_ahead(self, flight: _Flight) -> None:
        for one in flight.decoding:
            one.was_looked_ahead = False
        wanted = [one for one, k in zip(flight.decoding, flight.budgets, strict=True) if k > 0]
        budget_of = dict(
            zip((one.request_id for one in flight.decoding), flight.budgets.tolist(), strict=True)
        )
        at = {one.request_id: index for index, one in enumerate(flight.decoding)}
        branches = () if flight.verdicts is None else flight.verdicts.num_branches
        assert branches is not None
        for name, group in self.links.by_worker(wanted, self._events.now_s).items():
            budgets = [budget_of[one.request_id] for one in group]
            shares = [float(branches[at[one.request_id]]) for one in group]
            for one in group:
                one.was_looked_ahead = True
            self._send(name, group, budgets, shares)

    def _send(
        self,
        name: PeerId,
        group: Sequence[SimulatedRequest],
        budgets: Sequence[int],
        branches: Sequence[float] | None = None,
    ) -> None:
        """Send one message: drafts for those with a budget, reading for all that the worker has not seen."""
        now_s = self._events.now_s
        link = self.links.links[name]
        numbers: Sequence[float | None] = [None] * len(group) if branches is None else branches
        wishes = [
            DraftWish(
                request_id=one.request_id,
                num_draft_tokens=budget,
                context_tokens=one.committed_len,
                num_unseen=self.links.send(one),
                num_branches=number,
            )
            for one, budget, number in zip(group, budgets, numbers, strict=True)
        ]
        token = self._next_token = self._next_token + 1
        num_new = sum(wish.num_unseen for wish in wishes)
        asked = _Asked(name, token, self._life, now_s, len(wishes), num_new)
        message = DraftMessage(self.name, wishes, partial(self._answered, asked))
        self._events.at(now_s + self._hardware.wire_s, partial(self.links.workers[name].submit, message))
        num_proposals = sum(budget > 0 for budget in budgets)
        if num_proposals and link.patience.is_waited_for(now_s):
            awaited = self._awaited.setdefault(name, _Awaited())
            awaited.num_proposals[token] = num_proposals
            awaited.give_up_s = now_s + link.patience.deadline_s(asked.num_entries, num_new)
        link.patience.asked(now_s)

    def _answered(self, asked: _Asked, reply: DraftReply) -> None:
        name = asked.worker
        link = self.links.links.get(name)
        if asked.life != self._life or link is None:
            return
        link.patience.heard()
        self.links.hear(name, reply)
        awaited = self._awaited.get(name)
        if awaited is None or asked.token not in awaited.num_proposals:
            return
        awaited.num_proposals[asked.token] -= sum(wish.num_draft_tokens > 0 for wish in reply.wishes)
        if any(awaited.num_proposals.values()):
            return
        elapsed_s = self._events.now_s - asked.asked_s
        link.patience.measured(elapsed_s, asked.num_entries, asked.num_new_tokens)
        link.patience.answered_in_time()
        del self._awaited[name]
        self.counts.draft_s += elapsed_s
        self.counts.draft_rounds += 1
        self._draft_ready_s = elapsed_s
        self._draft_work_s = max(self._draft_work_s, reply.draft_s)
        if self._launching is not None and not self._awaited:
            self._submit()

    def _give_up(self, flight: _Flight) -> None:
        """Go on without those whose time is up."""
        if self._launching is not flight:
            return
        for name in self._awaited:
            if name in self.links.links:
                self.links.links[name].patience.missed(self._events.now_s)
            self.counts.draft_misses += 1
        late = set(self._awaited)
        self._awaited.clear()
        self._submit(late)

    # ------------------------------------------------------------------------------------ the target

    def _submit(self, absent: Collection[str] = ()) -> None:
        flight, self._launching = self._launching, None
        assert flight is not None
        now_s = self._events.now_s
        flight.submitted_s = now_s
        flight.draft_wait_s = now_s - flight.launched_s
        flight.draft_ready_s, self._draft_ready_s = (None if absent else self._draft_ready_s), None
        flight.draft_work_s, self._draft_work_s = self._draft_work_s, 0.0
        is_ahead = flight.mode == "draft_ahead"
        if flight.decoding:
            is_drafted = flight.is_drafted_here
            if is_drafted is None:
                is_drafted = np.array([self._is_drafted(one, absent) for one in flight.decoding])
            fan_out = self._fan_out if is_ahead else None
            flight.verdicts = play_round(
                flight.decoding, flight.budgets, is_drafted, fan_out, self._generator
            )
        flight.verify_s = self._verify_s(flight)
        wire_s = self._hardware.wire_s
        done_s = max(now_s + wire_s, self._target_free_s) + flight.verify_s
        self._target_free_s = done_s
        flight.landing_s = done_s + wire_s
        self._flights.append(flight)
        if is_ahead:
            self._look_ahead(flight)
        else:
            for one in flight.decoding:
                one.was_looked_ahead = one.has_drafts = False
        self._go()

    def _is_drafted(self, one: SimulatedRequest, absent: Collection[str]) -> bool:
        name = self.links.worker_of(one.request_id)
        if name is None or name in absent:
            return False
        if one.was_looked_ahead:
            return one.has_drafts
        return self.links.links[name].patience.is_waited_for(self._events.now_s)

    def _fan_out(self, request: SimulatedRequest, num_pending: int) -> tuple[int, ...]:
        return self.controller.fan_out(request, num_pending, self.limits.max_branches)

    def _verify_s(self, flight: _Flight) -> float:
        num_rows = flight.num_prompt_rows + (0 if flight.verdicts is None else flight.verdicts.num_rows)
        jitter = math.exp(self._generator.normal(0.0, self.limits.jitter))
        return jitter * self._hardware.verify_s(num_rows, flight.context_tokens)

    def _land(self) -> None:
        flight = self._flights.popleft()
        for one in (*flight.decoding, *flight.prompts):
            one.is_in_flight = False
        finished = self._commit(flight)
        self.counts.rounds += 1
        kind = flight.mode if flight.has_budgets else "plain"
        self.counts.rounds_by_kind[kind] = self.counts.rounds_by_kind.get(kind, 0) + 1
        overhead_s = self._hardware.round_overhead_s(len(flight.decoding) + len(flight.prompts))
        self.counts.target_s += flight.verify_s + overhead_s
        if self._learns:
            self._observe(flight, self._events.now_s + overhead_s)
        self._landed_s = self._events.now_s + overhead_s
        self._later(self._landed_s, self._go)
        for one in finished:
            self._on_finish(self, one)

    def _commit(self, flight: _Flight) -> list[SimulatedRequest]:
        now_s = self._events.now_s
        finished = []
        for one in flight.prompts:
            one.num_computed += flight.plan.num_tokens[one.request_id]
            if one.num_computed == one.committed_len:
                self._advance(one, 1, now_s)
        verdicts = flight.verdicts
        if verdicts is not None:
            news = zip(flight.decoding, verdicts.committed.tolist(), verdicts.hits, strict=True)
            for one, number, is_hit in news:
                self._advance(one, number, now_s)
                one.has_drafts = is_hit
            self.counts.drafted += int(verdicts.drafted.sum())
            self.counts.accepted += int(verdicts.accepted.sum())
        for one in (*flight.decoding, *flight.prompts):
            if one.is_finished:
                del self.running[one.request_id]
                self._num_free_blocks += one.num_blocks
                one.num_blocks = 0
                self._forget_drafts(one.request_id)
                finished.append(one)
        return finished

    def _advance(self, request: SimulatedRequest, number: int, now_s: float) -> None:
        request.committed_len += number
        request.num_generated += number
        request.num_computed = request.committed_len - 1
        self._hold(request, request.committed_len)
        self.counts.tokens += number
        if request.first_token_s is None:
            request.first_token_s = now_s

    # ------------------------------------------------------------------------------------ learning

    def _observe(self, flight: _Flight, now_s: float) -> None:
        its = flight.verdicts
        num_first = sum(one.num_generated == 1 for one in flight.prompts)
        num_committed = 0 if its is None else int(its.committed.sum())
        num_rows = 0 if its is None else its.num_rows
        self.controller.observe(
            RoundObservation(
                num_rows=num_rows + flight.num_prompt_rows,
                num_sequences=len(flight.decoding) + len(flight.prompts),
                num_committed=num_committed + num_first,
                draft_s=flight.draft_wait_s,
                verify_s=flight.landing_s - flight.submitted_s,
                outcomes=() if its is None else _outcomes(flight, its),
                mode=flight.mode,
                round_s=None if self._landed_s is None else now_s - self._landed_s,
                num_decoding=len(flight.decoding) + num_first,
                num_prompt_rows=flight.num_prompt_rows,
                context_tokens=flight.context_tokens,
                budgets=flight.plan.num_draft_tokens,
                num_behind=flight.num_behind,
                draft_ready_s=flight.draft_ready_s,
                draft_work_s=flight.draft_work_s or None,
                target_s=flight.verify_s,
                num_elsewhere=flight.num_elsewhere,
                ahead=() if its is None else _ahead(flight, its),
            )
        )
        self.controller.think()


def _outcomes(flight: _Flight, its: VerdictRound) -> list[DraftOutcome]:
    return [
        DraftOutcome(request_id=one.request_id, num_drafted=drafted, num_accepted=accepted)
        for one, drafted, accepted in zip(
            flight.decoding, its.drafted.tolist(), its.accepted.tolist(), strict=True
        )
        if drafted
    ]


def _ahead(flight: _Flight, its: VerdictRound) -> list[AheadOutcome]:
    if its.prepared is None or its.ranks is None:
        return []
    return [
        AheadOutcome(
            request_id=one.request_id,
            num_pending=drafted,
            num_accepted=accepted,
            num_prepared=prepared,
            rank=rank if rank < prepared else None,
        )
        for one, drafted, accepted, prepared, rank in zip(
            flight.decoding,
            its.drafted.tolist(),
            its.accepted.tolist(),
            its.prepared.tolist(),
            its.ranks.tolist(),
            strict=True,
        )
        if prepared
    ]
