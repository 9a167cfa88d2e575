"""Which models the paged engine can run, told from the configuration before weights are read.

The engine runs a model's own `transformers` code with paged attention in the place of its attention
function. That is exact for models whose only state between tokens is the K/V of causal (full or sliding
window) attention, and whose other computations depend on a token and its position alone.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig, PreTrainedModel

from specdec.model.adapters import ADAPTED_MODEL_TYPES, adapter_reason

WHAT_CAN_BE = "docs/models.md says what can be served"
"""Ends an error that refuses a model."""

_ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_REFUSED_MODEL_TYPES = {
    "gpt_oss": "its attention has sinks, which are not supported yet",
}


def unsupported_reason(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    """Return why this model cannot be run, or None."""
    if config.model_type in _REFUSED_MODEL_TYPES:
        return _REFUSED_MODEL_TYPES[config.model_type]
    kind_reason = _kind_reason(config, model_class)
    if kind_reason is not None:
        return kind_reason  # of what is no language model nobody can say which part is the text's
    text_config = config.get_text_config()
    return _layer_reason(text_config) or _rope_reason(text_config)


def kind_of(config: PretrainedConfig) -> str:
    """Return what a model is for which transformers has no causal language model, for people."""
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder-decoder model"
    if any(getattr(config, f"{kind}_config", None) is not None for kind in ("vision", "audio", "image")):
        return "a multimodal model"
    return "another kind of model"


def _kind_reason(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    stored_form = _stored_form(config)
    if stored_form is not None:
        return (
            f"its weights are stored quantised ({stored_form}), which is not supported yet; the unquantised "
            "model can be served with quantization: int8 or int4"
        )
    if getattr(model_class, "_is_stateful", False):
        return "it keeps state other than K/V (a recurrent or state-space model)"
    if config.model_type in ADAPTED_MODEL_TYPES:
        return adapter_reason(config)
    if not getattr(model_class, "_supports_attention_backend", False):
        return f"{model_class.__name__} does not use the attention interface of transformers"
    return None


def _stored_form(config: PretrainedConfig) -> str | None:
    """What says that the weights are quantised."""
    stored_form = getattr(config, "quantization_config", None)
    if stored_form is not None:
        method = stored_form.get("quant_method") if isinstance(stored_form, dict) else None
        return f"quantization_config, quant_method {method}"
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, torch.dtype) and dtype.itemsize == 1:
        return f"dtype {str(dtype).removeprefix('torch.')}"
    return None


def _layer_reason(config: PretrainedConfig) -> str | None:
    if getattr(config, "num_hidden_layers", 1) < 1:
        return "it has no layers"
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in _ATTENTION_LAYER_TYPES:
            return f"it has layers of type {layer_type}, only full and sliding-window attention are supported"
    if getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", ())):
        return (
            "it scales attention by the place of a token (attn_temperature_tuning), which its layers without "
            "rotary embedding take to be the place in the forward, not in the text"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        return "its layers share K/V (num_kv_shared_layers), which is not supported yet"
    # Of other values, `vision` (Gemma 4) is about the tokens of images alone, which are not served.
    is_bidirectional = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if is_bidirectional or not getattr(config, "is_causal", True):
        return "its attention is not causal"
    return None


def _rope_reason(config: PretrainedConfig) -> str | None:
    """One rotary embedding for all layers may depend on the length of the sequence (`model.rotary`)."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return None
    for layer_type, nested in parameters.items():
        if not isinstance(nested, dict):
            continue
        rope_type = nested.get("rope_type", nested.get("type", "default"))
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            return (
                f"the rotary embedding of its {layer_type} layers is of type {rope_type}: frequencies that "
                "depend on the length are supported where all layers share them"
            )
    return None
