"""Drafting ahead: which verdicts to prepare for, and how often that is right.

A verdict is how many of the pending draft tokens stand (a), and the token that follows them. Guesses of that
token are the drafter's best noisy scores, best first, without the pending token itself where a is not all of
them. How often guess r is right, given that none before it was, hardly depends on the model pair or the
temperature; it begins at values measured on a trained pair and is refined by what is observed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.core.decaying import DecayingRates
from specdec.core.proposal import AheadOutcome

Floats = NDArray[np.float64]

MAX_GUESSES = 32
"""Guesses behind one accept length of which hit rates are kept."""
_MEASURED = ((1, 0.325), (3, 0.585), (10, 0.80))
"""Given a miss, how often the right token is among the first so many guesses: the mean of temperatures 0
(.30, .54, .74) and 1 (.35, .63, .86), which differ little."""
_PRIOR_TRIALS = 40.0
_DECAY = 1.0 / 2048.0


def _usual_rates() -> Floats:
    """Return the hit rate of guess r given that none before it was right: [MAX_GUESSES]."""
    known = np.log([number for number, _ in _MEASURED])
    survival = np.log([1.0 - hit for _, hit in _MEASURED])
    numbers = np.log(np.arange(1, MAX_GUESSES + 1))
    slope = (survival[-1] - survival[-2]) / (known[-1] - known[-2])
    survivals = np.interp(numbers, known, survival)
    survivals = np.where(numbers > known[-1], survival[-1] + slope * (numbers - known[-1]), survivals)
    steps = np.diff(np.concatenate(([0.0], survivals)))
    rates: Floats = 1.0 - np.exp(steps)
    return rates


class GuessRanks:
    """How often the r-th guess of the token behind a rejected one is right."""

    def __init__(self) -> None:
        self._rates = DecayingRates(_usual_rates(), _PRIOR_TRIALS, decay=_DECAY)

    @property
    def rates(self) -> Floats:
        """Hit rate of guess r, given that none before it was right: [MAX_GUESSES]."""
        return self._rates.values

    def note(self, num_prepared: int, rank: int | None) -> None:
        """Learn from one verdict: guess `rank` of `num_prepared` was right, or none."""
        num_tried = min(num_prepared if rank is None else rank + 1, MAX_GUESSES)
        self._rates.note(num_tried, slice(0) if rank is None else slice(rank, rank + 1))

    def hear(self, ahead: AheadOutcome) -> None:
        """Learn from what became of the continuations of one verdict, where it says anything of ranks."""
        if ahead.num_prepared == 0:
            return
        if ahead.num_accepted < ahead.num_pending and not ahead.is_foreign:
            self.note(ahead.num_prepared, ahead.rank)
        elif ahead.rank != 0 and ahead.num_prepared > 1:
            # The first guess behind a proposal that stands, or that is not the drafter's own, is what it
            # would have drafted; those after it are guesses.
            self.note(ahead.num_prepared - 1, None if ahead.rank is None else ahead.rank - 1)


class GuessGains:
    """How likely each guess is the right one, given how likely draft tokens are accepted."""

    def __init__(self, accepted: Sequence[float] | Floats, rates: Floats) -> None:
        """Take what is expected.

        Args:
            accepted: [K + 1], probability that draft token j is accepted when it is reached. Behind a
                proposal that stands as a whole, the next token that the drafter would have drafted is the
                first guess.
            rates: [R], of `GuessRanks`.
        """
        self._accepted = np.asarray(accepted, dtype=np.float64)
        self._reached = np.concatenate(([1.0], np.cumprod(self._accepted[:-1])))
        """P(the first a draft tokens stand)."""
        survival = np.concatenate(([1.0], np.cumprod(1.0 - rates[:-1])))
        self._given_miss = np.minimum.accumulate(rates * survival)
        """P(guess r is right), behind a token that was rejected. Never rising, as guesses are made in
        order."""

    def behind(self, num_pending: int) -> Floats:
        """Return [num_pending + 1 (a), R]: the probability that exactly a stand and guess r is right."""
        next_accepted = self._accepted[num_pending]
        whole = np.concatenate(([next_accepted], (1.0 - next_accepted) * self._given_miss[:-1]))
        shares = np.empty((num_pending + 1, len(whole)))
        rejected = self._reached[:num_pending] * (1.0 - self._accepted[:num_pending])
        shares[:-1] = rejected[:, None] * self._given_miss
        shares[-1] = self._reached[num_pending] * np.minimum.accumulate(whole)
        return shares


def hit_table(accepted: Floats, rates: Floats, max_guesses: int) -> Floats:
    """Return how likely a verdict is among the best guesses, for proposals of every length.

    Args:
        accepted: [K + 1], as in `GuessGains`.
        rates: of `GuessRanks`.
        max_guesses: up to how many guesses.

    Returns:
        [K + 1 (k), max_guesses]: with k pending tokens and the best 1 to `max_guesses` guesses.
    """
    num_lengths, num_guesses = len(accepted), min(max_guesses, MAX_GUESSES)
    survival = np.concatenate(([1.0], np.cumprod(1.0 - rates[: num_guesses - 1])))
    given_miss = np.minimum.accumulate(rates[:num_guesses] * survival)
    reached = np.concatenate(([1.0], np.cumprod(accepted[:-1])))
    rejected = np.where(np.tri(num_lengths, k=-1, dtype=bool), reached * (1.0 - accepted), 0.0)
    gains = rejected[:, :, None] * given_miss
    whole = np.empty((num_lengths, num_guesses))
    whole[:, 0] = accepted
    whole[:, 1:] = (1.0 - accepted)[:, None] * given_miss[: num_guesses - 1]
    diagonal = np.arange(num_lengths)
    gains[diagonal, diagonal] = reached[:, None] * np.minimum.accumulate(whole, axis=1)
    best = -np.sort(-gains.reshape(num_lengths, -1), axis=1)[:, :num_guesses]
    table: Floats = np.minimum(np.cumsum(best, axis=1), 1.0)
    return table


def share_guesses(accepted: Sequence[float] | Floats, rates: Floats, max_guesses: int) -> tuple[int, ...]:
    """Share guesses out among accept lengths so that the right one is among them as likely as can be.

    Args:
        accepted: [k + 1] for k pending tokens, as in `GuessGains`.
        rates: of `GuessRanks`.
        max_guesses: how many there may be.

    Returns:
        entry a, of 0 to k: guesses behind exactly a accepted tokens.
    """
    num_lengths = len(accepted)
    if max_guesses <= 0:
        return (0,) * num_lengths
    gains = GuessGains(accepted, rates).behind(num_lengths - 1)
    # A stable sort keeps equal guesses of one accept length in their order, so that none is left out before.
    chosen = np.argsort(-gains, axis=None, kind="stable")[:max_guesses]
    return tuple(np.bincount(chosen // gains.shape[1], minlength=num_lengths).tolist())


def share_guesses_behind_foreign(
    accepted: Sequence[float] | Floats, next_accepted: float, rates: Floats, max_guesses: int
) -> tuple[int, ...]:
    """As `share_guesses`, for pending tokens that are not the drafter's own.

    Behind one of these that is rejected the drafter's first guess is what it would have drafted itself.

    Args:
        accepted: [k] for k pending tokens: how likely each is accepted, given that it is reached.
        next_accepted: how likely a token of the drafter's own would be.
        rates: of `GuessRanks`.
        max_guesses: how many there may be.
    """
    behind = np.concatenate(([next_accepted], rates[:-1]))
    return share_guesses([*accepted, next_accepted], behind, max_guesses)
