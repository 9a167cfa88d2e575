"""Who gets which drafter without anybody choosing."""

from __future__ import annotations

import pytest

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.drafter_shares import DrafterSet, place_of


def ids(number: int) -> list[RequestId]:
    return [RequestId(f"cmpl-{index}-0") for index in range(number)]


def test_shares_are_kept_and_the_rest_is_free() -> None:
    drafters = DrafterSet(names=("a", "b", "c"), shares=(0.2, 0.0, 0.3))
    own = [drafters.own(one, None) for one in ids(4000)]
    assert own.count(0) == pytest.approx(800, abs=100)
    assert own.count(1) == 0
    assert own.count(2) == pytest.approx(1200, abs=120)
    assert [drafters.own(one, None) for one in ids(4000)] == own


def test_a_wish_comes_first_then_the_share_then_the_choice() -> None:
    drafters = DrafterSet(names=("a", "b"), shares=(1.0, 0.0))
    one = ids(1)[0]
    assert drafters.own(one, "b") == 1
    assert drafters.own(one, None) == 0
    free = DrafterSet(names=("a", "b"), shares=(0.0, 0.0))
    assert free.of(free.own(one, None), one, "other") == 0
    free.pick = lambda _, class_name: int(class_name == "code")
    assert free.of(None, one, "code") == 1
    assert free.of(0, one, "code") == 0
    assert free.fault("b") is None
    assert free.fault("c") == "there is no drafter 'c' here; known are a, b"


def test_orders_for_different_purposes_have_nothing_in_common() -> None:
    places = [(place_of(one, "drafter"), place_of(one, "shadow")) for one in ids(2000)]
    both = sum(first < 0.5 and second < 0.5 for first, second in places)
    assert both == pytest.approx(500, abs=70)
