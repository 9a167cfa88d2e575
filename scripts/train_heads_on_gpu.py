"""Train a drafter of every kind longer, all at once on one GPU: `python scripts/train_heads_on_gpu.py`.

Runs `drafthouse train` for all of RECIPES at the same time, on all files that the target was trained on, and
each for as many tokens as the others, so that what they accept can be compared. How many that are follows
from `--minutes` and a trial of some steps. Heads are as deep as the papers', which those of `models/` are
not, to stay small; those that end in `_demo` are what lies there.

A run that was cut goes on with the same command: the number of steps is noted in WORK.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from scripts.train_demo_heads import ROOT, write_texts

_EVERYWHERE = ("--row-length", "512", "--batch-rows", "16", "--stored-dtype", "bfloat16", "--threads", "1")
_FOUR_DEEP = ("--depth", "4")
_LATE_LAYERS = ("--fused-layers", "2,5,7")
_TRIAL_STEPS = 40
_TRIAL_TEXTS = 60
_BESIDE_S = 75.0
"""Of `--minutes`, for reading texts and measuring acceptance."""
_CAUTION = 1.15
"""A trial is shorter than what it stands for: fewer run at the same time in parts of it."""
_FROM_TARGET = "--start-from-target"
_STEPS_NOTED = "steps.json"

RECIPES: Mapping[str, tuple[str, ...]] = {
    "medusa": ("medusa", *_FOUR_DEEP),
    "medusa_demo": ("medusa", "--depth", "2"),
    "hydra": ("hydra", *_FOUR_DEEP),
    "hydra_demo": ("hydra", "--depth", "2"),
    "hydra_plus": ("hydra", *_FOUR_DEEP, "--prefix-layer"),
    "parallel_heads": ("parallel_heads", *_FOUR_DEEP),
    "parallel_heads_demo": ("parallel_heads", "--depth", "2"),
    "eagle": ("eagle", *_FOUR_DEEP),
    # Of eight layers the paper's last state (after all but three) is the middle: benchmarks.head_recipes.
    "eagle3": ("eagle3", "--depth", "3", "--draft-vocab-size", "2048", *_LATE_LAYERS),
    "eagle3_whole": ("eagle3", *_FOUR_DEEP, *_LATE_LAYERS),
    "eagle3_paper": ("eagle3", *_FOUR_DEEP),
    "eagle31": ("eagle3", *_FOUR_DEEP, *_LATE_LAYERS, "--v31"),
    "mtp": ("mtp", *_FOUR_DEEP, "--matrix-lr", "5e-4", "--vector-lr", "3e-4", _FROM_TARGET),
    "medusa2": ("medusa2", *_FOUR_DEEP, "--lora-rank", "16", "--store", "adapter"),
    "layerskip": ("layerskip", "--depth", "4", "--exit-layer", "4"),
}
"""Method and options by name of the folder of what is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Where things are that all read, and what each has a folder in."""

    target: Path
    texts: Path
    out: Path
    work: Path


def command(name: str, folders: Folders, *, steps: int, more: Sequence[str] = ()) -> list[str]:
    """Return the command that trains one of RECIPES; it needs no `drafthouse` on the path."""
    method, *options = RECIPES[name]
    if _FROM_TARGET in options:
        options[options.index(_FROM_TARGET) :] = ["--start-from", str(folders.target)]
    return [
        *(sys.executable, "-c", "from deploy.cli import main; main()"),
        *("train", method, "--target", str(folders.target), "--data", str(folders.texts)),
        *("--out", str(folders.out / name), "--work", str(folders.work / name), "--steps", str(steps)),
        *("--warmup-steps", str(max(1, min(100, steps // 10)))),
        *(("--heads-first", str(steps // 10)) if method == "medusa2" else ()),
        *_EVERYWHERE,
        *options,
        *more,
    ]


def run_together(commands: Mapping[str, Sequence[str]], logs: Path, console: Console) -> list[str]:
    """Run all at the same time, each into a log of its own; return the names of those that failed."""
    logs.mkdir(parents=True, exist_ok=True)
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: list[str] = []
    started_s = time.monotonic()
    for name, arguments in commands.items():
        with (logs / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    while running:
        time.sleep(0.5)
        for name, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[name]
            passed_s = time.monotonic() - started_s
            outcome = "done" if process.returncode == 0 else f"failed, see {logs / name}.log"
            console.print(f"{passed_s:5.0f} s  {name}: {outcome}", soft_wrap=True)
            if process.returncode:
                failed.append(name)
    return failed


def step_seconds(out: Path, names: Sequence[str]) -> dict[str, float]:
    """Return how long a step of a trial took, by name."""
    noted: dict[str, Any] = {name: json.loads((out / name / "acceptance.json").read_text()) for name in names}
    return {name: one["elapsed_s"] / one["recipe"]["steps"] for name, one in noted.items()}


def write_first_lines(source: Path, path: Path, number: int) -> None:
    """Write the first lines of a file."""
    with source.open(encoding="utf-8") as lines:
        path.write_text("".join(line for _, line in zip(range(number), lines, strict=False)), "utf-8")


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(RECIPES)}; repeatable.")] = None,
    minutes: Annotated[float, typer.Option(help="How long all of it may take.")] = 9.0,
    steps: Annotated[int | None, typer.Option(help="So many optimizer steps, without a trial.")] = None,
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = Path("models/demo/target"),
    out: Annotated[Path, typer.Option(help="Where finished heads go.")] = ROOT / "runs/gpu-heads",
    work: Annotated[Path, typer.Option(help="Texts, checkpoints, logs.")] = ROOT / "runs/gpu-heads-work",
) -> None:
    """Train all of them.

    Example: python scripts/train_heads_on_gpu.py --only eagle --only eagle3 --minutes 5
    """
    console = Console(stderr=True, highlight=False)
    started_s = time.monotonic()
    names = list(only or RECIPES)
    unknown = [one for one in names if one not in RECIPES]
    if unknown:
        raise typer.BadParameter(f"--only {unknown[0]}: there is a recipe for {', '.join(RECIPES)}")
    texts, noted = work / "texts.jsonl", work / _STEPS_NOTED
    write_texts(texts, every_file=1)
    if steps is None and not noted.exists():
        few, trial = work / "few.jsonl", work / "trial"
        write_first_lines(texts, few, _TRIAL_TEXTS)
        briefly = Folders(target=target, texts=few, out=trial / "out", work=trial / "work")
        unmeasured = ("--eval-texts", "0")
        tried = {name: command(name, briefly, steps=_TRIAL_STEPS, more=unmeasured) for name in names}
        failed = run_together(tried, trial / "logs", console)
        names = [name for name in names if name not in failed]
        took = step_seconds(trial / "out", names)
        left_s = 60.0 * minutes - (time.monotonic() - started_s) - _BESIDE_S
        slowest = max(took, key=lambda name: took[name])
        number = max(_TRIAL_STEPS, int(left_s / (_CAUTION * took[slowest])))
        console.print(
            f"{number} steps each: the slowest, {slowest}, takes {1e3 * took[slowest]:.0f} ms for one"
        )
        noted.write_text(json.dumps({"steps": number, "step_seconds": took}))
    number = json.loads(noted.read_text())["steps"] if steps is None else steps
    folders = Folders(target=target, texts=texts, out=out, work=work)
    commands = {name: command(name, folders, steps=number) for name in names}
    failed = run_together(commands, work / "logs", console)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
