"""What the benchmark of attention on a GPU reports, with and without FlashInfer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.gpu_attention import flashinfer, headlines


def cell(batch: int, rows: int, **us: float) -> dict[str, Any]:
    return {"batch": batch, "context": 512, "rows": rows, "us": us, "times_floor": us["ours"] / 4}


def test_flashinfer_is_compared_where_it_ran() -> None:
    cells = [
        cell(1, 1, ours=8.0, torch_sdpa_dense=4.0, flashinfer=10.0),
        cell(8, 1, ours=20.0, torch_sdpa_dense=20.0, flashinfer=16.0),
        cell(8, 5, ours=22.0, torch_sdpa_dense=20.0, flashinfer=20.0),
    ]
    numbers = headlines(cells, 2e12)
    assert numbers["gpu_attention_times_flashinfer_median"] == pytest.approx(1.1)
    assert numbers["gpu_attention_verify_over_decode"] == pytest.approx(1.1)
    assert numbers["gpu_attention_times_floor_long"] == pytest.approx(5.5)
    for each in cells:
        del each["us"]["flashinfer"]
    assert "gpu_attention_times_flashinfer_median" not in headlines(cells, 2e12)


def test_without_it_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert flashinfer(torch.device("cpu")) is None
    (line,) = " ".join(capsys.readouterr().err.splitlines()).split("left out: ")[1:]
    assert line.startswith("attention_backend flashinfer: it runs on CUDA devices")
