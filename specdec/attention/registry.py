"""Chooses the attention backend of a model by name."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from specdec.attention.agreement import LARGEST_DIFFERENCE, largest_difference
from specdec.attention.base import AttentionBackend, LayerAttention
from specdec.attention.config import AttentionName, flashinfer_refusal, refusal_of
from specdec.attention.cpu import CpuPagedAttention
from specdec.attention.flashinfer import (
    FlashInferAttention,
    FlashInferUnavailable,
    MakeWrapper,
    load_flashinfer,
)
from specdec.attention.flashinfer_steps import LayerKind
from specdec.attention.native import NativeUnavailable
from specdec.attention.sdpa import SdpaAttention
from specdec.attention.triton import TritonPagedAttention, TritonUnavailable
from specdec.core.errors import ConfigError, ResourceError

logger = logging.getLogger(__name__)


def choose_backend(
    name: AttentionName,
    *,
    device: torch.device,
    dtype: torch.dtype,
    layers: Sequence[LayerAttention],
    max_context: int,
    batch_invariant: bool = False,
    cache_dir: str | None = None,
) -> AttentionBackend:
    """Return the backend for a model of these layers, whose longest sequence is `max_context` tokens.

    What has to be compiled for a CPU is kept in `cache_dir` (see `resolve_cache_dir`). With `batch_invariant`
    a row's result is the same bits in every batch: C++ on a CPU, Triton on a GPU.

    Raises:
        ConfigError: `cpu` or `flashinfer` does not go with this device, dtype or these layers.
        ResourceError: `cpu`, `triton` or `flashinfer` was asked for by name, or something batch-invariant,
            and cannot be used; the text says why.
    """
    if name == "cpu":
        return require_cpu(device, dtype, [layer.head_dim for layer in layers], cache_dir)
    if batch_invariant:
        return _invariant(device, dtype, layers, max_context, cache_dir)
    if name == "flashinfer":
        make_wrapper = require_flashinfer(device, dtype, [layer.head_dim for layer in layers])
        return _flashinfer(device, dtype, layers, make_wrapper)
    if name == "sdpa" or (name == "auto" and device.type != "cuda"):
        return SdpaAttention()
    try:
        return _triton(device, dtype, layers, max_context)
    except TritonUnavailable as error:
        if name == "triton":
            raise ResourceError(f"attention_backend triton: {error}") from error
        logger.warning("attention runs on plain tensor operations, which is much slower: %s", error)
        return SdpaAttention()


def require_cpu(
    device: torch.device, dtype: torch.dtype, head_dims: Sequence[int], cache_dir: str | None = None
) -> CpuPagedAttention:
    """Return the C++ attention, for a model that it can run; what is compiled is kept in `cache_dir`.

    Raises:
        ConfigError: it does not go with the device or the dtype.
        ResourceError: it cannot be built here, or does not run heads of these sizes.
    """
    reason = refusal_of("cpu", device=device.type, dtype=str(dtype).removeprefix("torch."))
    if reason is not None:
        raise ConfigError(f"attention_backend cpu: {reason}")
    try:
        return _native(dtype, head_dims, cache_dir)
    except NativeUnavailable as error:
        raise ResourceError(f"attention_backend cpu: {error}; leave attention_backend out") from error


def _native(dtype: torch.dtype, head_dims: Sequence[int], cache_dir: str | None) -> CpuPagedAttention:
    native = CpuPagedAttention(cache_dir)
    unknown = [head_dim for head_dim in head_dims if not native.supports(dtype, head_dim)]
    if unknown:
        raise NativeUnavailable(f"the C++ attention does not run {dtype} with heads of {unknown[0]}")
    return native


def require_flashinfer(device: torch.device, dtype: torch.dtype, head_dims: Sequence[int]) -> MakeWrapper:
    """Return what makes FlashInfer's wrappers, for a model that it can run.

    Raises:
        ConfigError: it does not go with the device, the dtype or the head sizes.
        ResourceError: the library is not there.
    """
    name = str(dtype).removeprefix("torch.")
    reason = flashinfer_refusal(device=device.type, dtype=name, head_dims=head_dims)
    if reason is not None:
        raise ConfigError(f"attention_backend flashinfer: {reason}")
    try:
        return load_flashinfer(device)
    except FlashInferUnavailable as error:
        raise ResourceError(f"attention_backend flashinfer: {error}") from error


def _flashinfer(
    device: torch.device, dtype: torch.dtype, layers: Sequence[LayerAttention], make_wrapper: MakeWrapper
) -> FlashInferAttention:
    backend = FlashInferAttention(device, make_wrapper)
    for layer in {LayerKind.of(layer, dtype): layer for layer in layers}.values():
        try:
            difference = largest_difference(backend, layer, dtype=dtype, device=device)
        except Exception as error:  # of its compilers, loaders and launches, in many classes
            raise ResourceError(
                "attention_backend flashinfer: its kernels, which it compiles with nvcc unless the package "
                f"flashinfer-jit-cache is installed, do not run here: {type(error).__name__}: {error}"
            ) from error
        if not difference <= LARGEST_DIFFERENCE:  # a NaN is refused too
            raise ResourceError(
                f"attention_backend flashinfer: on {device} its result for heads of {layer.head_dim} (window "
                f"{layer.sliding_window}, soft cap {layer.softcap}) differs from the reference's by "
                f"{difference:.2g} of its size: leave attention_backend out"
            )
    return backend


def _invariant(
    device: torch.device,
    dtype: torch.dtype,
    layers: Sequence[LayerAttention],
    max_context: int,
    cache_dir: str | None,
) -> AttentionBackend:
    try:
        if device.type == "cuda":
            return _triton(device, dtype, layers, max_context, batch_invariant=True)
        return _native(dtype, [layer.head_dim for layer in layers], cache_dir)
    except (TritonUnavailable, NativeUnavailable) as error:
        raise ResourceError(f"batch_invariant: {error}; without it, leave batch_invariant out") from error


def _triton(
    device: torch.device,
    dtype: torch.dtype,
    layers: Sequence[LayerAttention],
    max_context: int,
    *,
    batch_invariant: bool = False,
) -> TritonPagedAttention:
    backend = TritonPagedAttention(device, max_context=max_context, batch_invariant=batch_invariant)
    for layer in layers:
        if not backend.supports(dtype, layer.head_dim):
            raise TritonUnavailable(f"it does not run {dtype} with heads of {layer.head_dim}")
    return backend
