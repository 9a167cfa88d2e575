"""When something that keeps failing is tried again."""

from __future__ import annotations

from cluster.backoff import Attempts, Backoff


def a_backoff() -> Backoff:
    return Backoff(first_s=1.0, longest_s=8.0, forgiven_after_s=60.0)


def test_the_first_attempt_is_due_at_once() -> None:
    assert a_backoff().is_due(0.0)


def test_each_failure_in_a_row_waits_twice_as_long_up_to_a_limit() -> None:
    backoff, now_s, waits_s = a_backoff(), 100.0, []
    for _ in range(6):
        wait_s = backoff.failed(now_s)
        waits_s.append(wait_s)
        assert not backoff.is_due(now_s + 0.9 * wait_s)
        now_s += wait_s
        assert backoff.is_due(now_s)
        now_s += 5.0  # it takes a while to fail again
    assert waits_s == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_nothing_is_forgiven_where_nobody_says_after_what_time() -> None:
    backoff = Backoff(first_s=1.0, longest_s=3.0)
    assert [backoff.failed(now_s) for now_s in (0.0, 1e3, 1e6)] == [1.0, 2.0, 3.0]


def test_who_was_well_for_long_begins_anew() -> None:
    backoff = a_backoff()
    assert [backoff.failed(0.0), backoff.failed(1.0)] == [1.0, 2.0]
    # Due again at 3: what counts is how long it went well since then.
    assert backoff.failed(62.9) == 4.0
    assert backoff.failed(66.9 + 60.0) == 1.0


def some_attempts() -> Attempts:
    return Attempts(most=3, first_s=1.0, longest_s=8.0, soon_s=5.0, forgiven_after_s=60.0)


def test_what_is_lost_soon_after_each_start_came_to_nothing() -> None:
    attempts = some_attempts()
    waits_s = []
    for start_s in (0.0, 10.0, 20.0):
        assert not attempts.are_in_vain
        attempts.began(start_s)
        waits_s.append(attempts.lost(start_s + 4.9))
    assert waits_s == [1.0, 2.0, 4.0]
    assert attempts.are_in_vain


def test_what_served_for_some_time_is_started_anew_at_once_and_forgets_nothing() -> None:
    attempts = some_attempts()
    assert [attempts.failed(0.0), attempts.failed(1.0)] == [1.0, 2.0]
    for start_s in (10.0, 20.0, 30.0, 40.0):
        attempts.began(start_s)
        assert attempts.lost(start_s + 5.0) == 0.0
        assert not attempts.are_in_vain
    assert attempts.failed(50.0) == 4.0
    assert attempts.are_in_vain


def test_long_service_makes_up_for_what_was_before() -> None:
    attempts = some_attempts()
    assert [attempts.failed(0.0), attempts.failed(1.0)] == [1.0, 2.0]
    attempts.began(10.0)
    assert attempts.lost(70.0) == 0.0
    assert attempts.num_failed == 0
    assert attempts.failed(71.0) == 1.0
