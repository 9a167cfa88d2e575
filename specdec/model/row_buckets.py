"""Which batch sizes get a CUDA graph of their own. Bookkeeping only: no torch.

A graph is recorded for a number of rows. Decoding B sequences, verifying k drafts of B / (k + 1) of them, and
everything between are the same graph: it has room for as many sequences as rows, and which row belongs to
whom is data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_EVERY_SIZE_UP_TO = 8
_STEPS_PER_DOUBLING = 4


@dataclass(frozen=True, slots=True)
class RowBuckets:
    """Numbers of rows, rising: every one up to 8, then four to each doubling (padding is at most a fifth)."""

    sizes: tuple[int, ...]

    @classmethod
    def up_to(cls, max_rows: int) -> RowBuckets:
        """Return the buckets below `max_rows`, and `max_rows` itself; none for 0."""
        sizes = list(range(1, min(_EVERY_SIZE_UP_TO, max_rows) + 1))
        step = _EVERY_SIZE_UP_TO // _STEPS_PER_DOUBLING
        while sizes and sizes[-1] < max_rows:
            sizes.append(min(sizes[-1] + step, max_rows))
            if sizes[-1] >= 2 * _STEPS_PER_DOUBLING * step:
                step *= 2
        return cls(tuple(sizes))

    def bucket_for(self, num_rows: int) -> int | None:
        """Return the smallest bucket that holds `num_rows` rows; None when none does."""
        return smallest_holding(self.sizes, num_rows)


def smallest_holding(rising: Sequence[int], number: int) -> int | None:
    """Return the first of `rising` that is not below `number`."""
    at = bisect_left(rising, number)
    return rising[at] if at < len(rising) else None


def sequence_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return batch sizes for draft loops: powers of two, and `max_num_seqs` itself."""
    sizes: list[int] = []
    size = 1
    while size < max_num_seqs:
        sizes.append(size)
        size *= 2
    return (*sizes, max_num_seqs)
