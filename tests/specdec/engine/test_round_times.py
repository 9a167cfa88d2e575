"""What belongs to rounds, and what of them is neither drafting nor verifying."""

from __future__ import annotations

import pytest

from specdec.core.clock import ManualClock
from specdec.core.plan import TargetResult
from specdec.engine.engine import Engine
from specdec.engine.toy_target import ToyTarget
from tests.specdec.engine.toy_engines import GREEDY, MODEL, OracleProposer, request, toy_engine

VERIFY_S, BETWEEN_S = 0.010, 0.002


class _SlowTarget(ToyTarget):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__(MODEL)
        self._clock = clock

    def collect(self) -> TargetResult:
        self._clock.advance(VERIFY_S)
        return super().collect()


def started() -> tuple[Engine, ManualClock]:
    clock = ManualClock()
    engine = toy_engine(OracleProposer(), target=_SlowTarget(clock), clock=clock)
    engine.add_request(request("a", (1, 2, 3), GREEDY, seed=1))
    return engine, clock


def test_what_is_done_between_rounds_is_coordinator_time() -> None:
    engine, clock = started()
    clock.advance(5.0)  # before the first round there is none to belong to
    engine.step()
    while engine.has_work:
        clock.advance(BETWEEN_S)
        engine.step()
    metrics = engine.metrics()
    num_between = metrics.num_rounds - 1
    assert num_between > 2
    assert metrics.coordinator_s == pytest.approx(num_between * BETWEEN_S)
    assert metrics.round_s == pytest.approx(num_between * BETWEEN_S + metrics.num_rounds * VERIFY_S)


@pytest.mark.parametrize("how", ["done", "aborted"])
def test_time_without_work_belongs_to_no_round(how: str) -> None:
    engine, clock = started()
    engine.step()
    if how == "aborted":
        engine.abort(request("a", (1,), GREEDY).request_id)
    while engine.has_work:
        engine.step()
    clock.advance(3600.0)
    engine.add_request(request("b", (1, 2, 3), GREEDY, seed=1))
    while engine.has_work:
        engine.step()
    metrics = engine.metrics()
    assert metrics.coordinator_s == pytest.approx(0.0)
    assert metrics.round_s == pytest.approx(metrics.num_rounds * VERIFY_S)
