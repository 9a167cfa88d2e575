"""A model, a drafter and a checkpoint that fails, rolled out under load: no request fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ray import serve
from safetensors.torch import load_file, save_file

from deploy.serve_config import build
from specdec.core.errors import CheckpointError
from tests.architectures import save_model
from tests.deploy.rolling import serve_config
from tests.ports import free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, two versions of a draft that agrees with it often, another target, and two damaged ones."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("target", "draft", "redrafted", "other"):
        model = save_model(folder / name)
    generator = torch.Generator().manual_seed(1)
    for name, share in (("draft", 0.02), ("redrafted", 0.01), ("other", 0.5)):
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * share * parameter.std())
        model.save_pretrained(folder / name)
    for name in ("damaged", "broken"):
        shutil.copytree(folder / "other", folder / name)
    file = folder / "damaged" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    file = folder / "broken" / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "down_proj" in name)
    weights[name] = weights[name][:, :-4].clone()
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("part", "folder", "message"),
    [
        ("target", "damaged", r"damaged.*truncated or corrupt"),
        ("target", "broken", r"broken: the weights do not fit config\.json: tensor .*down_proj"),
        ("speculative_config", "broken", r"broken: the weights do not fit config\.json"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_anything_is_replaced(
    models: Path, part: str, folder: str, message: str
) -> None:
    """Serve then leaves the running application alone; no Ray is needed to say so."""
    arguments = serve_config(models)["applications"][0]["args"]
    arguments["config"][part]["model"] = str(models / folder)
    with pytest.raises(CheckpointError, match=message):
        build(arguments)


def test_models_that_this_node_has_not_are_not_checked_and_that_is_told(
    models: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("deploy.serve_config.build_application", lambda config, own, certificate: own)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr("deploy.serve_config._get_global_client", lambda **_: None)
    arguments = serve_config(models)["applications"][0]["args"]
    build(arguments)
    assert not caplog.records
    arguments["config"]["speculative_config"]["model"] = "/nowhere/draft"
    build(arguments)
    (record,) = caplog.records
    assert record.message.startswith("/nowhere/draft is not on the node that builds the application")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("room", [pytest.param(3, id="in-place"), pytest.param(5, id="surge")])
def test_no_request_fails(models: Path, room: int) -> None:
    said = run_script("rolling.py", models, str(room))
    assert "updated without a failed request" in said


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(3600)
def test_streams_that_outlast_the_drain_time_go_on_elsewhere(models: Path) -> None:
    """Behind several doors. Those of a former target end, and their clients are told."""
    assert "updated without a wrong token" in run_script("long_streams.py", models)


def run_script(name: str, models: Path, *arguments: str) -> str:
    """Run a script that begins a Ray of its own; return what it has said."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    script = Path(__file__).with_name(name)
    result = subprocess.run(
        [sys.executable, str(script), str(models), str(free_port()), *arguments],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3400,
        check=False,
    )
    sys.stdout.write(result.stdout)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return result.stdout
