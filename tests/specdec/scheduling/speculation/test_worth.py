"""What drafters are worth, over minutes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.scheduling.speculation.worth import PoolWorth


def test_it_follows_the_ratio_of_goodputs_slowly() -> None:
    decision: Any = SimpleNamespace(rates_by_mode={"lockstep": 6.0, "ping_pong": 3.0}, undrafted_rate=2.0)
    worth, other = PoolWorth(), PoolWorth()
    for _ in range(5):
        assert worth.ratio is None, "a few rounds do not say that a pool is not worth its devices"
        worth.note(decision, 1.0)
        other.note(decision, 60.0)  # a long pause says no more than a second
    assert worth.ratio is not None
    assert 1.0 < worth.ratio < 1.1
    assert other.ratio == worth.ratio
    for _ in range(1200):
        worth.note(decision, 1.0)
    assert worth.ratio == pytest.approx(3.0, rel=1e-3)


def test_where_nothing_may_be_drafted_nothing_is_gained() -> None:
    decision: Any = SimpleNamespace(rates_by_mode={}, undrafted_rate=2.0)
    worth = PoolWorth()
    for _ in range(1200):
        worth.note(decision, 1.0)
    assert worth.ratio == 1.0
