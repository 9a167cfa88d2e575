from __future__ import annotations

import itertools

import pytest

from specdec.engine.draft_pool.patience import DraftDeadlineConfig, DraftPatience

CONFIG = DraftDeadlineConfig(
    min_deadline_s=0.05, max_deadline_s=1.0, deadline_multiple=4.0, first_retry_s=0.1, max_retry_s=0.8
)


def test_the_deadline_follows_what_was_measured() -> None:
    patience = DraftPatience(CONFIG)
    assert patience.deadline_s(1, 1) == 1.0, "nothing is known yet"
    patience.measured(0.03, num_entries=1, num_new_tokens=5)
    assert patience.deadline_s(1, 5) == 0.12
    for _ in range(100):
        patience.measured(0.001, num_entries=1, num_new_tokens=5)
    assert patience.deadline_s(1, 5) == 0.05, "never below the floor"


def test_prefill_is_given_its_time() -> None:
    patience = DraftPatience(CONFIG)
    patience.measured(0.02, num_entries=1, num_new_tokens=2)
    assert patience.deadline_s(1, 1000) == 1.0, "its cost is not known yet"
    patience.measured(0.12, num_entries=1, num_new_tokens=1000)
    assert abs(patience.deadline_s(1, 1000) - 0.48) < 1e-9
    assert abs(patience.deadline_s(1, 3) - 0.08) < 1e-9
    assert patience.deadline_s(1, 100_000) == 1.0


def test_what_it_reads_without_drafting_tells_what_a_token_takes() -> None:
    patience = DraftPatience(CONFIG)
    patience.measured(0.02, num_entries=1, num_new_tokens=2)
    patience.has_read(0.05, 20)
    assert patience.deadline_s(1, 1000) == 1.0, "so few say what a call takes"
    patience.has_read(0.1, 1000)
    assert patience.deadline_s(1, 1000) == pytest.approx(0.48), "nothing is taken off: nothing was drafted"
    assert patience.is_worth_waiting_for(200)
    assert not patience.is_worth_waiting_for(201)


def test_a_dead_drafter_is_tried_ever_more_rarely_and_never_waited_for() -> None:
    patience = DraftPatience(CONFIG)
    assert patience.is_waited_for(0.0)
    patience.asked(0.0)
    patience.missed(1.0)
    attempts, now_s = [], 1.0
    while len(attempts) < 5:
        now_s += 0.01
        assert not patience.is_waited_for(now_s)
        if patience.may_ask(now_s):
            attempts.append(now_s)
            patience.asked(now_s)
    intervals = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert intervals == pytest.approx([0.2, 0.4, 0.8, 0.8], abs=0.02)
    assert abs(patience.late_for_s(now_s) - (now_s - 1.0)) < 1e-9


def test_one_late_answer_is_forgiven_and_repetition_costs_a_growing_rest() -> None:
    patience = DraftPatience(CONFIG)
    now_s, rests = 0.0, []
    for _ in range(5):
        patience.asked(now_s)
        patience.missed(now_s)
        patience.heard()
        assert patience.late_for_s(now_s) == 0.0, "it is slow, not silent"
        started_s = now_s
        while not patience.is_waited_for(now_s):
            now_s += 0.01
        rests.append(now_s - started_s)
    assert rests == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8], abs=0.02)
    patience.answered_in_time()
    patience.missed(now_s)
    patience.heard()
    assert patience.is_waited_for(now_s)
