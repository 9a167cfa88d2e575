"""Histograms of durations."""

from __future__ import annotations

import random

from specdec.engine.metrics.latencies import BOUNDS_S, Latencies


def test_buckets_hold_what_is_as_long_or_shorter() -> None:
    rng = random.Random(2)
    durations = [rng.choice((*BOUNDS_S, rng.random(), 20 * rng.random())) for _ in range(500)]
    latencies = Latencies()
    for seconds in durations:
        latencies.add(seconds)
    series = dict(latencies.series("x_seconds"))
    assert series.pop("x_seconds_count") == 500
    assert abs(series.pop("x_seconds_sum") - sum(durations)) < 1e-9
    assert series.pop('x_seconds_bucket{le="+Inf"}') == 500
    for bound in BOUNDS_S:
        counted = series.pop(f'x_seconds_bucket{{le="{bound}"}}')
        assert counted == sum(seconds <= bound for seconds in durations)
    assert series == {}
