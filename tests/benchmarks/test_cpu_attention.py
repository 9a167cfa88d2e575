"""What is counted of a kernel, and that what is measured is its attention over every key of every layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.cpu_attention import (
    FULL,
    QUICK,
    Batch,
    Cell,
    Layers,
    Machine,
    Mixed,
    costs_of_trees,
    headlines_of,
    kv_bytes_of,
    measure_tree,
    rated,
)
from benchmarks.report import Spread
from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.attention.sdpa import SdpaAttention

MACHINE = Machine(bytes_per_s=1e9, operations_per_s=1e10)


def cell_of(
    heads: str = "gqa", dtype: str = "bf16", batch: int = 2, context: int = 100, rows: int = 1
) -> Cell:
    return Cell(heads=heads, dtype=dtype, batch=batch, context=context, rows=rows)


def mixed_of(drafts_are_a_tree: bool = True, context: int = 100) -> Mixed:
    return Mixed(
        heads="gqa", dtype="fp32", context=context, rows=40, drafts=7, drafts_are_a_tree=drafts_are_a_tree
    )


def measured(cell: Cell, seconds: float) -> dict[str, object]:
    times = {"ours": Spread((seconds,)), "portable": Spread((3 * seconds,))}
    return {"cell": cell, "layer_s": times}


def test_bytes_and_operations_are_those_of_a_layer() -> None:
    cell = cell_of(rows=5)
    assert cell.kv_bytes == 2 * 100 * (2 + 2) * 64 * 2  # sequences, keys, heads of K and of V, lanes, bytes
    assert cell.num_operations == 2 * 5 * 100 * 4 * 64 * (2 + 2)  # q.k and w.v, two operations a lane each
    assert cell_of("mha", "fp32").kv_bytes == 4 * cell.kv_bytes
    assert cell_of("mha", rows=5).num_operations == cell.num_operations


def test_a_bound_is_of_reading_or_of_multiplying() -> None:
    decode, verify = cell_of(), cell_of(rows=50)
    assert MACHINE.bound_s(decode) == pytest.approx(decode.kv_bytes / 1e9)
    assert MACHINE.bound_s(verify) == pytest.approx(verify.num_operations / 1e10)
    one = rated(measured(verify, 2 * MACHINE.bound_s(verify)), MACHINE)
    assert one["share_of_bound"] == pytest.approx(0.5)
    assert one["share_of_product"] == pytest.approx(0.5)
    assert one["share_of_stream"] < 0.5
    assert one["times_faster_than_portable"] == pytest.approx(3.0)


def test_headlines_are_of_the_largest_batch_of_grouped_queries() -> None:
    cells = [
        rated(measured(cell, seconds), MACHINE)
        for cell, seconds in (
            (cell_of(), 1e-3),
            (cell_of(context=1000), 1e-2),
            (cell_of(context=1000, rows=5), 2e-2),
            (cell_of("mha", context=1000), 1.0),
            (cell_of("gqa7", context=1000), 1.0),
            (cell_of("gqa7", context=1000, rows=5), 1.25),
            (cell_of(dtype="fp32", context=1000), 1.0),
        )
    ]
    numbers = headlines_of(cells, {"early": 1.1, "late": 1.0, "alone_at_5": 1.3, "alone_at_6": 1.2})
    assert numbers["cpu_attention_verify_over_decode"] == pytest.approx(2.0)
    assert numbers["cpu_attention_wide_group_verify_over_decode"] == pytest.approx(1.25)
    assert numbers["cpu_attention_tree_over_chain_beside_chunk"] == 1.1
    assert numbers["cpu_attention_tree_over_chain_alone"] == 1.3
    assert numbers["cpu_attention_decode_gb_s_share"] == cells[1]["share_of_stream"]
    assert numbers["cpu_attention_verify_gflop_s_share"] == cells[2]["share_of_product"]


def test_the_plans_hold_what_headlines_want() -> None:
    for plan in (FULL, QUICK):
        assert {one.rows for one in plan.cells if (one.heads, one.dtype) == ("gqa", "bf16")} == {1, 2, 5}
        assert {one.rows for one in plan.cells if one.heads == "gqa7"} == {1, 2, 5}
        assert {one.heads for one in plan.cells} == {"gqa", "mha", "gqa7"}
        assert all(one.drafts_are_a_tree for one in plan.trees)
        assert {one.rows for one in plan.trees} == {0, 512}


def test_heads_of_qwen_are_seven_to_one() -> None:
    cell = cell_of("gqa7", rows=5)
    assert cell.kv_bytes == 2 * 100 * (4 + 4) * 128 * 2
    assert cell.num_operations == 2 * 5 * 100 * 28 * 128 * (2 + 2)


def test_a_tree_beside_a_chunk_is_compared_with_a_chain_there() -> None:
    chunk, drafts = mixed_of().reads
    assert (chunk.rows, chunk.parents) == (40, None)
    assert (drafts.rows, drafts.parents) == (7, (-1, 0, 0, 1, 1, 2, 2))
    assert mixed_of(drafts_are_a_tree=False).reads == [chunk, drafts._replace(parents=None)]
    alone = replace(mixed_of(), rows=0)
    assert alone.reads == [drafts]
    times = [
        {"mixed": tree, "tree_over_chain": Spread(ratios)}
        for tree, ratios in ((mixed_of(), (1.0, 1.5, 9.0)), (alone, (2.0,)))
    ]
    assert costs_of_trees(times) == {"gqa_fp32_beside_40_at_100": 1.5, "gqa_fp32_alone_at_100": 2.0}


def test_a_tree_and_a_chain_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def attend(layers: Layers, _backend: object) -> None:
        calls.append(layers._metadata.is_tree is not None)

    monkeypatch.setattr(Layers, "attend", attend)
    found = measure_tree(replace(mixed_of(), rows=0), SdpaAttention(), 3)
    assert calls[::2] == calls[1::2] == [False, True] * 3, "each after one that is not counted"
    for chain_s, tree_s, ratio in zip(
        *(found[name].values for name in ("chain_s", "tree_s", "tree_over_chain")), strict=True
    ):
        assert ratio == pytest.approx(tree_s / chain_s)


@pytest.mark.parametrize(
    "batch",
    [
        *(cell_of(heads, "fp32", rows=rows) for heads in ("gqa", "mha", "gqa7") for rows in (1, 5)),
        *(mixed_of(is_tree) for is_tree in (False, True)),
        replace(mixed_of(), rows=0),
    ],
    ids=str,
)
def test_both_ways_attend_to_the_same(batch: Batch) -> None:
    layers = Layers(batch, cold_bytes=3 * kv_bytes_of(batch))
    assert layers.num_layers == 3
    try:
        ours = CpuPagedAttention()
    except NativeUnavailable as error:
        pytest.skip(f"the C++ attention cannot be built here: {error}")
    torch.testing.assert_close(layers.attend(ours), layers.attend(SdpaAttention()), rtol=1e-5, atol=1e-5)
