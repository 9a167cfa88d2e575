"""Atomic training checkpoints: everything a run needs to continue exactly where it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn


def save_checkpoint(
    path: Path,
    *,
    step: int,
    elapsed_s: float,
    modules: dict[str, nn.Module],
    optimizers: list[torch.optim.Optimizer],
    generator: torch.Generator,
) -> None:
    """Write a checkpoint in one piece: an interruption leaves the previous one.

    ``step`` counts finished steps; it is also the data position, since batches are a function of the step.
    """
    state = {
        "step": step,
        "elapsed_s": elapsed_s,
        "modules": {name: module.state_dict() for name, module in modules.items()},
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "generator": generator.get_state(),
    }
    replace_file(path, partial(torch.save, state))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` write a temporary file and rename it: an interruption leaves what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    write(temporary)
    os.replace(temporary, path)


def load_checkpoint(
    path: Path,
    *,
    modules: dict[str, nn.Module],
    optimizers: list[torch.optim.Optimizer],
    generator: torch.Generator,
) -> tuple[int, float]:
    """Restore everything in place; returns (finished steps, seconds trained), (0, 0.0) without a file."""
    if not path.exists():
        return 0, 0.0
    state: dict[str, Any] = torch.load(path, weights_only=True)  # noqa: TID251 - our own file
    for name, module in modules.items():
        module.load_state_dict(state["modules"][name])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    generator.set_state(state["generator"])
    return int(state["step"]), float(state["elapsed_s"])
