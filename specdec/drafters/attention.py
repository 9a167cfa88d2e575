"""How the decoder layers of drafters attend: over pages when they draft, over whole rows in training.

Their layers are those of transformers, with `DRAFTER_ATTENTION` as their attention. The keyword `paged` of a
layer's forward says which of the two it is: a `PagedBatch` (flat batch [1, T], K/V in a pool), or a
`RowAttention` ([B, T], nothing is kept).

Shape letters: B rows of a batch, H query heads, G key/value heads, T positions, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

from specdec.attention.base import PagedBatch
from specdec.attention.hf import AttentionProbe, UnsupportedAttention, paged_attention

DRAFTER_ATTENTION = "drafthouse_drafter"


class RowAttention(ABC):
    """Attention of whole rows, without a pool; differentiable."""

    @abstractmethod
    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Run layer `layer_idx`: query [B, H, T, D], key and value [B, G, T, D] -> [B, H, T, D]."""


class CausalRows(RowAttention):
    """A position sees itself and those before it."""

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )


class UnrolledRows(RowAttention):
    """Attention of the training-time test (EAGLE-3, section 3.2): drafting from every position at once.

    The first call of a layer is causal. In the s-th call after it, position t stands for the s-th token
    drafted behind t: it sees the K/V of the first call up to t, and of every later call the one at t itself,
    its own included.
    """

    def __init__(self) -> None:
        self._keys: dict[int, list[torch.Tensor]] = {}
        self._values: dict[int, list[torch.Tensor]] = {}

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        keys = self._keys.setdefault(layer_idx, [])
        values = self._values.setdefault(layer_idx, [])
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        if len(keys) == 1:
            return F.scaled_dot_product_attention(query, keys[0], values[0], is_causal=True, scale=scaling)
        num_positions = query.shape[2]
        query = query * scaling
        future = torch.ones(num_positions, num_positions, dtype=torch.bool, device=query.device).triu(1)
        prefix = torch.matmul(query, keys[0].transpose(2, 3)).masked_fill(future, float("-inf"))
        drafted = torch.stack([(query * earlier).sum(dim=-1) for earlier in keys[1:]], dim=-1)
        scores = torch.cat([prefix, drafted], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        mixed = torch.matmul(weights[..., :num_positions], values[0])
        for step, earlier in enumerate(values[1:]):
            mixed = mixed + weights[..., num_positions + step, None] * earlier
        return mixed


Attends = PagedBatch | AttentionProbe | RowAttention
"""What a drafter's layers may be given."""


def drafter_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: Attends | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function in the signature of `transformers`; [1 or B, H, T, D] -> [1 or B, T, H, D]."""
    if sliding_window is None:
        sliding_window = _window_by_type(module)
    if not isinstance(paged, RowAttention):
        return paged_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            paged=paged,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            **others,
        )
    if sliding_window is not None and sliding_window < query.shape[2]:
        raise UnsupportedAttention(
            f"rows of {query.shape[2]} positions are longer than the sliding window of {sliding_window}"
        )
    if softcap is not None:
        raise UnsupportedAttention("softcap is not trained with")
    layer_idx: int = module.layer_idx  # type: ignore[assignment]
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = paged.attend(layer_idx, query, key, value, factor)
    return rows.transpose(1, 2).contiguous(), None


def _window_by_type(module: torch.nn.Module) -> int | None:
    """Return the window that a layer's kind gives it, also where its code knows none.

    Speculators trains layers of a Llama so, and has the window in masks of its own.
    """
    config: Any = getattr(module, "config", None)
    kinds, layer_idx = getattr(config, "layer_types", None) or (), getattr(module, "layer_idx", 0)
    is_windowed = layer_idx < len(kinds) and kinds[layer_idx] == "sliding_attention"
    window: int | None = getattr(config, "sliding_window", None) if is_windowed else None
    return window


AttentionInterface.register(DRAFTER_ATTENTION, drafter_attention)
