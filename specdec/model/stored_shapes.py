"""Whether a checkpoint has what its config.json describes, told from the headers of its files alone.

For whoever is about to replace a model that serves by this one: loading would tell the same, but later. What
its tensors are stored as, loading would not tell at all, and asks here.
"""

from __future__ import annotations

import json
import re
from typing import Any

from transformers import PreTrainedModel

from specdec.core.errors import CheckpointError
from specdec.model.checkpoint import READABLE_DTYPES, Checkpoint, foreign_files, open_checkpoint
from specdec.model.config import ModelConfig
from specdec.model.on_paper import check_servable
from specdec.model.stored_tensors import named_tensors


def check_stored_shapes(config: ModelConfig, *, is_draft: bool = False) -> None:
    """Compare what is stored with what the model needs. Reads no weights, and needs no device.

    What is stored in another form than it is used in (experts one by one) counts as there, whatever its
    shape; and a model with code of its own is left to its worker. So what passes may yet fail to load, but
    what can be loaded passes. `is_draft` as in `check_servable`.

    Raises:
        CheckpointError: a tensor is missing, quantised or has another shape, or the model cannot be served;
            names it.
        ConfigError: the model is divided, or as long, as it cannot be.
    """
    if config.trust_remote_code:
        return
    # What needs packages or a device is told where the model runs: they may not be here.
    config = config.model_copy(update={"attention_backend": "auto", "quantization": None})
    model: Any = check_servable(config, is_draft=is_draft).model
    checkpoint = open_checkpoint(config.model)
    check_stored_dtypes(checkpoint, model)
    needed = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found: set[str] = set()
    for stored in named_tensors(model, needed, checkpoint.weight_files):
        found.add(stored.parameter)
        expected = needed.get(stored.parameter)
        shape = tuple(stored.handle.get_slice(stored.name).get_shape())
        if stored.converter is None and expected is not None and shape != expected:
            raise CheckpointError(
                f"{checkpoint.path}: the weights do not fit config.json: tensor {stored.name} has shape "
                f"{shape}, the model needs {expected}"
            )
    ties: dict[str, str] = model.all_tied_weights_keys
    tied = {one for pair in ties.items() if found.intersection(pair) for one in pair}
    done_without = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    missing = [
        name
        for name in sorted(needed.keys() - found - tied)
        if not any(pattern.search(name) for pattern in done_without)
    ]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path}: the weights lack {len(missing)} tensors of the model, first {missing[0]}"
        )


def check_stored_dtypes(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Refuse weights that are codes of numbers (FP8, int8 and smaller), which have their scales beside them.

    Reading them would go well, and take the codes for the numbers. What the model does not use may be stored
    as anything, and so may buffers that are no numbers with a fraction, such as masks.

    Args:
        checkpoint: the files; only their headers are looked at.
        model: made of their config.json, on the meta device.

    Raises:
        CheckpointError: names the tensor and what it is stored as.
    """
    unread = {
        name: entry.get("dtype")
        for header in checkpoint.headers
        for name, entry in json.loads(header).items()
        if name != "__metadata__" and entry.get("dtype") not in READABLE_DTYPES
    }
    if not unread:
        return
    needed = model.state_dict()
    with foreign_files(f"{checkpoint.path}: the weights cannot be loaded"):
        parameters = {
            stored.name: needed.get(stored.parameter)
            for stored in named_tensors(model, needed, checkpoint.weight_files)
        }
    for name, dtype in unread.items():
        parameter = parameters[name]
        if parameter is not None and parameter.is_floating_point():
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} is stored as {dtype}: weights that are stored quantised "
                "are not supported yet; the unquantised model can be served with quantization: int8 or int4"
            )
