"""The window of Lookahead decoding: guesses at the next tokens, put right a little in each round.

It covers W positions and has N - 1 levels. Level 0 is a chain of guesses behind the last committed token,
which itself is in its first column. Each level is what the target has said, one round later, to what is now
the level before: so a column is a trajectory of Jacobi iterations, N - 1 tokens, and with what the target
says to them an n-gram that it finds likely.

As rows of a forward the window is a tree: the chain, and behind each of its tokens (the last committed one
too) the rest of its column. That is the mask of the paper: a row sees level 0 up to its column, and the
column.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from specdec.core.rows_beside import RowsBeside

Levels = tuple[tuple[int, ...], ...]
"""Level 0 without its first column, [W - 1], and N - 2 further levels, [W] each."""


def begin(window_size: int, ngram_size: int, guesses: Sequence[int]) -> Levels:
    """Return a window of first guesses: W - 1 + (N - 2) * W of them, level by level."""
    ends = [window_size - 1 + level * window_size for level in range(ngram_size - 1)]
    assert len(guesses) == ends[-1]
    return tuple(tuple(guesses[start:end]) for start, end in zip((0, *ends), ends, strict=False))


def rows_of(levels: Levels) -> RowsBeside:
    """Return the window as rows of the target's forward; the last level is answered."""
    window_size = len(levels[-1])
    token_ids = tuple(token_id for level in levels for token_id in level)
    return RowsBeside(token_ids, _parents(window_size, len(levels)), window_size)


@lru_cache(maxsize=64)
def _parents(window_size: int, num_levels: int) -> tuple[int, ...]:
    chain = range(-1, window_size - 2)
    second = range(-1, window_size - 1)
    further = range(window_size - 1, window_size - 1 + (num_levels - 2) * window_size)
    return (*chain, *second, *further)


def ngrams_of(levels: Levels, last_token: int, answers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the n-gram of each column, given the last committed token and what the target says."""
    first = (last_token, *levels[0])
    return list(zip(first, *levels[1:], answers, strict=True))


def advanced(levels: Levels, answers: Sequence[int]) -> Levels:
    """Return the window for the next round: levels move up by one, and the answers become the last."""
    return (levels[1][1:], *levels[2:], tuple(answers))
