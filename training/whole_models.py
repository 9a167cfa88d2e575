"""Models read from folders as they are: a weight that is not there is an error, never drawn by chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from specdec.core.errors import CheckpointError
from specdec.model.checkpoint import foreign_files

_AUTO_MODEL: Any = AutoModelForCausalLM
_GENERATION_CONFIG: Any = GenerationConfig


def load_whole_model(folder: Path, dtype: torch.dtype, **options: object) -> PreTrainedModel:
    """Return the causal language model of a folder, on the CPU; `options` go to transformers.

    Raises:
        CheckpointError: transformers does not read it, or it lacks weights of the model that it names.
    """
    with foreign_files(f"{folder} cannot be loaded"):
        model, found = _AUTO_MODEL.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            # Not the folder's, for which transformers refuses whole models that are served.
            generation_config=_GENERATION_CONFIG(),
            **options,
        )
    missing = sorted(found["missing_keys"])
    if missing:
        # transformers draws them by chance, and says so among much else.
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors of the model that its config.json names, first "
            f"{missing[0]}: is it the folder of a whole model?"
        )
    loaded: PreTrainedModel = model
    return loaded
