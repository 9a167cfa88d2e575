"""The recipes of the demo target's heads: commands that `drafthouse train` takes, run once each."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.drafter_families import FAMILIES
from deploy.cli.main import app
from scripts import demo_heads_table, train_demo_heads
from scripts.train_demo_heads import RECIPES, command, write_texts
from training.drafters import train
from training.drafters.options import TrainOptions
from training.drafters.recipe import DrafterRecipe


def test_every_recipe_is_what_the_command_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tuple[DrafterRecipe, TrainOptions]] = {}

    def note(recipe: DrafterRecipe, options: TrainOptions) -> dict[str, Any]:
        seen[options.out.name] = recipe, options
        return {"elapsed_s": 0.0}

    monkeypatch.setattr(train, "train_drafter", note)
    for name in RECIPES:
        folders = {one: tmp_path / one for one in ("target", "texts", "out", "work")}
        _, *arguments = command(name, **folders)
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert set(seen) == set(RECIPES)
    kept_alike = {(recipe.row_length, recipe.seed) for recipe, _ in seen.values()}
    assert len(kept_alike) == 1, "hidden states of the same rows are kept once"
    for name, (recipe, options) in seen.items():
        assert recipe.method == RECIPES[name].method
        assert options.out == tmp_path / "out" / name
        assert options.work == tmp_path / "work" / name
        assert options.hidden_folder == tmp_path / "work" / "hidden", "in one folder for all"
        assert options.start_from == (tmp_path / "target" if name == "mtp" else None)
        assert options.stored_dtype == "bfloat16"
        assert options.checkpoint_every_s == 30
        assert recipe.steps >= 100
    assert seen["eagle3"][0].draft_vocab_size == 2048
    assert seen["eagle3"][0].fused_layers == (2, 5, 7)
    assert seen["hydra_plus"][0].has_prefix_layer


def test_the_comparison_has_a_family_for_every_recipe() -> None:
    heads = {family.heads or family.name for family in FAMILIES if family.needs == "heads"}
    assert heads == set(RECIPES)


def test_what_is_finished_is_left_out_and_what_is_cut_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out" / "medusa").mkdir(parents=True)
    (tmp_path / "out" / "medusa" / "acceptance.json").write_text("{}")
    work = tmp_path / "work"
    work.mkdir()
    (work / "texts.jsonl").write_text('{"text": "a"}\n')
    run: list[tuple[list[str], float | None]] = []

    def cut(arguments: list[str], *, check: bool, timeout: float | None) -> None:
        run.append((arguments, timeout))
        if len(run) > 1:
            raise subprocess.TimeoutExpired(arguments, timeout or 0.0)

    monkeypatch.setattr(subprocess, "run", cut)
    with pytest.raises(typer.Exit) as ended:
        train_demo_heads.main(
            only=["medusa", "hydra", "eagle", "mtp"],
            minutes=5.0,
            target=tmp_path / "target",
            out=tmp_path / "out",
            work=work,
            threads=1,
            steps=7,
        )
    assert ended.value.exit_code == 0
    assert [arguments[2] for arguments, _ in run] == ["hydra", "eagle"]
    assert all(timeout is not None and 0.0 < timeout <= 300.0 for _, timeout in run)
    arguments = run[0][0]
    assert arguments[len(arguments) - arguments[::-1].index("--steps")] == "7", "the last one counts"
    with pytest.raises(typer.BadParameter, match="there is a recipe for medusa, hydra"):
        train_demo_heads.main(only=["lookahead"], minutes=None, work=work)


def test_texts_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "work" / "texts.jsonl"
    write_texts(path)
    lines = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert 300 < len(lines) < 600
    path.write_text("mine\n")
    write_texts(path)
    assert path.read_text() == "mine\n"


def test_the_table_of_the_heads_is_what_lies_in_their_folders(tmp_path: Path) -> None:
    page = demo_heads_table.HEADS / "README.md"
    assert page.read_text() == demo_heads_table.with_table(page.read_text(), demo_heads_table.HEADS)
    folder = tmp_path / "eagle"
    folder.mkdir()
    (tmp_path / "not finished").mkdir()
    (folder / "model.safetensors").write_bytes(bytes(1_640_000))
    one = {"k": 2, "tokens_per_round": 2.5, "reached": [0.9, 0.6]}
    report = {
        "recipe": {"method": "eagle"},
        "parameters": 820_000,
        "trained_tokens": 4_096_000,
        "elapsed_s": 600.0,
        "acceptance": {"0.0": one, "0.7": {**one, "tokens_per_round": 2.0}},
    }
    (folder / "acceptance.json").write_text(json.dumps(report))
    *_, line = demo_heads_table.table_of(tmp_path).splitlines()
    facts = "`eagle` | `eagle` | 0.82 M | 1.6 | 4.1 M | 10"
    assert line == f"| {facts} | k = 2: 2.50 | 0.90 / 0.60 | k = 2: 2.00 | 0.90 / 0.60 |"


def test_the_demo_models_stay_small() -> None:
    """Everybody who clones the repository gets them."""
    files = [file for file in demo_heads_table.HEADS.parents[1].rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 40 * 2**20
