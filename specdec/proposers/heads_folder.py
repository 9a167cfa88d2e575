"""The folder that heads are read from, and whether it holds what the configuration says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specdec.core.errors import ConfigError
from specdec.drafters.base import Drafter
from specdec.drafters.checkpoints.files import DrafterFolder, open_drafter
from specdec.drafters.checkpoints.mtp import has_mtp
from specdec.drafters.checkpoints.registry import DrafterKind, kind_of
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from specdec.drafters.parallel_heads import ParallelHeads
from specdec.proposers.config import SpeculativeConfig

_NAMES: Mapping[DrafterKind, type[Drafter]] = {
    "medusa": Medusa,
    "hydra": Hydra,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "mtp": Mtp,
    "parallel_heads": ParallelHeads,
}


def open_heads(config: SpeculativeConfig, target: str | Path) -> DrafterFolder:
    """Look at the folder of the heads that `config` names, which may be that of the `target`.

    Whether they fit the target is found out where they are loaded.

    Raises:
        CheckpointError: the folder holds no drafter, one of a kind that is not supported, or files that
            cannot be read.
        ConfigError: it holds none of the method that is asked for.
    """
    path = target if config.model is None else config.model
    folder = open_drafter(
        path, allow_pickled=config.allow_pickled_weights, passing_over_heads=config.model is None
    )
    if config.model is None and not has_mtp(folder):
        raise ConfigError(
            f"speculative_config.method: {config.method} without `model` drafts with modules in the target's "
            f"own folder, and {path} holds none: give the folder that holds them (model), or another method"
        )
    found = kind_of(folder)
    if found != config.method:
        raise ConfigError(
            f"speculative_config.method: {config.method}, but {path} holds {_NAMES[found].__name__}: "
            f"write method: {found}"
        )
    return folder
