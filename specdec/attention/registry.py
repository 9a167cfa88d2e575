"""Chooses the attention backend of a model by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from specdec.attention.base import AttentionBackend, LayerAttention
from specdec.attention.config import AttentionName
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
) -> AttentionBackend:
    """Return the backend for a model of these layers, whose longest sequence is `max_context` tokens.

    Raises:
        ResourceError: `triton` was asked for by name and cannot be used; the text says why.
    """
    if name == "sdpa" or (name == "auto" and device.type != "cuda"):
        return SdpaAttention()
    try:
        return _triton(device, dtype, layers, max_context)
    except TritonUnavailable as error:
        if name == "triton":
            raise ResourceError(f"attention_backend triton: {error}") from error
        logger.warning("attention runs on plain tensor operations, which is much slower: %s", error)
        return SdpaAttention()


def _triton(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerAttention], max_context: int
) -> TritonPagedAttention:
    backend = TritonPagedAttention(device, max_context=max_context)
    for layer in layers:
        if not backend.supports(dtype, layer.head_dim):
            raise TritonUnavailable(f"it does not run {dtype} with heads of {layer.head_dim}")
    return backend
