"""Chooses the attention backend of a model by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from specdec.attention.base import AttentionBackend, LayerAttention
from specdec.attention.config import AttentionName
from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.native import NativeUnavailable
from specdec.attention.sdpa import SdpaAttention
from specdec.attention.triton import TritonPagedAttention, TritonUnavailable
from specdec.core.errors import ResourceError

logger = logging.getLogger(__name__)


def choose_backend(
    name: AttentionName,
    *,
    device: torch.device,
    dtype: torch.dtype,
    layers: Sequence[LayerAttention],
    max_context: int,
    batch_invariant: bool = False,
) -> AttentionBackend:
    """Return the backend for a model of these layers, whose longest sequence is `max_context` tokens.

    With `batch_invariant` a row's result is the same bits in every batch: C++ on a CPU, Triton on a GPU.

    Raises:
        ResourceError: `triton` was asked for by name, or something batch-invariant, and cannot be used; the
            text says why.
    """
    if batch_invariant:
        return _invariant(device, dtype, layers, max_context)
    if name == "sdpa" or (name == "auto" and device.type != "cuda"):
        return SdpaAttention()
    try:
        return _triton(device, dtype, layers, max_context)
    except TritonUnavailable as error:
        if name == "triton":
            raise ResourceError(f"attention_backend triton: {error}") from error
        logger.warning("attention runs on plain tensor operations, which is much slower: %s", error)
        return SdpaAttention()


def _invariant(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerAttention], max_context: int
) -> AttentionBackend:
    try:
        if device.type == "cuda":
            return _triton(device, dtype, layers, max_context, splits_all=True)
        native = CpuPagedAttention()
    except (TritonUnavailable, NativeUnavailable) as error:
        raise ResourceError(f"batch_invariant: {error}; without it, leave batch_invariant out") from error
    unknown = [layer.head_dim for layer in layers if not native.supports(dtype, layer.head_dim)]
    if unknown:
        raise ResourceError(
            f"batch_invariant: the C++ attention does not run {dtype} with heads of {unknown[0]}"
        )
    return native


def _triton(
    device: torch.device,
    dtype: torch.dtype,
    layers: Sequence[LayerAttention],
    max_context: int,
    *,
    splits_all: bool = False,
) -> TritonPagedAttention:
    backend = TritonPagedAttention(device, max_context=max_context, splits_all=splits_all)
    for layer in layers:
        if not backend.supports(dtype, layer.head_dim):
            raise TritonUnavailable(f"it does not run {dtype} with heads of {layer.head_dim}")
    return backend
