"""Benchmarks that start processes of their own, as one would run them: nothing else starts these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(700)]
_HEADLINES = {
    "overlap": {
        "round_over_max_hit",
        "draft_ahead_vs_lockstep",
        "ping_pong_vs_lockstep_b16",
        "vs_colocated_equal_devices",
        "coordinator_ms_b1",
        "coordinator_ms_b64",
    },
    "never_slower": {"worst_vs_plain", "worst_vs_best_fixed"},
    "simulate": {"sim_controller_vs_best_fixed"},
    "resume": {"resume_256_worst_rounds"},
}
_MOST_S = 600
"""Five minutes are meant; other tests run beside."""


@pytest.mark.parametrize("name", _HEADLINES)
def test_a_quick_run_ends_with_its_headlines(name: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_S, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    said = [line.split() for line in run.stdout.splitlines() if line.startswith("headline: ")]
    values = {what: float(value) for _, what, value in said}
    assert values.keys() >= _HEADLINES[name]
    assert values.keys() == json.loads(file.read_text())["headlines"].keys()
