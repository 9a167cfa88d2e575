"""What was run to make a model: saved beside its weights, read by the model card."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from training.run import Recipe

FILE_NAME = "recipe.json"


def write_recipe(folder: Path, recipe: Recipe, *, command: str, elapsed_s: float, threads: int) -> None:
    """Save every recipe field with the time it took and the software it ran on."""
    record = {
        "command": command,
        "recipe": asdict(recipe),
        "trained_tokens": recipe.steps * recipe.batch_tokens,
        "elapsed_s": round(elapsed_s),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    (folder / FILE_NAME).write_text(json.dumps(record, indent=2) + "\n")


def read_recipe(folder: Path) -> dict[str, Any]:
    """The record of `write_recipe`."""
    record: dict[str, Any] = json.loads((folder / FILE_NAME).read_text())
    return record
