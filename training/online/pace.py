"""How much of a core a trainer takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from training.online.trainer import OnlineTrainer

_NOTHING_TO_DO_S = 0.2


def rest_s(worked_s: float, cpu_share: float) -> float:
    """Return how long to rest after so many seconds of work, for it to be that share of a core."""
    return worked_s * (1.0 / cpu_share - 1.0)


class PacedTrainer:
    """Runs a trainer piece by piece, with rests."""

    def __init__(
        self, trainer: OnlineTrainer, cpu_share: float, *, wait: Callable[[float], object] = time.sleep
    ) -> None:
        """`wait` rests for so many seconds."""
        self._trainer = trainer
        self._cpu_share = cpu_share
        self._wait = wait

    def run_once(self) -> None:
        """Do a piece of work, then rest."""
        started_s = time.thread_time()
        is_busy = self._trainer.run_next()
        worked_s = time.thread_time() - started_s
        self._wait(rest_s(worked_s, self._cpu_share) if is_busy else _NOTHING_TO_DO_S)
