"""Paged attention on the CPU in C++: blocks are read in place, once for all rows that share them.

`csrc/paged_attention.h` is the kernel. Its result for a row does not depend on what else is in the batch
nor on the number of threads, bit for bit.

Shape letters: T rows, H query heads, G key/value heads, D head size, N pool blocks, P block size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from specdec.attention.base import LayerAttention
from specdec.attention.metadata import AttentionMetadata
from specdec.attention.native import load_library, resolve_cache_dir
from specdec.attention.observation import Observation
from specdec.kv.packed_rows import is_packed

SOURCE = Path(__file__).parent / "csrc" / "attention.cpp"
_ENTRY_POINTS = {
    torch.float32: "drafthouse_paged_attention_f32",
    torch.bfloat16: "drafthouse_paged_attention_bf16",
}


class NativeObservation(ctypes.Structure):
    """`dh::Observation`: where rows tell what they attend to."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("masses", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("num_heads", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("skips_windows", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class NativeStep(ctypes.Structure):
    """`dh::Step`: addresses of one step's metadata; in which no node of a tree was read before."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("query_start", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("ancestor_mask", ctypes.c_void_p),
        ("num_rows", ctypes.c_int32),
        ("num_sequences", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("mask_width", ctypes.c_int32),
        ("observation", NativeObservation),
        ("num_known", ctypes.c_void_p),
        ("is_tree", ctypes.c_void_p),
    ]


class NativeLayer(ctypes.Structure):
    """`dh::Layer`: one layer's attention and pools."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("key_pool", ctypes.c_void_p),
        ("value_pool", ctypes.c_void_p),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("is_packed", ctypes.c_int32),
    ]


class _Strided(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("data", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
    ]


class _AttentionCall(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("query", _Strided),
        ("key", _Strided),
        ("value", _Strided),
        ("out", _Strided),
    ]


@dataclass(frozen=True, slots=True)
class _Plan:
    step: NativeStep
    num_threads: int
    has_padding: bool
    metadata: AttentionMetadata
    """Keeps the memory alive that `step` points to."""


class CpuPagedAttention:
    """Attention backend for fp32 and bf16 on the CPU.

    Raises on construction:
        NativeUnavailable: the kernel cannot be built or loaded here.
    """

    name = "cpu"
    observes = True
    reads_packed = True

    def __init__(self, cache_dir: str | Path | None = None) -> None:
        library = load_library(SOURCE, resolve_cache_dir(cache_dir))
        self._max_head_dim = int(library.drafthouse_attention_max_head_dim())
        self._entry_points: dict[torch.dtype, Callable[..., None]] = {}
        for dtype, name in _ENTRY_POINTS.items():
            entry_point = getattr(library, name)
            entry_point.restype = None
            self._entry_points[dtype] = entry_point

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the kernel runs K/V of this dtype and head size."""
        return dtype in self._entry_points and head_dim <= self._max_head_dim

    def begin(self, metadata: AttentionMetadata) -> _Plan:
        """Take the addresses of the step's metadata."""
        return _Plan(
            native_step(metadata),
            torch.get_num_threads(),
            metadata.num_rows != sum(metadata.query_lens_host),
            metadata,
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
        make = torch.zeros if plan.has_padding else torch.empty
        output = make(query.shape, dtype=query.dtype)
        call = _AttentionCall(_strided(query), _strided(key), _strided(value), _strided(output))
        native = native_layer(layer, key_cache, value_cache)
        entry_point = self._entry_points[query.dtype]
        entry_point(ctypes.byref(plan.step), ctypes.byref(native), ctypes.byref(call), plan.num_threads)
        return output


def native_step(metadata: AttentionMetadata) -> NativeStep:
    """Describe `metadata` to the kernels; its tensors must outlive the result."""
    mask, is_tree, observation = metadata.ancestor_mask, metadata.is_tree, metadata.observation
    assert (mask is None) == (is_tree is None), "trees come with a mask, and nothing else does"
    return NativeStep(
        metadata.query_start.data_ptr(),
        metadata.context_lens.data_ptr(),
        metadata.block_tables.data_ptr(),
        metadata.slot_mapping.data_ptr(),
        None if mask is None else mask.data_ptr(),
        metadata.num_rows,
        metadata.num_sequences,
        metadata.block_tables.shape[1],
        0 if mask is None else mask.shape[1],
        NativeObservation() if observation is None else native_observation(observation),
        None,
        None if is_tree is None else is_tree.data_ptr(),
    )


def native_observation(observation: Observation) -> NativeObservation:
    """Describe `observation` to the kernels; its tensors must outlive the result."""
    assert observation.masses.is_contiguous()
    _, num_heads, width = observation.masses.shape
    return NativeObservation(
        observation.masses.data_ptr(),
        observation.rows.data_ptr(),
        num_heads,
        width,
        observation.skips_windows,
        0,
    )


def native_layer(layer: LayerAttention, key_cache: torch.Tensor, value_cache: torch.Tensor) -> NativeLayer:
    """Describe one layer to the kernels; the caches, packed or not, are contiguous and outlive the result."""
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    return NativeLayer(
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        key_cache.shape[2],
        layer.sliding_window or 0,
        layer.scaling,
        layer.softcap or 0.0,
        is_packed(key_cache),
    )


def _strided(rows: torch.Tensor) -> _Strided:
    assert rows.stride(2) == 1, "heads must be contiguous"
    return _Strided(rows.data_ptr(), rows.stride(0), rows.stride(1))
