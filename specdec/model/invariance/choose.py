"""From a configuration to the batch-invariant form of a model's forward, or a refusal by name."""

from __future__ import annotations

import torch

from specdec.attention.native import NativeUnavailable
from specdec.attention.triton import TritonUnavailable
from specdec.core.errors import ConfigError, ResourceError
from specdec.model.config import ModelConfig
from specdec.model.invariance.native import NativeOperations
from specdec.model.invariance.on_gpu import GpuOperations
from specdec.model.invariance.operations import InvariantForward


def invariant_forward(
    config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> InvariantForward | None:
    """Return the mode that a model's forward runs in; None where `batch_invariant` is not asked for.

    Raises:
        ConfigError: the promise cannot be kept with this dtype.
        ResourceError: it needs a compiler or a package that is not here.
    """
    if not config.batch_invariant:
        return None
    if device.type == "cuda":
        try:
            return InvariantForward(GpuOperations(device))
        except TritonUnavailable as error:
            raise ResourceError(f"batch_invariant: {error}; without it, leave batch_invariant out") from error
    if dtype not in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"batch_invariant does not go with {name} on a CPU: set dtype to bfloat16 or float32"
        )
    try:
        return InvariantForward(
            NativeOperations(config.compile.cache_dir, is_quantized=config.quantization is not None)
        )
    except NativeUnavailable as error:
        raise ResourceError(
            f"batch_invariant needs the C++ kernels: {error}; install a C++ compiler (g++), or leave "
            "batch_invariant out"
        ) from error
