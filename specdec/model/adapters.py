"""Gives the paged attention hook to models of transformers that do not use its attention interface.

All others are only made to remember the step, for layers that they do not hand it to. Of the former, only
forwards of attention (and of layers that would keep the model from being compiled) are replaced, on the
instances of a loaded model; everything else is the model's own code. When the model is switched to another
attention implementation, its own attention runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from specdec.attention.hf import ATTENTION_NAME, paged_attention, remember_step

ADAPTED_MODEL_TYPES = frozenset({"falcon"})
"""Loaded with eager attention, then given to `adapt`."""


def adapter_reason(config: PretrainedConfig) -> str | None:
    """Return why the adapter for this kind of model cannot be used, or None."""
    if getattr(config, "alibi", False):
        return "its attention adds ALiBi biases, which are not supported yet"
    return None


def adapt(model: PreTrainedModel) -> None:
    """Let a model's layers call the paged attention, and find the step that they attend in."""
    is_adapted = model.config.model_type in ADAPTED_MODEL_TYPES
    remember_step(model, is_popped=is_adapted)
    if not is_adapted:
        return
    from transformers.models.falcon.modeling_falcon import FalconAttention, FalconLinear

    for module in model.modules():
        anything: Any = module
        if isinstance(module, FalconAttention):
            anything.forward = _FalconForward(anything, anything.forward)
        elif isinstance(module, FalconLinear) and "forward" not in vars(module):
            # The same product and sum, in the form that can be compiled; a rank's own forward stays.
            anything.forward = torch.nn.Linear.forward.__get__(module)
    # Transformers refuses to set a name that the model does not announce; no mask is built for ours.
    model.config._attn_implementation_internal = ATTENTION_NAME


class _FalconForward:
    """All generations of Falcon lay out [groups, queries of the group | key | value].

    No closure: a copy of the model, as a view of it in fewer bits is, has to have one of its own modules.
    """

    def __init__(self, module: Any, own: Callable[..., Any]) -> None:
        self._module = module
        self._own = own

    def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        module, rotate = self._module, cast("Any", apply_rotary_pos_emb)
        if module.config._attn_implementation != ATTENTION_NAME:
            return self._own(hidden_states, **kwargs)
        batch, length, _ = hidden_states.shape
        grouped = module.query_key_value(hidden_states).view(
            batch, length, module.num_kv_heads, -1, module.head_dim
        )
        query = grouped[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
        key, value = grouped[:, :, :, -2].transpose(1, 2), grouped[:, :, :, -1].transpose(1, 2)
        query, key = rotate(query, key, *kwargs["position_embeddings"])
        attended, _ = paged_attention(module, query, key, value, None, scaling=module.inv_norm_factor)
        return module.dense(attended.flatten(2)), None
