"""Decoder layers of new drafters: what they are described by, and what their weights begin as."""

from __future__ import annotations

import copy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import LlamaConfig, PretrainedConfig

from specdec.core.errors import ConfigError
from specdec.drafters.base import TargetParts
from specdec.model.layer_values import layer_values

_DEFAULT_RANGE = 0.02
"""transformers' own, of models whose configuration has no `initializer_range`."""


def llama_layers(target: TargetParts, num_layers: int) -> PretrainedConfig:
    """A Llama of the target's sizes: what EAGLE and EAGLE-3 are published as, whatever their target is.

    Raises:
        ConfigError: there is no Llama of these sizes.
    """
    config: Any = target.config
    if config.model_type == "llama":
        own: PretrainedConfig = copy.deepcopy(config)
        own.num_hidden_layers = num_layers
        return own
    try:
        return LlamaConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=_of_first_layer(config, "intermediate_size") or 4 * target.hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=_of_first_layer(config, "num_key_value_heads"),
            head_dim=_of_first_layer(config, "head_dim"),
            max_position_embeddings=config.max_position_embeddings,
            initializer_range=_initializer_range(config),
            rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            rope_parameters=_rope(config),
            bos_token_id=getattr(config, "bos_token_id", None),
            eos_token_id=getattr(config, "eos_token_id", None),
            pad_token_id=getattr(config, "pad_token_id", None),
        )
    except (StrictDataclassError, AttributeError, TypeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error, StrictDataclassError) else None
        raise ConfigError(
            f"no head can be made for a target of model type {config.model_type!r}, for it is made of layers "
            f"of a Llama of the target's sizes: {str(cause or error).splitlines()[0]}"
        ) from error


def _of_first_layer(config: Any, name: str) -> Any:
    """Return the value of a key that layers may have for themselves (Gemma 4); None where nobody has it."""
    return next(iter(layer_values(config, name)), None)


def _rope(config: Any) -> dict[str, Any] | None:
    """Rotary parameters as a Llama has them: one set for all layers, over whole heads."""
    stated: dict[str, Any] = copy.deepcopy(getattr(config, "rope_parameters", None) or {})
    rope: dict[str, Any] = stated.get("full_attention") or stated
    if rope.pop("partial_rotary_factor", None) not in (None, 1.0):
        # Factors of the other kinds are as many as a part of a head has frequencies.
        rope = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rope or None


@torch.no_grad()
def draw_what_is_unset(drafter: nn.Module, config: PretrainedConfig) -> None:
    """Draw matrices that transformers draws for whole models alone: routers and experts of mixtures.

    Until then they are what lay in memory, or zero. Modules that can reset their parameters have done so.
    """
    std = _initializer_range(config)
    for module in drafter.modules():
        if hasattr(module, "reset_parameters"):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim >= 2:
                parameter.normal_(std=std)


def _initializer_range(config: PretrainedConfig) -> float:
    return getattr(config, "initializer_range", None) or _DEFAULT_RANGE
