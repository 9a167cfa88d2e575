"""The arithmetic of the cost of `batch_invariant`, and that the measured ways are what they are called."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.batch_invariance import Plan, decoding, headlines, make_ways, measure, ratios, reading
from benchmarks.report import Paired
from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.attention.sdpa import SdpaAttention
from tests.architectures import save_model


def test_costs_are_ratios_of_rounds() -> None:
    paired = Paired(
        {
            "eager": [1.0, 2.0, 4.0],
            "eager_cpp": [2.0, 2.0, 2.0],
            "eager_invariant": [2.0, 6.0, 8.0],
            "compiled": [0.5, 0.5, 0.5],
            "compiled_invariant": [0.5, 1.0, 0.25],
        }
    )
    found = ratios(paired)
    assert found["eager_cost"].values == (2.0, 3.0, 2.0)
    assert found["eager_cost_same_attention"].values == (1.0, 3.0, 4.0)
    assert found["compiled_cost"].median == 1.0
    cells = [
        {"model": "26m", "dtype": "bfloat16", "work": "b1", **found},
        {"model": "demo", "dtype": "bfloat16", "work": "b8", **found},
    ]
    assert headlines(cells) == {
        "batch_invariant_eager_cost_b1": 2.0,
        "batch_invariant_compiled_cost_b1": 1.0,
    }


def test_ways_are_what_they_are_called(tmp_path: Path) -> None:
    try:
        CpuPagedAttention()
    except NativeUnavailable as error:
        pytest.skip(f"no C++ kernels here: {error}")
    save_model(tmp_path)
    ways = make_ways(tmp_path, "float32")
    assert isinstance(ways["eager"].backend, SdpaAttention)
    for name, runner in ways.items():
        is_compiled = runner.graphs is not None and runner.graphs.is_ready
        assert is_compiled == name.startswith("compiled")
        assert (runner.loaded.invariant is not None) == name.endswith("invariant")
    plan = Plan(subjects=(), rounds=2, steps=1)
    for batch in (decoding(2), reading()):
        cell = measure(ways, batch, plan, lambda: None)
        assert cell["eager_cost"].median > 0
    first = ways["eager"].forward(decoding(8))
    for name, runner in ways.items():
        runner.forward(reading())
        assert torch.isfinite(runner.forward(decoding(8))).all(), name
    assert first.shape[0] == 8
