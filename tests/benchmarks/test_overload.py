"""What the overload benchmark counts."""

from __future__ import annotations

import pytest

from benchmarks.overload import Load, Streams, headlines, most_at_once, num_lost, summed_up
from deploy.load.generator import Timeline


def timeline(
    due_s: float, *, ttft_s: float = 0.1, apart_s: float = 0.01, error: str | None = None
) -> Timeline:
    deliveries = [due_s + ttft_s + apart_s * index for index in range(10)]
    return Timeline(
        due_s=due_s,
        sent_s=due_s,
        deliveries_s=deliveries,
        ended_s=deliveries[-1],
        num_output_tokens=10,
        error=error,
    )


def test_a_byte_is_lost_if_it_is_not_where_it_should_be() -> None:
    assert num_lost("abc", "abc") == 0
    assert num_lost("ab", "abc") == 1
    assert num_lost("abcd", "abc") == 1
    assert num_lost("axc", "abc") == 1
    assert num_lost("bc", "abc") == 3
    assert num_lost("", "ü") == 2


def test_how_many_there_were_at_once() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0.0, 1), (1.0, -1), (1.0, 1), (2.0, -1)]) == 1
    assert most_at_once([(0.0, 1), (0.5, 1), (1.0, -1), (2.0, -1)]) == 2


def test_goodput_is_of_good_requests_behind_the_ramp() -> None:
    timelines = [
        timeline(1.0),  # in the ramp
        timeline(10.0),
        timeline(12.0),
        timeline(13.0, ttft_s=2.0),  # late
        timeline(14.0, apart_s=0.5),  # slow
        timeline(15.0, error="status 429"),
        timeline(19.99),  # ends when nothing is sent any more
    ]
    load = summed_up(timelines, {"ttft": 1.0, "tpot": 0.1}, share=5.0, rate=0.35, duration_s=20.0)
    assert load.outcomes == {"good": 4, "late": 2, "status 429": 1}
    assert load.goodput_per_s == pytest.approx(20 / 15)


def test_overload_is_compared_with_the_best_load() -> None:
    def load(share: float, goodput: float) -> Load:
        return Load(
            share=share,
            requests_per_s=1.0,
            num_requests=1,
            outcomes={},
            goodput_per_s=goodput,
            ttft_p50_s=0.0,
            ttft_p99_s=0.0,
            max_lateness_s=0.0,
        )

    streams = Streams(
        num_streams=2, num_bytes=9, num_lost_bytes=3, num_complete=2, errors={}, most_at_once=2, seconds=1.0
    )
    assert headlines([load(0.8, 90.0), load(1.1, 100.0), load(5.0, 95.0)], streams) == {
        "goodput_at_5x_vs_peak": 0.95,
        "streams_1000_lost_bytes": 3.0,
    }
