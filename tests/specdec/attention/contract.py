"""What every attention backend promises, as a test suite: subclass `AttentionContract`, say how to make one.

Answers are compared with those of the portable reference, which runs on the CPU.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from specdec.attention.base import AttentionBackend, LayerAttention
from specdec.attention.metadata import AttentionMetadata, build_metadata
from specdec.attention.sdpa import SdpaAttention
from specdec.kv.packed_rows import pack_rows

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 5e-3}
CPU = torch.device("cpu")

Shapes = list[tuple[int, int]]
"""(rows, cached tokens) of each sequence."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One sequence's slice."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    parents: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """One flat batch with its pools, inputs and layer."""

    pieces: list[Piece]
    block_size: int
    layer: LayerAttention
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def metadata(self) -> AttentionMetadata:
        return build_metadata(self.pieces, block_size=self.block_size, device=self.query.device)

    def only(self, number: int) -> Case:
        """The same pools, and of the batch one sequence."""
        first = sum(len(piece.token_ids) for piece in self.pieces[:number])
        rows = slice(first, first + len(self.pieces[number].token_ids))
        return self._cut([self.pieces[number]], rows)

    def only_row(self, row: int) -> Case:
        """Of a lone sequence, one row: what came before it is cached."""
        (piece,) = self.pieces
        cut = Piece(token_ids=[0], start=piece.start + row, block_table=piece.block_table)
        return self._cut([cut], slice(row, row + 1))

    def only_path(self, number: int, row: int) -> tuple[Case, int]:
        """Of a sequence's tree, the path to a row as a chain, and where in the batch the row is."""
        first, piece = sum(len(piece.token_ids) for piece in self.pieces[:number]), self.pieces[number]
        path = [row]
        while piece.parents is not None and (parent := piece.parents[path[0]]) >= 0:
            path.insert(0, parent)
        chain = Piece(token_ids=[0] * len(path), start=piece.start, block_table=piece.block_table)
        return self._cut([chain], [first + node for node in path]), first + row

    def _cut(self, pieces: list[Piece], rows: slice | list[int]) -> Case:
        return replace(
            self, pieces=pieces, query=self.query[rows], key=self.key[rows], value=self.value[rows]
        )

    def packed(self) -> Case:
        """The same with pools in 8 bits."""
        return replace(self, keys=pack_rows(self.keys), values=pack_rows(self.values))

    def on(self, device: torch.device) -> Case:
        """A copy with its tensors there."""
        moved = {name: getattr(self, name).to(device) for name in ("query", "key", "value", "keys", "values")}
        return replace(self, **moved)


def make_pieces(
    shapes: Shapes, block_size: int, *, trees: bool, rng: random.Random
) -> tuple[list[Piece], int]:
    """Slices over a shuffled pool, and the pool's size."""
    needed = [-(-(start + rows) // block_size) for rows, start in shapes]
    free = list(range(1, sum(needed) + 3))
    rng.shuffle(free)
    pieces = []
    for (rows, start), count in zip(shapes, needed, strict=True):
        table = [free.pop() for _ in range(count)]
        parents = [rng.randrange(-1, index) for index in range(rows)] if trees and rows > 1 else None
        pieces.append(Piece(token_ids=[0] * rows, start=start, block_table=table, parents=parents))
    return pieces, sum(needed) + 3


def make_case(
    shapes: Shapes,
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    trees: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    seed: int = 0,
) -> Case:
    pieces, num_blocks = make_pieces(shapes, block_size, trees=trees, rng=random.Random(seed))
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num_rows, (num_heads, num_kv_heads) = sum(rows for rows, _ in shapes), heads
    pools = [normal(num_blocks, num_kv_heads, block_size, head_dim) for _ in range(2)]
    # What lies past a context may be anything.
    for pool in pools:
        for piece in pieces:
            used = (piece.start + len(piece.token_ids)) % block_size
            if used:
                pool[piece.block_table[-1], :, used:] = float("nan")
    return Case(
        pieces=pieces,
        block_size=block_size,
        layer=LayerAttention(
            layer_idx=0,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scaling=head_dim**-0.5,
            sliding_window=window,
            softcap=softcap,
        ),
        # As models hand them over: heads and rows transposed.
        query=normal(num_rows, num_heads, head_dim),
        key=normal(num_kv_heads, num_rows, head_dim).transpose(0, 1),
        value=normal(num_rows, num_kv_heads, head_dim),
        keys=pools[0],
        values=pools[1],
    )


def attend(
    backend: AttentionBackend, case: Case, metadata: AttentionMetadata | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, and the pools afterwards (block 0 left out)."""
    metadata = case.metadata if metadata is None else metadata
    keys, values = case.keys.clone(), case.values.clone()
    extra = metadata.num_rows - case.query.shape[0]
    query, key, value = (
        torch.cat([rows, torch.randn(extra, *rows.shape[1:]).to(rows)])
        for rows in (case.query, case.key, case.value)
    )
    output = backend.attend(
        query,
        key,
        value,
        key_cache=keys,
        value_cache=values,
        metadata=metadata,
        plan=backend.begin(metadata),
        layer=case.layer,
    )
    return output, keys[1:], values[1:]


def check(
    backend: AttentionBackend,
    case: Case,
    device: torch.device = CPU,
    tolerances: Mapping[torch.dtype, float] = TOLERANCE,
) -> None:
    expected = attend(SdpaAttention(), case)
    output, keys, values = (tensor.cpu() for tensor in attend(backend, case.on(device)))
    tolerance = tolerances[case.query.dtype]
    torch.testing.assert_close(output, expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(keys, expected[1], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, expected[2], rtol=0, atol=0, equal_nan=True)


def check_paths(backend: AttentionBackend, case: Case) -> None:
    """Nodes of trees come out, to the last bit, as at the ends of chains of what they see."""
    output, *_ = attend(backend, case)
    for number, piece in enumerate(case.pieces):
        last = len(piece.token_ids) - 1
        for row in sorted({0, last // 3, last // 2, max(0, last - 1), last}):
            chain, place = case.only_path(number, row)
            expected = attend(backend, chain)[0][-1]
            assert torch.equal(output[place], expected)


TREE_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "wide_window": {"window": 600},
    "softcap": {"softcap": 3.0},
    "one_kv_head": {"heads": (16, 1)},
    "small_blocks": {"block_size": 3},
}
"""Layers in which nodes of trees are looked at."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


class AttentionContract(ABC):
    """The suite."""

    device: ClassVar[torch.device] = CPU
    shapes: ClassVar[dict[str, Shapes]] = {
        "decode": [(1, 0), (1, 15), (1, 16), (1, 63), (1, 64), (1, 200), (1, 600)],
        "verify": [(5, 0), (5, 11), (5, 61), (5, 510), (3, 1200), (9, 4)],
        "mixed": [(1, 130), (5, 77), (64, 0), (100, 37), (1, 0), (33, 512)],
        "trees": [(6, 9), (3, 63), (40, 130), (1, 20), (9, 510), (70, 1000), (5, 64)],
    }

    tolerance: ClassVar[Mapping[torch.dtype, float]] = TOLERANCE
    finest: ClassVar[torch.dtype] = torch.float32
    """Numbers of the tests that are not about dtypes; fp32 is left out where this is another."""
    head_dims: ClassVar[Collection[int] | None] = None
    """Head sizes that it runs; None: all."""
    small_head: ClassVar[int] = 32
    """Head size of tests that are about something else."""
    rows_are_bitwise: ClassVar[bool] = True
    """Whether a row comes out the same, to the last bit, among more rows of its sequence."""
    company_is_bitwise: ClassVar[bool] = True
    """Whether a sequence comes out the same, to the last bit, among others."""
    paths_are_bitwise: ClassVar[bool] = True
    """Whether a node of a tree comes out the same, to the last bit, as at the end of a chain."""
    packed: ClassVar[bool] = False
    """Whether pools are packed; those of the reference are too."""

    @abstractmethod
    def make_backend(self) -> AttentionBackend:
        """One for `device` and sequences of up to 4096 tokens; skips the test where there is none."""

    @pytest.fixture
    def backend(self) -> AttentionBackend:
        return self.make_backend()

    def make_case(self, shapes: Shapes, *, dtype: torch.dtype | None = None, **options: Any) -> Case:
        """The module's, in numbers that the backend runs."""
        if dtype == torch.float32 != self.finest:
            pytest.skip("the backend does not run fp32")
        case = make_case(shapes, dtype=self.finest if dtype is None else dtype, **options)
        return case.packed() if self.packed else case

    def check(self, backend: AttentionBackend, case: Case) -> None:
        check(backend, case, self.device, self.tolerance)

    @DTYPES
    @pytest.mark.parametrize("kind", ["decode", "verify", "mixed"])
    def test_agrees_with_the_reference(
        self, backend: AttentionBackend, kind: str, dtype: torch.dtype
    ) -> None:
        self.check(backend, self.make_case(self.shapes[kind], dtype=dtype))

    @DTYPES
    @pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 64, 80, 96, 128, 256])
    def test_any_head_size(self, backend: AttentionBackend, head_dim: int, dtype: torch.dtype) -> None:
        if self.head_dims is not None and head_dim not in self.head_dims:
            pytest.skip(f"the backend does not run heads of {head_dim}")
        self.check(backend, self.make_case([(1, 70), (4, 9)], head_dim=head_dim, dtype=dtype))

    @pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (1, 1), (40, 1)])
    def test_any_head_grouping(self, backend: AttentionBackend, heads: tuple[int, int]) -> None:
        self.check(
            backend, self.make_case([(1, 70), (6, 9), (17, 30)], heads=heads, head_dim=self.small_head)
        )

    @DTYPES
    @pytest.mark.parametrize("block_size", [1, 3, 8, 32, 256])
    def test_any_block_size(self, backend: AttentionBackend, block_size: int, dtype: torch.dtype) -> None:
        self.check(backend, self.make_case([(1, 70), (6, 9), (17, 130)], block_size=block_size, dtype=dtype))

    @DTYPES
    @pytest.mark.parametrize("window", [1, 7, 64, 100])
    @pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
    def test_sliding_windows(
        self, backend: AttentionBackend, window: int, trees: bool, dtype: torch.dtype
    ) -> None:
        shapes = [(1, 70), (6, 9), (17, 130), (5, 700), (3, 0)]
        self.check(backend, self.make_case(shapes, window=window, trees=trees, dtype=dtype))

    @DTYPES
    @pytest.mark.parametrize("seed", range(4))
    def test_trees(self, backend: AttentionBackend, seed: int, dtype: torch.dtype) -> None:
        shapes = [(1, 70), (6, 9), (40, 130), (9, 60), (2, 0)]
        self.check(backend, self.make_case(shapes, trees=True, seed=seed, dtype=dtype))

    @DTYPES
    def test_softcap(self, backend: AttentionBackend, dtype: torch.dtype) -> None:
        self.check(backend, self.make_case([(1, 70), (6, 9)], softcap=3.0, dtype=dtype))

    @pytest.mark.parametrize("window", [None, 600])
    def test_nan_in_a_query_comes_out_whatever_the_context(
        self, backend: AttentionBackend, window: int | None
    ) -> None:
        """A context of several parts must not turn it into a number: nobody would notice a broken model."""
        case = self.make_case([(3, 1300), (2, 20)], window=window)
        case.query[1] = case.query[3] = float("nan")
        expected, *_ = attend(SdpaAttention(), case)
        output = attend(backend, case.on(self.device))[0].cpu()
        assert output[1].isnan().all()
        tolerance = self.tolerance[self.finest]
        torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance, equal_nan=True)

    def test_a_wrong_mask_would_be_noticed(self, backend: AttentionBackend) -> None:
        """Negative control of the comparisons above."""
        tree = self.make_case([(6, 70)], trees=True).on(self.device)
        chain = self.make_case([(6, 70)], trees=False).on(self.device)
        assert (attend(backend, tree)[0] - attend(backend, chain)[0]).abs().max() > 1e-2

    @DTYPES
    def test_a_row_does_not_depend_on_its_company(
        self, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        """In a batch, alone, and row by row, each finding in the pool what was written before: bitwise."""
        shapes = [(5, 1400), *self.shapes["mixed"], (4, 509)]
        case = self.make_case(shapes, dtype=dtype).on(self.device)
        output, keys, values = attend(backend, case)
        first = 0
        for number in (0, len(shapes) - 1):
            alone = case.only(number)
            num_rows = alone.query.shape[0]
            expected = output[first : first + num_rows]
            tolerance = 0.0 if self.company_is_bitwise else self.tolerance[dtype]
            torch.testing.assert_close(attend(backend, alone)[0], expected, rtol=tolerance, atol=tolerance)
            pools = [
                torch.cat([pool[:1], after]) for pool, after in ((case.keys, keys), (case.values, values))
            ]
            written = replace(alone, keys=pools[0], values=pools[1])
            for row in range(num_rows):
                single = attend(backend, written.only_row(row))[0]
                tolerance = 0.0 if self.rows_are_bitwise else self.tolerance[dtype]
                torch.testing.assert_close(single, expected[row : row + 1], rtol=tolerance, atol=tolerance)
            first = output.shape[0] - shapes[-1][0]

    @DTYPES
    @pytest.mark.parametrize("options", TREE_OPTIONS.values(), ids=TREE_OPTIONS)
    def test_a_node_comes_out_as_at_the_end_of_a_chain(
        self, backend: AttentionBackend, options: dict[str, Any], dtype: torch.dtype
    ) -> None:
        """Bitwise, whatever lies between the nodes of its path."""
        if not self.paths_are_bitwise:
            pytest.skip("the backend takes the nodes of trees as they lie")
        shapes = self.shapes["trees"]
        case = self.make_case(shapes, trees=True, dtype=dtype, head_dim=self.small_head, **options)
        check_paths(backend, case.on(self.device))

    @pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
    def test_padding_changes_nothing(self, backend: AttentionBackend, trees: bool) -> None:
        shapes = self.shapes["verify"]
        case = self.make_case(shapes, trees=trees).on(self.device)
        expected, expected_keys, _ = attend(backend, case)
        rows = case.query.shape[0]
        padded = case.metadata.padded(num_rows=rows + 7, num_sequences=len(shapes) + 3, num_blocks=100)
        output, keys, _ = attend(backend, case, padded)
        assert torch.equal(output[:rows], expected)
        assert output.isfinite().all()
        torch.testing.assert_close(keys, expected_keys, rtol=0, atol=0, equal_nan=True)
