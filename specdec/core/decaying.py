"""Means of what is seen again and again, in which what was seen before counts less and less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@overload
def kept_after(age: float, half_life: float) -> float: ...
@overload
def kept_after(age: Floats, half_life: float) -> Floats: ...
def kept_after(age: float | Floats, half_life: float) -> float | Floats:
    """Return how much of what was seen `age` ago still counts: half of it after `half_life`, in its unit."""
    kept: float | Floats = 0.5 ** (age / half_life)
    return kept


def moved(mean: float | None, value: float, weight: float) -> float:
    """Return a mean, one value later, of which `weight` is that value's. None: it is the first."""
    return value if mean is None else mean + weight * (value - mean)


@dataclass(slots=True)
class DecayingMean:
    """A mean of what has come to `total` in all and happened `weight` times, both as far as they count."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, total: float, weight: float = 1.0, *, kept: float) -> None:
        """Count what happened `weight` times and came to `total`; of what was before, `kept` counts on."""
        self.total = kept * self.total + total
        self.weight = kept * self.weight + weight

    @property
    def value(self) -> float:
        """The mean; 0 before there is anything."""
        return self.total / self.weight if self.weight > 0.0 else 0.0


class DecayingRates:
    """How often trials by position succeed. What is tried decays; who is not reached stays as it is."""

    def __init__(self, rates: Floats, num_trials: float, *, decay: float) -> None:
        """Begin as if each position had been tried so often, with these rates; each trial costs `decay`."""
        self._trials = np.full(len(rates), num_trials)
        self._successes = rates * num_trials
        self._kept = 1.0 - decay

    @property
    def values(self) -> Floats:
        """[positions]."""
        values: Floats = self._successes / self._trials
        return values

    def note(self, num_tried: int, succeeded: slice) -> None:
        """Count one trial of each of the first positions, some of which have succeeded."""
        self._trials[:num_tried] = self._trials[:num_tried] * self._kept + 1.0
        self._successes[:num_tried] *= self._kept
        self._successes[succeeded] += 1.0
