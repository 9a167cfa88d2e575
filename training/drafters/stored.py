"""Finished weights: of the numbers that are asked for, and trained targets as folders that are served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.model.generation_file import GENERATION_FILE

_MTP_KEY = "num_nextn_predict_layers"


@contextmanager
def stored_as(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, weights are of ``dtype``; behind it of what they were, with the values that rounding has left.

    Tables of positions are no weights: they stay.
    """
    before = [parameter.dtype for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    try:
        yield
    finally:
        for parameter, own in zip(module.parameters(), before, strict=True):
            parameter.data = parameter.data.to(own)


def save_language_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype,
    begun_as: Path,
) -> None:
    """Write an ordinary model folder, and go on with what was written.

    What ends its texts, and how it is meant to be sampled, is as in the folder that it has `begun_as`.
    """
    with stored_as(model, dtype):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    before = begun_as / GENERATION_FILE
    if before.exists():
        shutil.copyfile(before, folder / GENERATION_FILE)
    else:  # transformers writes one of its own making
        (folder / GENERATION_FILE).unlink(missing_ok=True)
    # MTP modules were made for what the weights were before, and are not among them.
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if config.pop(_MTP_KEY, None) is not None:
        config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
