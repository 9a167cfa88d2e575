"""By what factors rounds take longer than was measured: of everything, and of regions of a grid."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

from specdec.core.decaying import kept_after

Floats = NDArray[np.float64]

_NOISE = 0.06**2
"""Variance of an observation, as all here of logarithms."""
_FIRST_SLOWNESS, _SLOWNESS_DRIFT = 0.5**2, 0.045**2
"""Variance of how slow everything is, at the start, and by how much it grows with each observation. A machine
may be half as fast as when it was measured, and others come and go."""
_OWN, _OWN_DRIFT = 0.15**2, 0.006**2
"""The same of how much slower a region is than everything."""
_LARGEST_LOG = 4.0
_ODD, _SOON, _LARGEST_STEP = 0.25, 32, 1.0
"""An observation that is off by more is believed once the next one of the region is, too, soon and in the
same direction; then by no more than so much at a time."""
_MOST_CELLS = 96
"""Regions that are kept: those that were not seen for longest are forgotten."""
_MOST_SEEN, _STALE_ROUNDS = 9.0, 300.0
"""Observations that count in the light of neighbours; after so many others of the grid each counts half."""
_OTHERS = 0.5
"""Weight of an observation beside the other side's work for steps that are alone, and the other way round."""
_NEIGHBOUR = 0.25
"""Weight of the next region beside a region's own."""
_DOUBTS = 2.0
"""Observations that say that both sides do not disturb each other."""


Cell = tuple[Hashable, int, int]
"""A region of a grid: whose, and where."""


class Slowness:
    """How much longer everything takes than it was measured, and how much longer each region beside that.

    A Kalman filter of logarithms: an observation is that of a region, and of everything. Others use the
    machine, too, or it is hot: what is known of regions that were not seen since then would be of another
    machine, and those that were would look worse than they are beside them. Which of both it was is told
    when another region is seen.
    """

    def __init__(self) -> None:
        """Begin with what was measured, in doubt."""
        self._places: dict[Cell, int] = {}
        """Of regions, those that were seen last at the end; everything is at 0."""
        self._mean = np.zeros(1)
        self._covariance = np.array([[_FIRST_SLOWNESS]])
        self._number = 0
        self._odd: dict[Cell, tuple[float, int]] = {}
        """Surprises that were the last of their regions, and when."""

    @property
    def of_all(self) -> float:
        """How much longer everything takes."""
        return float(self._mean[0])

    def note(self, cell: Cell, seen: float, guess: float) -> tuple[float, bool]:
        """Learn that a region took longer by `seen`. Of one that was never seen, `guess` was thought so far.

        Returns:
            by how much it took longer than such steps do, and whether that is believed. Of what is, it is the
            region's share, for it may be that everything has become slower.
        """
        self._number += 1
        place = self._places.pop(cell, None)
        if place is None:
            place = self._add(guess)
        self._places[cell] = place
        mean, covariance = self._mean, self._covariance
        variances = np.einsum("ii->i", covariance)
        variances[0] += _SLOWNESS_DRIFT
        variances[1:][variances[1:] < _OWN] += _OWN_DRIFT
        surprise = seen - float(mean[0] + mean[place])
        with_seen = covariance[:, 0] + covariance[:, place]
        total = float(with_seen[0] + with_seen[place]) + _NOISE
        believed = self._believed(cell, surprise)
        if believed is None:
            return surprise, False
        mean += with_seen * (believed / total)
        covariance -= np.outer(with_seen, with_seen / total)
        return surprise * math.sqrt(_NOISE / total), True

    def knows(self, cell: Cell) -> bool:
        """Whether a region was ever seen."""
        return cell in self._places

    def of_grid(self, grid: Hashable) -> tuple[list[tuple[int, int]], Floats]:
        """Return the regions of a grid that were seen, and how much longer each takes beside everything."""
        places = {(a, b): place for (whose, a, b), place in self._places.items() if whose == grid}
        return list(places), self._mean[list(places.values())]

    def _add(self, guess: float) -> int:
        if len(self._places) >= _MOST_CELLS:
            forgotten = next(iter(self._places))
            place = self._places.pop(forgotten)
            self._odd.pop(forgotten, None)
            self._covariance[place] = self._covariance[:, place] = 0.0
        else:
            place = len(self._mean)
            self._mean = np.append(self._mean, 0.0)
            self._covariance = np.pad(self._covariance, (0, 1))
        self._mean[place] = guess
        self._covariance[place, place] = _OWN
        return place

    def _believed(self, cell: Cell, surprise: float) -> float | None:
        """Return what to learn from an observation that is off by `surprise`; None: it may be a pause."""
        before, number = self._odd.pop(cell, (0.0, self._number))
        if abs(surprise) > _ODD:
            self._odd[cell] = surprise, self._number
            if surprise * before <= 0.0 or self._number - number > _SOON:
                return None
        return min(max(surprise, -_LARGEST_STEP), _LARGEST_STEP)


class CorrectionGrid:
    """Factors by region, [A, B]: of everything, times what regions have shown of their own, in the light of
    their neighbours.

    A region that was never seen follows those that were. A single pause moves nothing.
    """

    def __init__(self, num_a: int, num_b: int, slowness: Slowness | None = None, name: Hashable = 0) -> None:
        """Begin with 1 everywhere. `slowness` is shared with grids of other names."""
        self._slowness = Slowness() if slowness is None else slowness
        self._name = name
        self._near_a, self._near_b = _nearness(num_a), _nearness(num_b)
        self._num_seen = np.zeros((num_a, num_b))
        self._last_round = np.zeros((num_a, num_b))
        self._round = 0

    def note(self, a: int, b: int, ratio: float, guess: float | None = None) -> float:
        """Learn that something in region (a, b) took `ratio` times as long as it should.

        Of a region that was never seen, `guess` was thought so far, a logarithm beside how slow everything
        is; None: what its neighbours say.

        Returns:
            how many times as long it took as it lately does there.
        """
        here = a, b
        if not self.has_seen(a, b):
            self._num_seen[here] = 0.0
            if guess is None:
                guess = 0.0 if self.is_empty else float(self.smoothed()[here])
        seen = min(max(math.log(ratio), -_LARGEST_LOG), _LARGEST_LOG)
        surprise, is_believed = self._slowness.note((self._name, a, b), seen, guess or 0.0)
        self._round += 1
        if is_believed:
            kept = self._num_seen[here] * kept_after(self._round - self._last_round[here], _STALE_ROUNDS)
            self._num_seen[here] = min(kept + 1.0, _MOST_SEEN)
            self._last_round[here] = self._round
        return math.exp(surprise)

    def has_seen(self, a: int, b: int) -> bool:
        """Whether anything is known of a region."""
        return self._slowness.knows((self._name, a, b))

    @property
    def factors(self) -> Floats:
        """[A, B], all positive; 1 where nothing is known at all."""
        factors: Floats = np.exp(self.smoothed() + self._slowness.of_all)
        return factors

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known at all."""
        return self._round == 0

    def known(self) -> tuple[Floats, Floats]:
        """Return what regions have shown beside everything, as logarithms, and how many observations that is
        worth: [A, B] each, 0 where nothing was seen.
        """
        own, weights = np.zeros(self._num_seen.shape), np.zeros(self._num_seen.shape)
        cells, means = self._slowness.of_grid(self._name)
        if cells:
            at = tuple(np.array(cells).T)
            own[at] = means
            age = self._round - self._last_round[at]
            weights[at] = self._num_seen[at] * kept_after(age, _STALE_ROUNDS)
        return own, weights

    def smoothed(self, known: tuple[Floats, Floats] | None = None) -> Floats:
        """Return what is known, or `known`, in the light of neighbours: [A, B]."""
        log_factors, weights = self.known() if known is None else known
        weighted = weights * log_factors
        around = self._near_a @ weights @ self._near_b - weights
        value_around = self._near_a @ weighted @ self._near_b - weighted
        # A few regions far away count as one observation, so that nobody is without neighbours.
        overall = _mean(log_factors, weights)
        value_around = (value_around + 1e-3 * overall) / (around + 1e-3)
        smoothed: Floats = (weighted + value_around) / (weights + 1.0)
        return smoothed


class Corrections:
    """Factors of steps that have the machine for themselves, and of those beside which the other side works.

    Two devices may share more than one would think: memory bandwidth, caches, a power budget. What steps
    take beside others must not be taken for what they take alone, or plain decoding, which is alone, looks
    slower than it is. How much slower the others make them is found where both were seen lately; by that,
    what is seen of one says something of the other too.
    """

    def __init__(self, num_a: int, num_b: int) -> None:
        """Begin with 1 everywhere."""
        self._slowness = Slowness()
        self._alone = CorrectionGrid(num_a, num_b, self._slowness, "alone")
        self._beside = CorrectionGrid(num_a, num_b, self._slowness, "beside")
        self._kept: dict[bool, tuple[Floats, Floats]] = {}
        """By whether they are overlapped: factors and weights, since the last observation."""

    def factors(self, *, is_overlapped: bool) -> Floats:
        """[A, B], all positive; 1 where nothing is known at all."""
        return self._of(is_overlapped=is_overlapped)[0]

    def weights(self, *, is_overlapped: bool) -> Floats:
        """[A, B]: how many recent observations there are."""
        return self._of(is_overlapped=is_overlapped)[1]

    def note(self, a: int, b: int, ratio: float, *, is_overlapped: bool) -> float:
        """Learn and return as `CorrectionGrid.note`."""
        grid, guess = self._beside if is_overlapped else self._alone, None
        if not grid.has_seen(a, b):
            guess = math.log(float(self.factors(is_overlapped=is_overlapped)[a, b])) - self._slowness.of_all
        self._kept.clear()
        return grid.note(a, b, ratio, guess)

    def _of(self, *, is_overlapped: bool) -> tuple[Floats, Floats]:
        kept = self._kept.get(is_overlapped)
        if kept is None:
            kept = self._kept[is_overlapped] = self._combined(is_overlapped=is_overlapped)
        return kept

    def _combined(self, *, is_overlapped: bool) -> tuple[Floats, Floats]:
        if self._beside.is_empty:
            return self._alone.factors, self._alone.known()[1]
        own_grid, other_grid = self._own_first(is_overlapped=is_overlapped)
        own, own_weights = own_grid.known()
        other, other_weights = other_grid.known()
        in_both = np.minimum(own_weights, other_weights)
        longer = float((in_both * (own - other)).sum())
        num_elsewhere = min(own_weights.sum(), other_weights.sum()) - float(in_both.sum())
        longer += num_elsewhere * (_mean(own, own_weights) - _mean(other, other_weights))
        longer /= float(in_both.sum()) + num_elsewhere + _DOUBTS
        weights = own_weights + _OTHERS * other_weights
        weighted = own_weights * own + _OTHERS * other_weights * (other + longer)
        log_factors = own_grid.smoothed((weighted / np.maximum(weights, 1e-9), weights))
        return np.exp(log_factors + self._slowness.of_all), weights

    def _own_first(self, *, is_overlapped: bool) -> tuple[CorrectionGrid, CorrectionGrid]:
        return (self._beside, self._alone) if is_overlapped else (self._alone, self._beside)


def _nearness(size: int) -> Floats:
    index = np.arange(size)
    nearness: Floats = _NEIGHBOUR ** np.abs(index[:, None] - index[None, :]).astype(np.float64)
    return nearness


def _mean(values: Floats, weights: Floats) -> float:
    return float((weights * values).sum() / max(weights.sum(), 1e-9))
