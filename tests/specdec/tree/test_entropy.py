"""Trees as wide as the drafter is unsure, which end where it has no hope."""

from __future__ import annotations

import math

import pytest

from specdec.tree.entropy import EntropyTree, entropy_of
from specdec.tree.growth import Child


def children(*shares: float) -> list[Child]:
    return [Child(10 + rank, math.log(share)) for rank, share in enumerate(shares)]


def test_entropy_counts_what_is_not_seen_as_one() -> None:
    assert entropy_of(children(0.5, 0.5)) == pytest.approx(math.log(2))
    assert entropy_of(children(0.25, 0.25)) == pytest.approx(0.5 * math.log(4) + 0.5 * math.log(2))
    assert entropy_of(children(1.0)) == 0.0
    assert entropy_of([Child(1, 0.2)]) == 0.0, "confidence above one is certainty"


@pytest.mark.parametrize(
    ("shares", "num_kept"),
    [
        ((1.0,), 1),
        ((0.97, 0.01, 0.01, 0.01), 1),
        ((0.5, 0.5), 2),
        ((0.4, 0.3, 0.3), 3),
        ((0.2, 0.2, 0.2, 0.2, 0.2), 4),
    ],
)
def test_width_is_the_number_of_equally_likely_children(shares: tuple[float, ...], num_kept: int) -> None:
    shape = EntropyTree(top_k=4, depth=3, least_confidence=0.01)
    growth = shape.begin(20)
    growth.grow([children(*shares)])
    assert len(growth.best().token_ids) == num_kept


def test_it_is_narrow_where_the_drafter_is_sure_and_wide_where_it_is_not() -> None:
    growth = EntropyTree(top_k=4, depth=3, least_confidence=0.01).begin(20)
    assert list(growth.grow([children(0.99, 0.01)])) == [0]
    assert list(growth.grow([children(0.3, 0.3, 0.3, 0.05)])) == [1, 2, 3, 4]
    growth.grow([children(0.99)] * 4)
    best = growth.best()
    assert len(best.token_ids) == 9
    assert best.parents[:2] == (-1, 0), "the sure ones come first"


def test_nothing_is_looked_behind_that_has_little_hope() -> None:
    growth = EntropyTree(top_k=3, depth=5, least_confidence=0.3).begin(20)
    assert list(growth.grow([children(0.6, 0.3, 0.1)])) == [0, 1]
    assert list(growth.grow([children(0.4, 0.4, 0.2), children(0.9, 0.1)])) == []
    assert len(growth.best().token_ids) >= 4, "what was found is proposed"


def test_depth_and_frugality_stay_what_they_are() -> None:
    shape = EntropyTree(top_k=3, depth=5, least_confidence=0.3)
    assert shape.within(2) == EntropyTree(top_k=3, depth=2, least_confidence=0.3)
    assert shape.frugal().is_frugal
    assert isinstance(shape.frugal(), EntropyTree)
