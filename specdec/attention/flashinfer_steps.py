"""What FlashInfer's planner is told of a step: who owns which rows and pages, and who may see whom.

FlashInfer has one planner for prefill, decode and verification: sequence s owns consecutive rows of the
batch and the pages `pages[page_start[s]:page_start[s + 1]]`, the last of which holds `last_page_lens[s]`
tokens; its rows are its last tokens, and see each other causally. Trees are bool masks over all pairs of a
sequence's rows and cached tokens, laid out one sequence behind the other.

Shape letters: S sequences, N pages of all sequences together, q rows and L cached tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from specdec.attention.base import LayerAttention
from specdec.attention.metadata import AttentionMetadata


class LayerKind(NamedTuple):
    """Layers of one kind share a plan: all that planning depends on beside the step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None
    softcap: float | None
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: LayerAttention, dtype: torch.dtype) -> LayerKind:
        """Return that of a layer whose queries, keys and values are `dtype`."""
        return cls(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            scaling=layer.scaling,
            sliding_window=layer.sliding_window,
            softcap=layer.softcap,
            dtype=dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPages:
    """Rows and pages of a step's sequences; padding is left out."""

    query_start: torch.Tensor
    """int32 [S + 1], in host memory: the planner works there."""
    page_start: torch.Tensor
    """int32 [S + 1], in host memory."""
    last_page_lens: torch.Tensor
    """int32 [S], 1 to the block size, in host memory."""
    pages: torch.Tensor
    """int32 [N], on the step's device."""
    num_rows: int


def step_pages(metadata: AttentionMetadata) -> StepPages:
    """Return the rows and pages of a step, without waiting for its device."""
    block_size = metadata.block_size
    counts = [-(-context_len // block_size) for context_len in metadata.context_lens_host]
    page_start = [0, *accumulate(counts)]
    query_start = [0, *accumulate(metadata.query_lens_host)]
    last_page_lens = [(context_len - 1) % block_size + 1 for context_len in metadata.context_lens_host]
    return StepPages(
        query_start=torch.tensor(query_start, dtype=torch.int32),
        page_start=torch.tensor(page_start, dtype=torch.int32),
        last_page_lens=torch.tensor(last_page_lens, dtype=torch.int32),
        pages=_used_pages(metadata, page_start[-1]),
        num_rows=query_start[-1],
    )


def _used_pages(metadata: AttentionMetadata, num_pages: int) -> torch.Tensor:
    """Block tables without what is past each context, int32 [N]."""
    num_sequences = len(metadata.context_lens_host)
    device = metadata.block_tables.device
    counts_S = torch.div(
        metadata.context_lens[:num_sequences] + (metadata.block_size - 1),
        metadata.block_size,
        rounding_mode="floor",
    )
    sequences_N = torch.repeat_interleave(
        torch.arange(num_sequences, device=device), counts_S, output_size=num_pages
    )
    first_S = counts_S.cumsum(0) - counts_S
    places_N = torch.arange(num_pages, device=device) - first_S[sequences_N]
    return metadata.block_tables[sequences_N, places_N]


def tree_mask(metadata: AttentionMetadata, window: int | None) -> torch.Tensor | None:
    """Return who sees whom, bool [sum of q * L], on the step's device; None when all are chains.

    Windows of trees count positions, which are depths, and FlashInfer's count rows: they are in the mask.
    """
    if metadata.ancestor_mask is None:
        return None
    pieces, first = [], 0
    for query_len, context_len in zip(metadata.query_lens_host, metadata.context_lens_host, strict=True):
        rows, start = slice(first, first + query_len), context_len - query_len
        visible_qL = torch.ones((query_len, context_len), dtype=torch.bool, device=metadata.positions.device)
        visible_qL[:, start:] = metadata.ancestor_mask[rows, :query_len]
        if window is not None:
            positions_q = metadata.positions[rows]
            positions_L = torch.arange(context_len, device=positions_q.device)
            positions_L[start:] = positions_q
            visible_qL &= positions_q[:, None] - positions_L < window
        pieces.append(visible_qL.view(-1))
        first += query_len
    return torch.cat(pieces)


def plan_arguments(
    pages: StepPages, kind: LayerKind, *, block_size: int, mask: torch.Tensor | None
) -> dict[str, Any]:
    """Return the arguments of `BatchPrefillWithPagedKVCacheWrapper.plan` for layers of a kind.

    `mask` is `tree_mask` with the kind's window. FlashInfer's windows name the farthest key that is seen,
    -1 standing for all; without a soft cap it is given 0.
    """
    window = kind.sliding_window if mask is None else None
    return {
        "qo_indptr": pages.query_start,
        "paged_kv_indptr": pages.page_start,
        "paged_kv_indices": pages.pages,
        "paged_kv_last_page_len": pages.last_page_lens,
        "num_qo_heads": kind.num_heads,
        "num_kv_heads": kind.num_kv_heads,
        "head_dim_qk": kind.head_dim,
        "page_size": block_size,
        "custom_mask": mask,
        "causal": mask is None,
        "sm_scale": kind.scaling,
        "window_left": -1 if window is None else window - 1,
        "logits_soft_cap": 0.0 if kind.softcap is None else kind.softcap,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.dtype,
    }
