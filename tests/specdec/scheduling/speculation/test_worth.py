"""What drafters are worth, over minutes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.scheduling.speculation.worth import PoolWorth


def test_it_follows_the_ratio_of_goodputs_slowly() -> None:
    decision: Any = SimpleNamespace(rates_by_mode={"lockstep": 6.0, "ping_pong": 3.0}, undrafted_rate=2.0)
    worth = PoolWorth()
    worth.note(decision, 1.0)
    assert 1.0 < worth.ratio < 1.05
    once = worth.ratio
    other = PoolWorth()
    other.note(decision, 60.0)  # a long pause says no more than a second
    assert other.ratio == once
    for _ in range(1200):
        worth.note(decision, 1.0)
    assert worth.ratio == pytest.approx(3.0, rel=1e-3)


def test_without_anything_to_draft_with_it_goes_to_nothing() -> None:
    decision: Any = SimpleNamespace(rates_by_mode={}, undrafted_rate=2.0)
    worth = PoolWorth()
    for _ in range(1200):
        worth.note(decision, 1.0)
    assert worth.ratio < 0.001
