"""Atomic training checkpoints: everything a run needs to continue exactly where it was."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec.core.errors import ConfigError, ResourceError


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
    """Have ``write`` write a temporary file and rename it: an interruption leaves what was there before.

    Raises:
        ResourceError: it cannot be written, most often because the disk is full.
    """
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch says of a full disk what its writer's state is
        temporary.unlink(missing_ok=True)
        raise ResourceError(
            f"{path} cannot be written ({first_line(error)}); {_free(path.parent)} are free there. "
            "What was there before is as it was: the same command goes on from it"
        ) from error


def first_line(error: Exception) -> str:
    """What an error says, of several lines the first; some say nothing but what they are."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.2f} GB"
    except OSError:
        return "no bytes"


def load_checkpoint(
    path: Path,
    *,
    modules: dict[str, nn.Module],
    optimizers: list[torch.optim.Optimizer],
    generator: torch.Generator,
) -> tuple[int, float]:
    """Restore everything in place; returns (finished steps, seconds trained), (0, 0.0) without a file.

    Modules may be on another device than when it was written.

    Raises:
        ConfigError: the file is damaged.
        ResourceError: it cannot be read.
    """
    if not path.exists():
        return 0, 0.0
    try:
        # Our own file. To the host first: what it was on may not be there, or lack room for all of it twice.
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
    except OSError as error:
        raise ResourceError(f"{path} cannot be read ({first_line(error)})") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError) as error:
        if _is_whole(path):
            raise
        raise ConfigError(
            f"{path} is damaged, and nothing can go on from it ({first_line(error)}): remove it to "
            "begin with the first step again"
        ) from error
    for name, module in modules.items():
        module.load_state_dict(state["modules"][name])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    generator.set_state(state["generator"])
    return int(state["step"]), float(state["elapsed_s"])


def _is_whole(path: Path) -> bool:
    """Whether a file of torch's has all that was written to it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except zipfile.BadZipFile:
        return False
