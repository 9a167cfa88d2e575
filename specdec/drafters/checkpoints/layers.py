"""What the decoder layers of EAGLE heads are, by their tensors.

Configurations of published heads were often made from their target's: `model_type`, and flags of biases, are
the target's then, while the layers are those that all of EAGLE's code builds: Llama's.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from specdec.drafters.checkpoints.files import DrafterFolder
from specdec.drafters.checkpoints.fit import is_rotary_buffer
from specdec.drafters.checkpoints.keys import Keys

logger = logging.getLogger(__name__)

_LLAMA = {
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "hidden_norm",
    "input_layernorm",
    "post_attention_layernorm",
}
"""`hidden_norm` is EAGLE-3's."""
_OF_QWEN3 = {"self_attn.q_norm", "self_attn.k_norm"}


def read_layer_config(
    folder: DrafterFolder, keys: Keys, prefix: str, num_layers: int | None = None
) -> PretrainedConfig:
    """Return what the layers are made from that config.json describes.

    They are a Llama's or a Qwen 3's where their tensors are, and of the type that config.json states where
    those are others. Names of the first layer's begin with `prefix`; `num_layers` is as in
    `Keys.layer_config`.

    Raises:
        CheckpointError: naming the key at fault.
    """
    kind, stated = _kind(folder, prefix), keys.content.get("model_type", "llama")
    if kind is not None and kind != stated:
        logger.info(
            "%s: model_type is %r, the tensors are those of layers of %s: such are used",
            folder.path,
            stated,
            kind,
        )
    return keys.layer_config(kind, num_layers)


def match_biases(attention: Any, folder: DrafterFolder, prefix: str) -> None:
    """Give the projections of `attention` a bias where there is a tensor for it, and there alone.

    `prefix` is what names of its layer's tensors begin with.
    """
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        linear = getattr(attention, name, None)
        has_bias = f"{prefix}self_attn.{name}.bias" in folder.shapes
        if isinstance(linear, nn.Linear) and has_bias != (linear.bias is not None):
            setattr(attention, name, nn.Linear(linear.in_features, linear.out_features, bias=has_bias))


def _kind(folder: DrafterFolder, prefix: str) -> str | None:
    """Return the type of model whose layers have these parts; None: another than Llama and Qwen 3."""
    parts = {
        name.removeprefix(prefix).rpartition(".")[0]
        for name in folder.shapes
        if name.startswith(prefix) and not is_rotary_buffer(name)
    }
    if "post_attention_layernorm" not in parts:
        return None
    if parts <= _LLAMA:
        return "llama"
    return "qwen3" if _OF_QWEN3 <= parts <= _LLAMA | _OF_QWEN3 else None
