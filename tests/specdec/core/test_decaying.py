from __future__ import annotations

import numpy as np
import pytest

from specdec.core.decaying import DecayingMean, DecayingRates, kept_after, moved


def test_half_counts_on_after_a_half_life() -> None:
    assert kept_after(0.0, 32.0) == 1.0
    assert kept_after(32.0, 32.0) == 0.5
    assert kept_after(np.array([0.0, 64.0, np.inf]), 32.0).tolist() == [1.0, 0.25, 0.0]


def test_a_mean_moves_by_the_weight_of_what_is_new() -> None:
    assert moved(None, 7.0, 0.25) == 7.0, "the first is all that is known"
    assert moved(4.0, 8.0, 0.25) == 5.0
    assert moved(4.0, 8.0, 0.0) == 4.0
    assert moved(4.0, 8.0, 1.0) == 8.0


def test_what_was_before_counts_less() -> None:
    mean = DecayingMean()
    assert mean.value == 0.0
    mean.add(6.0, 2.0, kept=0.5)
    assert mean.value == 3.0
    mean.add(5.0, kept=0.5)
    assert (mean.total, mean.weight) == (8.0, 2.0)
    mean.add(0.0, 0.0, kept=0.5)
    assert mean.value == 4.0, "nothing new says nothing new"
    assert mean.weight == 1.0


def test_positions_that_are_not_reached_stay_as_they_are() -> None:
    rates = DecayingRates(np.array([0.5, 0.25, 0.125]), 8.0, decay=0.5)
    assert rates.values.tolist() == [0.5, 0.25, 0.125]
    rates.note(2, slice(1))
    assert rates.values.tolist() == pytest.approx([3 / 5, 1 / 5, 0.125])
    rates.note(0, slice(0))
    rates.note(3, slice(7, 8))  # behind the last: nothing has succeeded
    assert rates.values.tolist() == pytest.approx([1.5 / 3.5, 0.5 / 3.5, 0.5 / 5])
