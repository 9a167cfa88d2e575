"""What a controller takes for itself is not told to it as the time of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from specdec.core.clock import ManualClock
from specdec.engine.toy_target import ToyTarget
from specdec.scheduling.speculation.controller import FixedController, RoundObservation
from specdec.scheduling.state import Schedulable
from tests.specdec.engine.toy_engines import MODEL, request, run, toy_engine

ROUND_S = 0.002


class SlowTarget(ToyTarget):
    """Every step takes the same time."""

    clock: ManualClock

    def collect(self):  # type: ignore[no-untyped-def]
        self.clock.advance(ROUND_S)
        return super().collect()


@dataclass
class Ponderer(FixedController):
    """Takes its time."""

    clock: ManualClock
    choose_s: float
    observe_s: float
    heard: list[RoundObservation] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(0)

    def choose(self, decoding: Sequence[Schedulable], elsewhere: Sequence[Schedulable] = ()) -> Sequence[int]:
        self.clock.advance(self.choose_s)
        return super().choose(decoding, elsewhere)

    def observe(self, observation: RoundObservation) -> None:
        self.clock.advance(self.observe_s)
        self.heard.append(observation)


@pytest.mark.parametrize(("choose_s", "observe_s"), [(0.0, 0.0), (0.003, 0.0), (0.0, 0.004), (0.01, 0.02)])
def test_rounds_take_as_long_however_long_the_controller_thinks(choose_s: float, observe_s: float) -> None:
    clock = ManualClock()
    target = SlowTarget(MODEL)
    target.clock = clock
    engine = toy_engine(target=target, clock=clock)
    controller = Ponderer(clock, choose_s, observe_s)
    engine._rounds._controller._controller = controller
    run(engine, request())
    times = [one.round_s for one in controller.heard if one.round_s is not None]
    assert len(times) > 3
    assert times == pytest.approx([ROUND_S] * len(times))
