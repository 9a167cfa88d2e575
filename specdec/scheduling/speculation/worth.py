"""What drafters are worth over minutes: what autoscaling of a draft pool goes by."""

from __future__ import annotations

import math

from specdec.core.decaying import moved
from specdec.scheduling.speculation.decision import Decision
from specdec.scheduling.speculation.goodput import Kind

_WORTH_WINDOW_S = 120.0
_LONGEST_S = 1.0
"""What stands for more seconds counts as so many."""
_LEAST_S = 5.0
"""Of less than so many seconds nothing is said."""


class PoolWorth:
    """Goodput with speculation over goodput without, the mean of the last minutes."""

    def __init__(self, margin: float) -> None:
        """Begin with neither gain nor loss; `margin` is the share by which drafts have to be better than
        none to be gone over to (`KindSwitch`).
        """
        self._margin = margin
        self._ratio = 1.0
        self._noted_s = 0.0

    @property
    def ratio(self) -> float | None:
        """The mean; None as long as too little is known."""
        return self._ratio if self._noted_s >= _LEAST_S else None

    def note(self, decision: Decision, kind: Kind, seconds: float) -> None:
        """Rounds of a decision have passed, for so long; `kind` is what is done but for trials.

        Where nothing may be drafted, nothing is gained.
        """
        rates = [rate for other, rate in decision.rates.items() if other != "plain"]
        if kind == "plain":
            # What would bring too little to be done brings nothing: drafts just good enough count as 1.
            rates = [rate / (1.0 + self._margin) for rate in rates]
        if decision.drafts_as_asked:
            rates.append(decision.rates["plain"])
        ratio = max(rates, default=decision.undrafted_rate) / decision.undrafted_rate
        counted_s = min(seconds, _LONGEST_S)
        self._noted_s += counted_s
        self._ratio = moved(self._ratio, ratio, -math.expm1(-counted_s / _WORTH_WINDOW_S))
