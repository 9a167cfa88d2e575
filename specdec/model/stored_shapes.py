"""Whether a checkpoint has what its config.json describes, told from the headers of its files alone.

For whoever is about to replace a model that serves by this one: loading would tell the same, but later.
"""

from __future__ import annotations

import re
from typing import Any

from specdec.core.errors import CheckpointError
from specdec.model.checkpoint import open_checkpoint
from specdec.model.config import ModelConfig
from specdec.model.on_paper import check_servable
from specdec.model.stored_tensors import named_tensors


def check_stored_shapes(config: ModelConfig) -> None:
    """Compare what is stored with what the model needs. Reads no weights, and needs no device.

    What is stored in another form than it is used in (experts one by one) counts as there, whatever its
    shape; and a model with code of its own is left to its worker. So what passes may yet fail to load, but
    what can be loaded passes.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or the model cannot be served; names it.
        ConfigError: the model is divided, or as long, as it cannot be.
    """
    if config.trust_remote_code:
        return
    # What needs packages or a device is told where the model runs: they may not be here.
    config = config.model_copy(update={"attention_backend": "auto", "quantization": None})
    model: Any = check_servable(config).model
    checkpoint = open_checkpoint(config.model)
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
