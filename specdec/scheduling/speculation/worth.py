"""What drafters are worth over minutes: what autoscaling of a draft pool goes by."""

from __future__ import annotations

import math

from specdec.scheduling.speculation.decision import Decision

_WORTH_WINDOW_S = 120.0
_LONGEST_S = 1.0
"""What stands for more seconds counts as so many."""


class PoolWorth:
    """Goodput with speculation over goodput without, the mean of the last minutes."""

    def __init__(self) -> None:
        """Begin with neither gain nor loss."""
        self.ratio = 1.0

    def note(self, decision: Decision, seconds: float) -> None:
        """Rounds of a decision have passed, for so long."""
        ratio = max(decision.rates_by_mode.values(), default=0.0) / decision.undrafted_rate
        weight = -math.expm1(-min(seconds, _LONGEST_S) / _WORTH_WINDOW_S)
        self.ratio += weight * (ratio - self.ratio)
