"""The portable reference: gathers context blocks and attends with plain tensor operations.

Runs on every device and dtype that PyTorch runs on. Sequences of equal query length and similar context
are taken together, so that the number of operations does not grow with the batch, nor the work with
padding (at most a third of the gathered blocks is padding).

Shape letters: T rows, n sequences of a group, q query length of a group, H query heads, G key/value
heads, R = H / G, D head size, N pool blocks, P block size, b blocks gathered per sequence, L keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from specdec.attention.base import LayerAttention
from specdec.attention.metadata import AttentionMetadata
from specdec.attention.slots import PoolSlots
from specdec.kv.packed_rows import is_packed, unpack_rows

_MAX_GATHERED_KEYS = 1 << 17
"""Keys gathered at once: they are copied, so this bounds the memory that a step needs beside the pool."""
_MAX_SCORES = 1 << 26
"""Scores in memory at once (fp32, 256 MiB); more query rows are taken in turns."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """Sequences of one step that are attended to in one go."""

    rows: slice | torch.Tensor
    """Their rows in the batch: a slice when consecutive, else int64 [n * q]."""
    tables: torch.Tensor
    """int64 [n, b]: their blocks."""
    context_lens: list[int]
    query_len: int
    num_keys: int
    """L: b * P, or exactly the context of a lone sequence."""
    padding: torch.Tensor | None
    """bool [n, 1, L, 1]: keys past a sequence's context; None when there are none. They may hold anything,
    another request's NaN included, so both their scores and their values are overwritten."""
    hidden: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    """bool [n, 1, 1, q, L] by window: keys a row must not see; None where every row sees every key.
    Made on demand."""
    head_tables: dict[int, torch.Tensor] = field(default_factory=dict)
    """int64 [n * G * b] by G: block * G + head, in order of sequence, head, block. Made on demand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    slots: PoolSlots
    groups: tuple[_Group, ...]


class SdpaAttention:
    """Reference backend: two matrix products and an fp32 softmax over gathered blocks."""

    name = "sdpa"
    observes = False
    reads_packed = True

    def begin(self, metadata: AttentionMetadata) -> _Plan:
        """Group the step's sequences and find the pool coordinates of its rows."""
        members_of: dict[tuple[int, int], list[int]] = {}
        for index, (query_len, context_len) in enumerate(
            zip(metadata.query_lens_host, metadata.context_lens_host, strict=True)
        ):
            num_blocks = -(-context_len // metadata.block_size)
            members_of.setdefault((query_len, _size_class(num_blocks)), []).append(index)
        parts = [part for members in members_of.values() for part in _affordable(metadata, members)]
        return _Plan(
            slots=PoolSlots.of(metadata),
            groups=tuple(_make_group(metadata, part) for part in parts),
        )

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
        plan: _Plan,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        plan.slots.write(key, value, key_cache, value_cache)
        groups = plan.groups
        if len(groups) == 1 and len(groups[0].context_lens) * groups[0].query_len == query.shape[0]:
            hidden = _hidden(groups[0], metadata, layer.sliding_window)
            return _attend(query, key_cache, value_cache, groups[0], hidden, layer)
        output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        for group in groups:
            hidden = _hidden(group, metadata, layer.sliding_window)
            output[group.rows] = _attend(query[group.rows], key_cache, value_cache, group, hidden, layer)
        return output


def _affordable(metadata: AttentionMetadata, members: list[int]) -> list[list[int]]:
    """Split `members` so that no part gathers more than `_MAX_GATHERED_KEYS` (or one sequence)."""
    longest = max(metadata.context_lens_host[index] for index in members)
    size = max(1, _MAX_GATHERED_KEYS // longest)
    return [members[first : first + size] for first in range(0, len(members), size)]


def _size_class(num_blocks: int) -> int:
    """Contexts of one class differ by less than a third: 1, 2, 3, 4, 5-6, 7-8, 9-12, 13-16, 17-24, ..."""
    if num_blocks <= 4:
        return num_blocks
    power = (num_blocks - 1).bit_length() - 1
    return 4 + 2 * power + (num_blocks > 3 << (power - 1))


def _make_group(metadata: AttentionMetadata, members: list[int]) -> _Group:
    context_lens = [metadata.context_lens_host[index] for index in members]
    num_blocks = -(-max(context_lens) // metadata.block_size)
    tables = metadata.block_tables[members, :num_blocks]
    num_keys = context_lens[0] if len(members) == 1 else num_blocks * metadata.block_size
    padding = None
    if any(context_len != num_keys for context_len in context_lens):
        key_index = torch.arange(num_keys, device=tables.device)
        ends = torch.tensor(context_lens, device=tables.device)
        padding = (key_index >= ends[:, None])[:, None, :, None]
    return _Group(
        rows=_rows_of(metadata, members),
        tables=tables.long(),
        context_lens=context_lens,
        query_len=metadata.query_lens_host[members[0]],
        num_keys=num_keys,
        padding=padding,
    )


def _rows_of(metadata: AttentionMetadata, members: list[int]) -> slice | torch.Tensor:
    """Rows of `members` (of equal query length), as a slice where they are consecutive."""
    query_len = metadata.query_lens_host[members[0]]
    if members[-1] - members[0] == len(members) - 1:
        first = sum(metadata.query_lens_host[: members[0]])
        return slice(first, first + len(members) * query_len)
    starts = metadata.query_start[members].long()
    return (starts[:, None] + torch.arange(query_len, device=starts.device)).reshape(-1)


def _hidden(group: _Group, metadata: AttentionMetadata, window: int | None) -> torch.Tensor | None:
    """What the group's rows must not see in layers of this window."""
    if window is not None and max(group.context_lens) <= window:
        window = None
    if window not in group.hidden:
        group.hidden[window] = _make_hidden(group, metadata, window)
    return group.hidden[window]


def _make_hidden(group: _Group, metadata: AttentionMetadata, window: int | None) -> torch.Tensor | None:
    num_sequences, query_len = len(group.context_lens), group.query_len
    if query_len == 1 and group.padding is None and window is None:
        return None
    device = metadata.positions.device
    key_index = torch.arange(group.num_keys, device=device)
    context_lens = torch.tensor(group.context_lens, device=device)
    own = key_index[None, None, :] - (context_lens - query_len)[:, None, None]  # [n, 1, L], < 0: older
    row = torch.arange(query_len, device=device)[None, :, None]
    positions = metadata.positions[group.rows].reshape(num_sequences, query_len)
    if metadata.ancestor_mask is None:
        visible = own <= row
        key_positions = key_index[None, None, :]
    else:
        own_row = own.clamp(0, query_len - 1)
        ancestors = metadata.ancestor_mask[group.rows].reshape(num_sequences, query_len, -1)
        related = ancestors.gather(2, own_row.expand(-1, query_len, -1))
        visible = (own < 0) | ((own < query_len) & related)
        own_positions = positions[:, None, :].gather(2, own_row)
        key_positions = torch.where(own < 0, key_index[None, None, :], own_positions)
    if window is not None:
        visible = visible & (positions[:, :, None] - key_positions < window)
    return ~visible[:, None, None]


def _attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    group: _Group,
    hidden: torch.Tensor | None,
    layer: LayerAttention,
) -> torch.Tensor:
    """query [n * q, H, D] -> [n * q, H, D]; the query heads of one key/value head become rows."""
    num_sequences, query_len = len(group.context_lens), group.query_len
    num_kv_heads, head_dim = layer.num_kv_heads, layer.head_dim
    ratio = layer.num_heads // num_kv_heads
    keys = _gather(key_cache, group, query.dtype)
    values = _gather(value_cache, group, query.dtype)
    if group.padding is not None:
        values.masked_fill_(group.padding, 0.0)
    by_head = query.reshape(num_sequences, query_len, num_kv_heads, ratio, head_dim).permute(0, 2, 3, 1, 4)
    step = max(1, _MAX_SCORES // (num_sequences * layer.num_heads * group.num_keys))
    parts = [
        _weighted_sum(
            by_head[:, :, :, first : first + step],
            keys,
            values,
            None if hidden is None else hidden[:, :, :, first : first + step],
            layer,
        )
        for first in range(0, query_len, step)
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
    return out.permute(0, 3, 1, 2, 4).reshape(query.shape)


def _weighted_sum(
    query_nGRqD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    layer: LayerAttention,
) -> torch.Tensor:
    """Attention of q rows per sequence and head to keys and values [n, G, L, D] -> [n, G, R, q, D]."""
    shape = query_nGRqD.shape
    num_sequences, num_kv_heads, ratio, query_len, head_dim = shape
    folded = query_nGRqD.reshape(num_sequences, num_kv_heads, ratio * query_len, head_dim)
    scores = _products(folded, keys.transpose(2, 3)).mul_(layer.scaling)
    if layer.softcap is not None:
        scores = scores.div_(layer.softcap).tanh_().mul_(layer.softcap)
    if hidden is not None:
        split = scores.view(num_sequences, num_kv_heads, ratio, query_len, -1)
        split.masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1).to(folded.dtype)
    return torch.matmul(weights, values).view(shape)


def _products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """fp32 [n, G, R * q, L], new. Before they are scaled, float16 may have no number as large."""
    if queries.dtype == torch.float16:
        return torch.matmul(queries.float(), keys.float())
    return torch.matmul(queries, keys).float()


def _gather(cache: torch.Tensor, group: _Group, dtype: torch.dtype) -> torch.Tensor:
    """[N, G, P, D] -> the group's keys or values, [n, G, L, D], in one copy; packed ones become `dtype`."""
    num_blocks, num_kv_heads, block_size, head_dim = cache.shape
    index = group.head_tables.get(num_kv_heads)
    if index is None:
        heads = torch.arange(num_kv_heads, device=cache.device)[None, :, None]
        index = (group.tables[:, None, :] * num_kv_heads + heads).reshape(-1)
        group.head_tables[num_kv_heads] = index
    # The view makes (block, head) one dimension, because index_select along a middle one copies the pool.
    blocks = cache.view(num_blocks * num_kv_heads, block_size * head_dim).index_select(0, index)
    gathered = blocks.view(len(group.context_lens), num_kv_heads, -1, head_dim)
    if is_packed(cache):
        gathered = unpack_rows(gathered, dtype)
    return gathered[:, :, : group.num_keys]
