"""Embeddings and LM head of a target in full, beside a rank that has a part of them, or none.

Drafters in one rank compute with them alone: a collective for each drafted token would cost more than it
saves memory.
"""

from __future__ import annotations

import copy
from typing import Any, Literal, NamedTuple

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


class _Kind(NamedTuple):
    getter: str
    """Of a model of transformers."""
    plain: type[nn.Module]
    """What it must be: more than that is not known how to make."""


_KINDS: dict[End, _Kind] = {
    "embeddings": _Kind("get_input_embeddings", nn.Embedding),
    "head": _Kind("get_output_embeddings", nn.Linear),
}


def read_end(loaded: LoadedModel, end: End) -> nn.Module:
    """Read one end of a model that is divided over ranks; dtype and device are those of this rank's part.

    Raises:
        CheckpointError: it is not in the files.
        ConfigError: it is more than a matrix.
    """
    getter, plain = _KINDS[end]
    whole = _on_paper(loaded)
    on_paper: nn.Module = getattr(whole, getter)()
    if type(on_paper) is not plain:
        raise ConfigError(
            f"{loaded.path.name}: what it has as {end} ({type(on_paper).__name__}) is more than a matrix, "
            "which no drafter can borrow of a target over several ranks yet: write 1 for "
            "target.tensor_parallel_size and target.pipeline_parallel_size"
        )
    prefix = next(name for name, module in whole.named_modules() if module is on_paper)
    names = {name: f"{prefix}.{name}" for name in on_paper.state_dict()}
    try:
        tensors = read_whole(whole, open_checkpoint(loaded.path), names.values())
    except UnsupportedParallelism as refusal:
        raise CheckpointError(f"{loaded.path}: {refusal}") from refusal
    on_paper.load_state_dict({name: tensors[stored] for name, stored in names.items()}, assign=True)
    return on_paper.to(loaded.device, loaded.dtype).requires_grad_(requires_grad=False).eval()


def _on_paper(loaded: LoadedModel) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = _AUTO_MODEL.from_config(copy.deepcopy(loaded.config))
    return model
