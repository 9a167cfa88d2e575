"""Serve configs run, each part in its pool: the one that the chart renders, and the file for `serve deploy`.

They go the way that `serve deploy` goes, with Ray's token. A wrong next one changes nothing, and with a spare
target pod a right one is no outage.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architectures import make_tokenizer, save_model, save_wide_model
from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("serve_file.py")


def deploy_for_real(models: Path, config: str, nodes: list[dict[str, Any]]) -> None:
    """Deploy a Serve config (YAML) on Ray nodes of this machine, and have `serve_file.py` check what runs."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(models), str(free_port()), config, json.dumps(nodes)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **token},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    assert "deployed, placed, asked, and kept" in result.stdout


def test_the_charts_serve_config_is_deployed_for_real(tmp_path: Path) -> None:
    pytest.importorskip("helm_python", reason="Helm's engine is there for Linux x86-64 only")
    from tests.helm.chart import ray_service

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
        "target": {"cpu": 1, "gpu": 0, "spareGroups": 1},
        "draft": {"cpu": 1, "gpu": 0},
    }
    # The second target pod is the spare one.
    nodes = [
        {"pool": pool, "num_cpus": int(pool != "head")}
        for pool in ("head", "ingress", "target", "target", "draft")
    ]
    deploy_for_real(tmp_path, ray_service(values)["spec"]["serveConfigV2"], nodes)


def test_the_serve_file_is_deployed_for_real_on_the_nodes_of_the_cluster_file(tmp_path: Path) -> None:
    """Ray is told of the CPUs and GPUs of those machines; ranks find no GPU, and are told to take the CPU."""
    folder = ROOT / "deploy" / "ray"
    kinds = yaml.safe_load((folder / "cluster.yaml").read_text())["available_node_types"]
    nodes = [
        {
            "pool": kind["labels"]["pool"],
            "num_cpus": kind["resources"]["CPU"],
            "num_gpus": kind["resources"].get("GPU", 0),
        }
        for kind in kinds.values()
        for _ in range(kind.get("min_workers", 1))
    ]
    config = yaml.safe_load((folder / "serve.yaml").read_text())
    settings = config["applications"][0]["args"]["config"]
    eager = {"num_threads": 1, "compile": {"mode": "off"}}
    for part, name in (("target", "target"), ("speculative_config", "draft")):
        assert settings[part]["model"] == f"/models/{name}"
        save_wide_model(tmp_path / name)
        make_tokenizer().save_pretrained(tmp_path / name)
        settings[part] |= {"model": str(tmp_path / name), "device": "cpu", **eager}
    for part in (settings, settings["speculative_config"]):
        part["cache"] = {"num_blocks": 256, "block_size": 4}
    settings["cluster"]["drain_timeout_s"] = 2
    settings["http"]["served_model_name"] = "m"
    deploy_for_real(tmp_path, yaml.safe_dump(config), nodes)
