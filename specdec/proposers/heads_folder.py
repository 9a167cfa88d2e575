"""The folder that heads are read from, and whether it holds what the configuration says."""

from __future__ import annotations

from pathlib import Path

from specdec.core.errors import CheckpointError, ConfigError
from specdec.drafters.checkpoints.files import (
    FILES_OF_HEADS,
    DrafterFolder,
    open_drafter,
    pickled_error,
)
from specdec.drafters.checkpoints.mtp import has_mtp
from specdec.drafters.checkpoints.registry import DRAFTERS, DrafterKind, kind_of
from specdec.proposers.config import SpeculativeConfig


def open_heads(config: SpeculativeConfig, target: str | Path) -> DrafterFolder:
    """Look at the folder of the heads that `config` names, which may be that of the `target`.

    Whether they fit the target is found out where they are loaded.

    Raises:
        CheckpointError: the folder holds no drafter, one of a kind that is not supported, or files that
            cannot be read.
        ConfigError: it holds none of the method that is asked for.
    """
    path = target if config.model is None else config.model
    folder = open_drafter(path, kind=config.method, allow_pickled=config.allow_pickled_weights)
    if config.model is None and not has_mtp(folder):
        raise ConfigError(
            f"speculative_config.method: {config.method} without `model` drafts with modules in the target's "
            f"own folder, and {path} holds none: give the folder that holds them (model), or another method"
        )
    found = _kind_of(folder)
    if found == config.method:
        return folder
    beside = {file.stem: file for file in folder.passed_over}
    unread = beside.get(FILES_OF_HEADS.get(config.method, ""))
    if unread is not None:
        raise pickled_error(unread)
    held = next(kind for kind in DRAFTERS if FILES_OF_HEADS.get(kind) in beside) if found is None else found
    raise ConfigError(
        f"speculative_config.method: {config.method}, but {path} holds {DRAFTERS[held].__name__}: "
        f"write method: {held}"
    )


def _kind_of(folder: DrafterFolder) -> DrafterKind | None:
    """Return what a folder holds; None: a model, with nothing but files of heads that were passed over."""
    try:
        return kind_of(folder)
    except CheckpointError:
        if not folder.passed_over:
            raise
        return None
