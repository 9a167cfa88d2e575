"""What the Triton kernels are given to do: sequences cut into tiles of rows and splits of keys.

Every cut is a function of one sequence and of constants of the model, never of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_SPLIT_ROWS = 128
"""Sequences with more rows in a step than that (chunks of a prompt) have work enough without splits."""
MIN_SPLIT_KEYS = 512
MAX_SPLITS = 32
"""Splits of the longest context: a split is as long as that takes, in a power of two."""


class WorkUnit(NamedTuple):
    """A row of the kernels' work list."""

    sequence: int
    tile: int
    split: int


def split_keys_for(max_context: int) -> int:
    """Return the length of a split (keys), a power of two, for a model of this longest context."""
    wanted = max(MIN_SPLIT_KEYS, -(-max_context // MAX_SPLITS))
    return 1 << (wanted - 1).bit_length()


def work_units(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    sequences: Sequence[int],
    *,
    ratio: int,
    tile_rows: int,
    split_keys: int | None,
) -> NDArray[np.int32]:
    """Return the work of these `sequences` (indices into the lists) as int32 [W, 3], `WorkUnit`s.

    Args:
        query_lens: rows of each sequence in this step.
        context_lens: cached keys of each sequence, this step's included.
        sequences: which to do.
        ratio: query heads per key/value head; a tile holds `tile_rows` (row, head) pairs.
        tile_rows: see `ratio`.
        split_keys: keys per split; None: all keys at once.
    """
    index_S = np.array(sequences, dtype=np.int32)
    tiles_S = -(-np.array(query_lens, dtype=np.int32)[index_S] * ratio // tile_rows)
    splits_S = np.ones_like(tiles_S)
    if split_keys is not None:
        splits_S = -(-np.array(context_lens, dtype=np.int32)[index_S] // split_keys)
    counts_S = tiles_S * splits_S
    number_W = np.arange(counts_S.sum(), dtype=np.int32) - np.repeat(counts_S.cumsum() - counts_S, counts_S)
    splits_W = np.repeat(splits_S, counts_S)
    return np.stack([np.repeat(index_S, counts_S), number_W // splits_W, number_W % splits_W], axis=1).astype(
        np.int32
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRound:
    """Consecutive sequences whose partial results are in memory together."""

    sequences: tuple[int, ...]
    first_row: int
    num_rows: int
    num_splits: int
    """Most splits of any of them."""


def split_rounds(
    query_lens: Sequence[int], context_lens: Sequence[int], *, split_keys: int, max_partials: int
) -> Iterator[SplitRound]:
    """Group sequences of at most MAX_SPLIT_ROWS rows so that rows times splits stay within `max_partials`.

    A sequence that exceeds it alone is a round of its own.
    """
    members: list[int] = []
    first_row = end_row = num_splits = row = 0
    for sequence, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        row += query_len
        if query_len > MAX_SPLIT_ROWS:
            continue
        splits = -(-context_len // split_keys)
        if members and (row - first_row) * max(num_splits, splits) > max_partials:
            yield _round(members, first_row, end_row, num_splits)
            members, num_splits = [], 0
        if not members:
            first_row = row - query_len
        members.append(sequence)
        end_row, num_splits = row, max(num_splits, splits)
    if members:
        yield _round(members, first_row, end_row, num_splits)


def _round(members: list[int], first_row: int, end_row: int, num_splits: int) -> SplitRound:
    return SplitRound(
        sequences=tuple(members), first_row=first_row, num_rows=end_row - first_row, num_splits=num_splits
    )


def max_units(num_rows: int, *, ratio: int, tile_rows: int, max_splits: int) -> int:
    """Return the most units that `num_rows` rows can be, however they are shared out over sequences."""
    return num_rows * -(-ratio // tile_rows) * max_splits
