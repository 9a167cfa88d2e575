"""How many minutes the recipes of the demo target's heads take, told from their first steps.

    python -m benchmarks.recipe_times --json benchmarks/results/recipe-times.json   # some minutes
    python -m benchmarks.recipe_times --quick

Each recipe of `scripts/train_demo_heads.py` is run as that script runs it, by `drafthouse train` in a process
of its own, on few texts: the first steps compute the target's hidden states, and those that count find them
on disk, as all steps of a recipe do after the first one that has read the same layers. A step takes as long
on many texts. Acceptance, which a recipe measures at its end, is left out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plain_tool import PlainTool
from scripts.train_demo_heads import RECIPES, command
from training.corpus import load_corpus

_LOGGED_STEPS = 10
"""A line of a training's log is of so many steps."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is timed."""

    recipes: tuple[str, ...] = tuple(RECIPES)
    num_characters: int = 100_000
    """Of text: fewer than `num_filling` steps read all of it once."""
    num_filling: int = 20
    """Steps that are left out: of hidden states that are not there yet, and of everything that is cold."""
    num_timed: int = 40
    num_threads: int = 2


FULL = Plan()
QUICK = Plan(recipes=("medusa", "eagle3"), num_timed=20)


def steps_of(name: str) -> int:
    """Return how many steps a recipe has."""
    options = RECIPES[name].options
    return int(options[options.index("--steps") + 1])


def write_texts(path: Path, num_characters: int) -> None:
    """Write beginnings of files that the target was trained on, a document for each line."""
    lines: list[str] = []
    left = num_characters
    for file in load_corpus().train:
        if left <= 0:
            break
        text = file.text[: min(left, num_characters // 10)]
        lines.append(json.dumps({"text": text}) + "\n")
        left -= len(text)
    path.write_text("".join(lines), encoding="utf-8")


def seconds_per_step(log: Path, num_filling: int) -> list[float]:
    """Return what a step took, by line of a training's log, without those of the first steps."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["s_per_step"] for line in lines if line["step"] > num_filling]


def _timed(name: str, plan: Plan, models: Path, folder: Path) -> dict[str, Any]:
    num_steps = plan.num_filling + plan.num_timed
    changes = ("--threads", str(plan.num_threads), "--steps", str(num_steps), "--eval-texts", "0")
    arguments = command(
        name,
        target=models / "target",
        texts=folder / "texts.jsonl",
        out=folder / "out",
        work=folder / "work",
        changes=changes,
    )
    subprocess.run(arguments, check=True)
    seconds = seconds_per_step(folder / "work" / name / "log.jsonl", plan.num_filling)
    report = json.loads((folder / "out" / name / "acceptance.json").read_text())
    return {
        "recipe": name,
        "steps": steps_of(name),
        "tokens": report["trained_tokens"] // num_steps * steps_of(name),
        "s_per_step": seconds,
        "minutes": statistics.mean(seconds) * steps_of(name) / 60,
    }


def run(plan: Plan, models: Path) -> dict[str, Any]:
    """Run the first steps of each recipe, one after the other."""
    assert plan.num_filling % _LOGGED_STEPS == plan.num_timed % _LOGGED_STEPS == 0
    with tempfile.TemporaryDirectory(prefix="recipe-times-") as name:
        folder = Path(name)
        write_texts(folder / "texts.jsonl", plan.num_characters)
        recipes = [_timed(one, plan, models, folder) for one in plan.recipes]
    return {"plan": plan, "recipes": recipes}


def headlines(results: Mapping[str, Any]) -> dict[str, float]:
    """Minutes of every recipe's steps, and of the longest."""
    minutes = {f"minutes_{one['recipe']}": one["minutes"] for one in results["recipes"]}
    return minutes | {"longest_minutes": max(minutes.values())}


TOOL = PlainTool(
    module="recipe_times",
    summary="Tell from their first steps how many minutes the recipes of the demo target's heads take.",
    full=FULL,
    quick=QUICK,
    run=run,
    headlines=headlines,
)


if __name__ == "__main__":
    TOOL.main()
