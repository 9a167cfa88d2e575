"""The head node dies. With its state in Redis nobody notices; without, all goes on until the next head."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.network import network, why_not
from tests.cluster.head_loss import NUM_HOSTS, OUTSIDE

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("redis", "verdict"),
    [
        pytest.param("with", "every one right, 0 breaks", id="with-redis"),
        pytest.param("without", "after the new one had come", id="without-redis"),
    ],
)
def test_streams_outlive_the_head(model_folders: tuple[Path, Path], redis: str, verdict: str) -> None:
    reason = why_not()
    if reason is None and redis == "with" and shutil.which("redis-server") is None:
        reason = "needs the command redis-server (Debian: redis-server)"
    if reason is not None:
        pytest.skip(reason)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Short: Ray puts Unix sockets below it, whose paths may have 107 bytes.
    temp = Path(tempfile.mkdtemp(prefix="dhhl", dir="/tmp"))
    try:
        with network(f"dhh{os.getpid()}", NUM_HOSTS) as made:
            script = str(Path(__file__).with_name("head_loss.py"))
            arguments = [made.name, str(temp), *map(str, model_folders), redis]
            done = subprocess.run(
                made.command(OUTSIDE, sys.executable, script, *arguments),
                env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=850,
                check=False,
            )
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    assert verdict in done.stdout
