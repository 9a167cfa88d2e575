"""Operations of an eager forward on a CPU, in C++ (`csrc/operations.h`): those of the compiled forward.

fp32 and bf16. A sum is added up in one order, whatever the number of rows or threads, and an element goes
through the same instructions wherever it lies in its tensor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from specdec.attention.native import resolve_cache_dir
from specdec.model.invariance.operations import (
    InvariantOperations,
    Replacement,
    UnsupportedInvariance,
    last_dimension,
)
from specdec.model.native_forward import load_forward_library, load_quantized_kernel
from specdec.model.packed_weights import PackedWeights
from specdec.model.quantized_linear import Bits, QuantizedWeight
from specdec.model.recording import CannotLower

_ATEN: Any = torch.ops.aten
_OURS: Any = torch.ops.drafthouse

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_UNARY, _COS, _SIN, _POWER, _MEAN, _SOFTMAX, _NORM = range(7)
_UNARY_OPS = {"rsqrt": 9, "exp": 11, "tanh": 12, "sigmoid": 13, "silu": 14}
_GELU, _GELU_TANH = 16, 17
_POWER_OPS = {2: 6, 3: 7, 0.5: 8, -0.5: 9, -1: 10}
"""Numbers of `dh::Op`."""
_PIECE = 1024
"""Elements that an operation on single elements takes at a time."""
_WEIGHT_FORMATS = {8: 1, 4: 2}


class _Linear(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("panels", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("num_units", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("is_bf16", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    ]


class _Rows(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("kind", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("z", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_elements", ctypes.c_int64),
        ("row_size", ctypes.c_int32),
        ("scalar", ctypes.c_float),
        ("centred", ctypes.c_int32),
        ("round_before", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    ]


class _Quantized(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("format", ctypes.c_int32),
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inner", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("is_bf16", ctypes.c_int32),
    ]


class NativeOperations(InvariantOperations):
    """Implements `InvariantOperations` on CPUs.

    Raises on construction:
        NativeUnavailable: the kernels cannot be built or loaded here.
    """

    def __init__(self, cache_dir: str | None = None, *, is_quantized: bool = False) -> None:
        """Build or load the kernels, which are those of the compiled forward."""
        folder = resolve_cache_dir(cache_dir)
        self._library = library = load_forward_library(folder)
        for name, structure in (("linear", _Linear), ("rows", _Rows), ("quantized", _Quantized)):
            getattr(library, f"drafthouse_{name}").restype = None
            size = getattr(library, f"drafthouse_{name}_size")()
            assert size == ctypes.sizeof(structure), "structs differ from C++"
        self._quantized_kernel = load_quantized_kernel(folder) if is_quantized else None
        self._constants: set[int] = set()
        self._packed: PackedWeights | None = None

    def adopt(self, model: torch.nn.Module) -> None:
        """See `InvariantOperations`."""
        self._constants = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def prepare(self, max_bytes: int) -> None:
        """Pack weights from now on, each when it is first used: without, they are packed at each use."""
        self._packed = PackedWeights(self._library, max_bytes)

    def replacements(self) -> Mapping[Any, Replacement | None]:
        """See `InvariantOperations`."""
        unary: dict[Any, Replacement] = {
            getattr(_ATEN, name).default: self._unary_of(number) for name, number in _UNARY_OPS.items()
        }
        return {
            **unary,
            _ATEN.linear.default: self.linear,
            _ATEN.mm.default: self.matmul,
            _ATEN.bmm.default: self.matmul,
            _ATEN.matmul.default: self.matmul,
            _ATEN.addmm.default: self.addmm,
            _ATEN.gelu.default: self._gelu,
            _ATEN.cos.default: lambda x: self._elements(_COS, 0, x),
            _ATEN.sin.default: lambda x: self._elements(_SIN, 0, x),
            _ATEN.pow.Tensor_Scalar: self._pow,
            _ATEN.pow.Tensor_Tensor: self._pow_of_tensors,
            _ATEN.mean.dim: self.mean,
            _ATEN.sum.dim_IntList: self.sum,
            _ATEN.softmax.int: self._softmax,
            _ATEN._softmax.default: lambda x, dim, _: self._softmax(x, dim),
            _ATEN.layer_norm.default: self._layer_norm,
            _ATEN.rms_norm.default: self._rms_norm,
            _ATEN.dropout.default: _no_dropout,
            _OURS.quantized_linear.default: self._quantized,
        }

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `InvariantOperations`."""
        _check(x, weight, bias)
        columns, inner = weight.shape
        rows = x.reshape(-1, inner).contiguous()
        per_unit = 4 // x.itemsize
        if inner % per_unit:
            rows, weight = F.pad(rows, (0, 1)), F.pad(weight, (0, 1))
        y = torch.empty((rows.shape[0], columns), dtype=x.dtype)
        panels = self._panels(weight)
        if panels is None and weight.stride(1) != 1:
            weight = weight.contiguous()
        if bias is not None:
            bias = bias.contiguous()
        call = _Linear(
            *(_address(panels), _address(weight), weight.stride(0), _address(bias)),
            *(weight.shape[1] // per_unit, columns),
            *(rows.data_ptr(), rows.stride(0), y.data_ptr(), y.stride(0), rows.shape[0]),
            *(_DTYPES[x.dtype], torch.get_num_threads()),
        )
        self._library.drafthouse_linear(ctypes.byref(call))
        return y.view(*x.shape[:-1], columns)

    def _panels(self, weight: torch.Tensor) -> torch.Tensor | None:
        if self._packed is None or weight.untyped_storage().data_ptr() not in self._constants:
            return None
        try:
            return self._packed.pack(weight)
        except CannotLower:  # no room for it, and it is not read as it is: turned around at each use
            return None

    def _unary_of(self, op: int) -> Replacement:
        return lambda x: self._elements(_UNARY, op, x)

    def _gelu(self, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
        return self._elements(_UNARY, _GELU if approximate == "none" else _GELU_TANH, x)

    def _pow(self, x: torch.Tensor, exponent: float) -> torch.Tensor:
        op = _POWER_OPS.get(exponent)
        if op is not None:
            return self._elements(_UNARY, op, x)
        return self._elements(_POWER, 0, x, scalar=float(exponent))

    def _pow_of_tensors(self, x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
        dtype = torch.result_type(x, exponents)
        shape: Any = torch.broadcast_shapes(x.shape, exponents.shape)  # type: ignore[no-untyped-call]
        exponents = exponents.to(dtype).expand(shape).contiguous()
        return self._elements(_POWER, 0, x.to(dtype).expand(shape), exponents)

    def _elements(
        self, kind: int, op: int, x: torch.Tensor, y: torch.Tensor | None = None, *, scalar: float = 0.0
    ) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(kind, x, out, op=op, y=y, row_size=_PIECE, scalar=scalar)
        return out

    def add_up(self, x: torch.Tensor, divisor: float) -> torch.Tensor:
        """See `InvariantOperations`."""
        out = torch.empty((*x.shape[:-1], 1), dtype=x.dtype)
        self._run(_MEAN, x, out, row_size=x.shape[-1], scalar=divisor)
        return out

    def _softmax(self, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        last_dimension("softmax", x, dim)
        x = x.to(dtype or x.dtype).contiguous()
        out = torch.empty_like(x)
        self._run(_SOFTMAX, x, out, row_size=x.shape[-1])
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
        return self._norm(x, shape, weight, bias, (True, False, eps))

    def _rms_norm(
        self,
        x: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        epsilon = torch.finfo(x.dtype).eps if eps is None else eps
        return self._norm(x, shape, weight, None, (False, False, epsilon))

    def _norm(
        self,
        x: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        norm: tuple[bool, bool, float],
    ) -> torch.Tensor:
        if len(shape) != 1:
            raise UnsupportedInvariance("a norm over several dimensions")
        _check(x, *(one for one in (weight, bias) if one is not None))
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run(_NORM, x, out, y=weight, z=bias, row_size=x.shape[-1], norm=norm)
        return out

    def _run(
        self,
        kind: int,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        row_size: int,
        op: int = 0,
        y: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        scalar: float = 0.0,
        norm: tuple[bool, bool, float] = (False, False, 0.0),
    ) -> None:
        _check(x)
        call = _Rows(
            *(kind, op, _DTYPES[x.dtype], torch.get_num_threads()),
            *(x.data_ptr(), _address(y), _address(z), out.data_ptr()),
            *(x.numel(), row_size, scalar, *norm),
        )
        self._library.drafthouse_rows(ctypes.byref(call))

    def _quantized(
        self,
        x: torch.Tensor,
        panels: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        num_columns: int,
        bits: Bits,
    ) -> torch.Tensor:
        assert self._quantized_kernel is not None, "quantized weights need their kernels"
        _check(x)
        weight = QuantizedWeight(bits=bits, num_columns=num_columns, panels=panels, scales=scales)
        rows = x.reshape(-1, weight.num_inputs).contiguous()
        y = torch.empty((rows.shape[0], num_columns), dtype=x.dtype)
        call = _Quantized(
            *(_WEIGHT_FORMATS[bits], panels.data_ptr(), scales.data_ptr(), _address(bias)),
            *(weight.num_inputs, scales.shape[1], num_columns),
            *(rows.data_ptr(), rows.stride(0), y.data_ptr(), y.stride(0), rows.shape[0], _DTYPES[x.dtype]),
        )
        self._library.drafthouse_quantized(
            ctypes.byref(call), self._quantized_kernel, torch.get_num_threads()
        )
        return y.view(*x.shape[:-1], num_columns)


def _no_dropout(x: torch.Tensor, _: float, train: bool) -> torch.Tensor:
    assert not train, "models are in evaluation mode"
    return x


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Raise UnsupportedInvariance for numbers that the kernels do not know, or that are mixed."""
    if x.dtype not in _DTYPES or any(one is not None and one.dtype != x.dtype for one in others):
        dtypes = [str(one.dtype) for one in (x, *others) if one is not None]
        raise UnsupportedInvariance(f"arithmetic on {', '.join(dtypes)}")
