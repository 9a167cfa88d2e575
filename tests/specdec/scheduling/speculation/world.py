"""A virtual world for speculation controllers: true costs, true acceptance, a clock that nobody waits for.

What a controller earns is counted without luck: a round is booked with the tokens and the time that were to
be expected of it, while the controller sees what noise, outliers and chance made of them.

Modes follow each other as in the engine (`engine.round`): a round is run as it was decided, but ping_pong
begins with the next one, and one or two rounds behind it, which are on their way, are still of it. Drafts
that were prepared are used in any mode; where none were, they are waited for, in draft_ahead, too.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from specdec.core.ids import RequestId
from specdec.model.row_buckets import RowBuckets
from specdec.scheduling.speculation.controller import (
    AheadOutcome,
    DraftOutcome,
    PicksKvBudgets,
    RoundObservation,
    SpeculationController,
    bounded_choice,
)
from specdec.scheduling.speculation.cost_profile import CostProfile, DraftPoint, VerifyPoint
from specdec.scheduling.speculation.modes import OverlapMode
from tests.specdec.scheduling.simulation import FakeRequest, fake_request

TRUE_GUESS_RATES = tuple([0.35, 0.28, 0.22, 0.18] + [0.12] * 28)
"""Hit rate of guess r, given that none before it was right."""
LIFETIME = 256
"""Mean tokens of a request."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What things really cost, in seconds."""

    verify: Callable[[int, float, float], float]
    """(sequences, tokens of context, rows)"""
    draft: Callable[[int, float], float]
    """One step for (sequences, tokens of context that they attend to)."""
    draft_start_s: float
    row_context_s: float = 0.0
    """What a row costs for every token of the context of its sequence; `verify` has it for a mean context."""
    row_buckets: tuple[int, ...] = ()
    """Numbers of rows that smaller steps are padded to."""
    overhead_s: float = 0.0002
    overhead_per_sequence_s: float = 0.00002

    def overhead(self, num_sequences: int) -> float:
        return self.overhead_s + num_sequences * self.overhead_per_sequence_s

    def drafting(self, lengths: Sequence[int], contexts: float | Sequence[float]) -> float:
        """Time of a draft chain for sequences that want so many tokens each, and attend to so much."""
        each = contexts if isinstance(contexts, Sequence) else [contexts] * len(lengths)
        total = self.draft_start_s if any(lengths) else 0.0
        for step in range(max(lengths, default=0)):
            taking_part = [context for context, length in zip(each, lengths, strict=True) if length > step]
            total += self.draft(len(taking_part), sum(taking_part))
        return total

    def verifying(self, contexts: Sequence[float], num_drafted: Sequence[int], num_others: int = 0) -> float:
        """Time of a step for sequences of so much context, with so many draft rows each and some others."""
        number, context = len(contexts), float(sum(contexts))
        own = sum(rows * one for rows, one in zip(num_drafted, contexts, strict=True))
        extra = own - sum(num_drafted) * context / number
        rows = number + sum(num_drafted) + num_others
        return self.verify(number, context, rows) + self.row_context_s * extra


_BUCKETS = RowBuckets.up_to(640).sizes


def _gpu_verify(num_sequences: int, context: float, rows: float) -> float:
    """Reading weights costs most up to about 100 rows; rows come in buckets; the cache is read once."""
    padded = next(bucket for bucket in _BUCKETS if bucket >= rows - 1e-9)
    return 0.012 * max(1.0, padded / 110.0) + 2.5e-5 * padded**0.5 + 5e-8 * context


def _cpu_verify(num_sequences: int, context: float, rows: float) -> float:
    """Flat up to 16 rows, then linear; every row reads the cache again."""
    return 0.005 * (1.0 + max(0.0, rows - 4) * 0.004 + max(0.0, rows - 16) * 0.05) + 1.2e-8 * context * (
        1.0 + rows / num_sequences
    )


COSTS = {
    "gpu": Costs(
        verify=_gpu_verify,
        row_buckets=_BUCKETS,
        draft=lambda n, c: 0.0007 + 2e-6 * n + 4e-9 * c,
        draft_start_s=0.0008,
    ),
    "cpu": Costs(
        verify=_cpu_verify,
        draft=lambda n, c: 0.0006 * (1.0 + max(0, n - 8) * 0.04) + 1e-9 * c,
        draft_start_s=0.0004,
        row_context_s=1.2e-8,
    ),
    "expensive": Costs(
        verify=_cpu_verify,
        draft=lambda n, c: 0.002 * (1.0 + max(0, n - 8) * 0.05) + 4e-9 * c,
        draft_start_s=0.0006,
        row_context_s=1.2e-8,
    ),
}
LONG_COSTS = {
    # The target drafts for itself: a step of a draft is one of the target, with less to read.
    "self": Costs(
        verify=_gpu_verify,
        row_buckets=_BUCKETS,
        draft=lambda n, c: _gpu_verify(n, c, n),
        draft_start_s=0.0001,
    ),
    "model": Costs(
        verify=_gpu_verify,
        row_buckets=_BUCKETS,
        draft=lambda n, c: 0.0015 + 4e-6 * n + 2e-8 * c,
        draft_start_s=0.0008,
    ),
    "self on a cpu": Costs(
        verify=_cpu_verify,
        draft=lambda n, c: _cpu_verify(n, c, n),
        draft_start_s=0.0001,
        row_context_s=1.2e-8,
    ),
}
"""Where reading K/V is what costs."""


def profile_of(costs: Costs, *, seed: int = 0, noise: float = 0.025, draft_scale: float = 1.0) -> CostProfile:
    """Return what a profiler would measure: some points, with noise."""
    generator = np.random.default_rng(seed)

    def noisy(seconds: float) -> float:
        return seconds * float(np.exp(generator.normal(0.0, noise)))

    sizes: Sequence[int] = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64, 96, 128, 192, 256, 384, 512)
    if costs.row_buckets:
        sizes = [bucket for bucket in costs.row_buckets if bucket <= 512]
    shapes = [(min(rows, 32), rows) for rows in sizes]
    verify = [
        VerifyPoint(
            num_sequences=n,
            context_tokens=64 * n,
            num_rows=rows,
            seconds=noisy(costs.verify(n, 64.0 * n, rows)),
        )
        for n, rows in shapes
    ]
    verify += [
        VerifyPoint(num_sequences=8, context_tokens=c, num_rows=rows, seconds=noisy(costs.verify(8, c, rows)))
        for rows in (8, 32)
        for c in (512, 16384)
    ]
    draft = [
        DraftPoint(
            num_sequences=n,
            context_tokens=c * n,
            num_steps=k,
            num_unseen=1,
            seconds=draft_scale * noisy(costs.drafting([k] * n, c)),
        )
        for n, k, c in [
            *itertools.product((1, 4, 16, 64), (1, 8), (64,)),
            (4, 8, 2048),
        ]
    ]
    return CostProfile(key="world", verify=tuple(verify), draft=tuple(draft), row_buckets=costs.row_buckets)


Acceptance = Callable[[int, FakeRequest], float]
"""(round, request) -> probability that a draft token is accepted, at every position."""


@dataclass
class Booking:
    """What was earned, without luck."""

    tokens: float = 0.0
    seconds: float = 0.0
    speculating_rounds: int = 0
    rounds: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """A cohort's round between its launch and its landing."""

    requests: Sequence[FakeRequest]
    accepted: Sequence[int]
    expected: float
    lands: float
    """By the clock of the world, which begins anew whenever nothing overlaps."""
    luck: float
    observation: RoundObservation


@dataclass
class World:
    """Runs rounds of requests that come and go, a fixed number at any time."""

    costs: Costs
    acceptance: Acceptance
    num_sequences: int = 1
    context: int = 128
    noise: float = 0.05
    outlier_rate: float = 0.0
    outlier_factor: float = 50.0
    max_branches: int = 4
    seed: int = 0
    availability: float = 1.0
    lifetime: int = LIFETIME
    contexts: Sequence[int] = ()
    """Where given, prompts are as long as these, in turn, instead of `context`; who takes the place of
    another has a prompt as long.
    """
    kv_budget: int = 0
    """Tokens that drafts attend to; 0: all."""
    picks_budgets: bool = False
    """Whether the controller picks what drafts attend to."""
    class_names: Sequence[str] = ("other",)
    """Of requests, in turn."""
    stand_ins: float | None = None
    """draft_ahead: acceptance of tokens that stand in where nothing was prepared; None: nothing does."""
    gap_s: float = 0.0
    """ping_pong: what lies between a step and the next one that nobody tells of."""
    beside: float = 1.0
    """Drafter and target both take so many times as long where they work at the same time."""
    reading_s: float = 0.0
    """What the drafter takes for each token that was committed while it was not asked to draft; 0: it has
    nothing to read."""
    admission_s: float = 0.0
    """What rounds take longer for each request that comes, and reads its prompt in them."""
    slowness: Callable[[float], float] = lambda _now_s: 1.0
    """How many times as long everything takes at a time: others use the machine, too. Rounds are booked as if
    they did not. Not in ping_pong."""
    now_s: float = 0.0
    requests: list[FakeRequest] = field(default_factory=list)
    round_number: int = 0
    booking: Booking = field(default_factory=Booking)

    def __post_init__(self) -> None:
        self.generator = np.random.default_rng(self.seed)
        self._names = itertools.count()
        self._prompts: dict[RequestId, int] = {}
        self._has_drafts: set[RequestId] = set()
        self._read: dict[RequestId, int] = {}
        """Committed tokens of a request when it was last drafted for, or came."""
        self._verdicts_ahead: list[AheadOutcome] = []
        self._was_ahead = False
        """Whether continuations were prepared in the last round."""
        self._former_mode: OverlapMode = "lockstep"
        self._flights: deque[_Flight] = deque()
        self._target_free = self._drafter_free = self._landed = 0.0

    def run(self, controller: SpeculationController, num_rounds: int) -> Booking:
        """Run so many rounds and return what they have brought."""
        self.booking = Booking()
        for _ in range(num_rounds):
            self.run_round(controller)
        return self.booking

    def run_round(self, controller: SpeculationController) -> None:
        self._num_new = self._fill_up()
        mode = controller.mode
        if mode == "ping_pong" and len(self.requests) > 1:
            while len(self._flights) < 2 and self._launch_cohort(controller):
                pass
        if self._flights:
            self._land_cohort(controller)
        else:
            self._run_all(controller)
        self.round_number += 1

    def _fill_up(self) -> int:
        """Replace requests that have ended; return how many are new."""
        self.requests = [one for one in self.requests if one.num_generated < one.num_to_generate]
        del self.requests[self.num_sequences :]
        num_new = self.num_sequences - len(self.requests)
        while len(self.requests) < self.num_sequences:
            length = self._missing_context() if self.contexts else self.context
            prompt = length
            if self.round_number == 0:  # as old as requests are in the long run
                length += int(self.generator.exponential(self.lifetime))
            lifetime = max(2, int(self.generator.exponential(self.lifetime)))
            name = f"r{next(self._names)}"
            one = fake_request(name, length, generate=lifetime, computed=length - 1)
            one.kv_budget = self.kv_budget
            one.has_own_kv_budget = not self.picks_budgets
            one.class_name = self.class_names[len(self._prompts) % len(self.class_names)]
            self._prompts[one.request_id] = prompt
            self._read[one.request_id] = one.committed_len
            self.requests.append(one)
        return num_new

    def _missing_context(self) -> int:
        wanted = [self.contexts[index % len(self.contexts)] for index in range(self.num_sequences)]
        for one in self.requests:
            wanted.remove(self._prompts[one.request_id])
        return wanted[0]

    def _run_all(self, controller: SpeculationController) -> None:
        requests = self.requests
        chosen = bounded_choice(controller, requests)
        mode: OverlapMode = "lockstep" if controller.mode == "ping_pong" else controller.mode
        if self.picks_budgets:
            assert isinstance(controller, PicksKvBudgets)
            assert controller.pick_kv_budget is not None
            for one in requests:
                picked = controller.pick_kv_budget(one.request_id, one.class_name)
                one.kv_budget = picked.tokens(one.committed_len)
        is_prepared, told_ahead = self._was_ahead, self._verdicts_ahead if self._was_ahead else []
        drafted = list(chosen)
        is_there = self.generator.random(len(requests)) < self.availability
        drafted = [number if there else 0 for number, there in zip(drafted, is_there, strict=True)]
        stood = [0] * len(requests)
        if is_prepared:
            drafted = [
                number if one.request_id in self._has_drafts else 0
                for one, number in zip(requests, drafted, strict=True)
            ]
            if self.stand_ins is not None:
                stood = [0 if there else number for number, there in zip(chosen, drafted, strict=True)]
        context = float(sum(one.committed_len for one in requests))
        attended = [float(one.draft_context) for one in requests]
        accepted, expected = self._verdicts(requests, drafted)
        accepted_of_stood, expected_of_stood = self._stand_in_verdicts(stood)
        committed = [own + other for own, other in zip(accepted, accepted_of_stood, strict=True)]
        expected += expected_of_stood
        rows = len(requests) + sum(drafted) + sum(stood)
        contexts = [float(one.committed_len) for one in requests]
        verify_s = self.costs.verifying(contexts, drafted, sum(stood))
        overhead_s = self.costs.overhead(len(requests)) + self._num_new * self.admission_s
        asked_s = 0.0 if is_prepared else self.costs.drafting(chosen, attended)
        num_behind = self._num_behind(requests, chosen) if self.reading_s and mode == "lockstep" else 0
        asked_s += num_behind * self.reading_s
        ahead_s, self._was_ahead = 0.0, False
        if mode == "draft_ahead":
            fans = [
                controller.fan_out(one, own + other, self.max_branches, is_foreign=other > 0)
                if k
                else (0,) * (own + other + 1)
                for one, k, own, other in zip(requests, chosen, drafted, stood, strict=True)
            ]
            pending = [own + other for own, other in zip(drafted, stood, strict=True)]
            foreign = [other > 0 for other in stood]
            self._verdicts_ahead = self._outcomes_ahead(requests, pending, committed, fans, foreign)
            ahead = [one for one in zip(chosen, attended, fans, strict=True) for _ in range(sum(one[2]))]
            self._was_ahead = bool(ahead)
            ahead_s = self.costs.drafting([one[0] for one in ahead], [one[1] for one in ahead]) * self.beside
            verify_s *= self.beside if ahead else 1.0
        elif self._former_mode != "lockstep":  # the drafter ends what it is at
            verify_s *= self.beside
        true_s = asked_s + max(ahead_s, verify_s) + overhead_s
        slowness = self.slowness(self.now_s)
        self.now_s += true_s * slowness
        budgets = {one.request_id: k for one, k in zip(requests, chosen, strict=True)}
        if is_prepared:  # those that are new have to wait for their first verdict
            budgets = {
                one.request_id: budgets[one.request_id] for one in told_ahead if one.request_id in budgets
            }
        draft_luck, seen_verify_s = slowness * self._luck(), slowness * verify_s * self._luck()
        overhead_s *= slowness
        waited_s = asked_s * draft_luck + max(0.0, ahead_s * draft_luck - seen_verify_s)
        self._commit(requests, committed)
        self._book(len(requests) + expected, true_s, any(drafted) or any(chosen))
        self._former_mode = mode
        self._landed = self._target_free = self._drafter_free = 0.0
        controller.observe(
            RoundObservation(
                num_rows=rows,
                num_sequences=len(requests),
                num_committed=len(requests) + sum(committed),
                draft_s=waited_s,
                verify_s=seen_verify_s,
                outcomes=_outcomes(requests, drafted, accepted),
                stand_ins=_outcomes(requests, stood, accepted_of_stood),
                mode=mode,
                round_s=waited_s + seen_verify_s + overhead_s,
                num_decoding=len(requests),
                context_tokens=int(context),
                num_prompt_rows=self._num_new if self.admission_s else 0,
                budgets={one: k for one, k in budgets.items() if k},
                num_behind=num_behind,
                draft_ready_s=(asked_s or ahead_s) * draft_luck if any(chosen) else None,
                ahead=told_ahead,
            )
        )
        controller.think()

    def _num_behind(self, requests: Sequence[FakeRequest], chosen: Sequence[int]) -> int:
        """Have the drafter read what it has not read of those that it drafts for."""
        num_behind = 0
        for one, k in zip(requests, chosen, strict=True):
            if k:
                num_behind += max(0, one.committed_len - self._read[one.request_id] - 2 - k)
                self._read[one.request_id] = one.committed_len
        return num_behind

    def _launch_cohort(self, controller: SpeculationController) -> bool:
        """Send off a round of those that are in no other, if there are any, at most half of all.

        Queues of drafter and target, first come first served.
        """
        in_flight = {one.request_id for flight in self._flights for one in flight.requests}
        present = [one for one in self.requests if one.request_id not in in_flight]
        requests = present[: -(-len(self.requests) // 2)]
        if not requests:
            return False
        here = {one.request_id for one in requests}
        others = [one for one in self.requests if one.request_id not in here]
        chosen = bounded_choice(controller, requests, others)
        is_there = self.generator.random(len(requests)) < self.availability
        drafted = [number if there else 0 for number, there in zip(chosen, is_there, strict=True)]
        accepted, expected = self._verdicts(requests, drafted)
        beside = self.beside if any(chosen) else 1.0
        verify_s = self.costs.verifying([float(one.committed_len) for one in requests], drafted) * beside
        draft_s = self.costs.drafting(chosen, [float(one.draft_context) for one in requests]) * beside
        self._drafter_free = max(self._landed, self._drafter_free) + draft_s
        start = max(self._drafter_free, self._target_free)
        self._target_free = start + verify_s + self.costs.overhead(len(requests)) + self.gap_s
        self._was_ahead = False
        draft_luck, verify_luck = self._luck(), self._luck()
        observation = RoundObservation(
            num_rows=len(requests) + sum(drafted),
            num_sequences=len(requests),
            num_committed=len(requests) + sum(accepted),
            draft_s=0.0,
            verify_s=verify_s * verify_luck,
            outcomes=_outcomes(requests, drafted, accepted),
            mode="ping_pong",
            num_decoding=len(requests),
            context_tokens=sum(one.committed_len for one in requests),
            budgets={one.request_id: k for one, k in zip(requests, chosen, strict=True) if k},
            draft_ready_s=draft_s * draft_luck if any(chosen) else None,
            target_s=verify_s * verify_luck,
        )
        self._flights.append(
            _Flight(
                requests=requests,
                accepted=accepted,
                expected=expected,
                lands=self._target_free,
                luck=max(draft_luck, verify_luck),
                observation=observation,
            )
        )
        return True

    def _land_cohort(self, controller: SpeculationController) -> None:
        flight = self._flights.popleft()
        true_s, self._landed = flight.lands - self._landed, flight.lands
        requests = flight.requests
        self._commit(requests, flight.accepted)
        self._book(len(requests) + flight.expected, true_s, bool(flight.observation.budgets))
        self._former_mode = "ping_pong"
        controller.observe(
            replace(
                flight.observation,
                round_s=true_s * flight.luck,
                num_elsewhere=sum(len(other.requests) for other in self._flights),
            )
        )
        controller.think()

    def _verdicts(self, requests: Sequence[FakeRequest], drafted: Sequence[int]) -> tuple[list[int], float]:
        """Draw how many tokens stand, and return what was to be expected of all together."""
        accepted: list[int] = []
        expected = 0.0
        for one, number in zip(requests, drafted, strict=True):
            p = self.acceptance(self.round_number, one)
            stands = 0
            while stands < number and self.generator.random() < p:
                stands += 1
            accepted.append(stands)
            expected += sum(p**position for position in range(1, number + 1))
        return accepted, expected

    def _stand_in_verdicts(self, stood: Sequence[int]) -> tuple[list[int], float]:
        """As `_verdicts`, of tokens that stand in."""
        accepted = [0] * len(stood)
        expected = 0.0
        for index, number in enumerate(stood):
            if number:
                assert self.stand_ins is not None
                while accepted[index] < number and self.generator.random() < self.stand_ins:
                    accepted[index] += 1
                expected += sum(self.stand_ins**position for position in range(1, number + 1))
        return accepted, expected

    def _outcomes_ahead(
        self,
        requests: Sequence[FakeRequest],
        pending: Sequence[int],
        accepted: Sequence[int],
        fans: Sequence[tuple[int, ...]],
        foreign: Sequence[bool],
    ) -> list[AheadOutcome]:
        outcomes = []
        self._has_drafts = set()
        for one, number, stands, fan, is_foreign in zip(
            requests, pending, accepted, fans, foreign, strict=True
        ):
            if not any(fan):
                continue
            rank = 0
            is_behind_first = stands == number or is_foreign  # the first guess is what it would have drafted
            is_first = is_behind_first and self.generator.random() < self.acceptance(self.round_number, one)
            if not is_first:
                while rank < 31 and self.generator.random() >= TRUE_GUESS_RATES[rank]:
                    rank += 1
                rank += is_behind_first
            is_hit = rank < fan[stands]
            if is_hit:
                self._has_drafts.add(one.request_id)
            outcomes.append(
                AheadOutcome(
                    request_id=one.request_id,
                    num_pending=number,
                    num_accepted=stands,
                    num_prepared=fan[stands],
                    rank=rank if is_hit else None,
                    is_foreign=is_foreign,
                )
            )
        return outcomes

    def _commit(self, requests: Sequence[FakeRequest], accepted: Sequence[int]) -> None:
        for one, stands in zip(requests, accepted, strict=True):
            one.committed_len += 1 + stands
            one.num_generated += 1 + stands
            one.num_computed = one.committed_len - 1

    def _book(self, tokens: float, seconds: float, is_speculating: bool) -> None:
        self.booking.tokens += tokens
        self.booking.seconds += seconds
        self.booking.rounds += 1
        self.booking.speculating_rounds += is_speculating

    def _luck(self) -> float:
        factor = math.exp(self.generator.normal(0.0, self.noise))
        return factor * (self.outlier_factor if self.generator.random() < self.outlier_rate else 1.0)


def _outcomes(
    requests: Sequence[FakeRequest], drafted: Sequence[int], accepted: Sequence[int]
) -> list[DraftOutcome]:
    return [
        DraftOutcome(request_id=one.request_id, num_drafted=number, num_accepted=stands)
        for one, number, stands in zip(requests, drafted, accepted, strict=True)
        if number
    ]
