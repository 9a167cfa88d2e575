"""What Serve's proxies do on a Ray cluster that somebody else has started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("foreign_ray.py")


def started(told: str) -> tuple[list[str], int]:
    """Return what the controller's environment lacks, and how the proxy answers to too many headers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Short: Ray puts Unix sockets below it, whose paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        result = subprocess.run(
            [sys.executable, str(SCRIPT), str(free_port()), told],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("{"))  # Ray has some of its own
    told_by_it = json.loads(line)
    return told_by_it["missing"], told_by_it["status"]


def test_serve_and_its_proxies_have_what_the_command_gives_them() -> None:
    assert started("told") == ([], 431)


def test_without_it_they_have_not() -> None:
    missing, status = started("untold")
    assert len(missing) == 5
    assert status != 431
