"""How a recipe of ``drafthouse train`` is run: on what, and where things go."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specdec.core.errors import ConfigError
from training.drafters.recipe import CheckpointLayout

_SAMPLE_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What is trained, on what, and where things go."""

    target: Path
    data: tuple[Path, ...]
    out: Path
    work: Path
    """Checkpoint, log, hidden states and samples: what the same command goes on from."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the target, and of matrix products (weights in training are float32); auto: bfloat16 on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    samples: int = 0
    """Rows of the target's own writing to train on instead of the texts, which only begin them."""
    sample_temperature: float = _SAMPLE_TEMPERATURE
    start_from: Path | None = None
    """Folder of a drafter of the same kind and shapes for this target (mtp: the target's own; draft_model:
    any model with its tokenizer), whose weights are trained further; None: new ones."""
    allow_pickled_weights: bool = False
    """Read ``start_from`` of a pickled file, where it has no safetensors."""
    keeps_hidden: bool = False
    """Keep hidden states on disk, for later epochs and runs."""
    hidden_folder: Path | None = None
    """Where, for runs with other work folders too; None: in ``work``."""
    layout: CheckpointLayout = "published"
    stores_adapter: bool = False
    """medusa2: write what is added to the target (LoRA), not the target that it makes."""
    stored_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the finished weights, which are rounded to it before their acceptance is measured."""
    eval_texts: int = 16
    """Held-out excerpts that acceptance is measured behind; 0: it is not."""
    eval_tokens: int = 96
    stop_after_step: int | None = None
    checkpoint_every_s: float = 180.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_temperature < math.inf:
            raise ConfigError("--sample-temperature must be finite, and not negative")
        if self.sample_temperature != _SAMPLE_TEMPERATURE and not self.samples:
            raise ConfigError("--sample-temperature is that of --samples: give both, or leave it out")

    @property
    def rounds_states(self) -> bool:
        """Whether hidden states are kept on disk, wherever: they are rounded to bfloat16 for that."""
        return self.keeps_hidden or self.hidden_folder is not None
