"""Training all heads at once: commands that `drafthouse train` takes, as many steps as there is time for."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.drafter_families import FAMILIES
from deploy.cli.main import app
from scripts import train_heads_on_gpu
from scripts.train_heads_on_gpu import (
    RECIPES,
    Folders,
    command,
    run_together,
    step_seconds,
    write_first_lines,
)
from training.drafters import train
from training.drafters.options import TrainOptions
from training.drafters.recipe import DrafterRecipe


def test_every_recipe_is_what_the_command_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tuple[DrafterRecipe, TrainOptions]] = {}

    def note(recipe: DrafterRecipe, options: TrainOptions) -> dict[str, Any]:
        seen[options.out.name] = recipe, options
        return {"elapsed_s": 0.0}

    monkeypatch.setattr(train, "train_drafter", note)
    folders = Folders(
        target=tmp_path / "target", texts=tmp_path / "texts", out=tmp_path / "out", work=tmp_path / "work"
    )
    for name in RECIPES:
        arguments = command(name, folders, steps=1000)
        result = CliRunner().invoke(app, arguments[arguments.index("train") :], catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert set(seen) == set(RECIPES)
    alike = {(recipe.steps, recipe.batch_rows, recipe.row_length, recipe.seed) for recipe, _ in seen.values()}
    assert len(alike) == 1, "as many tokens each, of the same rows"
    assert seen["mtp"][1].start_from == tmp_path / "target"
    assert seen["hydra_plus"][0].has_prefix_layer
    assert seen["eagle3"][0].draft_vocab_size == 2048
    assert seen["eagle31"][0].is_v31
    assert seen["medusa2"][0].heads_first == 100


def test_the_comparison_finds_heads_of_every_family() -> None:
    assert {family.heads or family.name for family in FAMILIES if family.needs == "heads"} <= set(RECIPES)


def test_what_fails_is_named_with_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = {
        "fine": [sys.executable, "-c", "print('well')"],
        "broken": [sys.executable, "-c", "raise SystemExit('no such thing')"],
    }
    console = Console(file=sys.stderr, highlight=False)
    assert run_together(commands, tmp_path / "logs", console) == ["broken"]
    assert (tmp_path / "logs" / "broken.log").read_text().strip() == "no such thing"
    assert f"broken: failed, see {tmp_path / 'logs' / 'broken'}.log" in capsys.readouterr().err


def test_steps_are_what_there_is_time_for_by_the_slowest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a trial of all; one that fails there is left out, and a second start tries nothing again."""
    runs: list[dict[str, str]] = []

    def run(commands: Mapping[str, Sequence[str]], logs: Path, console: Console) -> list[str]:
        runs.append({name: arguments[arguments.index("--steps") + 1] for name, arguments in commands.items()})
        for name, arguments in commands.items():
            folder = Path(arguments[arguments.index("--out") + 1])
            folder.mkdir(parents=True)
            seconds = {"medusa": 2.0, "eagle": 4.0, "mtp": 1.0}[name]
            noted = {"elapsed_s": seconds, "recipe": {"steps": 40}}
            (folder / "acceptance.json").write_text(json.dumps(noted))
        return ["mtp"] if "trial" in logs.parts else []

    monkeypatch.setattr(train_heads_on_gpu, "run_together", run)
    monkeypatch.setattr(train_heads_on_gpu, "write_texts", _lines)
    arguments: dict[str, Any] = {
        "only": ["medusa", "eagle", "mtp"],
        "minutes": 10.0,
        "target": tmp_path / "target",
        "work": tmp_path / "work",
    }
    train_heads_on_gpu.main(**arguments, steps=None, out=tmp_path / "out")
    trial, whole = runs
    assert trial == {"medusa": "40", "eagle": "40", "mtp": "40"}
    assert set(whole) == {"medusa", "eagle"}
    (steps,) = {int(one) for one in whole.values()}
    assert 0.95 < steps / ((600 - 75) / (1.15 * 0.1)) <= 1.0
    train_heads_on_gpu.main(**arguments, steps=None, out=tmp_path / "again")
    assert len(runs) == 3
    with pytest.raises(typer.BadParameter, match="there is a recipe for medusa"):
        train_heads_on_gpu.main(only=["ngram"], work=tmp_path / "work")


def _lines(path: Path, every_file: int) -> None:
    assert every_file == 1, "all that the target was trained on"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"text": "a"}\n' * 100)


def test_a_trial_reads_few_texts(tmp_path: Path) -> None:
    _lines(tmp_path / "all.jsonl", 1)
    write_first_lines(tmp_path / "all.jsonl", tmp_path / "few.jsonl", 3)
    assert (tmp_path / "few.jsonl").read_text() == '{"text": "a"}\n' * 3


def test_seconds_of_a_step_are_those_of_the_run_over_its_steps(tmp_path: Path) -> None:
    (tmp_path / "eagle").mkdir()
    noted = {"elapsed_s": 8.0, "recipe": {"steps": 40}}
    (tmp_path / "eagle" / "acceptance.json").write_text(json.dumps(noted))
    assert step_seconds(tmp_path, ["eagle"]) == {"eagle": 0.2}
