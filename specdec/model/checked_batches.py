"""The batches on which a native form is compared with the eager one before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specdec.kv.pool import FIRST_BLOCK
from specdec.model.batch import SequenceSlice

_BATCHES = (((0, 7), (0, 3)), ((7, 1), (3, 3)), ((8, 1),))
"""(start, rows) of each sequence: read from the start, mixed, one row."""
LONGEST_CHECKED = max(start + rows for batch in _BATCHES for start, rows in batch)
"""Tokens of the longest of these sequences."""
MOST_CHECKED = max(len(batch) for batch in _BATCHES)
"""Sequences in the largest of these batches."""


def checked_batches(
    *, vocab_size: int, max_model_len: int, num_blocks: int
) -> Iterator[Sequence[SequenceSlice]]:
    """Yield them in order: each finds what those before have written. What is too long is left out.

    Args:
        vocab_size: token ids are below this.
        max_model_len: tokens that a sequence may have.
        num_blocks: of each sequence in the pool, behind the scratch block.
    """
    for batch in _BATCHES:
        if any(start + rows > max_model_len for start, rows in batch):
            return
        yield [
            SequenceSlice(
                token_ids=[(7 * place + index) % vocab_size for place in range(start, start + rows)],
                start=start,
                block_table=range(first := FIRST_BLOCK + index * num_blocks, first + num_blocks),
                num_logit_rows=rows,
            )
            for index, (start, rows) in enumerate(batch)
        ]
