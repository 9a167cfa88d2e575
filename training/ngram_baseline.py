"""Interpolated modified Kneser-Ney 5-gram over tokens (Chen and Goodman 1999): the baseline to beat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.tokenizer import VOCAB_SIZE

ORDER = 5
_BITS = 12  # ids are below 4096, so five of them fit a uint64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """One order: n-gram keys with discounted counts, and their contexts with total and back-off mass."""

    ngrams: np.ndarray
    """Sorted uint64 keys."""
    discounted: np.ndarray
    """float64, count minus discount, per key."""
    contexts: np.ndarray
    """Sorted uint64 keys of the n-grams' contexts."""
    totals: np.ndarray
    """float64, sum of counts per context."""
    backoff: np.ndarray
    """float64, discount mass per context (not yet divided by the total)."""


def _ngram_keys(stream: np.ndarray, order: int) -> np.ndarray:
    """uint64 [len(stream) - order + 1]; the latest token in the lowest bits."""
    count = len(stream) - order + 1
    keys = np.zeros(count, dtype=np.uint64)
    for offset in range(order):
        keys = (keys << np.uint64(_BITS)) | stream[offset : offset + count].astype(np.uint64)
    return keys


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Discounts for counts 0, 1, 2 and 3 or more (Chen and Goodman, equation 26)."""
    n1, n2, n3, n4 = (float((counts == value).sum()) or 1.0 for value in (1, 2, 3, 4))
    ratio = n1 / (n1 + 2 * n2)
    values = [0.0, 1 - 2 * ratio * n2 / n1, 2 - 3 * ratio * n3 / n2, 3 - 4 * ratio * n4 / n3]
    return np.clip(np.array(values), 0.0, np.array([0.0, 0.999, 1.999, 2.999]))


def _level(ngrams: np.ndarray, counts: np.ndarray) -> _Level:
    discount = _discounts(counts)[np.minimum(counts, 3)]
    contexts, first = np.unique(ngrams >> np.uint64(_BITS), return_index=True)
    return _Level(
        ngrams=ngrams,
        discounted=counts - discount,
        contexts=contexts,
        totals=np.add.reduceat(counts.astype(np.float64), first),
        backoff=np.add.reduceat(discount, first),
    )


def _find(sorted_keys: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index, whether found) of each key."""
    index = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return index, sorted_keys[index] == keys


class KneserNey:
    """The model over one token stream; ``log_probabilities`` scores another."""

    def __init__(self, stream: np.ndarray, order: int = ORDER) -> None:
        self.order = order
        ngrams, counts = np.unique(_ngram_keys(stream, order), return_counts=True)
        levels = [_level(ngrams, counts)]
        for lower in range(order - 1, 0, -1):
            # Continuation counts: in how many distinct left contexts the shorter n-gram occurs.
            suffixes = ngrams & np.uint64((1 << (_BITS * lower)) - 1)
            ngrams, counts = np.unique(suffixes, return_counts=True)
            levels.append(_level(ngrams, counts))
        self._levels = levels[::-1]

    def log_probabilities(self, stream: np.ndarray) -> np.ndarray:
        """float64 [len(stream) - order + 1] in nats: log P of each token but the first order - 1."""
        keys = _ngram_keys(stream, self.order)
        probability = np.full(len(keys), 1.0 / VOCAB_SIZE)
        for length, level in enumerate(self._levels, start=1):
            ngram = keys & np.uint64((1 << (_BITS * length)) - 1)
            context, known = _find(level.contexts, ngram >> np.uint64(_BITS))
            position, seen = _find(level.ngrams, ngram)
            direct = np.where(seen, level.discounted[position], 0.0)
            mixed = (direct + level.backoff[context] * probability) / level.totals[context]
            probability = np.where(known, mixed, probability)
        return np.log(probability)


def join_documents(documents: list[np.ndarray], separator: int, order: int = ORDER) -> np.ndarray:
    """One stream with enough separators between documents that no n-gram spans two texts."""
    gap = np.full(order - 1, separator, dtype=np.uint16)
    return np.concatenate([part for document in documents for part in (gap, document)] + [gap[:1]])
