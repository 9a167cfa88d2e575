"""Where an engine's time goes while there is work: waiting for drafts, waiting for the target, all else."""

from __future__ import annotations

from specdec.core.clock import Clock
from specdec.engine.metrics.engine_metrics import EngineMetrics


class RoundTimes:
    """Books the time of rounds, from the end of one to the end of the next.

    What goes on between two of them (taking requests in, sending tokens off) is the coordinator's time like
    planning and committing, as long as somebody's request is not complete.
    """

    def __init__(self, metrics: EngineMetrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._since_s: float | None = None
        """From when on time has not been booked yet; None: there is no work."""
        self._waited_s = 0.0
        self._is_in_round = False

    def begin(self) -> None:
        """A round begins, behind another one or with the first of the work."""
        if self._since_s is None:
            self._since_s = self._clock.now_s()
        self._waited_s = 0.0
        self._is_in_round = True

    def waited(self, seconds: float) -> None:
        """Of the round, so much was spent waiting for drafts, or for the target."""
        self._waited_s += seconds

    def end(self, *, has_work: bool) -> None:
        """The round has ended, and there is more work, or none."""
        assert self._since_s is not None, "it has begun"
        now_s = self._clock.now_s()
        elapsed_s = now_s - self._since_s
        self._metrics.round_s += elapsed_s
        self._metrics.coordinator_s += elapsed_s - self._waited_s
        self._since_s = now_s if has_work else None
        self._is_in_round = False

    def rest(self) -> None:
        """No round is under way, and there is no work any more: what follows belongs to none."""
        self._since_s = None
        self._is_in_round = False

    @property
    def is_in_round(self) -> bool:
        """Whether a round has begun that has not ended."""
        return self._is_in_round
