"""What a drafter is trained with; every field has an option of ``drafthouse train``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from specdec.core.errors import ConfigError
from training.run import Schedule

Method = Literal["medusa", "hydra", "eagle", "eagle3", "mtp", "parallel_heads"]
METHODS: tuple[str, ...] = get_args(Method)
CheckpointLayout = Literal["published", "speculators"]


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
    """Tokens ahead: heads of Medusa and Hydra, steps of the training-time test of the others."""
    decay: float = 0.8
    """Weight of a depth's loss, of that before it."""
    num_layers: int = 1
    """Residual blocks of a head, or decoder layers of EAGLE."""
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
        own = {
            "has_prefix_layer": ("hydra",),
            "draft_vocab_size": ("eagle3",),
            "fused_layers": ("eagle3",),
            "is_v31": ("eagle3",),
        }
        for name, methods in own.items():
            if getattr(self, name) and self.method not in methods:
                raise ConfigError(f"{name} is of method {' and '.join(methods)}, not of {self.method}")
