"""What drafters are worth over minutes: what autoscaling of a draft pool goes by."""

from __future__ import annotations

import math

from specdec.scheduling.speculation.decision import Decision

_WORTH_WINDOW_S = 120.0
_LONGEST_S = 1.0
"""What stands for more seconds counts as so many."""
_LEAST_S = 5.0
"""Of less than so many seconds nothing is said."""


class PoolWorth:
    """Goodput with speculation over goodput without, the mean of the last minutes."""

    def __init__(self) -> None:
        """Begin with neither gain nor loss."""
        self._ratio = 1.0
        self._noted_s = 0.0

    @property
    def ratio(self) -> float | None:
        """The mean; None as long as too little is known."""
        return self._ratio if self._noted_s >= _LEAST_S else None

    def note(self, decision: Decision, seconds: float) -> None:
        """Rounds of a decision have passed, for so long. Where nothing may be drafted, nothing is gained."""
        plain = decision.undrafted_rate
        ratio = max(decision.rates_by_mode.values(), default=plain) / plain
        counted_s = min(seconds, _LONGEST_S)
        self._noted_s += counted_s
        self._ratio -= math.expm1(-counted_s / _WORTH_WINDOW_S) * (ratio - self._ratio)
