"""A drafter of features as its steps are recorded: tokens, and beside each the features that it is read with.

T rows, L of which logits are wanted, H features of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec.attention.base import AttentionBackend, LayerAttention, LayerCaches
from specdec.attention.metadata import build_metadata
from specdec.drafters.base import FeatureDrafter
from specdec.kv.hidden_pool import HiddenPool
from specdec.model.batch import SequenceSlice, logit_rows
from specdec.model.position_ids import shifted_positions
from specdec.model.runner import ForwardInputs
from specdec.proposers.drafter_pool import DrafterPool


class DrafterLayers(NamedTuple):
    """Implements `static_batch.StaticLayers`."""

    path: Path
    """Its name alone, for people."""
    vocab_size: int
    layers: Sequence[LayerAttention]
    dtype: torch.dtype
    device: torch.device


class FeatureModel:
    """Implements `cuda_graphs.RecordedModel`.

    Slices are in places of the drafter's cache; features are made of their `states`, and without any they are
    zeros. Features that a forward makes are kept in a pool, for every slot.
    """

    def __init__(
        self, name: str, drafter: FeatureDrafter, pool: DrafterPool, kept: HiddenPool, num_carried: int
    ) -> None:
        """`num_carried`: most rows of logits behind which a forward goes on without being given features."""
        self._drafter, self._pool, self._kept = drafter, pool, kept
        self.loaded = DrafterLayers(
            Path(name), pool.vocab_size, drafter.attention_layers, pool.dtype, pool.device
        )
        self.vocab_size, self.block_size = pool.vocab_size, pool.block_size
        self.max_model_len = pool.max_model_len
        self.incoming_width: int | None = kept.width
        self._carried = torch.zeros(num_carried, kept.width, dtype=pool.dtype, device=pool.device)

    @property
    def backend(self) -> AttentionBackend:
        """The attention of its layers."""
        return self._pool.backend

    @property
    def caches(self) -> LayerCaches:
        """K/V of its layers."""
        return self._pool.kv

    def pack(self, slices: Sequence[SequenceSlice]) -> ForwardInputs:
        """See `RecordedModel`: rows in host memory, features where the drafter is."""
        pool = self._pool
        states = [piece.states for piece in slices if piece.states is not None]
        if states:
            return self.packed(slices, self._drafter.fuse(torch.cat(states).to(pool.device, pool.dtype)))
        shape = sum(len(piece.token_ids) for piece in slices), self._kept.width
        return self.packed(slices, torch.zeros(shape, dtype=pool.dtype, device=pool.device))

    def packed(self, slices: Sequence[SequenceSlice], features_TH: torch.Tensor) -> ForwardInputs:
        """As `pack`, with the features of all rows."""
        metadata = build_metadata(slices, block_size=self.block_size)
        return ForwardInputs(
            input_ids=torch.tensor([list(chain.from_iterable(piece.token_ids for piece in slices))]),
            logit_rows=torch.tensor(logit_rows(slices), dtype=torch.int64),
            metadata=metadata,
            shifted_positions=shifted_positions(metadata.positions, slices),
            incoming=features_TH[None],
        )

    def forward_eager(self, inputs: ForwardInputs) -> torch.Tensor:
        """See `RecordedModel`: logits [L, V] over all of the target's tokens."""
        inputs = inputs.to(self._pool.device)
        paged = self._pool.over(inputs.metadata)
        return self.call_and_keep(
            inputs.input_ids, inputs.position_ids[None], inputs.logit_rows, paged, inputs.incoming
        )

    def call_model(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        paged: Any,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `StaticModel`."""
        return self._run(input_ids, positions, logit_rows, paged, incoming)[0]

    def call_and_keep(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        paged: Any,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `StaticModel`."""
        logits, made = self._run(input_ids, positions, logit_rows, paged, incoming)
        self._kept.write(paged.metadata.slot_mapping, made)
        return logits

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        paged: Any,
        incoming: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [L, V], and the features that were made of all rows, [T, H]."""
        features = self._carried[None, : input_ids.shape[1]] if incoming is None else incoming
        step = self._drafter.step(self._drafter.embed(input_ids), features, positions, paged)
        made, num_logits = step.features[0], logit_rows.shape[0]
        if num_logits <= self._carried.shape[0]:
            self._carried[:num_logits].copy_(made[logit_rows])
        logits = self._drafter.logits(step.outputs[0, logit_rows])
        vocabulary = self._drafter.vocabulary
        return (logits if vocabulary is None else vocabulary.expand(logits)), made
