"""What drafters are worth, over minutes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.scheduling.speculation.goodput import Kind
from specdec.scheduling.speculation.kind_switch import KindSwitch
from specdec.scheduling.speculation.worth import PoolWorth

MARGIN = 0.02


def a_decision(*, is_asked: bool = False, **rates: float) -> Any:
    """Tokens per second of each kind, beside 2 without any drafts."""
    return SimpleNamespace(rates={"plain": 2.0, **rates}, undrafted_rate=2.0, drafts_as_asked=is_asked)


def after_minutes(decision: Any, kind: Kind, worth: PoolWorth | None = None) -> float:
    worth = worth or PoolWorth(MARGIN)
    for _ in range(1200):
        worth.note(decision, kind, 1.0)
    assert worth.ratio is not None
    return worth.ratio


def test_it_follows_the_ratio_of_goodputs_slowly() -> None:
    decision = a_decision(lockstep=6.0, ping_pong=3.0)
    worth, other = PoolWorth(MARGIN), PoolWorth(MARGIN)
    for _ in range(5):
        assert worth.ratio is None, "a few rounds do not say that a pool is not worth its devices"
        worth.note(decision, "lockstep", 1.0)
        other.note(decision, "lockstep", 60.0)  # a long pause says no more than a second
    assert worth.ratio is not None
    assert 1.0 < worth.ratio < 1.1
    assert other.ratio == worth.ratio
    assert after_minutes(decision, "lockstep", worth) == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize("kind", ["plain", "lockstep"])
def test_where_nothing_may_be_drafted_nothing_is_gained(kind: Kind) -> None:
    assert after_minutes(a_decision(), kind) == 1.0


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.01, 1.019, 1.021, 1.05])
def test_drafters_are_worth_it_where_drafts_are_what_is_done(ratio: float) -> None:
    """Also just beside plain decoding, where the switch waits for a margin; and soon after better times."""
    switch = KindSwitch(margin=MARGIN, dwell_rounds=16)
    decision = a_decision(lockstep=2.0 * ratio)
    assert switch.review(0, {"plain": 2.0, "lockstep": 1.0}, 4)
    for now in range(100):
        switch.review(now, decision.rates, 4)
    assert switch.kind is not None
    assert (switch.kind == "plain") == (ratio < 1.0 + MARGIN)
    worth = PoolWorth(MARGIN)
    after_minutes(a_decision(lockstep=3.0), "lockstep", worth)
    assert (after_minutes(decision, switch.kind, worth) <= 1.0) == (switch.kind == "plain")


def test_what_requests_ask_for_is_worth_what_it_brings() -> None:
    asked = a_decision(is_asked=True, lockstep=2.6)
    asked.rates["plain"] = 2.6
    assert after_minutes(asked, "plain") == pytest.approx(1.3, rel=1e-3)
    asked.rates.update(plain=1.6, lockstep=1.6)
    assert after_minutes(asked, "plain") == pytest.approx(0.8, rel=1e-3)
