"""Repeated measurements in raw results, and what they say of the true value."""

from __future__ import annotations

import math

import pytest

from benchmarks.report import PairedRatio, Spread, mean_bound, to_plain


def test_raw_results_keep_every_measurement() -> None:
    found = to_plain({"speeds": Spread((3.0, 1.0, 2.0))})
    assert found == {"speeds": {"median": 2.0, "min": 1.0, "max": 3.0, "n": 3, "values": [3.0, 1.0, 2.0]}}


def test_bounds_of_a_mean_are_those_of_students_t() -> None:
    values = (1.0, 2.0, 3.0, 4.0)
    half = 2.353 * math.sqrt(5.0 / 3.0) / 2.0
    assert mean_bound(values, 1.0) == pytest.approx(2.5 + half)
    assert mean_bound(values, -1.0) == pytest.approx(2.5 - half)


def test_one_value_bounds_nothing() -> None:
    assert (mean_bound((5.0,), 1.0), mean_bound((5.0,), -1.0)) == (math.inf, -math.inf)
    assert (PairedRatio((5.0,)).upper, PairedRatio((5.0,)).lower) == (math.inf, 0.0)
