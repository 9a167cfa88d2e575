"""Machines that do not see each other, or are gone: streams go on, with the tokens they would have had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.network import network, why_not
from tests.cluster.partition import HEAD, NUM_HOSTS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "scenarios",
    [
        pytest.param(("drafts_are_cut_off", "a_target_node_is_cut_off"), id="healed"),
        pytest.param(("the_draft_node_is_given_up", "a_target_node_loses_power"), id="lost"),
    ],
)
def test_streams_outlive_the_network(model_folders: tuple[Path, Path], scenarios: tuple[str, ...]) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Short: Ray puts Unix sockets below it, whose paths may have 107 bytes.
    temp = Path(tempfile.mkdtemp(prefix="dhnp", dir="/tmp"))
    try:
        with network(f"dh{os.getpid()}", NUM_HOSTS) as made:
            script = str(Path(__file__).with_name("partition.py"))
            arguments = [made.name, str(temp), *map(str, model_folders), *scenarios]
            done = subprocess.run(
                made.command(HEAD, sys.executable, script, *arguments),
                env={**environment, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
                timeout=1100,
                check=False,
            )
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    assert "every one right" in done.stdout
    assert all(f"{scenario}: " in done.stdout for scenario in scenarios)
