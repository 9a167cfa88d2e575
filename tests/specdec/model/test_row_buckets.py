"""Which graph a batch gets."""

from __future__ import annotations

import itertools

import hypothesis
from hypothesis import strategies as st

from specdec.model.row_buckets import RowBuckets, sequence_buckets, smallest_holding


@hypothesis.given(st.integers(0, 4096))
def test_sizes_rise_to_the_limit_and_waste_little(max_rows: int) -> None:
    sizes = RowBuckets.up_to(max_rows).sizes
    assert list(sizes) == sorted(set(sizes))
    assert (sizes[-1] if sizes else 0) == max_rows
    assert sizes[:8] == tuple(range(1, min(8, max_rows) + 1))
    for smaller, larger in itertools.pairwise(sizes):
        assert larger - (smaller + 1) < 0.25 * larger
    assert len(sizes) <= 8 + 4 * max(0, max_rows.bit_length() - 3)


@hypothesis.given(st.integers(1, 600), st.integers(1, 700))
def test_a_batch_gets_the_smallest_that_holds_it(max_rows: int, num_rows: int) -> None:
    buckets = RowBuckets.up_to(max_rows)
    expected = next((size for size in buckets.sizes if size >= num_rows), None)
    assert buckets.bucket_for(num_rows) == expected
    assert (expected is None) == (num_rows > max_rows)


def test_none_for_nothing() -> None:
    assert RowBuckets.up_to(0).sizes == ()
    assert smallest_holding((), 1) is None


def test_draft_loops_have_powers_of_two() -> None:
    assert sequence_buckets(1) == (1,)
    assert sequence_buckets(8) == (1, 2, 4, 8)
    assert sequence_buckets(20) == (1, 2, 4, 8, 16, 20)
