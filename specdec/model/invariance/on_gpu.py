"""Operations of an eager forward on a GPU that do not follow the batch: Triton kernels of fixed tiles.

cuBLAS chooses its kernels, and whether to cut the inner dimension, by the number of rows; PyTorch's
reductions give a row more threads when there are few. Elementwise kernels run one function per element
wherever it lies, and stay. Recorded into CUDA graphs like everything else.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from specdec.attention.triton import TritonUnavailable, is_interpreted, launch
from specdec.core.extras import how_to_install
from specdec.model.invariance.operations import (
    InvariantOperations,
    Replacement,
    UnsupportedInvariance,
    last_dimension,
)
from specdec.model.quantized_linear import Bits, quantized_linear

_ATEN: Any = torch.ops.aten
_OURS: Any = torch.ops.drafthouse

_LARGEST_ROW = 1 << 16
"""Elements of a row that one program holds."""
_SUM_BLOCK = 1024
_SAME_EVERYWHERE = (
    *("rsqrt", "exp", "tanh", "sigmoid", "silu", "gelu", "cos", "sin", "erf", "softplus", "log"),
    *("exp2", "log1p", "expm1", "leaky_relu", "elu", "mish", "hardswish", "hardsigmoid"),
)


class _Tile(NamedTuple):
    """One for every number of rows."""

    rows: int
    columns: int
    inputs: int
    num_warps: int
    num_stages: int


_TILES = {
    torch.float32: _Tile(16, 64, 64, 4, 3),
    torch.bfloat16: _Tile(64, 64, 64, 4, 4),
    torch.float16: _Tile(64, 64, 64, 4, 4),
}


class GpuOperations(InvariantOperations):
    """Implements `InvariantOperations` on CUDA devices; under Triton's interpreter also on the CPU.

    Raises on construction:
        TritonUnavailable: the package `triton` is missing, or there is no device that it can use.
    """

    def __init__(self, device: torch.device) -> None:
        self._interpreted = is_interpreted()
        if device.type != "cuda" and not self._interpreted:
            raise TritonUnavailable(f"its kernels run on CUDA devices, not on {device.type}")
        try:
            self._kernels: Any = importlib.import_module("specdec.model.invariance.triton_kernels")
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith("triton"):
                raise
            raise TritonUnavailable(f"it needs the package `triton`: {how_to_install('cuda')}") from error

    def adopt(self, model: torch.nn.Module) -> None:
        """See `InvariantOperations`: nothing is kept of it."""

    def prepare(self, max_bytes: int) -> None:
        """See `InvariantOperations`: there is nothing to prepare."""

    def replacements(self) -> Mapping[Any, Replacement | None]:
        """See `InvariantOperations`."""
        return {
            **{getattr(_ATEN, name).default: None for name in _SAME_EVERYWHERE},
            _ATEN.pow.Tensor_Scalar: None,
            _ATEN.pow.Tensor_Tensor: None,
            _ATEN.pow.Scalar: None,
            _ATEN.linear.default: self.linear,
            _ATEN.mm.default: self.matmul,
            _ATEN.bmm.default: self.matmul,
            _ATEN.matmul.default: self.matmul,
            _ATEN.addmm.default: self.addmm,
            _ATEN.mean.dim: self.mean,
            _ATEN.sum.dim_IntList: self.sum,
            _ATEN.softmax.int: self._softmax,
            _ATEN._softmax.default: lambda x, dim, _: self._softmax(x, dim),
            _ATEN.layer_norm.default: self._layer_norm,
            _ATEN.rms_norm.default: self._rms_norm,
            _ATEN.dropout.default: lambda x, _rate, _train: x,
            _OURS.quantized_linear.default: self._quantized,
        }

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `InvariantOperations`."""
        tile = _TILES.get(x.dtype)
        if tile is None or weight.dtype != x.dtype:
            raise UnsupportedInvariance(f"a product of {x.dtype} with {weight.dtype}")
        columns, inner = weight.shape
        rows = x.reshape(-1, inner)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty((rows.shape[0], columns), dtype=x.dtype, device=x.device)
        if out.numel() == 0:
            return out.view(*x.shape[:-1], columns)
        launch(
            self._kernels.linear_kernel,
            (-(-rows.shape[0] // tile.rows), -(-columns // tile.columns)),
            rows,
            weight,
            rows if bias is None else bias.contiguous(),
            out,
            rows.shape[0],
            columns,
            inner,
            rows.stride(0),
            weight.stride(0),
            weight.stride(1),
            HAS_BIAS=bias is not None,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.inputs,
            WIDEN=self._interpreted and x.dtype != torch.float32,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out.view(*x.shape[:-1], columns)

    def add_up(self, x: torch.Tensor, divisor: float) -> torch.Tensor:
        """See `InvariantOperations`."""
        out = torch.empty((*x.shape[:-1], 1), dtype=x.dtype, device=x.device)
        if out.numel():
            launch(
                self._kernels.sum_kernel,
                (out.numel(),),
                *(x, out, x.shape[-1], divisor),
                BLOCK=_SUM_BLOCK,
                num_warps=4,
            )
        return out

    def _softmax(self, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        last_dimension("softmax", x, dim)
        x = x.to(dtype or x.dtype).contiguous()
        out = torch.empty_like(x)
        if out.numel():
            launch(
                self._kernels.softmax_kernel,
                (x.numel() // x.shape[-1],),
                *(x, out, x.shape[-1]),
                BLOCK=_block_of(x),
                num_warps=4,
            )
        return out

    def _layer_norm(
        self,
        x: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        _: bool = True,
    ) -> torch.Tensor:
        return self._norm(x, shape, weight, bias, eps, centred=True)

    def _rms_norm(
        self,
        x: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        epsilon = torch.finfo(x.dtype).eps if eps is None else eps
        return self._norm(x, shape, weight, None, epsilon, centred=False)

    def _norm(
        self,
        x: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        epsilon: float,
        *,
        centred: bool,
    ) -> torch.Tensor:
        if len(shape) != 1:
            raise UnsupportedInvariance("a norm over several dimensions")
        x = x.contiguous()
        out = torch.empty_like(x)
        if out.numel():
            launch(
                self._kernels.norm_kernel,
                (x.numel() // x.shape[-1],),
                *(x, x if weight is None else weight, x if bias is None else bias, out, x.shape[-1], epsilon),
                CENTRED=centred,
                HAS_WEIGHT=weight is not None,
                HAS_BIAS=bias is not None,
                BLOCK=_block_of(x),
                num_warps=4,
            )
        return out

    def _quantized(
        self,
        x: torch.Tensor,
        panels: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        num_columns: int,
        bits: Bits,
    ) -> torch.Tensor:
        return quantized_linear(x, panels, scales, bias, num_columns, bits, multiply=self.matmul)


def _block_of(x: torch.Tensor) -> int:
    """Return the power of two that holds a row.

    Raises:
        UnsupportedInvariance: none does.
    """
    size = x.shape[-1]
    if size > _LARGEST_ROW:
        raise UnsupportedInvariance(f"rows of {size} elements")
    return max(16, 1 << (size - 1).bit_length())
