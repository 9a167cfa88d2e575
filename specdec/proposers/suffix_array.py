"""Where a string occurs in a text that does not change: a suffix array, searched by bisection.

Suffixes are sorted by their first `ORDERED_TOKENS` tokens, which is as far as anything is looked up: a text
that repeats itself takes no longer than any other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

ORDERED_TOKENS = 32
"""Longest string that can be looked up."""

IntArray = npt.NDArray[np.int32]


def sorted_suffixes(token_ids: IntArray) -> IntArray:
    """Return where the suffixes of a text begin, in order of their first `ORDERED_TOKENS` tokens.

    By prefix doubling (Manber and Myers, 1990).
    """
    num_tokens = len(token_ids)
    ranks = np.unique(token_ids, return_inverse=True)[1].astype(np.int64)
    order = np.argsort(ranks, kind="stable")
    width = 1
    while width < ORDERED_TOKENS:
        keys = ranks * (num_tokens + 1)
        keys[: num_tokens - width] += ranks[width:] + 1
        order = np.argsort(keys, kind="stable")
        in_order = keys[order]
        ranks = np.empty(num_tokens, dtype=np.int64)
        ranks[order] = np.concatenate(([0], np.cumsum(in_order[1:] != in_order[:-1])))
        width *= 2
    return order.astype(np.int32)


def occurs(token_ids: IntArray, suffixes: IntArray, string: Sequence[int]) -> bool:
    """Return whether a suffix begins with a string of at most `ORDERED_TOKENS` tokens."""
    beginning = _Beginnings(token_ids, suffixes, len(string))
    first = bisect_left(range(len(suffixes)), list(string), key=beginning)
    return first < len(suffixes) and beginning(first) == list(string)


def occurrences(token_ids: IntArray, suffixes: IntArray, string: Sequence[int]) -> range:
    """Return which of the sorted suffixes begin with a string of at most `ORDERED_TOKENS` tokens."""
    beginning = _Beginnings(token_ids, suffixes, len(string))
    everything, wanted = range(len(suffixes)), list(string)
    first = bisect_left(everything, wanted, key=beginning)
    return range(first, bisect_right(everything, wanted, lo=first, key=beginning))


class _Beginnings:
    """The first tokens of the suffixes in order: what a search compares."""

    __slots__ = ("_length", "_suffixes", "_token_ids")

    def __init__(self, token_ids: IntArray, suffixes: IntArray, length: int) -> None:
        assert length <= ORDERED_TOKENS
        self._token_ids = token_ids
        self._suffixes = suffixes
        self._length = length

    def __call__(self, index: int) -> list[int]:
        start = self._suffixes[index]
        found: list[int] = self._token_ids[start : start + self._length].tolist()
        return found
