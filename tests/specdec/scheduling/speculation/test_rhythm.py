"""How often decisions are thought over and rounds are learnt from."""

from __future__ import annotations

import random

import pytest

from specdec.core.clock import ManualClock
from specdec.scheduling.speculation.rhythm import Rhythm


def calm_rhythm(now: int) -> Rhythm:
    rhythm = Rhythm(8, None)
    rhythm.note_decision(now, is_known=False)
    return rhythm


def test_early_decisions_come_soon() -> None:
    rhythm = calm_rhythm(4)
    assert not rhythm.is_due(5, 1)
    assert rhythm.is_due(6, 1)


def test_later_ones_take_rounds_and_time() -> None:
    rhythm = calm_rhythm(1000)
    assert not rhythm.is_due(1100, 1)
    rhythm.note_round(0.1)
    assert not rhythm.is_due(1007, 1)
    assert rhythm.is_due(1008, 1)
    assert not rhythm.is_due(1008, 64)


def test_after_many_rounds_it_is_due_however_short_they_are() -> None:
    assert calm_rhythm(1000).is_due(1128, 64)


def test_a_trial_that_ended_is_due_at_once() -> None:
    rhythm = calm_rhythm(1000)
    rhythm.note_trial_end()
    assert rhythm.is_due(1000, 64)
    rhythm.note_decision(1000, is_known=True)
    assert not rhythm.is_due(1000, 64)


def test_an_alarm_makes_decisions_frequent_again() -> None:
    rhythm = calm_rhythm(1000)
    assert not rhythm.is_due(1008, 64)
    rhythm.note_alarm(1000)
    assert rhythm.is_due(1008, 64)


def test_short_rounds_are_heard_now_and_then_all_in_a_trial() -> None:
    rhythm = calm_rhythm(1000)
    heard = [rhythm.hear(1000 + at, 0.01, switched_round=0, is_trial=False) for at in range(8)]
    assert sum(one is not None for one in heard) == 2
    assert rhythm.hear(1010, 0.01, switched_round=0, is_trial=True) is not None
    assert rhythm.hear(1011, 0.01, switched_round=1000, is_trial=False) is not None


def test_alarms_all_the_time_do_not_make_thinking_dear() -> None:
    """Requests come and go and others use the same cores: something always takes longer than it did."""
    clock = ManualClock()
    rhythm = Rhythm(8, clock)
    round_s, thought_s, now = 0.006, 0.0, 1000
    rhythm.note_decision(now, is_known=False)
    for now in range(1000, 21_000):
        if now % 16 == 0:
            rhythm.note_alarm(now)
        rhythm.note_round(round_s)
        if rhythm.is_due(now, 16):
            with rhythm.deciding.timed():
                clock.advance(0.002)
            rhythm.note_decision(now, is_known=True)
            thought_s += 0.002
    total_s = 20_000 * round_s
    assert 0.0015 * total_s < thought_s - 0.03 < 0.003 * total_s


def test_of_short_plain_rounds_one_in_twenty_milliseconds_is_looked_at() -> None:
    rhythm = calm_rhythm(1000)
    looked_at = 0
    for _ in range(1000):
        if not rhythm.passes_over(1000, 0.001, switched_round=0):
            assert rhythm.take_passed_over() == (20, pytest.approx(0.02))
            looked_at += 1
    assert looked_at == 1000 // 21
    rhythm.take_passed_over()
    assert rhythm.passes_over(1000, 1.0, switched_round=0), "the first one, however long it is"
    assert not rhythm.passes_over(1000, 0.001, switched_round=0)


def test_long_rounds_are_looked_at_no_more_often_than_others() -> None:
    rhythm = calm_rhythm(1000)
    looked_at = []
    rng = random.Random(1)
    for _ in range(20_000):
        round_s = 0.02 if rng.random() < 1 / 7 else 0.001
        if not rhythm.passes_over(1000, round_s, switched_round=0):
            rhythm.take_passed_over()
            looked_at.append(round_s)
    assert len(looked_at) > 2000
    assert 0.8 / 7 < sum(one == 0.02 for one in looked_at) / len(looked_at) < 1.25 / 7


def test_while_much_is_new_every_round_is_looked_at() -> None:
    rhythm = calm_rhythm(1000)
    assert not rhythm.passes_over(1000, 0.001, switched_round=990)
    rhythm.note_alarm(1000)
    assert not rhythm.passes_over(1010, 0.001, switched_round=0)
    assert rhythm.passes_over(1040, 0.001, switched_round=0)
