"""Embeddings and LM head of a target in full, for whoever has a part of them, or none.

Drafters in one rank compute with them alone: a collective for each drafted token would cost more than it
saves memory. Drafters in draft workers have nothing else of the target.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.core.errors import CheckpointError, ConfigError
from specdec.model.checkpoint import open_checkpoint
from specdec.model.loader import LoadedModel
from specdec.model.parallel.loading import read_whole
from specdec.model.parallel.plan import UnsupportedParallelism

_AUTO_MODEL: Any = AutoModelForCausalLM
End = Literal["embeddings", "head"]
_PLAIN: dict[End, type[nn.Module]] = {"embeddings": nn.Embedding, "head": nn.Linear}
"""What they must be: more than that is not known how to make."""
_GETTERS: dict[End, str] = {"embeddings": "get_input_embeddings", "head": "get_output_embeddings"}
"""Of a model of transformers."""


def read_end(loaded: LoadedModel, end: End) -> nn.Module:
    """Read one end of a model that is divided over ranks; dtype and device are those of this rank's part.

    Raises:
        CheckpointError: it is not in the files.
        ConfigError: it is more than a matrix.
    """
    whole = _on_paper(loaded)
    module: nn.Module = getattr(whole, _GETTERS[end])()
    require_plain(module, end, loaded.path.name)
    return read_module(whole, module, loaded.path, loaded.device, loaded.dtype)


def require_plain(module: nn.Module, end: End, name: str) -> None:
    """Check that one end of the model `name` can be made without the model around it.

    Raises:
        ConfigError: it is more than a matrix.
    """
    if type(module) is not _PLAIN[end]:
        raise ConfigError(
            f"{name}: what it has as {end} ({type(module).__name__}) is more than a matrix, which no drafter "
            "can borrow of a target over several ranks, or in another process, yet: write 1 for "
            "target.tensor_parallel_size and target.pipeline_parallel_size, and heads_at: target"
        )


def read_module(
    whole: PreTrainedModel, module: nn.Module, path: Path, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """Read the weights of a module of a model on paper, `whole`, from the model's folder.

    Raises:
        CheckpointError: they are not in the files.
    """
    prefix = next(name for name, one in whole.named_modules() if one is module)
    names = {name: f"{prefix}.{name}" for name in module.state_dict()}
    try:
        tensors = read_whole(whole, open_checkpoint(path), names.values())
    except UnsupportedParallelism as refusal:
        raise CheckpointError(f"{path}: {refusal}") from refusal
    # On paper it stays as it is: what is read for a moment would be kept with it.
    read = copy.deepcopy(module)
    read.load_state_dict({name: tensors[stored] for name, stored in names.items()}, assign=True)
    return read.to(device, dtype).requires_grad_(requires_grad=False).eval()


def _on_paper(loaded: LoadedModel) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = _AUTO_MODEL.from_config(copy.deepcopy(loaded.config))
    return model
