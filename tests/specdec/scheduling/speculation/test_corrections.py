"""How slow everything is, and how much slower some regions are beside that."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from specdec.scheduling.speculation import corrections
from specdec.scheduling.speculation.corrections import CorrectionGrid, Corrections, Slowness


def see(grid: CorrectionGrid, ratios: Mapping[int, float], times: int) -> None:
    """In each of these regions in turn, steps take so many times as long as they should."""
    for _ in range(times):
        for a, ratio in ratios.items():
            grid.note(a, 0, ratio)


def test_who_was_it_is_told_when_another_region_is_seen() -> None:
    """First it seems that everything has become slower; then the other region says that it has not."""
    grid = CorrectionGrid(9, 1)
    see(grid, {2: 1.0, 6: 1.0}, 30)
    see(grid, {6: 1.3}, 5)
    assert grid.factors[2, 0] > 1.15
    see(grid, {2: 1.0, 6: 1.3}, 30)
    assert grid.factors[2, 0] == pytest.approx(1.0, rel=0.06)
    assert grid.factors[6, 0] == pytest.approx(1.3, rel=0.06)


def test_nothing_drifts_where_one_region_alone_is_seen() -> None:
    """A machine that is slow again and again: each time all of it is everything's, and nothing is left."""
    grid = CorrectionGrid(9, 1)
    see(grid, {2: 1.0, 6: 1.0}, 30)
    for _ in range(20):
        for ratio in (1.4, 1.0):
            for _ in range(12):
                grid.note(6, 0, ratio)
    assert grid.factors[:, 0] == pytest.approx(np.ones(9), rel=0.06)


def test_a_pause_is_not_believed_twice_it_is() -> None:
    slowness = Slowness()
    cell = ("grid", 0, 0)
    for _ in range(9):
        slowness.note(cell, 0.0, 0.0)
    assert slowness.note(cell, 3.0, 0.0) == (pytest.approx(3.0, abs=0.01), False), "how odd it was is told"
    assert slowness.of_all == pytest.approx(0.0, abs=0.01)
    assert slowness.note(cell, 0.0, 0.0) == (pytest.approx(0.0, abs=0.01), True)
    for _ in range(6):
        slowness.note(cell, 1.0, 0.0)
    assert slowness.of_all > 0.8


def test_few_regions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that has seen all batches there are; those that were seen last are known."""
    monkeypatch.setattr(corrections, "_MOST_CELLS", 4)
    grid = CorrectionGrid(16, 1)
    for a in range(16):
        for _ in range(9):
            grid.note(a, 0, 1.0 + 0.1 * (a % 2))
    assert np.flatnonzero(grid.known()[1][:, 0] > 0.0).tolist() == [12, 13, 14, 15]
    assert len(grid._slowness._mean) == 5
    assert grid.factors[14, 0] < grid.factors[15, 0]
    eigenvalues = np.linalg.eigvalsh(grid._slowness._covariance)
    assert eigenvalues.min() > 0.0


def test_both_sides_are_slowed_down_by_the_same_machine() -> None:
    """What is seen beside the drafter tells how slow steps alone are, once both are known."""
    both = Corrections(5, 1)
    for _ in range(20):
        both.note(2, 0, 1.0, is_overlapped=False)
        both.note(2, 0, 1.2, is_overlapped=True)
    for _ in range(8):
        both.note(2, 0, 1.2 * 1.4, is_overlapped=True)
    assert both.factors(is_overlapped=False)[2, 0] == pytest.approx(1.4, rel=0.1)


def test_what_is_old_does_not_come_back_with_one_observation() -> None:
    """A region that was slow once, and is as the others by now."""
    grid = CorrectionGrid(9, 1)
    see(grid, {2: 1.0, 6: 1.5}, 30)
    see(grid, {2: 1.0}, 3000)
    grid.note(6, 0, 1.0)
    assert grid.factors[6, 0] == pytest.approx(1.0, rel=0.1)


def test_the_first_steps_beside_others_are_as_was_thought() -> None:
    """They are no reason to think that everything has changed, nor that steps alone have."""
    both = Corrections(9, 1)
    for _ in range(40):
        both.note(2, 0, 1.0, is_overlapped=False)
        both.note(6, 0, 1.5, is_overlapped=False)
    thought = both.factors(is_overlapped=True)[6, 0]
    for _ in range(4):
        both.note(6, 0, 1.5, is_overlapped=True)
    assert thought == pytest.approx(1.5, rel=0.1)
    assert both.factors(is_overlapped=False)[2, 0] == pytest.approx(1.0, rel=0.05)


def test_what_is_new_stays_its_own_after_a_day() -> None:
    """How slow everything is stays known, however long the same two regions are seen."""
    grid = CorrectionGrid(9, 1)
    see(grid, {2: 1.0, 4: 1.0}, 5000)
    see(grid, {8: 1.2}, 4)
    assert grid.factors[2, 0] == pytest.approx(1.0, rel=0.06)
