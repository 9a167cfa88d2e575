"""The methods: the drafter that each makes, its loss, and the layout it is written in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from transformers import PretrainedConfig

from specdec.core.errors import ConfigError
from specdec.drafters.base import Drafter, FeatureDrafter, HeadsDrafter, TargetParts
from specdec.drafters.checkpoints.eagle import save_eagle
from specdec.drafters.checkpoints.eagle3 import save_eagle3
from specdec.drafters.checkpoints.hydra import save_hydra
from specdec.drafters.checkpoints.medusa import save_medusa
from specdec.drafters.checkpoints.mtp import save_modules
from specdec.drafters.checkpoints.parallel_heads import save_parallel_heads
from specdec.drafters.checkpoints.speculators import save_speculator
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3, Eagle3Settings, default_fused_layers
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from specdec.drafters.parallel_heads import ParallelHeads
from specdec.drafters.vocabulary import DraftVocabulary
from training.drafters.layers import draw_what_is_unset, llama_layers
from training.drafters.objectives import (
    TargetRows,
    decayed_mean,
    eagle_losses,
    hydra_losses,
    medusa_losses,
    parallel_losses,
    unrolled_losses,
)
from training.drafters.recipe import CheckpointLayout, DrafterRecipe

_MOST_KNOWN_IDS = 32_000
_NOT_OF_LAYERS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "layer_types",
        "max_position_embeddings",
        "mlp_layer_types",
        "num_hidden_layers",
        "pad_token_id",
        "tie_word_embeddings",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a model's configuration that say nothing of what a layer behind its last computes."""

DrafterT = TypeVar("DrafterT", bound=Drafter)


class Training(Protocol):
    """A drafter in training."""

    @property
    def drafter(self) -> Drafter: ...

    def loss(self, rows: TargetRows, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        """What to go down, and what to log."""
        ...

    def save(self, folder: Path, target_name: str, layout: CheckpointLayout) -> None:
        """Write the drafter in a layout, of those that its method has."""
        ...

    def go_on_with(self, other: Drafter) -> None:
        """Train another drafter of the same kind and shapes instead, with settings of its own.

        Raises:
            ConfigError: what is trained here cannot have these settings.
        """
        ...


class _TrainingOf(Generic[DrafterT]):
    """Holds the drafter; whoever writes it writes its settings too."""

    drafter: DrafterT

    def go_on_with(self, other: Drafter) -> None:
        assert isinstance(other, type(self.drafter)), "that was checked"
        self.drafter = other


def _by_depth(losses: list[torch.Tensor], decay: float) -> tuple[torch.Tensor, dict[str, float]]:
    return decayed_mean(losses, decay), {f"d{i + 1}": loss.item() for i, loss in enumerate(losses)}


class MedusaTraining(_TrainingOf[Medusa]):
    """Medusa-1: heads on a frozen target."""

    def __init__(self, recipe: DrafterRecipe, target: TargetParts, counts: torch.Tensor) -> None:
        self._decay = recipe.decay
        self.drafter = Medusa(target, num_heads=recipe.depth, num_layers=recipe.num_layers)
        self.drafter.start_from_target()

    def loss(self, rows: TargetRows, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        return _by_depth(medusa_losses(self.drafter, rows.hidden, rows.tokens), self._decay)

    def save(self, folder: Path, target_name: str, layout: CheckpointLayout) -> None:
        save_medusa(self.drafter, folder, base_model=target_name)


class HydraTraining(_TrainingOf[Hydra]):
    """Hydra, and Hydra++ with a prefix layer."""

    def __init__(self, recipe: DrafterRecipe, target: TargetParts, counts: torch.Tensor) -> None:
        self._decay = recipe.decay
        self.drafter = Hydra(
            target,
            num_heads=recipe.depth,
            num_layers=recipe.num_layers,
            has_prefix_layer=recipe.has_prefix_layer,
        )
        self.drafter.start_from_target()

    def loss(self, rows: TargetRows, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        return _by_depth(hydra_losses(self.drafter, rows), self._decay)

    def save(self, folder: Path, target_name: str, layout: CheckpointLayout) -> None:
        save_hydra(self.drafter, folder, base_model=target_name)


class EagleTraining(_TrainingOf[Eagle]):
    """EAGLE-1 and -2."""

    def __init__(self, recipe: DrafterRecipe, target: TargetParts, counts: torch.Tensor) -> None:
        self._recipe = recipe
        self.drafter = Eagle(target, llama_layers(target, recipe.num_layers))

    def loss(self, rows: TargetRows, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        regression, classification = eagle_losses(
            self.drafter, rows, noise=self._recipe.feature_noise, generator=generator
        )
        total = regression + self._recipe.classification_weight * classification
        return total, {"features": regression.item(), "tokens": classification.item()}

    def save(self, folder: Path, target_name: str, layout: CheckpointLayout) -> None:
        save_eagle(self.drafter, folder)


class Eagle3Training(_TrainingOf[Eagle3]):
    """EAGLE-3 and 3.1, by the training-time test."""

    def __init__(self, recipe: DrafterRecipe, target: TargetParts, counts: torch.Tensor) -> None:
        self._recipe = recipe
        layers = recipe.fused_layers or default_fused_layers(target.num_layers)
        if min(layers) < 0 or max(layers) >= target.num_layers:
            raise ConfigError(
                f"--fused-layers {','.join(map(str, layers))}: the target has {target.num_layers} layers; "
                f"states are those after 0 to {target.num_layers - 1} layers"
            )
        settings = Eagle3Settings(
            config=llama_layers(target, 1),
            fused_layers=layers,
            fc_norm=recipe.is_v31,
            norm_output=recipe.is_v31,
        )
        self.drafter = Eagle3(target, settings, _vocabulary(recipe, target, counts))
        self.drafter.start_from_target()

    def loss(self, rows: TargetRows, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        return _by_depth(unrolled_losses(self.drafter, rows, self._recipe.depth), self._recipe.decay)

    def save(self, folder: Path, target_name: str, layout: CheckpointLayout) -> None:
        if layout == "published":
            save_eagle3(self.drafter, folder)
        else:
            save_speculator(
                self.drafter, folder, base_model=target_name, num_speculative_tokens=self._recipe.depth
            )


class MtpTraining(_TrainingOf[Mtp]):
    """MTP: one module, used again for every depth (as FastMTP trains it), or one for each (DeepSeek-V3)."""

    def __init__(self, recipe: DrafterRecipe, target: TargetParts, counts: torch.Tensor) -> None:
        self._recipe = recipe
        self.drafter = Mtp(target, num_modules=recipe.num_modules)

    def go_on_with(self, other: Drafter) -> None:
        """Take the weights alone: not every layout says what layers are, beside the target's."""
        assert isinstance(other, Mtp), "that was checked"
        _require_same_layers(self.drafter.config, other.config)
        self.drafter.load_state_dict(other.state_dict())

    def loss(self, rows: TargetRows, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        return _by_depth(unrolled_losses(self.drafter, rows, self._recipe.depth), self._recipe.decay)

    def save(self, folder: Path, target_name: str, layout: CheckpointLayout) -> None:
        if layout == "published":
            save_modules(self.drafter, folder)
        else:
            save_speculator(
                self.drafter, folder, base_model=target_name, num_speculative_tokens=self._recipe.depth
            )


class ParallelTraining(_TrainingOf[ParallelHeads]):
    """Meta's parallel heads, on a frozen trunk."""

    def __init__(self, recipe: DrafterRecipe, target: TargetParts, counts: torch.Tensor) -> None:
        self._decay = recipe.decay
        self.drafter = ParallelHeads(target, num_heads=recipe.depth)

    def loss(self, rows: TargetRows, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, float]]:
        return _by_depth(parallel_losses(self.drafter, rows), self._decay)

    def save(self, folder: Path, target_name: str, layout: CheckpointLayout) -> None:
        save_parallel_heads(self.drafter, folder, base_model=target_name)


_METHODS: dict[str, Callable[[DrafterRecipe, TargetParts, torch.Tensor], Training]] = {
    "medusa": MedusaTraining,
    "hydra": HydraTraining,
    "eagle": EagleTraining,
    "eagle3": Eagle3Training,
    "mtp": MtpTraining,
    "parallel_heads": ParallelTraining,
}


def make_training(recipe: DrafterRecipe, target: TargetParts, counts: torch.Tensor) -> Training:
    """The drafter of a recipe, as it starts; ``counts`` int64 [V]: how often each token id is in the data.

    Raises:
        ConfigError: the recipe asks for what the target does not have, or does not go with its sizes.
        CheckpointError: decoder layers like the target's cannot be used one by one.
    """
    training = _METHODS[recipe.method](recipe, target, counts)
    require_whole_rows(training.drafter, recipe)
    draw_what_is_unset(training.drafter, target.config)
    return training


def require_whole_rows(drafter: Drafter, recipe: DrafterRecipe) -> None:
    """Check that layers of a drafter attend to rows in training as they do when they draft.

    Raises:
        ConfigError: they cap their scores, or rows are longer than what they attend to.
    """
    if not isinstance(drafter, FeatureDrafter | HeadsDrafter):
        return
    # The last position has no token behind it, which features are read with.
    length = recipe.row_length - 1 if isinstance(drafter, FeatureDrafter) else recipe.row_length
    for layer in drafter.attention_layers:
        if layer.softcap is not None:
            raise ConfigError(
                f"{recipe.method} cannot be trained for this target: softcap ({layer.softcap:g}) of the "
                "attention of its layers is not trained with"
            )
        if layer.sliding_window is not None and layer.sliding_window < length:
            raise ConfigError(
                f"{recipe.method} cannot be trained for this target with --row-length {recipe.row_length}: "
                f"its layers attend to {layer.sliding_window} positions (sliding_window), and in training to "
                f"all before: give at most {layer.sliding_window + recipe.row_length - length}"
            )


def _require_same_layers(wanted: PretrainedConfig, found: PretrainedConfig) -> None:
    ours, theirs = wanted.to_dict(), found.to_dict()
    for name in sorted((ours.keys() & theirs.keys()) - _NOT_OF_LAYERS):
        if ours[name] != theirs[name]:
            raise ConfigError(
                f"its layers have {name} {theirs[name]!r}, the target's {ours[name]!r}, and modules of the "
                "target's own kind are what is trained: leave it out"
            )


def _vocabulary(recipe: DrafterRecipe, target: TargetParts, counts: torch.Tensor) -> DraftVocabulary | None:
    size = recipe.draft_vocab_size or min(target.vocab_size, _MOST_KNOWN_IDS)
    if size > target.vocab_size:
        raise ConfigError(f"--draft-vocab-size {size}: the target knows {target.vocab_size} ids")
    if size == target.vocab_size:
        return None
    padded = torch.zeros(target.vocab_size, dtype=torch.int64)
    padded[: len(counts)] = counts
    return DraftVocabulary.of_ids(padded.argsort(descending=True, stable=True)[:size], target.vocab_size)
