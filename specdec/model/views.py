"""Views of a loaded model that draft for it: its first layers, or its weights with fewer bits.

A view is a model of its own to whoever runs it, and shares what it can: every weight that it does not change,
and, run by `ModelRunner.of_view`, the K/V pool. Layers keep their numbers, so that a view finds in the pool
what the model has written, and what it writes lies where the model will write.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from specdec.core.errors import ConfigError
from specdec.model.config import QuantizationName
from specdec.model.exit_states import ExitTap
from specdec.model.layer_map import LayerMap
from specdec.model.loader import LoadedModel
from specdec.model.parallel.plan import UnsupportedParallelism
from specdec.model.parallel.stages import layer_stack
from specdec.model.quantization import (
    UnsupportedQuantization,
    check_quantizable,
    replace_layers,
    require_torchao,
)


def early_exit(loaded: LoadedModel, exit_layer: int) -> LoadedModel:
    """Return the first `exit_layer` layers of a model, with its final norm and its head behind them.

    Layers are counted as in the original of a checkpoint with inserted do-nothing layers (`layer_map`).

    Raises:
        ConfigError: the model has not that many, or nothing would be left out, or its layers are not in one
            list.
    """
    stack = check_exit(loaded.config, loaded.model, loaded.path.name, exit_layer)
    first_layers = torch.nn.ModuleList(list(stack.layers)[: stack.num_kept])
    model = _with_module(loaded.model, stack.name, first_layers)
    return replace(loaded, model=model)  # `layers` stay those of the pool


def exit_tap(loaded: LoadedModel, exit_layer: int) -> ExitTap:
    """Return a tap at the last layer of what `early_exit` gives for the same model.

    Raises:
        ConfigError: as `early_exit`.
    """
    stack = check_exit(loaded.config, loaded.model, loaded.path.name, exit_layer)
    return ExitTap(stack.layers[stack.num_kept - 1])


class ExitStack(NamedTuple):
    """Where a model has its layers, and how many of them an early exit keeps."""

    name: str
    layers: torch.nn.ModuleList
    num_kept: int


def check_exit(config: PretrainedConfig, model: PreTrainedModel, folder: str, exit_layer: int) -> ExitStack:
    """Return what an early exit keeps of a model, which may be on the meta device.

    Raises:
        ConfigError: as `early_exit`.
    """
    name, kept = Path(folder).name, LayerMap.of_model(config)
    if not 1 <= exit_layer < kept.num_original_layers:
        raise ConfigError(
            f"speculative_config.exit_layer: {exit_layer} does not leave out any of the "
            f"{kept.num_original_layers} layers of {name}: "
            + (
                f"write 1 to {kept.num_original_layers - 1}"
                if kept.num_original_layers > 1
                else "a model of one layer has no early exit"
            )
        )
    try:
        stack_name, stack = layer_stack(model)
    except UnsupportedParallelism as error:
        raise ConfigError(f"speculative_config.method: layerskip does not go with {name}: {error}") from error
    return ExitStack(stack_name, stack, kept.exit_layers_for(exit_layer))


def with_fewer_bits(loaded: LoadedModel, name: QuantizationName) -> LoadedModel:
    """Return a model whose linear layers are quantized copies of this one's; all else is shared.

    Of a rank's part of a model, the layers that it has are quantized as they are cut. Scales then depend on
    the cut, and with them what is drafted.

    Raises:
        ConfigError: torchao is missing, or the model cannot be quantized so.
    """
    require_torchao(name)
    check_fewer_bits(loaded.model, loaded.path.name, name)
    hf_model: Any = loaded.model
    configs = [module.config for module in hf_model.modules() if hasattr(module, "config")]
    shared = {id(one): one for one in (*hf_model.parameters(), *hf_model.buffers(), loaded.config, *configs)}
    model = copy.deepcopy(loaded.model, shared)
    replace_layers(model, name, {})
    # What is drafted may depend on the batch: it is verified by a forward that does not.
    return replace(loaded, model=model, quantization=name, invariant=None)


def check_fewer_bits(model: PreTrainedModel, folder: str, name: QuantizationName) -> None:
    """Check that the linear layers of a model, which may be on the meta device, can be quantized to draft.

    Raises:
        ConfigError: they cannot.
    """
    try:
        check_quantizable(model, name)
    except UnsupportedQuantization as error:
        raise ConfigError(
            f"speculative_config.quantization: {name} does not go with {Path(folder).name}: {error}"
        ) from error


def _with_module(model: Any, name: str, module: torch.nn.Module) -> Any:
    """Return a model that has `module` in the place of that name, and shares everything else."""
    child, _, rest = name.partition(".")
    other = copy.copy(model)
    other._modules = dict(model._modules)
    other._modules[child] = _with_module(model._modules[child], rest, module) if rest else module
    return other
