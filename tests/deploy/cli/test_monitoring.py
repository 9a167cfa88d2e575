"""`drafthouse rules write`, and what is said where the extra `grafana` is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

import deploy.cli.monitoring as command
from deploy.cli.main import app

runner = CliRunner()


def write_rules(*arguments: object) -> Result:
    return runner.invoke(app, ["rules", "write", *map(str, arguments)])


def test_a_file_is_written(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    result = write_rules(file)
    assert result.exit_code == 0, result.stderr
    assert f"wrote {file}" in result.stdout
    assert yaml.safe_load(file.read_text())["groups"]


def test_standard_output_is_the_file_alone() -> None:
    result = write_rules("-", "--first-token", 1, "--in-time", 0.99, "--runbook", "https://x/ops")
    assert result.exit_code == 0, result.stderr
    text = json.dumps(yaml.safe_load(result.stdout))
    assert 'le=\\"1.0\\"' in text
    assert "< 0.99" in text
    assert "https://x/ops#drafthouse" in text


def test_a_bound_that_no_bucket_has() -> None:
    result = write_rules("-", "--first-token", 3)
    assert result.exit_code == 2
    assert "take one of" in result.stderr


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    result = write_rules(tmp_path / "none" / "rules.yaml")
    assert result.exit_code == 2
    assert "No such file or directory" in result.stderr


def test_without_the_extra_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_PACKAGES", ("json", "not_there"))
    result = runner.invoke(app, ["dashboards", "write", str(tmp_path)])
    assert result.exit_code == 2
    assert "pip install -e '.[grafana]' in a checkout" in result.stderr
    assert "not_there" in result.stderr


@pytest.mark.parametrize("words", [("dashboards", "push"), ("dashboards", "write"), ("rules", "write")])
def test_help_has_an_example(words: tuple[str, ...]) -> None:
    result = runner.invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    assert f"drafthouse {' '.join(words)} " in " ".join(result.stdout.split())
