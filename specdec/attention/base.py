"""The contract of a paged attention backend, and what one call of it is given.

Shape letters: T rows, H query heads, G key/value heads, D head size, N pool blocks, P block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specdec.attention.metadata import AttentionMetadata
from specdec.attention.observation import observe_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What one layer's attention is, constant over the life of a model."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    """Factor on query-key products."""
    sliding_window: int | None = None
    """A row sees keys at most `sliding_window - 1` positions before it; None: all of them."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap), after scaling and before masking."""


class LayerCaches(Protocol):
    """K and V of every layer in blocks: per layer [N, G, P, D], indexed by position in the model."""

    @property
    def keys(self) -> Sequence[torch.Tensor]: ...
    @property
    def values(self) -> Sequence[torch.Tensor]: ...


class AttentionBackend(Protocol):
    """Writes a step's K/V into the pool and attends to it.

    `begin` runs once per step on the host; what it returns is handed to every layer's `attend` of that
    step. A backend keeps no state between steps.
    """

    @property
    def name(self) -> str: ...
    @property
    def observes(self) -> bool:
        """Whether `attend` does what `metadata.observation` asks for; if not, `observe_blocks` does."""
        ...

    @property
    def reads_packed(self) -> bool:
        """Whether caches may be packed (`kv.packed_rows`), those of steps of which nothing is observed."""
        ...

    def begin(self, metadata: AttentionMetadata) -> Any:
        """Prepare what all layers of one step share."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        plan: Any,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """Write `key` and `value` at the step's slots, then attend.

        Args:
            query: [T, H, D]; rows and heads may have any strides, a head's numbers are neighbours.
            key: [T, G, D], likewise.
            value: [T, G, D], likewise.
            key_cache: this layer's [N, G, P, D], or packed rows instead of D numbers.
            value_cache: this layer's [N, G, P, D], likewise.
            metadata: the step.
            plan: what `begin` returned for it.
            layer: which layer.

        Returns:
            [T, H, D] in the dtype of `query`; rows of padding hold finite numbers without meaning.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """One step, as it travels through the model's forward to every attention layer (keyword `paged`)."""

    backend: AttentionBackend
    layers: Sequence[LayerAttention]
    """Consecutive layers of the model: all, or those of one stage of it."""
    caches: LayerCaches
    """Of these layers."""
    metadata: AttentionMetadata
    plan: Any

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Run layer `layer_idx`: query [T, H, D], key and value [T, G, D] -> [T, H, D]."""
        index = layer_idx - self.layers[0].layer_idx
        rows = self.backend.attend(
            query,
            key,
            value,
            key_cache=self.caches.keys[index],
            value_cache=self.caches.values[index],
            metadata=self.metadata,
            plan=self.plan,
            layer=self.layers[index],
        )
        observation = self.metadata.observation
        if observation is not None and not self.backend.observes:
            observe_blocks(query, self.caches.keys[index], self.metadata, self.layers[index], observation)
        return rows
