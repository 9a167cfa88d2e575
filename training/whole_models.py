"""Models read from folders as they are: a weight that is not there is an error, never drawn by chance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.core.errors import CheckpointError
from training.checkpointing import first_line

_AUTO_MODEL: Any = AutoModelForCausalLM


def load_whole_model(folder: Path, dtype: torch.dtype, **options: object) -> PreTrainedModel:
    """Return the causal language model of a folder, on the CPU; `options` go to transformers.

    Raises:
        CheckpointError: transformers does not read it, or it lacks weights of the model that it names.
    """
    try:
        model, found = _AUTO_MODEL.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    except (ImportError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} cannot be loaded: {first_line(error)}") from error
    missing = sorted(found["missing_keys"])
    if missing:
        # transformers draws them by chance, and says so among much else.
        raise CheckpointError(
            f"{folder} lacks {len(missing)} tensors of the model that its config.json names, first "
            f"{missing[0]}: is it the folder of a whole model?"
        )
    loaded: PreTrainedModel = model
    return loaded
