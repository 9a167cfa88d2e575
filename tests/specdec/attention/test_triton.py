"""The Triton attention: its kernels under Triton's interpreter on the CPU, and what is decided around them.

On a machine with a GPU the same suite runs compiled, in tests/gpu.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, ClassVar

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from specdec.attention import triton as backend_module
from specdec.attention.base import AttentionBackend
from specdec.attention.triton import TritonPagedAttention, TritonUnavailable
from specdec.attention.triton_work import (
    MAX_SPLIT_ROWS,
    WorkUnit,
    num_partials,
    partial_places,
    split_keys_for,
    split_rounds,
    work_units,
)
from tests.specdec.attention.contract import (
    CPU,
    DTYPES,
    TREE_OPTIONS,
    AttentionContract,
    Shapes,
    attend,
    check_paths,
    make_case,
)
from tests.triton_interpreter import needs_interpreter


@needs_interpreter
# The interpreter's maximum passes over NaN, as that of a GPU does, and numpy says so.
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
class TestInterpretedTriton(AttentionContract):
    """The interpreter needs milliseconds for every operation of a tile, so the batches are small."""

    shapes: ClassVar[dict[str, Shapes]] = {
        "decode": [(1, 0), (1, 15), (1, 16), (1, 64), (1, 600)],
        "verify": [(5, 11), (5, 510), (3, 1100)],
        "mixed": [(1, 130), (5, 0), (MAX_SPLIT_ROWS + 2, 3)],
        "trees": [(6, 9), (3, 63), (1, 20), (9, 510)],
    }
    paths_are_bitwise = False

    @pytest.fixture(autouse=True)
    def _products_row_by_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The interpreter's products are numpy's, which do not treat all rows of a matrix alike."""

        def product(first: Any, second: Any, dtype: Any = None) -> Any:
            return np.einsum("mk,kn->mn", first, second, dtype=dtype)

        monkeypatch.setattr(np, "matmul", product)

    def make_backend(self) -> AttentionBackend:
        return TritonPagedAttention(CPU, max_context=4096)

    def test_half_precision(self, backend: AttentionBackend) -> None:
        self.check(backend, make_case([(1, 70), (4, 9)], dtype=torch.float16))

    def test_long_chunks_in_splits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As `batch_invariant` has it: one kind of tile for all chunks."""
        tiles = []
        tile_of = TritonPagedAttention._tile

        def noted(self: TritonPagedAttention, kind: Any, *, is_split: bool) -> Any:
            tiles.append(is_split)
            return tile_of(self, kind, is_split=is_split)

        monkeypatch.setattr(TritonPagedAttention, "_tile", noted)
        backend = TritonPagedAttention(CPU, max_context=4096, batch_invariant=True)
        self.check(backend, make_case([(MAX_SPLIT_ROWS + 2, 500), (1, 70)]))
        assert tiles
        assert all(tiles)

    @pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
    def test_windows_over_several_splits(self, backend: AttentionBackend, trees: bool) -> None:
        self.check(backend, make_case([(5, 1700), (1, 1100)], window=600, trees=trees))

    @DTYPES
    @pytest.mark.parametrize("options", TREE_OPTIONS.values(), ids=TREE_OPTIONS)
    def test_nodes_in_the_order_of_chains(self, options: dict[str, Any], dtype: torch.dtype) -> None:
        """As `batch_invariant` has it; the chain is computed without a mask."""
        backend = TritonPagedAttention(CPU, max_context=4096, batch_invariant=True)
        case = self.make_case(self.shapes["trees"], trees=True, dtype=dtype, head_dim=16, **options)
        self.check(backend, case)
        check_paths(backend, case)

    def test_chains_beside_trees_keep_their_bits(self) -> None:
        backend = TritonPagedAttention(CPU, max_context=4096, batch_invariant=True)
        case = make_case([(12, 505), (7, 40)], trees=True, head_dim=16)
        chunk, tree = case.pieces
        case = replace(case, pieces=[replace(chunk, parents=None), tree])
        assert torch.equal(attend(backend, case)[0][:12], attend(backend, case.only(0))[0])

    def test_more_heads_than_a_tile_has_rows(self, backend: AttentionBackend) -> None:
        self.check(backend, make_case([(1, 20), (3, 600)], heads=(40, 1), head_dim=16))

    def test_several_rounds_where_memory_is_short(
        self, backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backend_module, "MAX_PARTIAL_BYTES", 4 * 4 * 64 * 8)
        self.check(backend, make_case([(1, 700), (3, 600), (2, 40), (1, 1200)]))

    def test_splits_do_not_follow_the_batch(
        self, backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Negative control: cut anywhere else, the sums come out differently in their last bits."""
        case = make_case([(2, 1400)])
        outputs = []
        for split_keys in (512, 256):
            monkeypatch.setattr(backend, "split_keys", split_keys)
            monkeypatch.setattr(backend, "max_splits", 4096 // split_keys)
            outputs.append(attend(backend, case)[0])
        assert not torch.equal(*outputs)
        torch.testing.assert_close(*outputs, rtol=5e-6, atol=5e-6)


@hypothesis.given(
    lens=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 4000)), min_size=1, max_size=8),
    ratio=st.sampled_from((1, 4, 71)),
    tile_rows=st.sampled_from((16, 64)),
    split_keys=st.sampled_from((None, 512)),
)
def test_work_covers_every_row_and_key_once(
    lens: list[tuple[int, int]], ratio: int, tile_rows: int, split_keys: int | None
) -> None:
    query_lens = [rows for rows, _ in lens]
    context_lens = [rows + start for rows, start in lens]
    units = work_units(
        query_lens, context_lens, range(len(lens)), ratio=ratio, tile_rows=tile_rows, split_keys=split_keys
    )
    assert units.dtype == np.int32
    assert len({tuple(unit) for unit in units.tolist()}) == len(units)
    for number, (rows, start) in enumerate(lens):
        mine = [WorkUnit(*unit) for unit in units.tolist() if unit[0] == number]
        assert {(unit.first_row, unit.query_len) for unit in mine} == {(sum(query_lens[:number]), rows)}
        own = [(unit.tile, unit.split) for unit in mine]
        tiles, splits = {tile for tile, _ in own}, {split for _, split in own}
        assert len(own) == len(tiles) * len(splits)
        assert tiles == set(range(-(-rows * ratio // tile_rows)))
        expected = 1 if split_keys is None else -(-(rows + start) // split_keys)
        assert splits == set(range(expected))
    if split_keys is not None:
        places = partial_places(query_lens, context_lens, range(len(lens)), split_keys)
        assert all(unit[5:7] == places[unit[0]].tolist() for unit in units.tolist())
        lengths = [min(split_keys, context_lens[unit[0]] - unit[2] * split_keys) for unit in units.tolist()]
        num_whole = lengths.count(split_keys)
        assert set(lengths[:num_whole]) <= {split_keys}, "whole splits come first"
        # What static memory is sized by.
        assert len(units) <= num_partials(query_lens, context_lens, split_keys) * -(-ratio // tile_rows)


@hypothesis.given(
    lens=st.lists(st.tuples(st.integers(1, 200), st.integers(0, 4000)), min_size=1, max_size=12),
    max_partials=st.sampled_from((1, 40, 10_000)),
)
def test_rounds_hold_every_split_sequence_once(lens: list[tuple[int, int]], max_partials: int) -> None:
    query_lens = [rows for rows, _ in lens]
    context_lens = [rows + start for rows, start in lens]
    parts = list(split_rounds(query_lens, context_lens, split_keys=512, max_partials=max_partials))
    members = [sequence for part in parts for sequence in part.sequences]
    assert members == [number for number, rows in enumerate(query_lens) if rows <= MAX_SPLIT_ROWS]
    for part in parts:
        first = sum(query_lens[: part.sequences[0]])
        end = sum(query_lens[: part.sequences[-1] + 1])
        assert (part.first_row, part.num_rows) == (first, end - first)
        assert part.is_split == any(context_lens[sequence] > 512 for sequence in part.sequences)
        assert len(part.sequences) == 1 or part.num_partials <= max_partials
        places = partial_places(query_lens, context_lens, part.sequences, 512)
        taken = [
            first + row * per_row + split
            for sequence in part.sequences
            for first, per_row in (places[sequence].tolist(),)
            for row in range(query_lens[sequence])
            for split in range(-(-context_lens[sequence] // 512))
        ]
        assert sorted(taken) == list(range(part.num_partials))


@pytest.mark.parametrize(
    ("max_context", "split_keys"), [(2, 512), (131072, 512), (131073, 1024), (1 << 20, 4096)]
)
def test_splits_are_a_constant_of_the_model(max_context: int, split_keys: int) -> None:
    assert split_keys_for(max_context) == split_keys


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "specdec.attention.triton_kernels", raising=False)
    with pytest.raises(TritonUnavailable, match=r"pip install -e '\.\[cuda\]'"):
        TritonPagedAttention(CPU, max_context=64)


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(TritonUnavailable, match="runs on CUDA devices, not on cpu"):
        TritonPagedAttention(CPU, max_context=64)
