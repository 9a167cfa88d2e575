"""Gives the paged attention hook to models of transformers that do not use its attention interface.

Only forwards of attention (and of layers that would keep the model from being compiled) are replaced, on the
instances of a loaded model; everything else is the model's own code. When the model is switched to another
attention implementation, its own attention runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel

from specdec.attention.hf import ATTENTION_NAME, paged_attention

ADAPTED_MODEL_TYPES = frozenset({"falcon"})
"""Loaded with eager attention, then given to `adapt`."""


def adapter_reason(config: PretrainedConfig) -> str | None:
    """Return why the adapter for this kind of model cannot be used, or None."""
    if getattr(config, "alibi", False):
        return "its attention adds ALiBi biases, which are not supported yet"
    return None


def adapt(model: PreTrainedModel) -> None:
    """Let a model of `ADAPTED_MODEL_TYPES` call the paged attention; others are left alone."""
    if model.config.model_type not in ADAPTED_MODEL_TYPES:
        return
    from transformers.models.falcon.modeling_falcon import FalconAttention, FalconLinear

    step = _Step()
    for module in model.modules():
        anything: Any = module
        if isinstance(module, FalconAttention):
            anything.forward = _FalconForward(anything, anything.forward, step)
        elif isinstance(module, FalconLinear) and "forward" not in vars(module):
            # The same product and sum, in the form that can be compiled; a rank's own forward stays.
            anything.forward = torch.nn.Linear.forward.__get__(module)
    model.register_forward_pre_hook(step.enter, with_kwargs=True)
    model.register_forward_hook(step.leave, always_call=True)
    # Transformers refuses to set a name that the model does not announce; no mask is built for ours.
    model.config._attn_implementation_internal = ATTENTION_NAME


class _Step:
    """Carries `paged` past a model's forward that does not hand keywords on to its layers."""

    def __init__(self) -> None:
        self.paged: Any = None

    def enter(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = dict(kwargs)
        self.paged = kwargs.pop("paged", None)
        return args, kwargs

    def leave(self, model: torch.nn.Module, args: object, output: object) -> None:
        self.paged = None


class _FalconForward:
    """All generations of Falcon lay out [groups, queries of the group | key | value].

    No closure: a copy of the model, as a view of it in fewer bits is, has to have one of its own modules.
    """

    def __init__(self, module: Any, own: Callable[..., Any], step: _Step) -> None:
        self._module = module
        self._own = own
        self._step = step

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
        attended, _ = paged_attention(
            module, query, key, value, None, paged=self._step.paged, scaling=module.inv_norm_factor
        )
        return module.dense(attended.flatten(2)), None
