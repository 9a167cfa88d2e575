"""The Serve config that the chart renders runs, each part in its pool; a wrong next one changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architectures import save_model

pytest.importorskip("helm_python", reason="helm-python-sdk, Helm's engine, is there for Linux x86-64 only")

from tests.helm.chart import ray_service
from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("serve_file.py")


def test_the_charts_serve_config_is_deployed_for_real(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        save_model(tmp_path / name)
    eager = {"num_threads": 1, "compile": {"mode": "off"}}
    values = {
        "config": {
            "target": {"model": str(tmp_path / "target"), **eager},
            "speculative_config": {
                "method": "draft_model",
                "model": str(tmp_path / "draft"),
                "controller": "fixed",
                **eager,
            },
            "cache": {"num_blocks": 256, "block_size": 4},
            "cluster": {"drain_timeout_s": 2},
            "http": {"served_model_name": "m"},
        },
        "target": {"cpu": 1, "gpu": 0},
        "draft": {"cpu": 1, "gpu": 0},
    }
    config = ray_service(values)["spec"]["serveConfigV2"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(free_port()), config],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    assert "deployed, placed, asked, and kept" in result.stdout
