"""Whether a version of the draft model is good enough to be served."""

from __future__ import annotations

import math
from dataclasses import dataclass

_ERRORS = 2.0
"""So many standard errors the gain has to be away from nothing."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Two versions on the same tokens of the target, which neither was trained on.

    A token counts for a version that would have drafted it, with everything before it committed.
    """

    num_tokens: int
    num_before: int
    """Tokens that the version served would have drafted."""
    num_after: int
    """Tokens that the version tried would have."""
    num_gained: int
    """Those that only the version tried would have drafted."""

    @property
    def num_lost(self) -> int:
        """Those that only the version served would have drafted."""
        return self.num_before + self.num_gained - self.num_after

    @property
    def before(self) -> float:
        """Acceptance of the version served."""
        return self.num_before / self.num_tokens

    @property
    def after(self) -> float:
        """Acceptance of the version tried."""
        return self.num_after / self.num_tokens


def is_better(trial: Trial, min_gain: float) -> bool:
    """Whether acceptance is larger by `min_gain` at least, and that is hardly chance.

    Only tokens on which the versions differ tell which is better; were both alike, either would win half of
    them (McNemar's test).
    """
    if trial.num_tokens == 0 or trial.after - trial.before < min_gain:
        return False
    num_different = trial.num_gained + trial.num_lost
    return trial.num_gained - trial.num_lost > _ERRORS * math.sqrt(num_different)
