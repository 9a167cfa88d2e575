"""Evidence, overheads and trials: what is learnt of rounds, and when something else is tried."""

from __future__ import annotations

import itertools

import pytest

from specdec.scheduling.speculation.evidence import Alarm, Evidence, Lately, OutlierGate, Overheads
from specdec.scheduling.speculation.trials import TrialLength, Trials


def test_measured_times_replace_expected_ones() -> None:
    evidence = Evidence()
    assert evidence.factor(0, "lockstep", "here") == 1.0
    for number in range(100):
        evidence.note_times(number, "lockstep", "here", [2.0])
    assert evidence.factor(100, "lockstep", "here") == pytest.approx(0.5, abs=0.03)
    assert evidence.factor(100, "plain", "here") == 1.0


def test_rounds_that_are_told_of_together_count_as_many() -> None:
    ratios = [1.5, 2.0, 2.5, 50.0, 2.0] * 20
    together, one_by_one = Evidence(), Evidence()
    for first in range(0, len(ratios), 20):
        together.note_times(first + 20, "lockstep", "here", ratios[first : first + 20])
    for number, ratio in enumerate(ratios):
        one_by_one.note_times(number, "lockstep", "here", [ratio])
    assert together.factor(100, "lockstep", "here") == pytest.approx(0.52, abs=0.03)
    assert one_by_one.factor(100, "lockstep", "here") == pytest.approx(0.52, abs=0.03)


def test_what_was_measured_beside_another_kind_is_believed_at_once() -> None:
    evidence = Evidence()
    for number in range(1000):
        evidence.note_times(number, "plain", "here", [2.0])
    evidence.note_tokens(1000, "plain", 400.0, 100.0)
    tokens = evidence.token_factor(1000, "plain")
    assert tokens < 1.0
    evidence.settle(1000, "plain", "here", 1.25)
    assert evidence.factor(1000, "plain", "here") == pytest.approx(tokens / 1.25)
    assert evidence.factor(1000, "plain", "there") == pytest.approx(tokens / 2.0, rel=0.05)
    for number in range(1000, 2000):
        evidence.note_times(number, "plain", "here", [2.0])
    tokens = evidence.token_factor(2000, "plain")
    assert evidence.factor(2000, "plain", "here") == pytest.approx(tokens / 2.0, rel=0.05)


def test_lately_is_the_last_few_rounds() -> None:
    lately = Lately()
    for _ in range(3):
        lately.note("plain", 3.0)
    assert lately.ratio("plain") is None
    for _ in range(60):
        lately.note("plain", 1.5)
    lately.note("lockstep", 1.0)
    assert lately.ratio("plain") == pytest.approx(1.5, abs=0.05)
    lately.forget("lockstep")
    assert lately.ratio("plain") is not None
    lately.forget()
    assert lately.ratio("plain") is None


def test_another_region_begins_with_what_the_kind_has_shown() -> None:
    evidence = Evidence()
    for number in range(100):
        evidence.note_times(number, "lockstep", "here", [2.0])
    assert evidence.factor(100, "lockstep", "there") == pytest.approx(0.52, abs=0.05)
    for number in range(100, 200):
        evidence.note_times(number, "lockstep", "there", [1.0])
    assert evidence.factor(200, "lockstep", "there") == pytest.approx(1.0, abs=0.05)


def test_missing_drafts_count() -> None:
    evidence = Evidence()
    for number in range(200):
        evidence.note_times(number, "draft_ahead", "here", [1.0])
        evidence.note_tokens(number, "draft_ahead", 4.0, 2.0)
    assert evidence.factor(200, "draft_ahead", "here") == pytest.approx(0.55, abs=0.06)


def test_evidence_grows_old() -> None:
    evidence = Evidence()
    for number in range(100):
        evidence.note_times(number, "plain", "here", [2.0])
    assert evidence.factor(100, "plain", "here") == pytest.approx(0.5, abs=0.03)
    assert evidence.factor(40_000, "plain", "here") == pytest.approx(1.0, abs=0.02)


def test_single_outliers_are_left_out_and_many_in_a_row_are_not() -> None:
    gate = OutlierGate()
    assert [gate.lets_through(ratio) for ratio in (1.0, 50.0, 1.1, 0.9, 50.0, 50.0, 50.0, 50.0, 1.0)] == [
        True, False, True, True, False, False, True, True, True,
    ]  # fmt: skip


def test_pauses_do_not_count() -> None:
    evidence = Evidence()
    for number in range(200):
        evidence.note_times(number, "lockstep", "here", [50.0 if number % 10 == 0 else 1.0])
    assert evidence.factor(200, "lockstep", "here") == pytest.approx(1.0, abs=0.01)


def test_overheads_are_medians_of_the_closest_batch() -> None:
    overheads = Overheads()
    assert overheads.of(8, has_drafts=True) == 0.0
    for seconds in (0.001, 0.0011, 0.0009, 0.05, 0.001):
        overheads.note(8, seconds, has_drafts=True)
    assert overheads.of(8, has_drafts=True) == pytest.approx(0.001)
    assert 0.0005 <= overheads.of(1, has_drafts=True) <= 0.0007
    assert overheads.of(64, has_drafts=True) == pytest.approx(0.008)
    overheads.note(64, 0.002, has_drafts=True)
    assert overheads.of(64, has_drafts=True) == pytest.approx(0.002)
    assert overheads.of(64, has_drafts=False) == pytest.approx(0.002)
    overheads.note(64, 0.0005, has_drafts=False)
    assert overheads.of(64, has_drafts=False) == pytest.approx(0.0005)


def test_rounds_without_drafts_never_have_more_to_do() -> None:
    """The machine was slower when they were measured, that is all."""
    overheads = Overheads()
    overheads.note(16, 0.001, has_drafts=True)
    overheads.note(16, 0.004, has_drafts=False)
    assert overheads.of(16, has_drafts=False) <= overheads.of(16, has_drafts=True)


ROUND_S = 0.01


def run_trials(trials: Trials, num_rounds: int, *, loss_s: float, paid_s: float) -> list[int]:
    """Run rounds with failing probes and return where they began."""
    begins = []
    for number in range(num_rounds):
        if trials.current is None:
            trials.begin("probing", TrialLength(3, 8), loss_s)
            if trials.current is not None:
                begins.append(number)
        trials.note_round(ROUND_S, paid_s if trials.current else 0.0)
    return begins


@pytest.mark.parametrize("loss", [0.2, 1.0, 5.0])
def test_probes_lose_little_and_become_rare(loss: float) -> None:
    trials = Trials(0.005)
    num_rounds = 20_000
    begins = run_trials(trials, num_rounds, loss_s=loss * ROUND_S, paid_s=loss * ROUND_S)
    assert len(begins) >= 3
    assert trials.num_rounds["probing"] * loss < 0.01 * num_rounds
    gaps = [after - before for before, after in itertools.pairwise(begins)]
    assert gaps[-1] >= 3000


def test_a_loss_beyond_what_was_expected_is_paid_for() -> None:
    """Probes are expected to cost nothing, and cost five rounds each time."""
    trials = Trials(0.005)
    run_trials(trials, 20_000, loss_s=-0.001, paid_s=5 * ROUND_S)
    assert trials.num_rounds["probing"] * 5 < 0.01 * 20_000


def test_a_change_ends_the_wait() -> None:
    def next_probe(*, changes: bool) -> int:
        trials = Trials(0.005)
        run_trials(trials, 6000, loss_s=0.2 * ROUND_S, paid_s=0.0)
        if changes:
            trials.note_change()
        return next(iter(run_trials(trials, 6000, loss_s=0.2 * ROUND_S, paid_s=0.0)))

    assert next_probe(changes=True) < next_probe(changes=False)


def test_what_was_settled_far_from_what_is_believed_stays_a_time() -> None:
    evidence = Evidence()
    for number in range(300):
        evidence.note_times(number, "plain", "there", [50.0])
    evidence.settle(300, "plain", "here", 1.0)
    assert evidence.factor(300, "plain", "here") == pytest.approx(1.0, rel=0.01)
    for number in range(300, 2000):
        evidence.note_times(number, "plain", "there", [0.5])
        assert 0.2 < evidence.factor(number, "plain", "here") < 5.0
    evidence.settle(2000, "plain", "here", 1e-9)
    evidence.note_times(2001, "plain", "there", [1e-3])
    assert evidence.factor(2001, "plain", "here") > 0.0


def test_an_alarm_goes_off_when_rounds_stay_slower_and_then_takes_that_as_usual() -> None:
    alarm = Alarm()
    assert not any(alarm.goes_off("lockstep", 1.2 + 0.1 * (number % 3)) for number in range(50))
    assert [alarm.goes_off("lockstep", 2.6) for _ in range(4)] == [False, True, False, False]
    assert [alarm.goes_off("lockstep", 1.2) for _ in range(3)] == [False, True, False]


def test_an_alarm_does_not_go_off_for_single_pauses_nor_for_slow_changes() -> None:
    alarm = Alarm()
    assert not any(alarm.goes_off("plain", 50.0 if number % 5 == 0 else 1.0) for number in range(1, 60))
    assert not any(alarm.goes_off("plain", 1.01**number) for number in range(120))


def test_an_alarm_compares_like_with_like() -> None:
    alarm = Alarm()
    assert not any(alarm.goes_off(what, ratio) for _ in range(20) for what, ratio in (("a", 1.0), ("b", 3.0)))
