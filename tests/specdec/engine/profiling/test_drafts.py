"""What drafts cost, measured of drafters that are late, busy with others' drafts, or not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome, Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.draft_pool.patience import DraftDeadlineConfig, DraftPatience
from specdec.engine.profiling.rounds import measure_profile
from specdec.proposers.base import AheadWish, Proposer, ProposerCapabilities
from specdec.scheduling.speculation.cost_profile import CostProfile
from tests.specdec.engine.profiling.timed_parts import TimedProposer, big_target, plan

WIRE_S, LATE_S = 0.001, 0.4
SHAPES = {(1, 1), (1, 4), (4, 1), (4, 4), (16, 1), (16, 4)}


def work_s(num_sequences: int, num_steps: int) -> float:
    return 0.001 + num_steps * (0.0005 + 0.0001 * num_sequences)


class Worker:
    """A draft worker elsewhere, as it looks through `RemoteProposer`: by the real `DraftPatience`.

    `delay_s` says how long each job lies before others' are done.
    """

    capabilities = ProposerCapabilities(name="worker", kv="own", remote=True)

    def __init__(
        self,
        clock: ManualClock,
        *,
        late: Iterable[int] = (),
        silent_from: int | None = None,
        delay_s: Callable[[int], float] = lambda _job: 0.0,
        num_places: int = 99,
        longest: int = 10_000,
    ) -> None:
        self.clock = clock
        self.ready_s: float | None = None
        self.num_jobs = 0
        self.silent_from = silent_from
        self._patience = DraftPatience(DraftDeadlineConfig())
        self._late = frozenset(late)
        self._delay_s = delay_s
        self._num_places = num_places
        self._longest = longest
        self._drafting_s = self._free_s = 0.0
        self._num_sent: dict[RequestId, int] = {}
        self._under_way: list[tuple[float, float]] = []
        """When answers that nobody waits for will come, and the work on them."""

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        self.clock.advance(2e-5)
        asked_s = self.clock.now_s()
        self.ready_s, self._drafting_s = None, 0.0
        for arrival_s, its_work_s in list(self._under_way):
            if arrival_s <= asked_s:
                self._patience.heard()
                self._drafting_s = its_work_s
                self._under_way.remove((arrival_s, its_work_s))
        if not self._patience.may_ask(asked_s):
            return {}
        is_waited_for = self._patience.is_waited_for(asked_s)
        num_new = sum(one.committed_len - self._num_sent.get(one.request_id, 0) for one in sequences)
        self._num_sent.update({one.request_id: one.committed_len for one in sequences})
        deadline_s = self._patience.deadline_s(len(sequences), num_new)
        self._patience.asked(asked_s)
        if max(one.committed_len for one in sequences) > self._longest:
            return {}  # it reads, and is not waited for meanwhile
        if self.silent_from is not None and self.num_jobs >= self.silent_from:
            self._give_up(deadline_s)
            return {}
        number = self.num_jobs
        self.num_jobs += 1
        its_work_s = work_s(len(sequences), max(num_draft_tokens.values()))
        if number in self._late:
            its_work_s = LATE_S
        start_s = max(asked_s + WIRE_S / 2, self._free_s) + self._delay_s(number)
        self._free_s = start_s + its_work_s
        elapsed_s = self._free_s + WIRE_S / 2 - asked_s
        if not is_waited_for or elapsed_s > deadline_s:
            self._under_way.append((asked_s + elapsed_s, its_work_s))
            if is_waited_for:
                self._give_up(deadline_s)
            return {}
        self.clock.advance(elapsed_s)
        self._patience.heard()
        self._patience.measured(elapsed_s, len(sequences), num_new)
        self._patience.answered_in_time()
        self.ready_s, self._drafting_s = elapsed_s, its_work_s
        return {
            one.request_id: Proposal(
                request_id=one.request_id,
                committed_len=one.committed_len,
                prefix_hash=one.prefix_hash,
                token_ids=(1,) * num_draft_tokens[one.request_id],
            )
            for one in sequences[: self._num_places]
        }

    def _give_up(self, deadline_s: float) -> None:
        self.clock.advance(deadline_s)
        self._patience.missed(self.clock.now_s())

    def take_drafting_s(self) -> float:
        drafting_s, self._drafting_s = self._drafting_s, 0.0
        return drafting_s

    def take_ahead_outcomes(self) -> Sequence[AheadOutcome]:
        return ()

    def look_ahead(self, wishes: Sequence[AheadWish]) -> None:
        pass

    def release(self, request_ids: Iterable[RequestId]) -> None:
        pass

    def close(self) -> None:
        pass


def measured(
    worker: Proposer, clock: ManualClock, known: CostProfile | None = None, budget_s: float = 60.0
) -> CostProfile:
    target = big_target(clock)
    its_plan = plan(budget_s=budget_s)
    return measure_profile(target, worker, its_plan, known=known, clock=clock, sleep=clock.advance)


def shapes_of(profile: CostProfile) -> list[tuple[int, int]]:
    short = [one for one in profile.draft if one.context_tokens == 32 * one.num_sequences]
    return [(one.num_sequences, one.num_steps) for one in short]


def assert_all_is_right(profile: CostProfile) -> None:
    assert profile.has_all_drafts
    assert sorted(shapes_of(profile)) == sorted(SHAPES)
    assert len(profile.draft) == len(SHAPES) + 1
    for point in profile.draft:
        assert point.seconds == pytest.approx(work_s(point.num_sequences, point.num_steps), rel=0.01)
    assert min(point.wire_s for point in profile.draft) == pytest.approx(WIRE_S, rel=0.1)


@pytest.mark.parametrize("late", [(job,) for job in range(10)] + [(2, 3), (2, 9, 16), (1, 7, 13, 20, 30)])
def test_a_late_answer_spoils_no_measurement(late: tuple[int, ...]) -> None:
    """Of a draft worker that is late the next calls return at once: with nothing, which takes no time."""
    clock = ManualClock()
    assert_all_is_right(measured(Worker(clock, late=late), clock))


def test_what_waits_for_others_is_not_what_drafts_take() -> None:
    """A group that starts while others are busy: three of four jobs lie for some time."""
    clock = ManualClock()
    worker = Worker(clock, delay_s=lambda job: 0.004 * (job % 4))
    assert_all_is_right(measured(worker, clock))


@pytest.mark.parametrize("silent_from", [0, 1, 4, 17])
def test_what_a_silent_drafter_left_out_is_measured_at_the_next_start(silent_from: int) -> None:
    clock = ManualClock()
    first = measured(Worker(clock, silent_from=silent_from), clock)
    assert first.verify
    assert len(first.draft) < len(SHAPES)
    assert not first.has_all_drafts
    assert clock.now_s() < 20.0, "it is not waited for for ever"
    still_there = measured(Worker(clock, silent_from=0), clock, first)
    assert still_there == first
    second = measured(Worker(clock), clock, first)
    assert second.verify == first.verify
    assert second.draft[: len(first.draft)] == first.draft
    assert_all_is_right(second)


def test_where_time_runs_out_for_waiting_the_next_starts_go_on() -> None:
    clock = ManualClock()
    profile, num_starts = None, 0
    while profile is None or not profile.has_all_drafts:
        before = 0 if profile is None else len(profile.draft)
        worker = Worker(clock, delay_s=lambda job: 0.01 * (job % 2))
        profile = measured(worker, clock, profile, budget_s=0.3)
        assert len(profile.draft) > before
        num_starts += 1
    assert num_starts > 1
    assert_all_is_right(profile)


def test_what_a_slow_drafter_leaves_no_time_for_is_left_out() -> None:
    """As at the target: what was measured tells of what was not."""
    clock = ManualClock()
    profile = measured(Worker(clock), clock, budget_s=0.1)
    assert 1 < len(profile.draft) < len(SHAPES)
    assert profile.has_all_drafts


def test_what_a_drafter_has_no_place_for_is_not_asked_for_again() -> None:
    clock = ManualClock()
    profile = measured(Worker(clock, num_places=4), clock)
    assert sorted(shapes_of(profile)) == [(1, 1), (1, 4), (4, 1), (4, 4)]
    assert profile.has_all_drafts


def test_what_takes_long_to_read_does_not_keep_anything_else_from_being_measured() -> None:
    clock = ManualClock()
    profile = measured(Worker(clock, longest=256), clock)
    assert sorted(shapes_of(profile)) == sorted(SHAPES)
    assert not profile.has_all_drafts
    assert_all_is_right(measured(Worker(clock), clock, profile))


def test_a_drafter_in_this_process_is_asked_again_without_waiting() -> None:
    """It has read everything after some calls, and whoever is not late need not be waited for."""
    clock = ManualClock()
    profile = measure_profile(big_target(clock), TimedProposer(clock), plan(), clock=clock, sleep=_never)
    assert profile.has_all_drafts
    assert {point.wire_s for point in profile.draft} == {0.0}


def _never(seconds: float) -> None:
    raise AssertionError(f"slept for {seconds} s")
