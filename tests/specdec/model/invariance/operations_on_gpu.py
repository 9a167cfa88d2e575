"""Operations of the Triton kernels, and their references: interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

from specdec.model.invariance.operations import InvariantForward

Operation = Callable[[torch.Tensor], torch.Tensor]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def weight_of(x: torch.Tensor, *shape: int) -> torch.Tensor:
    numbers = np.random.default_rng(x.shape[-1]).standard_normal(shape)  # not an operation of torch
    return torch.from_numpy(numbers).to(x.device, torch.bfloat16).to(x.dtype)


OPERATIONS: dict[str, Operation] = {
    "linear": lambda x: F.linear(x, weight_of(x, 65, x.shape[-1])),
    "linear with bias": lambda x: F.linear(x, weight_of(x, 65, x.shape[-1]), weight_of(x, 65)),
    "addmm": lambda x: torch.addmm(weight_of(x, 40), x, weight_of(x, x.shape[-1], 40)),
    "matmul": lambda x: x[:, None, :] @ weight_of(x, x.shape[-1], 33),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(
        x, x.shape[-1:], weight_of(x, x.shape[-1]), weight_of(x, x.shape[-1]), 1e-5
    ),
    "rms norm": lambda x: F.rms_norm(x, x.shape[-1:], weight_of(x, x.shape[-1]), 1e-6),
}


def rows(num_rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(num_rows, width, generator=generator).bfloat16().to(dtype)
    return x.to(device)


@torch.inference_mode()
def run(mode: InvariantForward | None, operation: Operation, x: torch.Tensor) -> torch.Tensor:
    if mode is None:
        return operation(x)
    with mode:
        return operation(x)


def relative_error(mode: InvariantForward, operation: Operation, x: torch.Tensor) -> float:
    """Largest difference from what PyTorch computes in float64."""
    expected = run(None, operation, x.double())
    got = run(mode, operation, x)
    assert got.dtype == x.dtype
    assert got.shape == expected.shape
    return float((got.double() - expected).abs().max() / expected.abs().max())
