from __future__ import annotations

import pytest

from specdec.core.clock import ManualClock
from specdec.scheduling.speculation.time_budget import TimeBudget


def take(budget: TimeBudget, clock: ManualClock, seconds: float) -> None:
    with budget.timed():
        clock.advance(seconds)


def test_what_takes_long_is_done_seldom() -> None:
    clock = ManualClock()
    budget = TimeBudget(clock, 0.01)
    assert budget.interval_s == 0.0
    take(budget, clock, 0.002)
    assert budget.interval_s == pytest.approx(0.2)
    for _ in range(40):
        take(budget, clock, 0.001)
    assert budget.interval_s == pytest.approx(0.1, rel=0.01)


def test_what_is_done_in_two_parts_counts_once() -> None:
    clock = ManualClock()
    budget = TimeBudget(clock, 0.01)
    with budget.timed(goes_on=True):
        clock.advance(0.003)
    assert budget.interval_s == 0.0, "it is not done yet"
    take(budget, clock, 0.001)
    assert budget.interval_s == pytest.approx(0.4)
    for _ in range(40):
        take(budget, clock, 0.001)
    assert budget.interval_s == pytest.approx(0.1, rel=0.01), "the first part belongs to one alone"


def test_one_interruption_changes_little() -> None:
    clock = ManualClock()
    budget = TimeBudget(clock, 0.01)
    take(budget, clock, 0.001)
    take(budget, clock, 10.0)
    assert budget.interval_s == pytest.approx(0.15)


def test_the_first_time_says_little() -> None:
    clock = ManualClock()
    budget = TimeBudget(clock, 0.01)
    take(budget, clock, 0.2)
    assert budget.interval_s == pytest.approx(0.5)
    for _ in range(12):
        take(budget, clock, 0.001)
    assert budget.interval_s == pytest.approx(0.1, rel=0.15)


def test_haste_is_paid_for_by_what_was_saved() -> None:
    clock = ManualClock()
    budget = TimeBudget(clock, 0.01)
    num_hasty = 0
    while budget.has_saved:
        take(budget, clock, 0.002)
        budget.pass_time(0.05)  # four times its share
        num_hasty += 1
    assert 18 <= num_hasty <= 22
    budget.pass_time(0.5)
    assert budget.has_saved
    take(budget, clock, 10.0)  # it was interrupted: as much as three usual ones
    assert not budget.has_saved
    budget.pass_time(1.0)
    assert budget.has_saved
    budget.pass_time(1000.0)
    for _ in range(16):
        take(budget, clock, 0.002)
    assert not budget.has_saved, "there is no more to be saved than that"


def test_without_a_clock_it_takes_no_time() -> None:
    budget = TimeBudget(None, 0.01)
    with budget.timed():
        pass
    assert budget.interval_s == 0.0
    assert budget.has_saved


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(ValueError, match="share must be above 0 and at most 1"):
        TimeBudget(None, share)
