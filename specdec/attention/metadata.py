"""Where the rows of one flat batch live: sequences, positions, cache slots, and who may see whom.

Shape letters: T rows (tokens of this step), S sequences, B blocks per sequence (widest table of the batch).
The tensors are contiguous and of fixed dtypes, so that kernels read them as they are:

    query_start    int32 [S + 1]  rows of sequence s are query_start[s] .. query_start[s + 1] - 1
    context_lens   int32 [S]      cached tokens of s once this step's rows are written
    block_tables   int32 [S, B]   pool blocks of s; entries past its context are 0 (the scratch block)
    slot_mapping   int64 [T]      where the row's K/V go: block * block_size + offset
    positions      int64 [T]      position ids; in a chain also the row's index in its sequence's cache
    ancestor_mask  bool [T, max_query_len] or None when every sequence is a chain
    is_tree        bool [S]       which sequences are trees; None when none is, or all are to be read as such

Cache index c of sequence s holds the token of row c - (context_len - query_len) of this step, or an
older token when that is negative. A row attends to every older token, and among this step's rows

    without a mask   to itself and to rows of its sequence before it (causal);
    with a mask      to row j of its sequence where `ancestor_mask[row, j]` (chains: lower triangle).

Padding (`padded`) adds rows that belong to no sequence (slot 0, position 0: they write into the scratch
block and their output means nothing) and sequences without rows (context 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.attention.observation import Observation
from specdec.tree.masks import ancestor_mask
from specdec.tree.topology import tree


class RowSlice(Protocol):
    """What metadata need to know of `model.batch.SequenceSlice`."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def block_table(self) -> Sequence[int]: ...
    @property
    def parents(self) -> Sequence[int] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One flat batch as the attention sees it; see the module's text for shapes and meaning."""

    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    ancestor_mask: torch.Tensor | None
    is_tree: torch.Tensor | None
    """A backend that looks here reads no mask of a chain, nor keys that its rows do not see."""
    query_lens_host: tuple[int, ...]
    """Rows of each sequence, as Python numbers (no device read needed). Real sequences only."""
    context_lens_host: tuple[int, ...]
    """`context_lens` as Python numbers. Real sequences only."""
    block_size: int
    max_query_len: int
    max_context_len: int
    observation: Observation | None = None
    """Asks what rows attend to; see there."""

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return self.slot_mapping.shape[0]

    @property
    def num_sequences(self) -> int:
        """S, padding included."""
        return self.context_lens.shape[0]

    def to(self, device: torch.device) -> AttentionMetadata:
        """Return a copy with its tensors on `device`."""
        mask, is_tree, observation = self.ancestor_mask, self.is_tree, self.observation
        return replace(
            self,
            query_start=self.query_start.to(device),
            context_lens=self.context_lens.to(device),
            block_tables=self.block_tables.to(device),
            slot_mapping=self.slot_mapping.to(device),
            positions=self.positions.to(device),
            ancestor_mask=None if mask is None else mask.to(device),
            is_tree=None if is_tree is None else is_tree.to(device),
            observation=None if observation is None else observation.to(device),
        )

    def padded(
        self, *, num_rows: int, num_sequences: int, num_blocks: int, max_query_len: int | None = None
    ) -> AttentionMetadata:
        """Return a copy grown to static sizes: T = num_rows, S = num_sequences, B = num_blocks.

        `max_query_len` widens the ancestor mask, where there is one. Sizes must not be smaller than
        the batch's own, in which nothing is observed.
        """
        assert self.observation is None, "what is observed runs as it is"
        width = self.max_query_len if max_query_len is None else max_query_len
        total_rows = sum(self.query_lens_host)
        mask, is_tree = self.ancestor_mask, self.is_tree
        return AttentionMetadata(
            query_start=_grown(self.query_start, (num_sequences + 1,), fill=total_rows),
            context_lens=_grown(self.context_lens, (num_sequences,)),
            block_tables=_grown(self.block_tables, (num_sequences, num_blocks)),
            slot_mapping=_grown(self.slot_mapping, (num_rows,)),
            positions=_grown(self.positions, (num_rows,)),
            ancestor_mask=None if mask is None else _grown(mask, (num_rows, width)),
            is_tree=None if is_tree is None else _grown(is_tree, (num_sequences,)),
            query_lens_host=self.query_lens_host,
            context_lens_host=self.context_lens_host,
            block_size=self.block_size,
            max_query_len=width,
            max_context_len=self.max_context_len,
        )


def build_metadata(
    slices: Sequence[RowSlice], *, block_size: int, device: torch.device | None = None
) -> AttentionMetadata:
    """Describe `slices` as one flat batch, rows in slice order.

    Every slice has at least one token and a block table that covers its last one. Tensors are built on
    the host and copied to `device` when that is not the CPU.
    """
    rows = _RowPlaces.of(slices, block_size)
    query_start, cache_index = rows.query_start, rows.cache_index
    query_lens, context_lens = rows.query_lens, rows.context_lens
    max_query_len = max(query_lens)
    positions, mask = cache_index, None
    trees = [piece.parents is not None for piece in slices]
    if any(trees):
        positions, mask = _tree_rows(slices, query_start, cache_index, max_query_len)
    on_host = AttentionMetadata(
        query_start=torch.from_numpy(query_start),
        context_lens=torch.from_numpy(np.array(context_lens, dtype=np.int32)),
        block_tables=torch.from_numpy(rows.tables),
        slot_mapping=torch.from_numpy(rows.slots),
        positions=torch.from_numpy(positions),
        ancestor_mask=None if mask is None else torch.from_numpy(mask),
        is_tree=None if mask is None else torch.tensor(trees),
        query_lens_host=tuple(query_lens),
        context_lens_host=tuple(context_lens),
        block_size=block_size,
        max_query_len=max_query_len,
        max_context_len=max(context_lens),
    )
    return on_host if device is None or device.type == "cpu" else on_host.to(device)


def slots_of(slices: Sequence[RowSlice], *, block_size: int) -> torch.Tensor:
    """Return `AttentionMetadata.slot_mapping` of `build_metadata` alone, int64 [T], on the host."""
    return torch.tensor(slot_list(slices, block_size=block_size), dtype=torch.long)


def slot_list(
    slices: Sequence[RowSlice], *, block_size: int, num_more: Sequence[int] | None = None
) -> list[int]:
    """Return the slots of rows, and with `num_more` of so many tokens behind each slice too.

    In plain Python: of the few rows of a verification, array operations take longer.
    """
    slots: list[int] = []
    for piece, more in zip(slices, num_more or repeat(0, len(slices)), strict=True):
        table, start = piece.block_table, piece.start
        for place in range(start, start + len(piece.token_ids) + more):
            block, offset = divmod(place, block_size)
            slots.append(table[block] * block_size + offset)
    return slots


class _RowPlaces(NamedTuple):
    """Where the rows of slices are, in their sequences and in the cache."""

    query_lens: list[int]
    context_lens: list[int]
    query_start: NDArray[np.int32]
    tables: NDArray[np.int32]
    """[S, B]"""
    cache_index: NDArray[np.int64]
    """[T]: place in the sequence's cache."""
    slots: NDArray[np.int64]
    """[T]"""

    @staticmethod
    def of(slices: Sequence[RowSlice], block_size: int) -> _RowPlaces:
        query_lens = [len(piece.token_ids) for piece in slices]
        starts = [piece.start for piece in slices]
        context_lens = [start + query_len for start, query_len in zip(starts, query_lens, strict=True)]
        query_start = np.zeros(len(slices) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=query_start[1:])
        tables = _stack_tables(slices, context_lens, -(-max(context_lens) // block_size), block_size)
        cache_index, sequence_of_row = _row_coordinates(starts, query_lens, query_start)
        blocks, offsets = np.divmod(cache_index, block_size)
        slots = tables[sequence_of_row, blocks] * np.int64(block_size) + offsets
        return _RowPlaces(query_lens, context_lens, query_start, tables, cache_index, slots)


def _stack_tables(
    slices: Sequence[RowSlice], context_lens: Sequence[int], num_blocks: int, block_size: int
) -> NDArray[np.int32]:
    """Block tables as int32 [S, B], zero past each context."""
    tables = np.zeros((len(slices), num_blocks), dtype=np.int32)
    for row, (piece, context_len) in enumerate(zip(slices, context_lens, strict=True)):
        used = -(-context_len // block_size)
        assert used <= len(piece.block_table), "the block table ends before the slice does"
        tables[row, :used] = piece.block_table[:used]
    return tables


def _row_coordinates(
    starts: Sequence[int], query_lens: Sequence[int], query_start: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64] | int]:
    """(index in its sequence's cache, sequence) of every row, int64 [T]."""
    num_sequences = len(starts)
    if num_sequences == 1:
        return np.arange(starts[0], starts[0] + query_lens[0], dtype=np.int64), 0
    first = np.array(starts, dtype=np.int64)
    num_rows = int(query_start[-1])
    if num_rows == num_sequences:
        return first, np.arange(num_sequences, dtype=np.int64)
    cache_index = np.arange(num_rows, dtype=np.int64) + np.repeat(first - query_start[:-1], query_lens)
    return cache_index, np.repeat(np.arange(num_sequences, dtype=np.int64), query_lens)


def _tree_rows(
    slices: Sequence[RowSlice],
    query_start: NDArray[np.int32],
    cache_index: NDArray[np.int64],
    max_query_len: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Position ids by depth, int64 [T], and the ancestor mask, bool [T, max_query_len]."""
    positions = cache_index.copy()
    mask = np.zeros((len(cache_index), max_query_len), dtype=np.bool_)
    for piece, first in zip(slices, query_start[:-1].tolist(), strict=True):
        count = len(piece.token_ids)
        if piece.parents is None:
            mask[first : first + count, :count] = np.tri(count, dtype=np.bool_)
            continue
        topology = tree(tuple(piece.parents))
        mask[first : first + count, :count] = ancestor_mask(topology).numpy()
        positions[first : first + count] = piece.start - 1 + np.array(topology.depths)
    return positions, mask


def _grown(tensor: torch.Tensor, shape: tuple[int, ...], *, fill: int = 0) -> torch.Tensor:
    """Copy of `tensor` in the leading corner of a new one filled with `fill`."""
    grown = torch.full(shape, fill, dtype=tensor.dtype, device=tensor.device)
    grown[tuple(slice(size) for size in tensor.shape)] = tensor
    return grown
