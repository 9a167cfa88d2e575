"""The roofline, and that a round is what the target does: the same code on a CPU with a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.gpu_long_context import (
    _PUBLISHED,
    FULL,
    Machine,
    Plan,
    Roofline,
    Rounds,
    headlines,
    layers_that_fit,
    measure_cell,
    roofline_of,
    shapes_that_fit,
    shorter_models,
    tokens_per_round,
    with_layers,
)
from benchmarks.gpu_models import GIB, random_model
from benchmarks.gpu_models import LLAMA_8B as SHAPE_8B
from specdec.kv.config import CacheConfig
from specdec.model.runner import ModelRunner

TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
H100 = Machine(bytes_per_s=0.8 * 3.35e12, operations_per_s=0.6 * 989e12)
LLAMA_8B = Roofline(
    machine=H100,
    num_weights=7_500_000_000,
    weight_bytes=15_000_000_000,
    kv_bytes=131072,
    attention_width=32 * 32 * 128,
)


@pytest.mark.parametrize(
    ("batch", "context", "expected"),
    [
        (32, 4096, 1.16),
        (128, 4096, 1.41),
        (256, 4096, 1.43),
        (32, 16384, 1.79),
        (128, 16384, 2.35),
        (256, 16384, 2.49),
        (32, 32768, 2.30),
        (128, 32768, 2.94),
        (256, 32768, 3.10),
    ],
)
def test_bounds_are_those_of_an_8b_model_on_an_h100(batch: int, context: int, expected: float) -> None:
    """As computed by others from the data sheet, for a budget of 512 and an acceptance of .8."""
    bound = max(LLAMA_8B.speedup(batch, context, k=k, budget=512, acceptance=0.8) for k in range(1, 13))
    assert bound == pytest.approx(expected, rel=0.04)


def test_speculation_does_not_pay_over_short_contexts() -> None:
    for batch in (32, 256):
        assert max(LLAMA_8B.speedup(batch, 1024, k=k, budget=512, acceptance=0.8) for k in range(1, 13)) < 1


@pytest.fixture
def runner() -> ModelRunner:
    loaded = random_model(TINY, torch.device("cpu"), max_model_len=512, dtype=torch.float32)
    made = ModelRunner(loaded, CacheConfig(block_size=16, num_blocks=80), max_num_seqs=8)
    torch.manual_seed(0)
    for tensor in (*made.pool.keys, *made.pool.values):
        tensor.normal_()
    return made


def test_a_round_drafts_through_the_selected_blocks_and_verifies(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    forward = runner.forward

    def watched(slices: Any, *rest: Any) -> torch.Tensor:
        seen.append((slices[0].start + slices[0].num_dropped, slices[0].start))
        seen.append((len(slices), len(slices[0].token_ids)))
        return forward(slices, *rest)

    rounds = Rounds(runner, 3, 200, 64)
    monkeypatch.setattr(runner, "forward", watched)
    assert rounds.round(3) == 9
    positions, shapes = seen[::2], seen[1::2]
    assert shapes == [(3, 1), (3, 1), (3, 1), (3, 4)]
    assert [position for position, _ in positions] == [200, 201, 202, 200]
    assert all(place < 64 + 2 * 16 + 3 for _, place in positions[:3]), "drafts see their budget"
    assert positions[3] == (200, 200), "verification sees everything"
    seen.clear()
    assert rounds.round(0) == 0
    assert seen == [(200, 200), (3, 1)]


def test_a_cell_is_measured(runner: ModelRunner) -> None:
    plan = Plan(shapes=((2, 96), (4, 200)), lengths=(1, 2), budgets=(64,), repeats=2)
    roofline = roofline_of(runner, 4 * 12_000, H100)
    assert roofline.kv_bytes == 2 * 2 * 2 * 8 * 4
    assert roofline.attention_width == 2 * 32
    with torch.inference_mode():
        cells = [measure_cell(runner, roofline, shape, 64, plan) for shape in plan.shapes]
    for cell in cells:
        k = cell["k"]
        assert cell["speedup"] == pytest.approx(
            tokens_per_round(0.8, k) * cell["ms"]["0"] / cell["ms"][f"{k}"]
        )
        assert cell["share_of_bound"] == pytest.approx(cell["speedup"] / cell["bound"])
    numbers = headlines(cells)
    assert numbers["gpu_long_speedup_largest"] == cells[1]["speedup"]
    assert "gpu_long_over_published" not in numbers


def test_published_figures_are_compared_where_they_were_measured() -> None:
    cell = {"plain_times_roofline": 1.2, "share_of_bound": 0.8, "num_layers": 32}
    cells = [
        {**cell, "batch": batch, "context": context, "budget": budget, "speedup": speedup * budget / 256}
        for (batch, context), speedup in _PUBLISHED.items()
        for budget in (256, 128)
    ]
    assert headlines(cells)["gpu_long_over_published"] == pytest.approx(1.0)


def test_fewer_layers_count_for_published_figures_alone() -> None:
    whole = {"plain_times_roofline": 1.2, "share_of_bound": 0.8, "num_layers": 32, "speedup": 1.5}
    shorter = {
        **whole,
        "share_of_bound": 0.4,
        "num_layers": 14,
        "speedup": 2.44,
        "batch": 32,
        "context": 32768,
    }
    numbers = headlines([{**whole, "batch": 32, "context": 4096}, shorter])
    assert numbers["gpu_long_over_published"] == pytest.approx(2.0)
    assert numbers["gpu_long_over_published_layers"] == 14
    assert numbers["gpu_long_speedup_best"] == 1.5
    assert numbers["gpu_long_share_of_bound"] == 0.8


def test_as_many_layers_as_fit_stand_for_all_of_them() -> None:
    """An H100 and an H200 with what they have free; the first holds too few layers with 64 x 32k."""
    assert layers_that_fit(SHAPE_8B, (32, 32768), 78 * GIB) == 14
    assert layers_that_fit(SHAPE_8B, (32, 4096), 78 * GIB) == 32
    assert layers_that_fit(SHAPE_8B, (32, 4096), 1 * GIB) == 0
    for num_bytes, expected in (
        (78 * GIB, {(32, 32768): 14}),
        (139 * GIB, {(32, 32768): 28, (64, 32768): 14}),
    ):
        models = shorter_models(FULL, SHAPE_8B, [(32, 4096)], num_bytes)
        assert {shape: config.num_hidden_layers for config, shape in models} == expected
        assert all(config.hidden_size == SHAPE_8B.hidden_size for config, _ in models)
    assert shorter_models(FULL, SHAPE_8B, list(_PUBLISHED), 139 * GIB) == []
    assert SHAPE_8B.num_hidden_layers == 32


def test_what_a_layer_takes_is_what_it_has() -> None:
    tiny = [random_model(with_layers(TINY, n), torch.device("cpu"), max_model_len=64) for n in (1, 3)]
    sizes = [sum(parameter.nbytes for parameter in one.model.parameters()) for one in tiny]
    assert [len(one.layers) for one in tiny] == [1, 3]
    weights = (sizes[1] - sizes[0]) // 2
    cached = 2 * 2 * 8 * 2 * (96 + 128)
    fixed = sizes[0] - weights
    for count in (0, 1, 2):
        room = 12 * GIB + fixed + count * (weights + cached)
        assert layers_that_fit(TINY, (1, 96), room + 100) == count
        assert layers_that_fit(TINY, (1, 96), room - 400) == max(0, count - 1)


def test_what_does_not_fit_is_left_out() -> None:
    assert (16, 65536) not in shapes_that_fit(FULL, 600_000)
    assert {(128, 4096), (16, 32768)} < set(shapes_that_fit(FULL, 600_000))
    with pytest.raises(SystemExit, match="no batch fits"):
        shapes_that_fit(FULL, 1000)


def test_the_gpu_script_runs_it() -> None:
    script = Path(__file__).parents[2] / "scripts" / "gpu"
    assert "benchmarks.gpu_long_context --quick" in script.read_text()
