"""What a drafter is trained with; every field has an option of ``drafthouse train``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from specdec.core.errors import ConfigError
from training.divergence import DivergenceName
from training.run import Schedule

Method = Literal[
    "medusa", "hydra", "eagle", "eagle3", "mtp", "parallel_heads", "medusa2", "layerskip", "draft_model"
]
METHODS: tuple[str, ...] = get_args(Method)
TargetLoss = Literal["text", "self"]
CheckpointLayout = Literal["published", "speculators"]

_SEEDS = 1 << 32
"""Seeds are below it: what is made of one for each of many samples has 64 bits."""


@dataclass(frozen=True, kw_only=True)
class DrafterRecipe(Schedule):
    """Decides a drafter's weights, given target and data."""

    method: Method
    steps: int = 1000
    row_length: int = 512
    """Tokens of a row."""
    batch_rows: int = 16
    """Rows of a forward."""
    accumulate: int = 1
    """Forwards before the optimizer moves."""
    depth: int = 4
    """Tokens ahead: heads of Medusa and Hydra, steps of the training-time test of the others; of methods
    without either, what acceptance is measured for."""
    decay: float = 0.8
    """Weight of a depth's loss, of that before it."""
    num_layers: int = 1
    """Medusa, Hydra: residual blocks of a head; EAGLE: decoder layers; draft model: those of the target's."""
    num_modules: int = 1
    """MTP: modules, each for a depth of its own; the last is used again for later ones."""
    has_prefix_layer: bool = False
    """Hydra++."""
    draft_vocab_size: int | None = None
    """EAGLE-3: most frequent token ids that it knows; None: all, but no more than 32,000."""
    fused_layers: tuple[int, ...] | None = None
    """EAGLE-3: states that it fuses; None: after 2, half of the layers, and all but 3."""
    is_v31: bool = False
    """EAGLE-3.1: ``fc_norm`` and ``norm_output``."""
    feature_noise: float = 0.1
    """EAGLE: width of the uniform noise on features, to either side."""
    classification_weight: float = 0.1
    """EAGLE: of the cross entropy, beside the regression."""
    target_rate: float = 0.25
    """Methods that move the target: its learning rates, as a share of those below."""
    heads_first: int = 0
    """Medusa-2: steps in which the heads learn alone."""
    heads_weight: float = 0.2
    """Medusa-2: of the heads' losses, beside the target's own."""
    target_loss: TargetLoss = "text"
    """Medusa-2: what the target is held to: the text, or its own distributions before training."""
    lora_rank: int = 0
    """Medusa-2: of the matrices that are added to the target's; 0: its weights themselves are trained."""
    lora_alpha: float = 16.0
    """Medusa-2: what is added is scaled by alpha / rank."""
    layer_dropout: float = 0.1
    """LayerSkip's p_max."""
    exit_scale: float = 0.5
    """LayerSkip's e_scale."""
    exit_layer: int | None = None
    """LayerSkip: layers that draft where acceptance is measured; None: half of them."""
    divergence: DivergenceName = "forward_kl"
    """Draft model: from the target's distribution to its own."""
    on_policy: float = 0.5
    """Draft model: share of the steps on continuations that it writes itself (GKD's lambda)."""
    muon_lr: float = 2e-3
    adamw_lr: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 20
    constant_share: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_rows", "accumulate", "depth", "num_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
        if self.row_length < self.depth + 3:
            raise ConfigError(
                f"--row-length {self.row_length} is too short to look {self.depth} tokens ahead"
            )
        defaults = {field.name: field.default for field in fields(self)}
        for name, methods in _OF_METHODS.items():
            if getattr(self, name) != defaults[name] and self.method not in methods:
                raise ConfigError(f"{flag_of(name)} is of method {_listed(methods)}, not of {self.method}")
        self._check_ranges()
        if not 1 <= self.num_modules <= self.depth:
            raise ConfigError(f"--num-modules must be from 1 to --depth ({self.depth})")
        if self.method == "medusa2":
            self._check_joint()

    def _check_ranges(self) -> None:
        for name in ("on_policy", "layer_dropout", "decay", "constant_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{flag_of(name)} must be from 0 to 1")
        for name in ("feature_noise", "classification_weight", "weight_decay", "warmup_steps", "exit_scale"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{flag_of(name)} must not be negative")
        for name in ("muon_lr", "adamw_lr", "target_rate", "heads_weight"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{flag_of(name)} must be finite, and not negative")
        if not 0 <= self.seed < _SEEDS:
            raise ConfigError(f"--seed must be from 0 to {_SEEDS - 1}")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise ConfigError("--draft-vocab-size must be at least 1")
        if not self.clip_norm > 0.0:
            raise ConfigError("--clip-norm must be above 0")

    def _check_joint(self) -> None:
        if self.lora_rank < 0:
            raise ConfigError("--lora-rank must be at least 1, or 0 to train all of the target's weights")
        if not 0.0 < self.lora_alpha < math.inf:
            raise ConfigError("--lora-alpha must be finite, and above 0")
        if self.lora_alpha != DrafterRecipe.lora_alpha and not self.lora_rank:
            raise ConfigError("--lora-alpha scales what --lora-rank adds: give both, or leave it out")
        if not 0 <= self.heads_first < self.steps:
            raise ConfigError(f"--heads-first must be from 0 to one less than --steps ({self.steps})")
        if self.target_loss == "self" and not self.lora_rank:
            raise ConfigError(
                "--target-loss self needs --lora-rank: without what is added the target is what it was; a "
                "copy of all its weights is not kept"
            )


def _listed(methods: Sequence[str]) -> str:
    *others, last = methods
    return f"{', '.join(others)} and {last}" if others else last


_CALLED = {"muon_lr": "matrix_lr", "adamw_lr": "vector_lr"}
"""Options that say what is meant, not by whom."""


def flag_of(name: str) -> str:
    """The option that sets a field."""
    words = _CALLED.get(name, name).removeprefix("is_").removeprefix("has_")
    return f"--{words.replace('_', '-')}"


_OF_METHODS: dict[str, tuple[Method, ...]] = {
    "num_layers": ("medusa", "hydra", "eagle", "medusa2", "draft_model"),
    "decay": ("medusa", "hydra", "eagle3", "mtp", "parallel_heads", "medusa2"),
    "feature_noise": ("eagle",),
    "classification_weight": ("eagle",),
    "num_modules": ("mtp",),
    "has_prefix_layer": ("hydra",),
    "draft_vocab_size": ("eagle3",),
    "fused_layers": ("eagle3",),
    "is_v31": ("eagle3",),
    "target_rate": ("medusa2", "layerskip"),
    "heads_first": ("medusa2",),
    "heads_weight": ("medusa2",),
    "target_loss": ("medusa2",),
    "lora_rank": ("medusa2",),
    "lora_alpha": ("medusa2",),
    "layer_dropout": ("layerskip",),
    "exit_scale": ("layerskip",),
    "exit_layer": ("layerskip",),
    "divergence": ("draft_model",),
    "on_policy": ("draft_model",),
}
"""Settings that other methods do not read."""
