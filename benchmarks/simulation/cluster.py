"""Pools of M draft workers and N target groups behind one door, with traffic and failures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np

from benchmarks.simulation.clock import EventQueue
from benchmarks.simulation.drafter import DraftWorker
from benchmarks.simulation.group import Group, GroupKind, GroupLimits
from benchmarks.simulation.hardware import Hardware
from benchmarks.simulation.traffic import CHAT, LoadStep, SimulatedRequest, Source, Trace, arrival_times
from specdec.core.ids import RequestId
from specdec.engine.draft_pool.placement import DraftPlacementConfig
from specdec.scheduling.speculation.controller import SpeculationController

MakeController = Callable[[], SpeculationController]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A cluster. Every pool is the same: its draft workers serve its groups and no others."""

    hardware: Hardware
    controller: MakeController
    trace: Trace = CHAT
    num_pools: int = 1
    groups_per_pool: int = 1
    workers_per_pool: int = 1
    kind: GroupKind = "apart"
    limits: GroupLimits = field(default_factory=GroupLimits)
    placement: DraftPlacementConfig = field(default_factory=DraftPlacementConfig)
    lease_s: float = 6.0
    """A draft worker that has died is taken off the list after so long (`MembershipConfig.lease_s`)."""
    renew_s: float = 1.0
    """One that comes back is on it after so long."""

    def __post_init__(self) -> None:
        if self.kind != "apart" and self.workers_per_pool != 0:
            raise ValueError(
                f"workers_per_pool must be 0 for {self.kind} groups, got {self.workers_per_pool}: "
                "only groups whose drafters are apart have draft workers"
            )

    @property
    def num_groups(self) -> int:
        """Target groups of all pools."""
        return self.num_pools * self.groups_per_pool

    @property
    def num_gpus(self) -> int:
        """GPUs of both sides."""
        draft = self.num_pools * self.workers_per_pool * self.hardware.draft.num_gpus
        return self.num_groups * self.hardware.target.num_gpus + draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that dies and comes back."""

    what: Literal["draft_worker", "target_group"]
    index: int
    at_s: float
    down_s: float


@dataclass(slots=True)
class Ledger:
    """What has become of requests."""

    num_arrived: int = 0
    finished: dict[RequestId, SimulatedRequest] = field(default_factory=dict)
    finished_s: dict[RequestId, float] = field(default_factory=dict)
    num_replays: int = 0
    tokens_by_second: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run has brought, warm-up left out."""

    num_gpus: int
    num_groups: int
    goodput: float
    """Committed tokens per second, of all groups."""
    ttft_ms: tuple[float, ...]
    """50th, 95th, 99th percentile of the time to the first token."""
    token_ms: tuple[float, ...]
    """The same of the time per token of whole streams, behind the first token."""
    rounds_per_s: float
    """Of one group."""
    draft_ms: float
    """From asking for drafts to having them, mean of rounds."""
    verify_ms: float
    """T_verify and the coordinator's own time, mean of rounds; those that read prompts included."""
    acceptance: float
    draft_load: float
    """Share of the time in which a draft worker is busy."""
    jobs_per_batch: float
    """Coordinators' wishes that a draft worker served together."""
    kinds: dict[str, float]
    """Shares of rounds by how they were run."""
    num_finished: int
    num_replays: int
    num_events: int

    @property
    def goodput_per_group(self) -> float:
        """Tokens per second of one group."""
        return self.goodput / self.num_groups


class Cluster:
    """One simulation. The same spec, seed and calls give the same numbers."""

    def __init__(self, spec: ClusterSpec, seed: int = 0) -> None:
        self.spec = spec
        self.events = EventQueue()
        self.ledger = Ledger()
        self._seed = seed
        self._source = Source(spec.trace, seed)
        self._homeless: deque[SimulatedRequest] = deque()
        self._refill = self._through_door = False
        self.workers = [
            [
                DraftWorker(f"draft-{pool}-{number}", spec.hardware, self.events)
                for number in range(spec.workers_per_pool)
            ]
            for pool in range(spec.num_pools)
        ]
        self._listed = [list(workers) for workers in self.workers]
        self.groups = [
            Group(
                f"group-{index}",
                spec.hardware,
                spec.limits,
                spec.controller(),
                self.events,
                np.random.default_rng([seed, index]),
                self._finish,
                placement=spec.placement,
                kind=spec.kind,
            )
            for index in range(spec.num_groups)
        ]
        for index, group in enumerate(self.groups):
            group.set_workers(self._listed[index // spec.groups_per_pool])

    # ------------------------------------------------------------------------------------ what happens

    def keep_busy(self, num_sequences: int, *, through_door: bool = False) -> None:
        """Let every group have so many requests at any time; begin as in the middle of a long run.

        With `through_door`, whoever follows a finished request goes where the load is least.
        """
        self._refill, self._through_door = True, through_door
        for group in self.groups:
            for _ in range(num_sequences):
                self._begin_with_one_more(group)

    def keep_in_flight(self, num_sequences: int) -> None:
        """Let all groups together have so many requests at any time; begin as in the middle of a long run.

        They are spread evenly, and whoever follows goes where the load is least: clusters of other layouts
        begin with the same requests.
        """
        self._refill = self._through_door = True
        for number in range(num_sequences):
            self._begin_with_one_more(self.groups[number % len(self.groups)])

    def send_traffic(self, steps: Sequence[LoadStep], end_s: float) -> None:
        """Let requests come to the door at these rates."""
        generator = np.random.default_rng([self._seed, 0xD002])
        times = arrival_times(steps, end_s, self.spec.trace.variation, generator)

        def arrive() -> None:
            self.submit(self._source.draw(self.events.now_s))
            wait()

        def wait() -> None:
            time_s = next(times, None)
            if time_s is not None:
                self.events.at(time_s, arrive)

        wait()

    def submit(self, request: SimulatedRequest) -> None:
        """Give a new request to the least loaded group, as the door does."""
        self.ledger.num_arrived += 1
        self._route(request)

    def fail(self, failures: Sequence[Failure]) -> None:
        """Let these things happen."""
        for one in failures:
            act = self._fail_worker if one.what == "draft_worker" else self._fail_group
            self.events.at(one.at_s, partial(act, one))

    def run(self, until_s: float) -> None:
        """Let time pass."""
        second = int(self.events.now_s)
        before = sum(group.counts.tokens for group in self.groups)
        while self.events.now_s < until_s:
            second += 1
            self.events.run(min(float(second), until_s))
            total = sum(group.counts.tokens for group in self.groups)
            self.ledger.tokens_by_second.append(total - before)
            before = total

    def drain(self, limit_s: float) -> None:
        """Let everything come to its end; an error if it takes longer than that."""
        self._refill = False
        while len(self.ledger.finished) < self.ledger.num_arrived:
            assert self.events.now_s < limit_s, "somebody starves"
            self.run(self.events.now_s + 1.0)

    def measure(self, warm_up_s: float, seconds: float) -> Outcome:
        """Let time pass and return what the last `seconds` have brought."""
        self.run(self.events.now_s + warm_up_s)
        start_s = self.events.now_s
        before = self._totals()
        self.run(start_s + seconds)
        return self._outcome(start_s, before)

    # ------------------------------------------------------------------------------------ inside

    def _begin_with_one_more(self, group: Group) -> None:
        self.ledger.num_arrived += 1
        group.add_running(self._source.draw_running(0.0))

    def _route(self, request: SimulatedRequest) -> None:
        alive = [group for group in self.groups if group.is_alive]
        if alive:
            min(alive, key=lambda group: group.load).add(request)
        else:
            self._homeless.append(request)

    def _finish(self, group: Group, request: SimulatedRequest) -> None:
        ledger = self.ledger
        assert request.request_id not in ledger.finished, "a request that ends twice"
        ledger.finished[request.request_id] = request
        ledger.finished_s[request.request_id] = self.events.now_s
        if self._refill:
            ledger.num_arrived += 1
            following = self._source.draw(self.events.now_s)
            if self._through_door:
                self._route(following)
            else:
                group.add(following)

    def _fail_worker(self, failure: Failure) -> None:
        pool, number = divmod(failure.index, self.spec.workers_per_pool)
        worker = self.workers[pool][number]
        if not worker.is_alive:
            return
        worker.die()
        now_s = self.events.now_s
        self.events.at(now_s + self.spec.lease_s, partial(self._list, pool))
        self.events.at(now_s + failure.down_s, worker.revive)
        self.events.at(now_s + failure.down_s + self.spec.renew_s, partial(self._list, pool))

    def _list(self, pool: int) -> None:
        """Tell coordinators which workers there are."""
        listed = [worker for worker in self.workers[pool] if worker.is_alive]
        first = pool * self.spec.groups_per_pool
        for group in self.groups[first : first + self.spec.groups_per_pool]:
            group.set_workers(listed)

    def _fail_group(self, failure: Failure) -> None:
        group = self.groups[failure.index]
        if not group.is_alive:
            return
        orphans = group.die()
        self.ledger.num_replays += len(orphans)
        self.events.at(self.events.now_s + failure.down_s, partial(self._revive_group, group))
        for one in orphans:
            self._route(one)

    def _revive_group(self, group: Group) -> None:
        group.revive()
        while self._homeless:
            self._route(self._homeless.popleft())

    def _totals(self) -> np.ndarray:
        workers = [worker for pool in self.workers for worker in pool]
        groups = self.groups
        return np.array(
            [
                sum(group.counts.tokens for group in groups),
                sum(group.counts.rounds for group in groups),
                sum(group.counts.drafted for group in groups),
                sum(group.counts.accepted for group in groups),
                sum(worker.busy_s for worker in workers),
                sum(worker.num_jobs for worker in workers),
                sum(worker.num_batches for worker in workers),
                self.events.num_events,
                sum(group.counts.draft_s for group in groups),
                sum(group.counts.draft_rounds for group in groups),
                sum(group.counts.target_s for group in groups),
            ],
            dtype=np.float64,
        )

    def _outcome(self, start_s: float, before: np.ndarray) -> Outcome:
        seconds = self.events.now_s - start_s
        tokens, rounds, drafted, accepted, busy_s, jobs, batches, events, *times = self._totals() - before
        draft_s, draft_rounds, target_s = times
        spec, ledger = self.spec, self.ledger
        kinds: dict[str, int] = {}
        for group in self.groups:
            for kind, number in group.counts.rounds_by_kind.items():
                kinds[kind] = kinds.get(kind, 0) + number
        recent = [
            (one, ledger.finished_s[name])
            for name, one in ledger.finished.items()
            if one.arrived_s >= start_s and one.first_generated == 0
        ]
        ttft = [
            1e3 * (one.first_token_s - one.arrived_s) for one, _ in recent if one.first_token_s is not None
        ]
        per_token = [
            1e3 * (end_s - one.first_token_s) / (one.num_to_generate - 1)
            for one, end_s in recent
            if one.first_token_s is not None and one.num_to_generate > 1
        ]
        num_workers = spec.num_pools * spec.workers_per_pool
        return Outcome(
            num_gpus=spec.num_gpus,
            num_groups=spec.num_groups,
            goodput=tokens / seconds,
            ttft_ms=_percentiles(ttft),
            token_ms=_percentiles(per_token),
            rounds_per_s=rounds / seconds / spec.num_groups,
            draft_ms=1e3 * draft_s / draft_rounds if draft_rounds else 0.0,
            verify_ms=1e3 * target_s / max(rounds, 1.0),
            acceptance=accepted / drafted if drafted else 0.0,
            draft_load=busy_s / seconds / num_workers if num_workers else 0.0,
            jobs_per_batch=jobs / batches if batches else 0.0,
            kinds={kind: number / sum(kinds.values()) for kind, number in kinds.items()},
            num_finished=len(recent),
            num_replays=ledger.num_replays,
            num_events=int(events),
        )


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(one) for one in np.percentile(values, (50, 95, 99))) if values else ()
