"""When messages arrived that were read later."""

from __future__ import annotations

import random

import pytest

from specdec.engine.draft_pool.arrivals import ArrivalClock


def test_what_is_read_at_once_arrives_when_it_is_read() -> None:
    arrivals = ArrivalClock()
    assert arrivals.arrival_s(1000.0, 3.25) == pytest.approx(3.25)
    assert arrivals.arrival_s(1001.0, 4.125) == pytest.approx(4.125), "this one was quicker"


def test_what_lay_in_the_queue_arrived_when_the_wire_had_brought_it() -> None:
    generator = random.Random(3)
    arrivals = ArrivalClock()
    offset_s, now_s = -7e5, 100.0
    wires, errors = [], []
    for number in range(200):
        now_s += generator.uniform(0.005, 0.05)
        wire_s = 1e-4 + generator.expovariate(1 / 2e-5)
        lay_s = 0.0 if number % 5 == 0 else generator.uniform(0.0, 0.03)
        arrived_s = now_s + wire_s
        now_s = arrived_s + lay_s
        estimate_s = arrivals.arrival_s(arrived_s - wire_s + offset_s, now_s)
        assert estimate_s <= now_s + 1e-9
        wires.append(wire_s)
        errors.append(abs(estimate_s - arrived_s))
    assert max(errors[10:]) <= max(wires) + 0.001


def test_clocks_may_run_apart() -> None:
    arrivals = ArrivalClock()
    for second in range(3600):
        sent_s = second * (1.0 - 1e-5)
        arrived_s = second + 1e-4
        lay_s = 0.01 if second % 2 else 0.0
        assert arrivals.arrival_s(sent_s, arrived_s + lay_s) == pytest.approx(arrived_s, abs=1e-4)


def test_a_reader_that_is_always_late_knows_no_better_than_its_quickest() -> None:
    arrivals = ArrivalClock()
    lateness = [0.03, 0.02, 0.05, 0.04]
    late = [arrivals.arrival_s(float(at), at + lay_s) - at for at, lay_s in enumerate(lateness)]
    assert late == pytest.approx([0.03, 0.02, 0.02, 0.02], abs=1e-3)
