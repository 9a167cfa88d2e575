"""The only hook into `transformers`: an attention function that reads and writes a paged pool.

A model is loaded with `attn_implementation=ATTENTION_NAME` and run on a flat batch, `input_ids` [1, T],
with `position_ids` [1, T], `use_cache=False` and the keyword `paged=PagedBatch(...)`, which the model's own
forward passes down to every attention layer. Layers to which it does not pass it find it where
`remember_step` has put it. No mask function is registered under that name, so
`transformers` builds no mask.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from specdec.attention.base import LayerAttention

ATTENTION_NAME = "drafthouse_paged"

_HARMLESS_KEYWORDS = frozenset(
    # Information that the paged batch already carries, or flags of other implementations.
    {"position_ids", "use_cache", "output_attentions", "is_causal", "cache_position", "layer_idx"}
)


_WINDOW_IN_MASK_ALONE = frozenset({"phimoe"})
"""Model types whose model puts `sliding_window` into the mask of all layers, which do not pass it on."""
_WINDOWS_BY_TYPE_IN_MASK_ALONE = frozenset({"qwen2_moe"})
"""The same of layers that are `sliding_attention` by `layer_types`."""


_STEP = "paged_step"


class RememberedStep:
    """Carries `paged` past forwards that do not hand keywords on to what they are made of."""

    def __init__(self, *, is_popped: bool) -> None:
        self.paged: Any = None
        self._is_popped = is_popped

    def enter(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Note it before the model's forward, which it may be hidden from."""
        self.paged = kwargs.get("paged")
        if not self._is_popped:
            return None
        return args, {name: value for name, value in kwargs.items() if name != "paged"}

    def leave(self, model: torch.nn.Module, args: object, output: object) -> None:
        """Forget it behind the model's forward, also where that has failed."""
        self.paged = None


def remember_step(model: torch.nn.Module, *, is_popped: bool = False) -> None:
    """Let attention layers that are not handed `paged` find it all the same (Nemotron).

    Args:
        model: whose forward is called with `paged`.
        is_popped: its forward does not take that keyword, and is called without it.
    """
    step = RememberedStep(is_popped=is_popped)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _STEP, step)
    model.register_forward_pre_hook(step.enter, with_kwargs=True)
    model.register_forward_hook(step.leave, always_call=True)


class UnsupportedAttention(Exception):
    """A layer asks its attention for something that the paged attention does not do."""


class _Attends(Protocol):
    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor: ...


def _window_of_mask(module: torch.nn.Module, layer_idx: int) -> int | None:
    """Return the window of a layer that has it in its mask alone: there are no masks here."""
    config: Any = getattr(module, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type in _WINDOWS_BY_TYPE_IN_MASK_ALONE:
        is_windowed = config.layer_types[layer_idx] == "sliding_attention"
    else:
        is_windowed = model_type in _WINDOW_IN_MASK_ALONE
    window: int | None = config.sliding_window if is_windowed else None
    return window


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: _Attends | AttentionProbe | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in the signature of `transformers`.

    Args:
        module: the attention layer; its `layer_idx` names the cache.
        query: [1, H, T, D].
        key: [1, G, T, D].
        value: [1, G, T, D].
        attention_mask: always None, because no mask function is registered.
        paged: the step (`PagedBatch`), or the probe that records what the layers ask for; None: what
            `remember_step` has noted.
        scaling: factor on query-key products. Like the window and the softcap it is a constant of the
            layer, which the probe has recorded.
        dropout: 0 outside of training.
        sliding_window: see `LayerAttention`.
        softcap: see `LayerAttention`.
        others: whatever else the layer passes; the probe has refused what would change the result.

    Returns:
        [1, T, H, D], contiguous (models view it as [1, T, H * D]), and no attention weights.
    """
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    if sliding_window is None:
        sliding_window = _window_of_mask(module, layer_idx)
    if paged is None:
        paged = getattr(getattr(module, _STEP, None), "paged", None)
    if paged is None:
        raise UnsupportedAttention(f"layer {layer_idx} is not handed the keywords of the model's forward")
    if isinstance(paged, AttentionProbe):
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedAttention(f"layer {layer_idx} is not causal")
        paged.record(layer_idx, query, key, value, scaling, sliding_window, softcap, attention_mask, others)
        return torch.zeros_like(query.transpose(1, 2), memory_format=torch.contiguous_format), None
    rows = paged.attend(layer_idx, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    return rows.contiguous()[None], None


class AttentionProbe:
    """Passed as `paged` through one forward, learns what every layer's attention is.

    It sees only what reaches the hook: a model whose layers do not call it at all is found out by
    `layers()`.
    """

    def __init__(self) -> None:
        self._layers: dict[int, LayerAttention] = {}

    def record(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        attention_mask: torch.Tensor | None,
        others: dict[str, Any],
    ) -> None:
        """Note one layer's call.

        Raises:
            UnsupportedAttention: naming the layer and what it asks for.
        """
        for name, argument in {"attention_mask": attention_mask, **others}.items():
            if name not in _HARMLESS_KEYWORDS and argument is not None and argument is not False:
                raise UnsupportedAttention(f"layer {layer_idx} passes `{name}` to its attention")
        if layer_idx in self._layers:
            raise UnsupportedAttention(f"layer {layer_idx} attends more than once")
        if not query.shape[-1] == key.shape[-1] == value.shape[-1] or key.shape[1] != value.shape[1]:
            raise UnsupportedAttention(f"layer {layer_idx} has keys and values of different shapes")
        head_dim = query.shape[-1]
        self._layers[layer_idx] = LayerAttention(
            layer_idx=layer_idx,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            scaling=head_dim**-0.5 if scaling is None else float(scaling),
            sliding_window=sliding_window,
            softcap=softcap,
        )

    def layers(self, indices: range) -> tuple[LayerAttention, ...]:
        """Return these layers.

        Raises:
            UnsupportedAttention: one of them did not call the hook, or another did.
        """
        missing = [index for index in indices if index not in self._layers]
        if missing or len(self._layers) != len(indices):
            raise UnsupportedAttention(
                f"of {len(indices)} layers, {len(self._layers)} use the attention interface"
                + (f"; layer {missing[0]} does not" if missing else "")
            )
        return tuple(self._layers[index] for index in indices)


AttentionInterface.register(ATTENTION_NAME, paged_attention)
