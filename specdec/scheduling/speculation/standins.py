"""What proposals bring that stand in for missing ones, kept apart from what the drafter's own bring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.core.decaying import DecayingRates
from specdec.scheduling.speculation.controller import DraftOutcome

Floats = NDArray[np.float64]

_DECAY = 1.0 / 256.0
_PRIOR_TRIALS = 8.0
_PRIOR_ACCEPTANCE = 0.4
"""Of one token, where nothing is known: a lookup is right less often than a drafter."""
_UNSEEN = 16.0
"""Missing proposals that weigh as much as the belief that nothing stands in for them."""


class StandIns:
    """Decaying counts of missing proposals, of those that stood in for them, and of what these brought."""

    def __init__(self, num_positions: int) -> None:
        """Follow the first `num_positions` draft tokens."""
        self._num_positions = num_positions
        self._num_missing = 0.0
        self._num_there = 0.0
        self._num_rows = 0.0
        self._num_accepted = 0.0
        self._rates = DecayingRates(np.full(num_positions, _PRIOR_ACCEPTANCE), _PRIOR_TRIALS, decay=_DECAY)

    def note(self, num_missing: int, outcomes: Sequence[DraftOutcome]) -> None:
        """Learn from a round.

        Args:
            num_missing: requests that something was wanted for and the drafter had nothing.
            outcomes: of the proposals that stood in.
        """
        if num_missing <= 0:
            return
        kept = (1.0 - _DECAY) ** num_missing
        self._num_missing = self._num_missing * kept + num_missing
        self._num_there = self._num_there * kept + len(outcomes)
        self._num_rows = self._num_rows * kept + sum(one.num_drafted for one in outcomes)
        self._num_accepted = self._num_accepted * kept + sum(one.num_accepted for one in outcomes)
        for one in outcomes:
            num_tried = min(one.num_accepted + 1, one.num_drafted, self._num_positions)
            self._rates.note(num_tried, slice(min(one.num_accepted, num_tried)))

    @property
    def are_there(self) -> bool:
        """Whether any proposal has stood in lately."""
        return self._num_there > 0.0

    @property
    def gain(self) -> float:
        """Tokens that are accepted for each missing proposal."""
        return self._num_accepted / (self._num_missing + _UNSEEN)

    @property
    def rows(self) -> float:
        """Draft rows for each missing proposal."""
        return self._num_rows / (self._num_missing + _UNSEEN)

    @property
    def gain_if_there(self) -> float:
        """Tokens that are accepted of each proposal that stands in."""
        return self._num_accepted / self._num_there if self._num_there else 0.0

    @property
    def accepted(self) -> Floats:
        """[positions]: how likely a token that stands in is accepted, given that those before it are."""
        return self._rates.values
