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
MAX_SPLITS = 256
"""Splits of the longest context: a split is as long as that takes, in a power of two."""


class WorkUnit(NamedTuple):
    """A row of the kernels' work list: all of a sequence that does not change while a step is repeated."""

    sequence: int
    tile: int
    split: int
    first_row: int
    """Of the sequence, in the batch."""
    query_len: int
    first_place: int
    """See `partial_places`; zeros where there are no splits."""
    places_per_row: int
    unused: int = 0
    """A unit is 32 bytes: one access to memory."""


UNIT_SIZE = len(WorkUnit._fields)


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
    """Return the work of these `sequences` (indices into the lists) as int32 [W, 8], `WorkUnit`s.

    Whole splits come first: programs that take units in turns then have about as much to do as each other.

    Args:
        query_lens: rows of each sequence in this step.
        context_lens: cached keys of each sequence, this step's included.
        sequences: which to do.
        ratio: query heads per key/value head; a tile holds `tile_rows` (row, head) pairs.
        tile_rows: see `ratio`.
        split_keys: keys per split; None: all keys at once.
    """
    index_S = np.array(sequences, dtype=np.int32)
    query_lens_B = np.array(query_lens, dtype=np.int32)
    lens_S = query_lens_B[index_S]
    tiles_S = -(-lens_S * ratio // tile_rows)
    splits_S = np.ones_like(tiles_S)
    fields_S = np.zeros((len(index_S), UNIT_SIZE), dtype=np.int32)
    fields_S[:, 0] = index_S
    fields_S[:, 3] = (query_lens_B.cumsum() - query_lens_B)[index_S]
    fields_S[:, 4] = lens_S
    if split_keys is not None:
        contexts_S = np.array(context_lens, dtype=np.int32)[index_S]
        splits_S = -(-contexts_S // split_keys)
        fields_S[:, 5:7] = partial_places(query_lens, context_lens, sequences, split_keys)[index_S]
    counts_S = tiles_S * splits_S
    number_W = np.arange(counts_S.sum(), dtype=np.int32) - np.repeat(counts_S.cumsum() - counts_S, counts_S)
    splits_W = np.repeat(splits_S, counts_S)
    units_W = np.repeat(fields_S, counts_S, axis=0)
    units_W[:, 1] = number_W // splits_W
    units_W[:, 2] = number_W % splits_W
    if split_keys is None:
        return units_W
    is_cut_W = (units_W[:, 2] + 1) * split_keys > np.repeat(contexts_S, counts_S)
    return units_W[np.argsort(is_cut_W, kind="stable")]


def num_partials(query_lens: Sequence[int], context_lens: Sequence[int], split_keys: int) -> int:
    """Return how many partial results (per head) these sequences have in all: rows times splits."""
    return sum(
        query_len * -(-context_len // split_keys)
        for query_len, context_len in zip(query_lens, context_lens, strict=True)
    )


def partial_places(
    query_lens: Sequence[int], context_lens: Sequence[int], sequences: Sequence[int], split_keys: int
) -> NDArray[np.int32]:
    """Return where the partial results of each sequence are, int32 [S, 2]: the first place, places per row.

    Those of `sequences` lie one behind the other; the others have none.
    """
    places_S2 = np.zeros((len(query_lens), 2), dtype=np.int32)
    index = np.array(sequences, dtype=np.int32)
    splits = -(-np.array(context_lens, dtype=np.int32)[index] // split_keys)
    counts = np.array(query_lens, dtype=np.int32)[index] * splits
    places_S2[index, 0] = counts.cumsum() - counts
    places_S2[index, 1] = splits
    return places_S2


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRound:
    """Consecutive sequences whose partial results are in memory together."""

    sequences: tuple[int, ...]
    first_row: int
    num_rows: int
    num_partials: int
    is_split: bool
    """Whether any of them has several splits."""


def split_rounds(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    split_keys: int,
    max_partials: int,
    max_rows: int | None = MAX_SPLIT_ROWS,
) -> Iterator[SplitRound]:
    """Group sequences of at most `max_rows` rows (None: all), with at most `max_partials` partial results.

    A sequence that exceeds it alone is a round of its own.
    """
    members: list[int] = []
    first_row = end_row = partials = row = 0

    def finished() -> SplitRound:
        return SplitRound(
            sequences=tuple(members),
            first_row=first_row,
            num_rows=end_row - first_row,
            num_partials=partials,
            is_split=any(context_lens[member] > split_keys for member in members),
        )

    for sequence, (query_len, context_len) in enumerate(zip(query_lens, context_lens, strict=True)):
        row += query_len
        if max_rows is not None and query_len > max_rows:
            continue
        own = query_len * -(-context_len // split_keys)
        if members and partials + own > max_partials:
            yield finished()
            members, partials = [], 0
        if not members:
            first_row = row - query_len
        members.append(sequence)
        end_row, partials = row, partials + own
    if members:
        yield finished()
