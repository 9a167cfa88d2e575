"""Which batches are about as large as one another."""

from __future__ import annotations

import math

_LARGEST_CHANGE = 1.5
"""A batch whose size has changed by this factor is another one."""


def is_as_large(num_sequences: int, before: int) -> bool:
    """Return whether a batch is about as large as another one."""
    return 1 / _LARGEST_CHANGE < num_sequences / before < _LARGEST_CHANGE


def size_class(num_sequences: int) -> int:
    """Return the closest power of two: batches of one class are alike.

    Limits of a batch are powers of two more often than not. A full batch, which lacks one sequence at one
    moment and none at the next, is far from where one class ends.
    """
    return int(math.log2(num_sequences) + 0.5)
