"""Pictures from raw results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import overlap_plots

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "overlap.json"


@pytest.mark.skipif(not RESULTS.exists(), reason="not measured yet")
def test_the_committed_results_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    overlap_plots.main(RESULTS, tmp_path)
    for name in ("overlap-ratios.svg", "overlap-batches.svg"):
        assert "T_draft" in (tmp_path / name).read_text() or "acceptance" in (tmp_path / name).read_text()
    assert json.loads(RESULTS.read_text())["headlines"].keys() == {
        "round_over_max_hit",
        "draft_ahead_vs_lockstep",
        "ping_pong_vs_lockstep_b16",
        "vs_colocated_equal_devices",
        "round_over_max_hit_worst",
        "coordinator_ms_b1",
        "coordinator_ms_b64",
        "coordinator_goodput_ms_b1",
        "coordinator_goodput_ms_b64",
    }
