"""What is timed of recipes: steps that read hidden states from disk, on texts that few steps read whole."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recipe_times
from benchmarks.recipe_times import Plan, headlines, run, seconds_per_step, steps_of, write_texts
from benchmarks.recipe_times_table import with_table
from scripts.train_demo_heads import RECIPES


def test_texts_are_as_long_as_asked_and_of_several_files(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", 5_000)
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert sum(map(len, texts)) == 5_000
    assert len(texts) >= 10
    assert max(map(len, texts)) <= 500


def test_the_first_steps_do_not_count(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    seconds = {10: 9.0, 20: 8.0, 30: 1.0, 40: 2.0}
    log.write_text("".join(json.dumps({"step": n, "s_per_step": s}) + "\n" for n, s in seconds.items()))
    assert seconds_per_step(log, 20) == [1.0, 2.0]


def test_a_recipe_is_run_as_its_script_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def trained(arguments: list[str], *, check: bool) -> None:
        seen.append(arguments)
        after = dict(itertools.pairwise(arguments))
        assert Path(after["--data"]).is_file()
        work, out = Path(after["--work"]), Path(after["--out"])
        work.mkdir(parents=True)
        out.mkdir(parents=True)
        lines = [{"step": step, "s_per_step": 0.5 if step > 20 else 7.0} for step in range(10, 41, 10)]
        (work / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (out / "acceptance.json").write_text(json.dumps({"trained_tokens": 40 * 4096}))

    monkeypatch.setattr(subprocess, "run", trained)
    plan = Plan(recipes=("hydra", "mtp"), num_characters=2_000, num_timed=20)
    results = run(plan, tmp_path)
    assert [one[2] for one in seen] == ["hydra", "mtp"]
    assert all(one[-2:] == ["--eval-texts", "0"] for one in seen)
    assert headlines(results) == {
        "minutes_hydra": 0.5 * steps_of("hydra") / 60,
        "minutes_mtp": 0.5 * steps_of("mtp") / 60,
        "longest_minutes": 0.5 * steps_of("hydra") / 60,
    }
    assert results["recipes"][0]["tokens"] == 4096 * steps_of("hydra")


def test_every_recipe_has_steps_and_is_timed() -> None:
    assert recipe_times.FULL.recipes == tuple(RECIPES)
    assert all(steps_of(name) >= 100 for name in RECIPES)


def test_the_page_has_the_table_of_its_results() -> None:
    results: dict[str, Any] = json.loads(Path("benchmarks/results/recipe-times.json").read_text())
    page = Path("docs/drafters/training.md").read_text()
    assert page == with_table(page, results)
