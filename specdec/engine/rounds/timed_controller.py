"""How long a controller thinks: it is not to take its own time for that of the rounds that it compares.

Thinking is rare where rounds are many, and comes in bunches: just when something else is tried for a few
rounds, every one of them is learnt from. Counted as theirs, these milliseconds make short rounds look half
again as long as they are when nobody looks.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.clock import Clock
from specdec.scheduling.speculation.controller import RoundObservation, SpeculationController
from specdec.scheduling.speculation.explanation import ControllerState
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.state import Schedulable


class TimedController:
    """Implements `SpeculationController` by another one, and says what it took."""

    def __init__(self, controller: SpeculationController, clock: Clock) -> None:
        """Ask `controller`."""
        self._controller = controller
        self._clock = clock
        self._thought_s = 0.0

    def take_thought_s(self) -> float:
        """Return the seconds that it has thought since the last call."""
        thought_s, self._thought_s = self._thought_s, 0.0
        return thought_s

    @property
    def mode(self) -> OverlapMode:
        """See `SpeculationController`."""
        return self._controller.mode

    @property
    def state(self) -> ControllerState:
        """See `SpeculationController`."""
        return self._controller.state

    @property
    def minds_targets(self) -> bool:
        """See `SpeculationController`."""
        return self._controller.minds_targets

    def choose(self, decoding: Sequence[Schedulable], elsewhere: Sequence[Schedulable] = ()) -> Sequence[int]:
        """See `SpeculationController`."""
        started_s = self._clock.now_s()
        chosen = self._controller.choose(decoding, elsewhere)
        self._thought_s += self._clock.now_s() - started_s
        return chosen

    def fan_out(
        self, request: Schedulable, num_pending: int, max_branches: int, *, is_foreign: bool = False
    ) -> tuple[int, ...]:
        """See `SpeculationController`; its time is not counted: it is part of every round of draft_ahead."""
        return self._controller.fan_out(request, num_pending, max_branches, is_foreign=is_foreign)

    def observe(self, observation: RoundObservation) -> None:
        """See `SpeculationController`."""
        started_s = self._clock.now_s()
        self._controller.observe(observation)
        self._thought_s += self._clock.now_s() - started_s

    def think(self) -> None:
        """See `SpeculationController`."""
        started_s = self._clock.now_s()
        self._controller.think()
        self._thought_s += self._clock.now_s() - started_s

    def think_beside(self) -> None:
        """As `think`, while the target is at work: who calls it knows whether rounds take longer by it."""
        self._controller.think()
