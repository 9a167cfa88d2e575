"""Train a drafter of every kind for the demo target: `.venv/bin/python scripts/train_demo_heads.py`.

Runs `drafthouse train` for the usual ones of RECIPES, on a quarter of the files that the target was trained
on, and puts the finished heads, in bfloat16, where `benchmarks.drafters` looks for them: models/demo/heads.
All read the same rows, so what the target makes of them is computed once and kept in runs/heads: up to 6 GB.

It can be stopped at any time, or stops by itself (`--minutes`): the same command goes on with the last
checkpoint, and leaves out what is finished. `--steps` is for a trial, in other folders than the defaults.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from training.corpus import load_corpus

ROOT = Path(__file__).resolve().parent.parent
EVERY_FILE = 4
"""One of so many files is trained on."""
CHECKPOINT_EVERY_S = 30
_EVERYWHERE = ("--row-length", "512", "--batch-rows", "8", "--stored-dtype", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What `drafthouse train` is told beside target, texts and folders."""

    method: str
    options: tuple[str, ...]
    continues_target: bool = False
    """Whether what the target brings along is trained further."""
    is_usual: bool = True
    """Whether it is trained without being asked for by name."""


RECIPES: Mapping[str, Recipe] = {
    # Each head of the first three has an LM head of its own, 2 MB: what is in models/ is to stay small.
    "medusa": Recipe(method="medusa", options=("--steps", "800", "--depth", "2")),
    "hydra": Recipe(method="hydra", options=("--steps", "800", "--depth", "2")),
    "hydra_plus": Recipe(
        method="hydra", options=("--steps", "600", "--depth", "2", "--prefix-layer"), is_usual=False
    ),
    "parallel_heads": Recipe(method="parallel_heads", options=("--steps", "600", "--depth", "2")),
    "eagle": Recipe(method="eagle", options=("--steps", "1000")),
    # Of eight layers the paper's last state (after all but three) is the middle: benchmarks.head_recipes.
    "eagle3": Recipe(
        method="eagle3",
        options=(
            *("--steps", "350", "--depth", "3"),
            *("--draft-vocab-size", "2048", "--fused-layers", "2,5,7"),
        ),
    ),
    "eagle31": Recipe(
        method="eagle3",
        options=("--steps", "350", "--depth", "3", "--fused-layers", "2,5,7", "--v31"),
        is_usual=False,
    ),
    "mtp": Recipe(
        method="mtp",
        options=("--steps", "400", "--depth", "3", "--matrix-lr", "5e-4", "--vector-lr", "3e-4"),
        continues_target=True,
    ),
}
"""By name of the folder of what is made."""


def command(
    name: str, *, target: Path, texts: Path, out: Path, work: Path, changes: Sequence[str] = ()
) -> list[str]:
    """Return the command that trains one of RECIPES; of options given twice the last counts."""
    recipe = RECIPES[name]
    return [
        str(Path(sys.executable).with_name("drafthouse")),
        *("train", recipe.method, "--target", str(target), "--data", str(texts)),
        *("--out", str(out / name), "--work", str(work / name), "--hidden-folder", str(work / "hidden")),
        *("--checkpoint-every", str(CHECKPOINT_EVERY_S)),
        *_EVERYWHERE,
        *recipe.options,
        *(("--start-from", str(target)) if recipe.continues_target else ()),
        *changes,
    ]


def write_texts(path: Path, every_file: int = EVERY_FILE) -> None:
    """Write what is trained on, a document for each line: one of so many files."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": file.text}) + "\n" for file in load_corpus().train[::every_file]]
    path.write_text("".join(lines), encoding="utf-8")


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(RECIPES)}; repeatable.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so long; run again to go on.")] = None,
    target: Annotated[Path, typer.Option(help="Folder of the target.")] = Path("models/demo/target"),
    out: Annotated[Path, typer.Option(help="Where finished heads go.")] = ROOT / "models/demo/heads",
    work: Annotated[Path, typer.Option(help="Texts, hidden states, checkpoints.")] = ROOT / "runs/heads",
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    steps: Annotated[int | None, typer.Option(help="Fewer optimizer steps, for a trial.")] = None,
) -> None:
    """Train what is not there yet.

    Example: python scripts/train_demo_heads.py --only eagle --minutes 6
    """
    console = Console(stderr=True)
    chosen = only or [name for name, recipe in RECIPES.items() if recipe.is_usual]
    unknown = [one for one in chosen if one not in RECIPES]
    if unknown:
        raise typer.BadParameter(f"--only {unknown[0]}: there is a recipe for {', '.join(RECIPES)}")
    end_s = None if minutes is None else time.monotonic() + 60 * minutes
    texts = work / "texts.jsonl"
    write_texts(texts)
    changes = ["--threads", str(threads), *([] if steps is None else ["--steps", str(steps)])]
    for name in chosen:
        if (out / name / "acceptance.json").exists():
            console.print(f"{name}: finished before, {out / name}")
            continue
        arguments = command(name, target=target, texts=texts, out=out, work=work, changes=changes)
        console.print(" ".join(arguments), soft_wrap=True)
        left_s = None if end_s is None else max(1.0, end_s - time.monotonic())
        try:
            subprocess.run(arguments, check=True, timeout=left_s)
        except subprocess.TimeoutExpired:
            console.print(f"{name}: stopped; the same command goes on")
            raise typer.Exit(0) from None
        except subprocess.CalledProcessError as error:
            raise typer.Exit(error.returncode) from error


if __name__ == "__main__":
    typer.run(main)
