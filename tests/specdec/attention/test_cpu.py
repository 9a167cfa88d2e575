"""The C++ paged attention against the portable reference, and what it promises beyond it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from specdec.attention.base import AttentionBackend, LayerAttention
from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.metadata import AttentionMetadata, build_metadata
from specdec.attention.native import NativeUnavailable
from specdec.attention.sdpa import SdpaAttention

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def cpu() -> CpuPagedAttention:
    try:
        return CpuPagedAttention()
    except NativeUnavailable as error:
        pytest.skip(f"the C++ attention cannot be built here: {error}")


@dataclass(frozen=True, kw_only=True)
class Piece:
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
        return build_metadata(self.pieces, block_size=self.block_size)


def make_pieces(
    shapes: Sequence[tuple[int, int]], block_size: int, *, trees: bool, rng: random.Random
) -> tuple[list[Piece], int]:
    """(rows, cached tokens) per sequence -> slices over a shuffled pool, and the pool's size."""
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
    shapes: Sequence[tuple[int, int]],
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
        torch.cat([rows, torch.randn(extra, *rows.shape[1:]).to(rows.dtype)])
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


def check(cpu: CpuPagedAttention, case: Case) -> None:
    expected, expected_keys, expected_values = attend(SdpaAttention(), case)
    output, keys, values = attend(cpu, case)
    tolerance = TOLERANCE[case.query.dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(keys, expected_keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, expected_values, rtol=0, atol=0, equal_nan=True)


DECODE = [(1, 0), (1, 15), (1, 16), (1, 63), (1, 64), (1, 200), (1, 600)]
VERIFY = [(5, 0), (5, 11), (5, 61), (5, 510), (3, 1200), (9, 4)]
MIXED = [(1, 130), (5, 77), (64, 0), (100, 37), (1, 0), (33, 512)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("shapes", [DECODE, VERIFY, MIXED], ids=["decode", "verify", "mixed"])
def test_agrees_with_the_reference(
    cpu: CpuPagedAttention, shapes: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    check(cpu, make_case(shapes, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("head_dim", [8, 16, 24, 40, 80, 96, 128, 256])
def test_any_head_size(cpu: CpuPagedAttention, head_dim: int, dtype: torch.dtype) -> None:
    assert cpu.supports(dtype, head_dim)
    check(cpu, make_case([(1, 70), (4, 9)], head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1), (1, 1), (40, 1)])
def test_any_head_grouping(cpu: CpuPagedAttention, heads: tuple[int, int]) -> None:
    check(cpu, make_case([(1, 70), (6, 9), (17, 30)], heads=heads, head_dim=32))


@pytest.mark.parametrize("block_size", [1, 3, 8, 32, 256])
def test_any_block_size(cpu: CpuPagedAttention, block_size: int) -> None:
    check(cpu, make_case([(1, 70), (6, 9), (17, 130)], block_size=block_size))


@pytest.mark.parametrize("window", [1, 7, 64, 100])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_sliding_windows(cpu: CpuPagedAttention, window: int, trees: bool) -> None:
    check(cpu, make_case([(1, 70), (6, 9), (17, 130), (5, 700), (3, 0)], window=window, trees=trees))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_trees(cpu: CpuPagedAttention, seed: int, dtype: torch.dtype) -> None:
    check(cpu, make_case([(1, 70), (6, 9), (40, 130), (9, 60), (2, 0)], trees=True, seed=seed, dtype=dtype))


def test_softcap(cpu: CpuPagedAttention) -> None:
    check(cpu, make_case([(1, 70), (6, 9)], softcap=3.0))


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_nan_in_a_query_comes_out_whatever_the_context(
    cpu: CpuPagedAttention, num_threads: int, window: int | None
) -> None:
    """A context of several chunks must not turn it into a number: nobody would notice a broken model."""
    case = make_case([(3, 1300), (2, 20)], window=window)
    case.query[1] = case.query[3] = float("nan")
    expected, *_ = attend(SdpaAttention(), case)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        output, *_ = attend(cpu, case)
    finally:
        torch.set_num_threads(before)
    assert output[1].isnan().all()
    torch.testing.assert_close(output, expected, rtol=5e-6, atol=5e-6, equal_nan=True)


def test_a_wrong_mask_would_be_noticed(cpu: CpuPagedAttention) -> None:
    """Negative control of the comparison above."""
    case = make_case([(6, 70)], trees=True)
    output, _, _ = attend(cpu, case)
    chain = make_case([(6, 70)], trees=False)
    wrong, _, _ = attend(cpu, chain)
    assert (output - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_a_row_does_not_depend_on_its_batch_or_on_threads(cpu: CpuPagedAttention, dtype: torch.dtype) -> None:
    """Bitwise: alone, in a batch, and however the work is shared out over threads."""
    case = make_case([(5, 1400), *MIXED, *VERIFY], dtype=dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected, _, _ = attend(cpu, case)
        torch.set_num_threads(3)
        batched, _, _ = attend(cpu, case)
        assert torch.equal(batched, expected)
        alone = Case(
            pieces=case.pieces[:1],
            block_size=case.block_size,
            layer=case.layer,
            query=case.query[:5],
            key=case.key[:5],
            value=case.value[:5],
            keys=case.keys,
            values=case.values,
        )
        output, _, _ = attend(cpu, alone)
        assert torch.equal(output, expected[:5])
        # One row at a time: each finds in the pool what the rows before it wrote.
        for row in range(5):
            piece = Piece(token_ids=[0], start=1400 + row, block_table=case.pieces[0].block_table)
            rows = slice(row, row + 1)
            single = Case(
                pieces=[piece],
                block_size=case.block_size,
                layer=case.layer,
                query=case.query[rows],
                key=case.key[rows],
                value=case.value[rows],
                keys=case.keys,
                values=case.values,
            )
            meta = single.metadata
            output = cpu.attend(
                single.query,
                single.key,
                single.value,
                key_cache=case.keys,
                value_cache=case.values,
                metadata=meta,
                plan=cpu.begin(meta),
                layer=single.layer,
            )
            assert torch.equal(output, expected[rows])
    finally:
        torch.set_num_threads(threads)


def test_padding_changes_nothing(cpu: CpuPagedAttention) -> None:
    case = make_case(VERIFY)
    expected, expected_keys, _ = attend(cpu, case)
    rows = case.query.shape[0]
    padded = case.metadata.padded(num_rows=rows + 7, num_sequences=len(VERIFY) + 3, num_blocks=100)
    output, keys, _ = attend(cpu, case, padded)
    assert torch.equal(output[:rows], expected)
    assert output.isfinite().all()
    torch.testing.assert_close(keys, expected_keys, rtol=0, atol=0, equal_nan=True)


def test_half_precision_is_left_to_the_portable_path(cpu: CpuPagedAttention) -> None:
    assert not cpu.supports(torch.float16, 64)
    assert not cpu.supports(torch.float32, 257)


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found \(CXX=no-such-compiler\)"):
        CpuPagedAttention(tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found \(g\+\+"):
        CpuPagedAttention(tmp_path)
