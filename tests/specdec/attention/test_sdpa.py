"""The portable paged attention against dense attention, one row at a time, in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from specdec.attention.base import LayerAttention
from specdec.attention.metadata import AttentionMetadata, build_metadata
from specdec.attention.sdpa import SdpaAttention
from specdec.kv.packed_rows import pack_rows, unpack_rows
from specdec.model.batch import SequenceSlice

NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM = 96, 4, 8


@dataclass
class Case:
    slices: list[SequenceSlice]
    layer: LayerAttention
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    seed = draw(st.integers(0, 2**16))
    free = list(range(1, NUM_BLOCKS))
    random.Random(seed).shuffle(free)
    slices = []
    for _ in range(draw(st.integers(1, 7))):
        start, count = draw(st.integers(0, 30)), draw(st.sampled_from((1, 1, 1, 3, 5)))
        num_blocks = -(-(start + count) // BLOCK_SIZE)
        parents = None
        if draw(st.booleans()):
            parents = tuple(draw(st.integers(-1, row - 1)) for row in range(count))
        table, free = free[:num_blocks], free[num_blocks:]
        slices.append(
            SequenceSlice(
                token_ids=[0] * count, start=start, block_table=table, num_logit_rows=0, parents=parents
            )
        )
    heads, kv_heads = draw(st.sampled_from(((4, 4), (4, 2), (6, 1))))
    layer = LayerAttention(
        layer_idx=0,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        scaling=0.3,
        sliding_window=draw(st.sampled_from((None, 1, 6, 100))),
        softcap=draw(st.sampled_from((None, 2.0))),
    )
    return Case(slices, layer, seed)


@dataclass
class Tensors:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor


def make_tensors(case: Case, num_rows: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(case.seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    kv_heads = case.layer.num_kv_heads
    return Tensors(
        query=draw(num_rows, case.layer.num_heads, HEAD_DIM),
        key=draw(num_rows, kv_heads, HEAD_DIM),
        value=draw(num_rows, kv_heads, HEAD_DIM),
        key_cache=draw(NUM_BLOCKS, kv_heads, BLOCK_SIZE, HEAD_DIM),
        value_cache=draw(NUM_BLOCKS, kv_heads, BLOCK_SIZE, HEAD_DIM),
    )


def attend(case: Case, metadata: AttentionMetadata, tensors: Tensors) -> torch.Tensor:
    backend = SdpaAttention()
    return backend.attend(
        tensors.query,
        tensors.key,
        tensors.value,
        key_cache=tensors.key_cache,
        value_cache=tensors.value_cache,
        metadata=metadata,
        plan=backend.begin(metadata),
        layer=case.layer,
    )


def dense(case: Case, tensors: Tensors) -> torch.Tensor:
    """What every row should get, from the K/V that this step wrote and those that were there."""
    layer, rows = case.layer, []
    ratio = layer.num_heads // layer.num_kv_heads
    first = 0
    for piece in case.slices:
        count = len(piece.token_ids)
        context = piece.start + count
        blocks = list(piece.block_table)
        keys, values = (
            cache[blocks].transpose(0, 1).reshape(layer.num_kv_heads, -1, HEAD_DIM)[:, :context].clone()
            for cache in (tensors.key_cache, tensors.value_cache)
        )
        keys[:, piece.start :] = tensors.key[first : first + count].transpose(0, 1)
        values[:, piece.start :] = tensors.value[first : first + count].transpose(0, 1)
        parents = tuple(range(-1, count - 1)) if piece.parents is None else piece.parents
        paths: list[list[int]] = []
        for row, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), row])
        for row, path in enumerate(paths):
            seen = [*range(piece.start), *(piece.start + index for index in path)]
            if layer.sliding_window is not None:
                seen = seen[-layer.sliding_window :]
            query = tensors.query[first + row].double().view(layer.num_kv_heads, ratio, HEAD_DIM)
            scores = query @ keys[:, seen].double().transpose(1, 2) * layer.scaling
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            rows.append((scores.softmax(-1) @ values[:, seen].double()).reshape(layer.num_heads, HEAD_DIM))
        first += count
    return torch.stack(rows)


@hypothesis.given(cases())
def test_equals_dense_attention(case: Case) -> None:
    metadata = build_metadata(case.slices, block_size=BLOCK_SIZE)
    tensors = make_tensors(case, metadata.num_rows)
    expected = dense(case, tensors)
    torch.testing.assert_close(attend(case, metadata, tensors).double(), expected, rtol=1e-4, atol=1e-5)


@hypothesis.settings(max_examples=25, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(case=cases(), max_keys=st.sampled_from((1, 40)), max_scores=st.sampled_from((1, 300)))
def test_taking_large_batches_in_turns_changes_nothing(
    case: Case, max_keys: int, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = build_metadata(case.slices, block_size=BLOCK_SIZE)
    tensors = make_tensors(case, metadata.num_rows)
    expected = dense(case, tensors)
    with monkeypatch.context() as patch:
        patch.setattr("specdec.attention.sdpa._MAX_GATHERED_KEYS", max_keys)
        patch.setattr("specdec.attention.sdpa._MAX_SCORES", max_scores)
        got = attend(case, metadata, tensors)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@hypothesis.settings(max_examples=25)
@hypothesis.given(cases())
def test_writes_this_step_and_nothing_else(case: Case) -> None:
    metadata = build_metadata(case.slices, block_size=BLOCK_SIZE)
    tensors = make_tensors(case, metadata.num_rows)
    before = tensors.key_cache.clone(), tensors.value_cache.clone()
    attend(case, metadata, tensors)
    for cache, old, new in zip(
        (tensors.key_cache, tensors.value_cache), before, (tensors.key, tensors.value), strict=True
    ):
        by_slot, old_by_slot = (c.transpose(1, 2).reshape(-1, *new.shape[1:]) for c in (cache, old))
        assert torch.equal(by_slot[metadata.slot_mapping], new)
        old_by_slot[metadata.slot_mapping] = new
        assert torch.equal(by_slot, old_by_slot)


@hypothesis.settings(max_examples=25)
@hypothesis.given(cases())
def test_padding_changes_nothing(case: Case) -> None:
    metadata = build_metadata(case.slices, block_size=BLOCK_SIZE)
    num_rows = metadata.num_rows
    tensors = make_tensors(case, num_rows + 3)
    padded = metadata.padded(
        num_rows=num_rows + 3, num_sequences=metadata.num_sequences + 2, num_blocks=20, max_query_len=9
    )
    lean = replace(
        tensors, query=tensors.query[:num_rows], key=tensors.key[:num_rows], value=tensors.value[:num_rows]
    )
    expected = dense(case, lean)
    got = attend(case, padded, tensors)
    torch.testing.assert_close(got[:num_rows].double(), expected, rtol=1e-4, atol=1e-5)
    assert got.isfinite().all()


@hypothesis.settings(max_examples=25)
@hypothesis.given(cases())
def test_foreign_garbage_never_shows(case: Case) -> None:
    """NaN left behind in free blocks, the scratch block and the unused tail of a sequence's last one."""
    metadata = build_metadata(case.slices, block_size=BLOCK_SIZE)
    tensors = make_tensors(case, metadata.num_rows)
    expected = dense(case, tensors)
    valid = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    for piece in case.slices:
        index = torch.arange(piece.start)
        valid[torch.tensor(piece.block_table)[index // BLOCK_SIZE], index % BLOCK_SIZE] = True
    for cache in (tensors.key_cache, tensors.value_cache):
        cache.transpose(1, 2)[~valid] = float("nan")
    torch.testing.assert_close(attend(case, metadata, tensors).double(), expected, rtol=1e-4, atol=1e-5)


@hypothesis.settings(max_examples=25)
@hypothesis.given(cases())
def test_packed_caches_are_read_as_what_they_stand_for(case: Case) -> None:
    """K and V of the step's own rows too."""
    metadata = build_metadata(case.slices, block_size=BLOCK_SIZE)
    tensors = make_tensors(case, metadata.num_rows)

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        return unpack_rows(pack_rows(rows), rows.dtype)

    names = ("key", "value", "key_cache", "value_cache")
    expected = dense(case, replace(tensors, **{name: rounded(getattr(tensors, name)) for name in names}))
    tensors.key_cache, tensors.value_cache = pack_rows(tensors.key_cache), pack_rows(tensors.value_cache)
    got = attend(case, metadata, tensors)
    assert got.dtype == tensors.query.dtype
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_an_fp32_softmax(dtype: torch.dtype) -> None:
    slices = [SequenceSlice(token_ids=[0] * 3, start=60, block_table=range(1, 17), num_logit_rows=0)]
    layer = LayerAttention(layer_idx=0, num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, scaling=1.0)
    case = Case(slices, layer, seed=1)
    tensors = make_tensors(case, 3, dtype)
    expected = dense(case, tensors)
    got = attend(case, build_metadata(slices, block_size=BLOCK_SIZE), tensors)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("factor", [40.0, 400.0])
def test_products_of_float16_may_be_larger_than_its_numbers(factor: float) -> None:
    """8 * 400 * 400 is about 20 times the largest one; scaled, it is an ordinary score."""
    slices = [SequenceSlice(token_ids=[0] * 3, start=60, block_table=range(1, 17), num_logit_rows=0)]
    layer = LayerAttention(layer_idx=0, num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM, scaling=factor**-2)
    case = Case(slices, layer, seed=1)
    tensors = make_tensors(case, 3, torch.float16)
    for one in (tensors.query, tensors.key, tensors.key_cache):
        one.mul_(factor)
    expected = dense(case, tensors)
    got = attend(case, build_metadata(slices, block_size=BLOCK_SIZE), tensors)
    torch.testing.assert_close(got.double(), expected, rtol=0.01, atol=0.01)
