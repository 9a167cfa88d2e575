"""The recipe of every method of ``drafthouse train``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from specdec.core.errors import ConfigError
from training.drafters.draft_model import train_draft_model
from training.drafters.early_exits import train_early_exits
from training.drafters.folders import alone_in
from training.drafters.frozen_target import train_beside_target
from training.drafters.joint import train_jointly
from training.drafters.options import TrainOptions
from training.drafters.recipe import DrafterRecipe, Method

logger = logging.getLogger(__name__)
_OTHERS: Mapping[Method, Callable[[DrafterRecipe, TrainOptions], dict[str, Any]]] = {
    "medusa2": train_jointly,
    "layerskip": train_early_exits,
    "draft_model": train_draft_model,
}
_READ_NO_PICKLES: frozenset[Method] = frozenset({"layerskip", "draft_model"})
"""They begin with whole models, which are read from safetensors alone."""


def train_drafter(recipe: DrafterRecipe, options: TrainOptions) -> dict[str, Any]:
    """Train, or go on, and return the measured acceptance.

    Raises:
        ConfigError: an option, a file of data, or the recipe for this target is wrong.
        CheckpointError: the target cannot be read.
    """
    _require_layout(recipe, options)
    _require_use(recipe, options)
    _warn_of_shared_blocks(recipe)
    with alone_in(options.work):
        return _OTHERS.get(recipe.method, train_beside_target)(recipe, options)


def _require_layout(recipe: DrafterRecipe, options: TrainOptions) -> None:
    """What cannot be written at the end has to be refused at the beginning."""
    if options.stores_adapter and recipe.method != "medusa2":
        raise ConfigError(f"--store adapter is of method medusa2, not of {recipe.method}")
    held = recipe.method in ("eagle3", "mtp") and recipe.num_modules == 1
    if options.layout != "published" and not held:
        what = "several MTP modules" if recipe.num_modules > 1 else recipe.method
        raise ConfigError(f"--format {options.layout} does not hold {what}: give published")
    if options.layout == "published" and recipe.fused_layers and recipe.fused_layers[0] == 1:
        raise ConfigError(
            f"--fused-layers {','.join(map(str, recipe.fused_layers))}: engines read others from --format "
            "published where 1 is the first: give --format speculators, or another order"
        )


def _warn_of_shared_blocks(recipe: DrafterRecipe) -> None:
    """The authors of Medusa and Hydra make all further blocks of a head one module: the last wins."""
    num_blocks = recipe.num_layers - (recipe.method == "hydra")
    if recipe.method in ("medusa", "medusa2", "hydra") and num_blocks > 1:
        logger.warning(
            "--num-layers %d: heads with several residual blocks are read as they are by this server and by "
            "vLLM; the code of the method's authors takes the last block for all of them, and drafts worse",
            recipe.num_layers,
        )


def _require_use(recipe: DrafterRecipe, options: TrainOptions) -> None:
    """What would change nothing is refused: whoever gives it means something."""
    if options.allow_pickled_weights and recipe.method in _READ_NO_PICKLES:
        raise ConfigError(
            f"--allow-pickled-weights is not of method {recipe.method}, which reads safetensors alone: "
            "leave it out"
        )
    if options.allow_pickled_weights and options.start_from is None:
        raise ConfigError(
            "--allow-pickled-weights is about the files of --start-from: give both, or leave it out"
        )
    if options.rounds_states and recipe.method == "draft_model" and recipe.on_policy == 1.0:
        flag = "--keep-hidden" if options.keeps_hidden else "--hidden-folder"
        raise ConfigError(
            f"{flag} does not go with --on-policy 1: all steps are on what the draft model has just written, "
            "of which no states are kept: leave it out"
        )
