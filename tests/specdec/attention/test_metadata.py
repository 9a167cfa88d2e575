"""The flat description of a batch, against a slow one written from its definition."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from specdec.attention.metadata import build_metadata
from specdec.model.batch import SequenceSlice

BLOCK_SIZES = (1, 3, 4, 16)


@dataclass
class Batch:
    slices: list[SequenceSlice]
    block_size: int


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    slices = []
    for _ in range(draw(st.integers(1, 6))):
        start, count = draw(st.integers(0, 40)), draw(st.integers(1, 9))
        num_blocks = -(-(start + count) // block_size) + draw(st.integers(0, 2))
        parents = None
        if draw(st.booleans()):
            parents = tuple(draw(st.integers(-1, row - 1)) for row in range(count))
        slices.append(
            SequenceSlice(
                token_ids=list(range(count)),
                start=start,
                block_table=draw(st.lists(st.integers(1, 999), min_size=num_blocks, max_size=num_blocks)),
                num_logit_rows=0,
                parents=parents,
            )
        )
    return Batch(slices, block_size)


def ancestors(parents: tuple[int, ...], row: int) -> set[int]:
    found = set()
    while row != -1:
        found.add(row)
        row = parents[row]
    return found


@hypothesis.given(batches())
def test_tensors_follow_their_definition(batch: Batch) -> None:
    metadata = build_metadata(batch.slices, block_size=batch.block_size)
    row = 0
    for index, piece in enumerate(batch.slices):
        count = len(piece.token_ids)
        assert metadata.query_start[index : index + 2].tolist() == [row, row + count]
        context = piece.start + count
        assert metadata.context_lens[index] == context == metadata.context_lens_host[index]
        assert metadata.query_lens_host[index] == count
        used = -(-context // batch.block_size)
        table = metadata.block_tables[index].tolist()
        assert table[:used] == list(piece.block_table[:used])
        assert not any(table[used:])
        chain = tuple(range(-1, count - 1))
        parents = chain if piece.parents is None else tuple(piece.parents)
        for local in range(count):
            seen = ancestors(parents, local)
            block, offset = divmod(piece.start + local, batch.block_size)
            assert metadata.slot_mapping[row] == piece.block_table[block] * batch.block_size + offset
            assert metadata.positions[row] == piece.start + len(seen) - 1
            if metadata.ancestor_mask is not None:
                assert set(metadata.ancestor_mask[row].nonzero().flatten().tolist()) == seen
            row += 1
    assert metadata.num_rows == row
    trees = [piece.parents is not None for piece in batch.slices]
    assert (metadata.ancestor_mask is None) == (not any(trees))
    found = None if metadata.is_tree is None else metadata.is_tree.tolist()
    assert found == (trees if any(trees) else None)
    assert metadata.max_query_len == max(metadata.query_lens_host)
    assert metadata.max_context_len == max(metadata.context_lens_host)


@hypothesis.given(batches())
def test_kernels_may_rely_on_dtypes_and_layout(batch: Batch) -> None:
    metadata = build_metadata(batch.slices, block_size=batch.block_size)
    for tensor, dtype in (
        (metadata.query_start, torch.int32),
        (metadata.context_lens, torch.int32),
        (metadata.block_tables, torch.int32),
        (metadata.slot_mapping, torch.int64),
        (metadata.positions, torch.int64),
    ):
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()


@hypothesis.given(batches(), st.tuples(*[st.integers(0, 5) for _ in range(4)]))
def test_padding_adds_rows_of_nobody_that_write_into_the_scratch_block(
    batch: Batch, extra: tuple[int, int, int, int]
) -> None:
    metadata = build_metadata(batch.slices, block_size=batch.block_size)
    rows, sequences, blocks, width = extra
    old_rows, old_sequences = metadata.num_rows, metadata.num_sequences
    padded = metadata.padded(
        num_rows=old_rows + rows,
        num_sequences=old_sequences + sequences,
        num_blocks=metadata.block_tables.shape[1] + blocks,
        max_query_len=metadata.max_query_len + width,
    )
    assert padded.num_rows == old_rows + rows
    assert padded.num_sequences == old_sequences + sequences
    assert torch.equal(padded.slot_mapping[:old_rows], metadata.slot_mapping)
    assert not padded.slot_mapping[old_rows:].any()
    assert torch.equal(padded.positions[:old_rows], metadata.positions)
    assert padded.query_start.tolist() == metadata.query_start.tolist() + [old_rows] * sequences
    assert padded.context_lens.tolist() == metadata.context_lens.tolist() + [0] * sequences
    assert torch.equal(
        padded.block_tables[:old_sequences, : metadata.block_tables.shape[1]], metadata.block_tables
    )
    assert int(padded.block_tables.sum()) == int(metadata.block_tables.sum())
    if metadata.ancestor_mask is not None:
        assert padded.ancestor_mask is not None
        assert padded.ancestor_mask.shape == (old_rows + rows, metadata.max_query_len + width)
        assert int(padded.ancestor_mask.sum()) == int(metadata.ancestor_mask.sum())
        assert padded.is_tree is not None
        assert metadata.is_tree is not None
        assert padded.is_tree.tolist() == metadata.is_tree.tolist() + [False] * sequences


def test_a_numpy_block_table_gives_the_same_as_a_list() -> None:
    table = [7, 3, 9]
    results = [
        build_metadata(
            [SequenceSlice(token_ids=[1, 2], start=5, block_table=kind, num_logit_rows=1)], block_size=4
        )
        for kind in (table, np.array(table, dtype=np.int32))
    ]
    assert torch.equal(results[0].slot_mapping, results[1].slot_mapping)
    assert results[0].slot_mapping.tolist() == [3 * 4 + 1, 3 * 4 + 2]


def test_a_block_table_that_is_too_short_is_an_error() -> None:
    piece = SequenceSlice(token_ids=[1, 2], start=3, block_table=[5], num_logit_rows=0)
    with pytest.raises(AssertionError, match="block table ends"):
        build_metadata([piece], block_size=4)
