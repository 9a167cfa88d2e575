"""Of two things that go on at once, the longer one counts: what that is where their times vary."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NUM_FACTORS = 6
_NUM_RECENT = 48
_NUM_DOUBTS = 12
"""Times that are thought to have been usual before the first."""
_LARGEST = 4.0


class TimeSpread:
    """After how long drafts are there, over what work on them usually takes, as equally likely factors.

    A drafter that is usually done when the target is, but now and then works for somebody else first, makes
    rounds longer than either takes in the mean: the expected maximum is above the maximum of expectations.

    Waiting for others counts as if it were longer the longer one's own drafts are. For one group it is not;
    but those that share a drafter are all the better off the less each asks of it, and so each is told to pay
    for what it asks.
    """

    def __init__(self) -> None:
        """Begin with times that are always as usual."""
        self._recent = deque([1.0] * _NUM_DOUBTS, maxlen=_NUM_RECENT)
        self._factors: Floats | None = None

    def note(self, ratio: float) -> None:
        """Learn from drafts that were there after `ratio` times what work on them usually takes."""
        self._recent.append(min(ratio, _LARGEST))
        self._factors = None

    @property
    def factors(self) -> Floats:
        """[F], rising: the means of equal parts of what was lately seen."""
        if self._factors is None:
            parts = np.array_split(np.sort(np.array(self._recent)), _NUM_FACTORS)
            self._factors = np.array([part.mean() for part in parts])
        return self._factors


@dataclass(frozen=True, slots=True)
class PromptLoad:
    """What is read of prompts in rounds that decode, too."""

    rounds_per_token: float = 0.0
    """Rounds that read prompts, by committed token."""
    seconds: float = 0.0
    """What prompts take of such a round."""


NO_PROMPTS = PromptLoad()


def mean_longer(one: Floats, other: Floats | float, factors: Floats) -> Floats:
    """Return the expected time of the longer of two, where the first varies by these factors.

    Args:
        one: [...], what it usually takes.
        other: [...], or of all.
        factors: [F], equally likely.
    """
    total = np.zeros_like(one)
    for factor in factors.tolist():
        total += np.maximum(one * factor, other)
    return total / len(factors)
