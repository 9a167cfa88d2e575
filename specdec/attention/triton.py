"""Paged attention on CUDA devices: our own Triton kernels (`triton_kernels`), blocks read in place.

The rows of a verification share each load of keys and values. Long contexts are cut into splits of fixed
length that are computed side by side and put together in a fixed order (flash-decoding), so that a row's
result depends neither on its company nor on how many rows its sequence has, as long as these are at most
`MAX_SPLIT_ROWS` (longer chunks of prompts go through larger tiles without splits, unless told not to).

Shape letters as in `attention.base`; S sequences, W units of work.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.attention.base import LayerAttention
from specdec.attention.metadata import AttentionMetadata
from specdec.attention.triton_work import (
    MAX_SPLIT_ROWS,
    UNIT_SIZE,
    SplitRound,
    num_partials,
    partial_places,
    split_keys_for,
    split_rounds,
    work_units,
)
from specdec.core.extras import how_to_install

_LOG2_E = 1.4426950408889634
MAX_PARTIAL_BYTES = 512 << 20
"""Partial results of one layer in memory at once."""
_SHARED_BYTES = 96 << 10
"""Shared memory that a tile may take where the device does not say: what every GPU since Ampere has."""
_PROGRAMS_PER_PROCESSOR = 2
"""Programs that share split work: as many as a multiprocessor holds, which then has no others to begin."""
_MAX_DEFERRED_SUMS = 2048
"""Weights of a tile, above which registers are too few to add them up at the end."""
_MAX_HEAD_DIM = 256
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class TritonUnavailable(Exception):
    """The Triton attention cannot be used here; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """How the attention of one kind of layer is cut; compile-time constants of the kernel."""

    rows: int
    """Pairs of query row and query head."""
    keys: int
    lanes: int
    """Head size, rounded up to a power of two."""
    num_warps: int
    num_stages: int

    @property
    def defers_sum(self) -> bool:
        """Whether weights are added up once per unit of work."""
        return self.rows * self.keys <= _MAX_DEFERRED_SUMS


class _Kind(NamedTuple):
    """What decides the tiles of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    item_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Units of work of one launch, on the device."""

    units: torch.Tensor
    """int32 [W, 8]: `triton_work.WorkUnit`s."""
    count: torch.Tensor
    """int32 [1]: how many of them are to be done."""
    num_programs: int
    places: torch.Tensor
    """int32 [S, 2]: see `triton_work.partial_places`."""
    is_split: bool
    """Whether keys are cut into splits."""
    first_row: int
    num_rows: int
    num_partials: int
    """Partial results in memory per head; 0 where no sequence has several splits."""


@dataclass(slots=True, kw_only=True)
class _Plan:
    metadata: AttentionMetadata
    row_sequences: torch.Tensor | None = None
    """int32 [T]: sequence of each row, negative for padding; made when a combination needs it."""
    is_tree: torch.Tensor | None = None
    """uint8 [S]: which sequences are trees; made when something batch-invariant needs it."""
    works: dict[_Kind, tuple[_Work, ...]] = field(default_factory=dict)


class TritonPagedAttention:
    """Attention backend for fp32, bf16 and fp16 on CUDA (fp32 products are never rounded to TF32)."""

    name = "triton"
    observes = False
    reads_packed = False

    def __init__(self, device: torch.device, *, max_context: int, batch_invariant: bool = False) -> None:
        """Prepare for one device and model.

        Args:
            device: a CUDA device; the CPU only under Triton's interpreter (TRITON_INTERPRET=1).
            max_context: longest sequence in tokens.
            batch_invariant: long chunks of prompts are computed as all others are, and nodes of trees as ends
                of chains, row by row with the same bits.

        Raises:
            TritonUnavailable: the package `triton` is missing, or there is no device that it can use.
        """
        self._interpreted = is_interpreted()
        if device.type != "cuda" and not self._interpreted:
            raise TritonUnavailable(
                f"the triton attention runs on CUDA devices, not on {device.type}; "
                "TRITON_INTERPRET=1 runs it on the CPU, very slowly, for tests"
            )
        self._kernels = _import_kernels()
        self._device = device
        self._shared_bytes, self._num_processors = _device_limits(device)
        self._max_split_rows = None if batch_invariant else MAX_SPLIT_ROWS
        self._in_order = batch_invariant
        self.split_keys = split_keys_for(max_context)
        self.max_splits = -(-max_context // self.split_keys)

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the kernels run K/V of this dtype and head size."""
        return dtype in _DTYPES and head_dim <= _MAX_HEAD_DIM

    def begin(self, metadata: AttentionMetadata) -> _Plan:
        """Note the step; its work is laid out when the first layer of a kind asks for it."""
        return _Plan(metadata=metadata)

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
        assert query.stride(2) == key.stride(2) == value.stride(2) == 1, "heads must be contiguous"
        assert key_cache.is_contiguous()
        assert value_cache.is_contiguous()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._store(key, value, out, key_cache, value_cache, metadata)
        for work in self._works(plan, layer, query.dtype):
            self._run(work, query, out, key_cache, value_cache, plan, layer)
        return out

    def static_plan(self, layers: Sequence[LayerAttention], dtype: torch.dtype, static: StaticWork) -> _Plan:
        """Return a plan over memory that is filled anew before each run, as recorded launches need it.

        Raises:
            TritonUnavailable: layers differ in their heads.
        """
        kind = self._only_kind(layers, dtype)
        work = _Work(
            units=static.units,
            count=static.count,
            num_programs=self._num_programs(static.units.shape[0], kind),
            places=static.places,
            is_split=True,
            first_row=0,
            num_rows=static.row_sequences.shape[0],
            num_partials=static.num_partials if self.max_splits > 1 else 0,
        )
        plan = _Plan(metadata=static.metadata, row_sequences=static.row_sequences, works={kind: (work,)})
        _is_tree(plan)  # what has to be made for it is made before launches are recorded
        return plan

    def static_size(self, layers: Sequence[LayerAttention], dtype: torch.dtype, num_rows: int) -> StaticSize:
        """Return how much work of `num_rows` rows is made room for: all there can be, within limits.

        Raises:
            TritonUnavailable: layers differ in their heads.
        """
        kind = self._only_kind(layers, dtype)
        ratio, tile_rows = _ratio(kind), self._tile(kind, is_split=True).rows
        partials = min(num_rows * self.max_splits, _max_partials(kind.num_heads, kind.head_dim))
        return StaticSize(
            num_units=partials * -(-ratio // tile_rows),
            num_partials=partials,
            ratio=ratio,
            tile_rows=tile_rows,
        )

    def holds(self, size: StaticSize, query_lens: Sequence[int], context_lens: Sequence[int]) -> bool:
        """Whether there is room for the work of a step, all of it split."""
        return (
            max(query_lens) <= MAX_SPLIT_ROWS
            and num_partials(query_lens, context_lens, self.split_keys) <= size.num_partials
        )

    def static_work(
        self, size: StaticSize, query_lens: Sequence[int], context_lens: Sequence[int]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the units and the places, for `StaticWork`, of a step that it holds."""
        everyone = range(len(query_lens))
        units = work_units(
            query_lens,
            context_lens,
            everyone,
            ratio=size.ratio,
            tile_rows=size.tile_rows,
            split_keys=self.split_keys,
        )
        return units, partial_places(query_lens, context_lens, everyone, self.split_keys)

    def _only_kind(self, layers: Sequence[LayerAttention], dtype: torch.dtype) -> _Kind:
        kinds = {_kind(layer, dtype) for layer in layers}
        if len(kinds) != 1:
            raise TritonUnavailable("layers differ in their numbers of heads or their size")
        return kinds.pop()

    def _store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        num_rows, num_kv_heads, head_dim = key.shape
        launch(
            self._kernels.store_kernel,
            (num_rows,),
            key,
            value,
            key_cache,
            value_cache,
            out,
            metadata.slot_mapping,
            metadata.query_start,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            metadata.num_sequences,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=key_cache.shape[2],
            OUT_WIDTH=out.shape[1] * head_dim,
            BLOCK=min(1024, _power_of_two(num_kv_heads * head_dim)),
            num_warps=4,
        )

    def _run(
        self,
        work: _Work,
        query: torch.Tensor,
        out: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        plan: _Plan,
        layer: LayerAttention,
    ) -> None:
        assert layer.scaling > 0, "the largest score is taken before the scale"
        metadata = plan.metadata
        kind = _kind(layer, query.dtype)
        tile = self._tile(kind, is_split=work.is_split)
        mask = metadata.ancestor_mask
        in_order = self._in_order and mask is not None
        partials = _Partials.allocate(work, layer, query.device)
        launch(
            self._kernels.attend_kernel,
            (work.num_programs,),
            query,
            key_cache,
            value_cache,
            out,
            *partials,
            work.units,
            work.count,
            metadata.context_lens,
            metadata.block_tables,
            metadata.positions,
            metadata.positions if mask is None else mask.view(torch.uint8),
            metadata.positions if not in_order else _is_tree(plan),
            query.stride(0),
            query.stride(1),
            metadata.block_tables.shape[1],
            0 if mask is None else mask.shape[1],
            layer.scaling if layer.softcap is not None else layer.scaling * _LOG2_E,
            layer.softcap or 0.0,
            NUM_KV_HEADS=kind.num_kv_heads,
            RATIO=_ratio(kind),
            HEAD_DIM=kind.head_dim,
            BLOCK_SIZE=key_cache.shape[2],
            WINDOW=layer.sliding_window or 0,
            HAS_SOFTCAP=layer.softcap is not None,
            HAS_MASK=mask is not None,
            IN_ORDER=in_order,
            SPLIT_KEYS=self.split_keys if work.is_split else 0,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            BLOCK_D=tile.lanes,
            DEFER_SUM=tile.defers_sum,
            WIDEN=self._interpreted and query.dtype != torch.float32,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if not work.num_partials:
            return
        launch(
            self._kernels.combine_kernel,
            (work.num_rows, kind.num_heads),
            out,
            *partials,
            work.places,
            _row_sequences(plan, self._max_split_rows),
            metadata.context_lens,
            metadata.query_start,
            work.first_row,
            NUM_HEADS=kind.num_heads,
            HEAD_DIM=kind.head_dim,
            WINDOW=layer.sliding_window or 0,
            HAS_MASK=mask is not None,
            SPLIT_KEYS=self.split_keys,
            MAX_SPLITS=_power_of_two(self.max_splits),
            SPLITS_AT_ONCE=min(16, _power_of_two(self.max_splits)),
            BLOCK_D=tile.lanes,
            num_warps=max(1, tile.lanes // 128),  # rows are many, and each has little to do
        )

    def _works(self, plan: _Plan, layer: LayerAttention, dtype: torch.dtype) -> tuple[_Work, ...]:
        kind = _kind(layer, dtype)
        works = plan.works.get(kind)
        if works is None:
            works = plan.works[kind] = tuple(self._lay_out(plan.metadata, kind))
        return works

    def _lay_out(self, metadata: AttentionMetadata, kind: _Kind) -> list[_Work]:
        """Cut a step into work: rounds of split sequences, then the long chunks in one launch."""
        query_lens, context_lens = metadata.query_lens_host, metadata.context_lens_host
        assert max(context_lens) <= self.split_keys * self.max_splits, "longer than the backend was made for"
        works = []
        max_partials = _max_partials(kind.num_heads, kind.head_dim)
        for part in split_rounds(
            query_lens,
            context_lens,
            split_keys=self.split_keys,
            max_partials=max_partials,
            max_rows=self._max_split_rows,
        ):
            units = work_units(
                query_lens,
                context_lens,
                part.sequences,
                ratio=_ratio(kind),
                tile_rows=self._tile(kind, is_split=True).rows,
                split_keys=self.split_keys,
            )
            places = partial_places(query_lens, context_lens, part.sequences, self.split_keys)
            works.append(_work(units, places, self._num_programs(len(units), kind), self._device, part))
        longest = self._max_split_rows
        long = [number for number, rows in enumerate(query_lens) if longest is not None and rows > longest]
        if long:
            units = work_units(
                query_lens,
                context_lens,
                long,
                ratio=_ratio(kind),
                tile_rows=self._tile(kind, is_split=False).rows,
                split_keys=None,
            )
            nowhere = np.zeros((0, 2), dtype=np.int32)
            works.append(_work(units, nowhere, len(units) * kind.num_kv_heads, self._device, None))
        return works

    def _num_programs(self, num_units: int, kind: _Kind) -> int:
        """Of a launch of split work."""
        return min(num_units * kind.num_kv_heads, self._num_processors * _PROGRAMS_PER_PROCESSOR)

    def _tile(self, kind: _Kind, *, is_split: bool) -> _Tile:
        lanes = max(16, _power_of_two(kind.head_dim))
        wide = kind.item_size > 2
        if is_split:
            # Eight rows of a verification share each load; more heads than that fill a tile by themselves.
            rows = min(max(16, _power_of_two(8 * _ratio(kind))), 32 if wide else 64)
        else:
            rows = 32 if wide else 64
        keys = 32 if wide or lanes > 128 else 64
        # With n stages, n - 1 tiles of keys and values are in memory or on their way.
        fixed_bytes = rows * (lanes + keys) * kind.item_size
        copied_bytes = 2 * keys * lanes * kind.item_size
        num_stages = 1 + min(2, max(1, (self._shared_bytes - fixed_bytes) // copied_bytes))
        return _Tile(rows=rows, keys=keys, lanes=lanes, num_warps=4, num_stages=num_stages)


class StaticSize(NamedTuple):
    """How much work a `StaticWork` has room for, and how work of its layers is cut."""

    num_units: int
    num_partials: int
    ratio: int
    tile_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticWork:
    """Memory of constant size that holds the work of changing steps of at most T rows.

    A step may have as many sequences as rows; sequences without rows have context 0.
    """

    metadata: AttentionMetadata
    units: torch.Tensor
    """int32 [W, 8] with W = `StaticSize.num_units`"""
    count: torch.Tensor
    """int32 [1]: how many of them there are."""
    places: torch.Tensor
    """int32 [S, 2]"""
    num_partials: int
    row_sequences: torch.Tensor
    """int32 [T], negative for padding."""


class _Partials(NamedTuple):
    out: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor

    @classmethod
    def allocate(cls, work: _Work, layer: LayerAttention, device: torch.device) -> _Partials:
        shape = (max(1, work.num_partials), layer.num_heads)
        return cls(
            torch.empty((*shape, layer.head_dim), device=device),
            torch.empty(shape, device=device),
            torch.empty(shape, device=device),
        )


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a Triton kernel on the device of its first argument; every launch comes through here."""
    device = args[0].device
    with nullcontext() if device.type == "cpu" else torch.cuda.device(device):
        kernel[grid](*args, **constants)


def _import_kernels() -> Any:
    try:
        return importlib.import_module("specdec.attention.triton_kernels")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("triton"):
            raise
        raise TritonUnavailable(
            f"the triton attention needs the package `triton`: {how_to_install('cuda')}"
        ) from error


def is_interpreted() -> bool:
    """Whether Triton's kernels run on the CPU here, for tests."""
    # Triton itself reads it when the kernels' module is imported.
    return os.environ.get("TRITON_INTERPRET") == "1"


def _device_limits(device: torch.device) -> tuple[int, int]:
    """(shared memory of one program in bytes, number of multiprocessors)."""
    if device.type != "cuda":
        return _SHARED_BYTES, 1
    properties: Any = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", _SHARED_BYTES)
    return int(shared), int(properties.multi_processor_count)


def _work(
    units: NDArray[np.int32],
    places: NDArray[np.int32],
    num_programs: int,
    device: torch.device,
    part: SplitRound | None,
) -> _Work:
    """Send a launch's work to the device; `part` is what is split, None where nothing is."""
    count = np.array([len(units)], dtype=np.int32)
    # All in one copy.
    packed = torch.from_numpy(np.concatenate([units.reshape(-1), places.reshape(-1), count])).to(device)
    return _Work(
        units=packed[: units.size].view(-1, UNIT_SIZE),
        count=packed[-1:],
        num_programs=num_programs,
        places=packed[units.size : -1].view(-1, 2),
        is_split=part is not None,
        first_row=0 if part is None else part.first_row,
        num_rows=0 if part is None else part.num_rows,
        num_partials=part.num_partials if part is not None and part.is_split else 0,
    )


def _row_sequences(plan: _Plan, max_split_rows: int | None) -> torch.Tensor:
    """int32 [T], negative for padding and for rows that were not split."""
    if plan.row_sequences is None:
        metadata = plan.metadata
        lens = metadata.query_lens_host
        longest = max(lens) if max_split_rows is None else max_split_rows
        numbers = [-1 if query_len > longest else number for number, query_len in enumerate(lens)]
        rows_T = np.full(metadata.num_rows, -1, dtype=np.int32)
        rows_T[: sum(lens)] = np.repeat(np.array(numbers, dtype=np.int32), lens)
        plan.row_sequences = torch.from_numpy(rows_T).to(metadata.positions.device)
    return plan.row_sequences


def _is_tree(plan: _Plan) -> torch.Tensor:
    if plan.is_tree is None:
        metadata = plan.metadata
        known = metadata.is_tree
        if known is None:
            known = torch.ones(metadata.num_sequences, dtype=torch.bool, device=metadata.positions.device)
        plan.is_tree = known.view(torch.uint8)
    return plan.is_tree


def _kind(layer: LayerAttention, dtype: torch.dtype) -> _Kind:
    return _Kind(layer.num_heads, layer.num_kv_heads, layer.head_dim, dtype.itemsize)


def _ratio(kind: _Kind) -> int:
    return kind.num_heads // kind.num_kv_heads


def _max_partials(num_heads: int, head_dim: int) -> int:
    return max(1, MAX_PARTIAL_BYTES // (4 * num_heads * head_dim))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
