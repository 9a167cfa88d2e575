"""What share of the last seconds something took."""

from __future__ import annotations

import pytest

from specdec.core.clock import ManualClock
from specdec.engine.metrics.recent_share import RecentShare


def test_it_is_of_the_time_that_has_passed_since_ten_seconds_ago() -> None:
    clock = ManualClock(100.0)
    share = RecentShare(clock)
    assert share.take(0.0) == 0.0, "no time has passed"
    clock.advance(4.0)
    assert share.take(1.0) == pytest.approx(0.25)
    clock.advance(11.0)
    share.take(1.0)
    clock.advance(1.0)
    assert share.take(3.0) == pytest.approx(2.0 / 12.0), "since the first look behind"
    for _ in range(12):
        clock.advance(1.0)
        last = share.take(3.0)
    assert last == 0.0
    clock.advance(1.0)
    assert share.take(33.0) == 1.0, "of a step that began long ago"


def test_of_several_it_is_the_mean() -> None:
    clock = ManualClock()
    share = RecentShare(clock)
    clock.advance(2.0)
    assert share.take(3.0, 2) == pytest.approx(0.75)
    clock.advance(2.0)
    assert share.take(5.0, 4) == pytest.approx(5.0 / 16.0)
