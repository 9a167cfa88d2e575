"""K/V of a drafter's own layers, in blocks, and batches over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.attention.base import AttentionBackend, LayerAttention, PagedBatch
from specdec.attention.metadata import AttentionMetadata, build_metadata
from specdec.drafters.base import Drafter
from specdec.kv.config import CacheConfig
from specdec.kv.pool import FIRST_BLOCK, KvPool, KvShape, plan_num_blocks
from specdec.model.batch import SequenceSlice
from specdec.model.position_ids import shifted_positions


class DrafterPool:
    """Implements `model.batch.PagedModel` for a drafter beside a target."""

    def __init__(
        self,
        drafter: Drafter,
        layers: Sequence[LayerAttention],
        cache: CacheConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        backend: AttentionBackend,
        row_bytes: int = 0,
        max_held_tokens: int | None = None,
    ) -> None:
        """Allocate K/V of `layers`, of a size that `cache` gives, for so many sequences of such a length.

        `row_bytes` are what is kept of each token beside them, by others. Of a sequence `max_held_tokens`
        tokens have K/V at the same time, at most; None: all.

        Raises:
            ResourceError: the memory does not hold a single block.
        """
        weight = next(drafter.parameters())
        shapes = [KvShape(num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim) for layer in layers]
        self.device, self.dtype = weight.device, weight.dtype
        self.vocab_size = drafter.target.vocab_size
        self.block_size = cache.block_size
        held = max_model_len if max_held_tokens is None else min(max_held_tokens, max_model_len)
        self.num_blocks = plan_num_blocks(
            cache, shapes, weight.dtype, max_tokens=max_num_seqs * held, row_bytes=row_bytes
        )
        capacity = (self.num_blocks - FIRST_BLOCK) * self.block_size
        self.max_model_len = max_model_len if held <= capacity else min(max_model_len, capacity)
        self._shapes = shapes
        self.kv = self._make_kv(self.num_blocks)
        self._layers = tuple(layers)
        self.backend = backend

    def spare_kv(self, num_blocks: int) -> KvPool:
        """Return K/V of their own, `num_blocks` beside the scratch block, for who tries something out."""
        return self._make_kv(FIRST_BLOCK + num_blocks)

    def batch(self, pieces: Sequence[SequenceSlice], kv: KvPool | None = None) -> PagedBatch:
        """Return what the layers attend to when they read `pieces`, each of one token at least.

        K/V lie in the pool, unless others are given.
        """
        return self.over(self.metadata(pieces), kv)

    def metadata(self, pieces: Sequence[SequenceSlice]) -> AttentionMetadata:
        """Return where the rows of `pieces` live."""
        return build_metadata(pieces, block_size=self.block_size).to(self.device)

    def positions(self, pieces: Sequence[SequenceSlice], metadata: AttentionMetadata) -> torch.Tensor:
        """Return the position ids of rows that are laid out already: what was left out counts."""
        shifted = shifted_positions(metadata.positions, pieces)
        return metadata.positions if shifted is None else shifted

    def over(self, metadata: AttentionMetadata, kv: KvPool | None = None) -> PagedBatch:
        """As `batch`, of rows that are laid out already."""
        return PagedBatch(
            backend=self.backend,
            layers=self._layers,
            caches=self.kv if kv is None else kv,
            metadata=metadata,
            plan=self.backend.begin(metadata),
        )

    def _make_kv(self, num_blocks: int) -> KvPool:
        return KvPool(
            self._shapes,
            num_blocks=num_blocks,
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
        )
