"""Atomic training checkpoints: everything a run needs to continue exactly where it was."""

from __future__ import annotations

import os
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
    """Write to a temporary file and rename, so that an interruption leaves the previous checkpoint whole.

    ``step`` counts finished steps; it is also the data position, since batches are a function of the step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    torch.save(
        {
            "step": step,
            "elapsed_s": elapsed_s,
            "modules": {name: module.state_dict() for name, module in modules.items()},
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "generator": generator.get_state(),
        },
        temporary,
    )
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
