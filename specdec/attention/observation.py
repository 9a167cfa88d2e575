"""What rows attend to, block by block: asked for by who selects blocks, found while attention is computed.

The mass of a block is the sum of the softmax weights that a row gives to the block's tokens. Nodes of a tree
count where they would lie if the path of the row were a chain, as they will once it is accepted. Masses are
summed over the observed layers: those without a sliding window, where a model has such (others say nothing
about what is far away), else all. What a sink attracts is part of the sum: 1 for each head and layer.

Shape letters: T rows, H query heads, G key/value heads, R = H / G, D head size, N pool blocks, P block size,
O observed rows, W blocks of the widest table, m observed rows of one sequence, b its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from specdec.attention.base import LayerAttention
    from specdec.attention.metadata import AttentionMetadata

_LANES = 16
"""The kernel adds up so many blocks at once."""
_BLOCKS_AT_ONCE = 256
"""Of one sequence, in a pass of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Which rows of one step are observed, and what they attend to, once the step has run."""

    rows: torch.Tensor
    """int32 [T]: number of a row among the observed ones, -1: it is not observed."""
    masses: torch.Tensor
    """fp32 [O, H, W or more], zero before the step: sums over layers. Unseen blocks have none; a row with a
    value that is not finite may have any."""
    skips_windows: bool
    """Whether layers with a sliding window are left out."""
    num_observed: tuple[int, ...]
    """Of each sequence, how many of its last rows are observed."""

    @classmethod
    def of(
        cls,
        num_observed: Sequence[int],
        *,
        query_lens: Sequence[int],
        num_blocks: int,
        layers: Sequence[LayerAttention],
        device: torch.device,
    ) -> Observation:
        """Observe the last rows of sequences of `query_lens` rows and at most `num_blocks` blocks."""
        rows: list[int] = []
        firsts = accumulate(num_observed, initial=0)
        for count, query_len, first in zip(num_observed, query_lens, firsts, strict=False):
            rows += [-1] * (query_len - count)
            rows += range(first, first + count)
        return cls(
            rows=torch.tensor(rows, dtype=torch.int32),
            masses=_zeros(_shape(sum(num_observed), num_blocks, layers), device),
            skips_windows=any(layer.sliding_window is None for layer in layers),
            num_observed=tuple(num_observed),
        )

    def to(self, device: torch.device) -> Observation:
        """Return a copy with its row numbers on `device`; the masses, which are written to, are the same."""
        return replace(self, rows=self.rows.to(device))

    def by_row(self) -> torch.Tensor:
        """Return masses summed over heads as well, fp32 [O, W or more]."""
        if self.masses.device.type == "cpu":
            return torch.from_numpy(self.masses.numpy().sum(1))  # see `_zeros`
        return self.masses.sum(1)

    def observes(self, layer: LayerAttention) -> bool:
        """Whether the masses of this layer count."""
        return layer.sliding_window is None or not self.skips_windows


def masses_bytes(num_rows: int, *, num_blocks: int, layers: Sequence[LayerAttention]) -> int:
    """Return what the masses of so many observed rows take, of sequences of at most `num_blocks` blocks."""
    return torch.float32.itemsize * math.prod(_shape(num_rows, num_blocks, layers))


def _shape(num_rows: int, num_blocks: int, layers: Sequence[LayerAttention]) -> tuple[int, int, int]:
    width = -(-num_blocks // _LANES) * _LANES
    return num_rows, max(layer.num_heads for layer in layers), width


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Zeros in fp32. On a CPU they are NumPy's: PyTorch would wake OpenMP's threads for as many, and these
    spin for a while then, beside those of the compiled forward.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(shape, device=device)


def observe_blocks(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    metadata: AttentionMetadata,
    layer: LayerAttention,
    observation: Observation,
) -> None:
    """Add what the observed rows of one layer attend to, in a pass of its own over their keys.

    The portable way, for backends that keep their weights to themselves: on any device, and what the kernels
    are compared with. Sequence by sequence, because what is observed is seldom much.

    Args:
        query: [T, H, D].
        key_cache: this layer's [N, G, P, D], with the keys of this step.
        metadata: the step.
        layer: which layer.
        observation: takes the masses.
    """
    if not observation.observes(layer):
        return
    end = first = 0
    for sequence, (query_len, count) in enumerate(
        zip(metadata.query_lens_host, observation.num_observed, strict=True)
    ):
        end += query_len
        if not count:
            continue
        masses = _masses(query[end - count : end], key_cache, metadata, layer, sequence)
        observation.masses[first : first + count, : layer.num_heads, : masses.shape[-1]] += masses
        first += count


def _masses(
    query_mHD: torch.Tensor,
    key_cache: torch.Tensor,
    metadata: AttentionMetadata,
    layer: LayerAttention,
    sequence: int,
) -> torch.Tensor:
    """Masses of the last rows of one sequence, fp32 [m, H, b].

    So many blocks at a time (online softmax): of a long text, all keys and scores at once are gigabytes.
    """
    context_len, block_size = metadata.context_lens_host[sequence], metadata.block_size
    num_rows, num_heads, head_dim = query_mHD.shape
    num_blocks = -(-context_len // block_size)
    grouped = query_mHD.reshape(num_rows, layer.num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    folded = grouped.reshape(layer.num_kv_heads, -1, head_dim)
    own_m, path_mq = _paths(metadata, sequence, num_rows)
    start = context_len - metadata.query_lens_host[sequence]
    own_block = start // block_size
    maxima, sums = [], []
    # What a tree lies in, of which there is little, is one part.
    end = num_blocks if path_mq is None else own_block
    for first, last in pairwise([*range(0, end, _BLOCKS_AT_ONCE), *dict.fromkeys((end, num_blocks))]):
        table = metadata.block_tables[sequence, first:last].long()
        keys = key_cache[table].transpose(0, 1).reshape(layer.num_kv_heads, -1, head_dim)
        scores = torch.matmul(folded, keys.transpose(1, 2)).float().mul_(layer.scaling)
        if layer.softcap is not None:
            scores = scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
        by_row = scores.view(num_heads, num_rows, (last - first) * block_size)
        place = torch.arange(first * block_size, last * block_size, device=keys.device)
        if path_mq is not None and first == own_block:
            behind = (place - start).clamp(0, path_mq.shape[1] - 1)
            node_mk = torch.where(place < start, place - start, path_mq[:, behind])
            by_row = by_row.gather(2, (node_mk + start - place[0]).expand_as(by_row))
        hidden = place > own_m[:, None]
        if layer.sliding_window is not None:
            hidden |= own_m[:, None] - place >= layer.sliding_window
        by_row.masked_fill_(hidden, float("-inf"))
        # Where nothing is seen in these blocks: any finite number.
        largest = by_row.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
        weights = by_row.sub_(largest).exp_()
        maxima.append(largest)
        sums.append(weights.view(num_heads, num_rows, last - first, block_size).sum(-1))
    largest = torch.cat(maxima, -1).amax(-1, keepdim=True)
    masses = torch.cat([one.mul_((its - largest).exp_()) for one, its in zip(sums, maxima, strict=True)], -1)
    return masses.div_(masses.sum(-1, keepdim=True)).transpose(0, 1)


def _paths(
    metadata: AttentionMetadata, sequence: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where the last rows of one sequence stand in chains of what they see, and these chains.

    Returns:
        int64 [m] places in the sequence's cache, and int64 [m, query_len] nodes in the order of the chain,
        those that a row does not see last; None where there is no tree.
    """
    query_len, start_row = metadata.query_lens_host[sequence], sum(metadata.query_lens_host[:sequence])
    device = metadata.positions.device
    start = metadata.context_lens_host[sequence] - query_len
    is_chain = metadata.is_tree is not None and not metadata.is_tree[sequence]
    if metadata.ancestor_mask is None or is_chain:
        return torch.arange(start + query_len - num_rows, start + query_len, device=device), None
    end = start_row + query_len
    related_mq = metadata.ancestor_mask[end - num_rows : end, :query_len]
    nodes_mq = torch.argsort(related_mq.int(), dim=1, descending=True, stable=True)
    return start - 1 + related_mq.sum(1), nodes_mq
