"""Scores of a sequence's blocks: what its latest committed tokens attend to. Kept with the target's sequence.

Scores come from the attention of committed tokens alone, as the target computes it when it reads a prompt and
when it verifies what it has drafted (`attention.observation`), summed over heads and layers. They begin with
the first token that a sequence samples and end with its state at the target: a preempted sequence is scored
anew when it comes back. Until there are some, a draft attends to sink and window (`kv.selection`). Where
nothing is drafted nobody needs them, and nobody looks: whoever is drafted for after a while begins with those
of before, and is looked at in that very round.

`WindowScores` are those of SnapKV (Li et al., arXiv 2404.14469): sums over an observation window, pooled over
neighbours. `RunningScores` follow every verified token, the latest ones counting most.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Masses = NDArray[np.float32]
"""[rows, blocks]: what each of consecutive committed tokens attends to, oldest first."""

MAX_WINDOW = 32
"""Tokens whose attention counts for one score, at most: the observation window of a prompt."""
DECAY = 0.5
"""How much less a token's attention counts for each token that has come since."""
_TOKENS_PER_OBSERVED = 8
"""Of so many tokens between two scorings of a window one is looked at: most rounds are to be as cheap as
those of a policy without scores."""


class BlockScores(Protocol):
    """Scores of one sequence, fed round by round."""

    @property
    def values(self) -> NDArray[np.float32] | None:
        """By block, higher is better, only to be compared with each other; None: nothing is known yet."""
        ...

    def num_wanted(self, start: int, num_rows: int, *, is_early: bool = False) -> int:
        """Return how many of the last of `num_rows` rows from position `start` on to observe: 0: none.

        The first of the rows is that of a committed token. `is_early`: from half of the interval on, since
        the step is observed for another sequence anyway.
        """
        ...

    def learn(self, masses: Masses, end: int) -> None:
        """Take what the committed ones among the observed rows attend to; the last is at `end - 1`."""
        ...


class WindowScores:
    """snapkv: scores of the last tokens before a scoring, and there is one every `interval` tokens.

    The tokens of a window follow each other: what was seen before a while in which nobody looked is no part
    of it.
    """

    def __init__(self, interval: int) -> None:
        """Score anew once `interval` tokens have been committed."""
        self._interval = interval
        self._window = min(max(1, interval // _TOKENS_PER_OBSERVED), MAX_WINDOW)
        self._next_end = 0
        self._end = 0
        self._sum: NDArray[np.float32] = np.zeros(0, np.float32)
        self._num_summed = 0
        self._values: NDArray[np.float32] | None = None

    @property
    def values(self) -> NDArray[np.float32] | None:
        """See `BlockScores`."""
        return self._values

    def num_wanted(self, start: int, num_rows: int, *, is_early: bool = False) -> int:
        """See `BlockScores`."""
        first = self._next_end - self._window - (self._interval // 2 if is_early else 0)
        is_due = self._num_summed > 0 or start >= first
        return min(num_rows, MAX_WINDOW) if is_due else 0

    def learn(self, masses: Masses, end: int) -> None:
        """See `BlockScores`. A window that is not full yet is better than none, or one that is too old."""
        if end - len(masses) != self._end:
            self._forget_window()
        self._sum = _grown(self._sum, masses.shape[1]) + masses.sum(0)
        self._num_summed += len(masses)
        self._end = end
        is_full = self._num_summed >= self._window
        if is_full or end >= self._next_end:
            self._values = _pooled(self._sum / np.float32(self._num_summed))
        if is_full:
            self._next_end = end + self._interval
            self._forget_window()

    def _forget_window(self) -> None:
        self._sum, self._num_summed = np.zeros(0, np.float32), 0


class RunningScores:
    """verified: a running mean that every observed token enters, `DECAY` as strong for each one since."""

    def __init__(self, interval: int) -> None:
        """Look at rounds that end `interval` tokens, or more, after the last one that was looked at."""
        self._interval = interval
        self._end = 0
        self._values: NDArray[np.float32] | None = None

    @property
    def values(self) -> NDArray[np.float32] | None:
        """See `BlockScores`."""
        return self._values

    def num_wanted(self, start: int, num_rows: int, *, is_early: bool = False) -> int:
        """See `BlockScores`."""
        interval = self._interval // 2 if is_early else self._interval
        is_due = self._values is None or start + 1 - self._end >= interval
        return min(num_rows, MAX_WINDOW) if is_due else 0

    def learn(self, masses: Masses, end: int) -> None:
        """See `BlockScores`."""
        weights: NDArray[np.float32] = np.power(DECAY, np.arange(len(masses))[::-1]).astype(np.float32)
        values: NDArray[np.float32] = weights @ masses
        if self._values is not None:
            values = values + np.float32(DECAY ** (end - self._end)) * _grown(self._values, len(values))
        self._values, self._end = values, end


def _grown(values: NDArray[np.float32], num_blocks: int) -> NDArray[np.float32]:
    """`values` with zeros behind them; blocks are never fewer than they were."""
    grown = np.zeros(num_blocks, np.float32)
    grown[: len(values)] = values[:num_blocks]
    return grown


def _pooled(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Half of each value, and a quarter of either neighbour."""
    padded = np.pad(values, 1, mode="edge")
    pooled: NDArray[np.float32] = 0.25 * padded[:-2] + 0.5 * values + 0.25 * padded[2:]
    return pooled
