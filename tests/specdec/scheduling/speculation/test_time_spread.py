"""The longer of two things whose times vary."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.scheduling.speculation.time_spread import TimeSpread, mean_longer


def test_what_is_always_as_usual_has_no_spread() -> None:
    spread = TimeSpread()
    assert spread.factors.tolist() == [1.0] * len(spread.factors)
    one, other = np.array([1.0, 3.0]), np.array([2.0, 2.0])
    assert mean_longer(one, other, spread.factors).tolist() == [2.0, 3.0]


def test_of_two_that_take_as_long_in_the_mean_the_longer_takes_longer() -> None:
    spread = TimeSpread()
    for _ in range(100):
        spread.note(0.5)
        spread.note(1.5)
    assert spread.factors.mean() == pytest.approx(1.0)
    assert mean_longer(np.array([1.0]), np.array([1.0]), spread.factors)[0] == pytest.approx(1.25)
    # Far from there it makes no difference.
    assert mean_longer(np.array([0.5]), np.array([1.0]), spread.factors)[0] == pytest.approx(1.0)
    assert mean_longer(np.array([2.0]), np.array([1.0]), spread.factors)[0] == pytest.approx(2.0)


def test_one_long_pause_is_not_how_things_are() -> None:
    spread = TimeSpread()
    for _ in range(47):
        spread.note(1.0)
    spread.note(1000.0)
    assert spread.factors.mean() < 1.1
    assert (np.diff(spread.factors) >= 0.0).all()
