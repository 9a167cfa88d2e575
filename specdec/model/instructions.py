"""Scheduled operations as the C++ side reads them. The structs mirror `csrc/forward.cpp`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from specdec.attention.base import LayerAttention
from specdec.model.lowering import (
    Attention,
    Collective,
    Elementwise,
    ExpertsDown,
    ExpertsUp,
    Gather,
    Largest,
    LinearLayer,
    Mean,
    Norm,
    Operation,
    Rotary,
    Softmax,
    Spread,
    domain_of,
)
from specdec.model.packed_weights import PackedWeights, panel_bytes
from specdec.model.parallel.shared_slots import RankSlots
from specdec.model.quantized_linear import QuantizedWeight
from specdec.model.recording import CannotLower
from specdec.model.schedule import Step
from specdec.model.trace import Ref, Value

_ELEMENTWISE, _MEAN, _NORM, _ROTARY, _GATHER, _LINEAR, _WRITE_KV, _ATTENTION = range(8)
_SOFTMAX, _LARGEST, _EXPERTS_UP, _EXPERTS_DOWN = range(8, 12)
_HAND_ON, _FETCH, _SUM_UP, _LINE_UP = range(12, 16)
_SPREAD = 16
_CUTS = {"rows": 0, "columns": 1, "own": 2}
_INDICES = {"tokens": 0, "logit_rows": 2}
_WEIGHT_FORMATS = {8: 1, 4: 2}
"""By bits; 0: not quantized."""
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2}
NO_BUFFER = -1
_MAX_DIMS = 3


class _Operand(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("buffer", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("stride", ctypes.c_int64 * _MAX_DIMS),
        ("by_position", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class _Norm(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("centred", ctypes.c_int32),
        ("round_before", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    ]


class Instruction(ctypes.Structure):
    """An operation, or a part of one."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("kind", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("cut", ctypes.c_int32),
        ("sync", ctypes.c_int32),
        ("logit_rows", ctypes.c_int32),
        ("extent", ctypes.c_int32 * _MAX_DIMS),
        ("out", _Operand),
        ("a", _Operand),
        ("b", _Operand),
        ("c", _Operand),
        ("scalar", ctypes.c_float),
        ("scalar2", ctypes.c_float),
        ("norm", _Norm),
        ("index", ctypes.c_int32),
        ("num_indices", ctypes.c_int32),
        ("weight", ctypes.c_int32),
        ("weight_format", ctypes.c_int32),
        ("is_packed", ctypes.c_int32),
        ("weight_stride", ctypes.c_int64),
        ("num_units", ctypes.c_int32),
        ("num_columns", ctypes.c_int32),
        ("scales", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("plan", ctypes.c_int32),
        ("second_weight", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("expert_stride", ctypes.c_int64),
        ("first_index", ctypes.c_int32),
        ("num_in_table", ctypes.c_int32),
        ("meeting", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class Encoder:
    """Encodes the operations of one forward, and collects what they read."""

    def __init__(
        self,
        buffers: Mapping[Value, int],
        num_buffers: int,
        tables: Mapping[Value, torch.Tensor],
        *,
        weights: PackedWeights,
        layers: Sequence[LayerAttention],
        has_quantized_kernel: bool,
        slots: RankSlots | None,
    ) -> None:
        """Number what is read from `num_buffers` on: `buffers` has the numbers of all row values.

        The rest as for `NativeForward`.
        """
        self._buffers = buffers
        self._tables = tables
        self._weights = weights
        self._layers = layers
        self._has_quantized_kernel = has_quantized_kernel
        self._slots = slots
        self._fixed_index: dict[tuple[int, torch.dtype], int] = {}
        self._plans: dict[tuple[int, int, int | None], int] = {}
        self.num_buffers = num_buffers
        self.fixed: dict[int, torch.Tensor] = {}
        """Weights, tables and constants, by the number of their buffer."""
        self.meetings: list[tuple[bool, int]] = []
        """Where ranks meet, in order: whether rows are put side by side, and bytes of a rank's row."""

    @property
    def num_plans(self) -> int:
        """How many ways there are to divide attention among threads: layers that are alike share one."""
        return len(self._plans)

    def encode(self, step: Step) -> Sequence[Instruction]:
        """Return the instructions of a step.

        Raises:
            CannotLower: something does not fit the instruction format.
        """
        operation = step.operation
        instruction = Instruction(
            cut=_CUTS[step.share], sync=step.sync, logit_rows=domain_of(operation) == "logit_rows"
        )
        for name in ("out", "a", "b", "c"):
            getattr(instruction, name).buffer = NO_BUFFER
        if isinstance(operation, Attention):
            return self._attention(instruction, operation)
        if isinstance(operation, Collective):
            return self._collective(instruction, operation)
        encode: dict[type[Operation], Callable[[Instruction, Any], None]] = {
            Elementwise: self._elementwise,
            Mean: self._mean,
            Norm: self._norm,
            Rotary: self._rotary,
            Gather: self._gather,
            LinearLayer: self._linear,
            Softmax: self._softmax,
            Largest: self._largest,
            ExpertsUp: self._experts_up,
            ExpertsDown: self._experts_down,
            Spread: self._spread,
        }
        encode[type(operation)](instruction, operation)
        return [instruction]

    def _elementwise(self, instruction: Instruction, operation: Elementwise) -> None:
        instruction.kind = _ELEMENTWISE
        instruction.op = operation.op
        instruction.scalar, instruction.scalar2 = operation.scalar, operation.scalar2
        self._operands(instruction, (operation.out, *operation.inputs))

    def _mean(self, instruction: Instruction, operation: Mean) -> None:
        instruction.kind = _MEAN
        (source,) = operation.inputs
        instruction.scalar = 1.0 if operation.is_sum else float(source.dims[-1][0])
        self._operands(instruction, (operation.out, source), sizes=source.dims, keep_last=True)

    def _softmax(self, instruction: Instruction, operation: Softmax) -> None:
        instruction.kind = _SOFTMAX
        self._operands(instruction, (operation.out, *operation.inputs), keep_last=True)

    def _largest(self, instruction: Instruction, operation: Largest) -> None:
        instruction.kind = _LARGEST
        (source,) = operation.inputs
        if math.prod(size for size, _ in source.dims[:-1]) != 1:
            raise CannotLower("a top-k of several dimensions")
        instruction.num_columns = operation.out.dims[-1][0]
        self._operands(instruction, (operation.out, source), sizes=source.dims, keep_last=True)

    def _spread(self, instruction: Instruction, operation: Spread) -> None:
        instruction.kind = _SPREAD
        instruction.out = self._operand(operation.out, (0, 0, 1))
        instruction.a = self._operand(operation.inputs[0], (0, 0, 1))
        instruction.b.buffer = self._fixed_buffer(operation.places)
        instruction.num_columns = len(operation.places)
        instruction.extent = (ctypes.c_int32 * _MAX_DIMS)(1, 1, operation.out.value.row_size)

    def _norm(self, instruction: Instruction, operation: Norm) -> None:
        instruction.kind = _NORM
        instruction.norm = _Norm(operation.centred, operation.round_before, operation.epsilon)
        source, *parameters = operation.inputs
        if any(ref.dims[-1] != (source.dims[-1][0], 1) for ref in (operation.out, *parameters)):
            raise CannotLower("a norm whose weights are not one vector")
        self._operands(instruction, (operation.out, source), keep_last=True)
        for name, ref in zip(("b", "c"), parameters, strict=False):
            setattr(instruction, name, self._operand(ref, (0, 0, 1)))

    def _rotary(self, instruction: Instruction, operation: Rotary) -> None:
        instruction.kind = _ROTARY
        source, cosines, sines = operation.inputs
        self._operands(instruction, (operation.out, source), keep_last=True)
        instruction.b = self._operand(cosines, (0, 0, 1))
        instruction.c = self._operand(sines, (0, 0, 1))

    def _gather(self, instruction: Instruction, operation: Gather) -> None:
        instruction.kind = _GATHER
        instruction.index = _INDICES[operation.index]
        (source,) = operation.inputs
        if source.value.kind == "constant":
            (num_rows, row_stride), _ = source.dims
            shard = operation.shard
            instruction.num_indices = num_rows if shard is None else shard.vocab_size
            instruction.first_index = 0 if shard is None else shard.first
            instruction.num_in_table = num_rows
            instruction.a = self._operand(source, (0, 0, 1))
            instruction.a.row_stride = row_stride
        else:
            instruction.a = self._operand(source, (0, 0, 1))
        instruction.out = self._operand(operation.out, (0, 0, 1))
        instruction.extent = (ctypes.c_int32 * _MAX_DIMS)(1, 1, operation.out.value.row_size)

    def _linear(self, instruction: Instruction, operation: LinearLayer) -> None:
        instruction.kind = _LINEAR
        x, *bias = operation.inputs
        instruction.out = self._operand(operation.out, (0, 0, 1))
        instruction.a = self._operand(x, (0, 0, 1))
        if bias:
            instruction.b = self._operand(bias[0], (0, 0, 1))
        if isinstance(operation.weight, QuantizedWeight):
            self._quantized_weight(instruction, operation.weight, x.dtype)
        else:
            self._weight(instruction, operation.weight)

    def _weight(self, instruction: Instruction, weight: torch.Tensor) -> None:
        columns, inner = weight.shape
        panels = self._weights.pack(weight)
        instruction.weight = self._fixed_buffer(weight if panels is None else panels)
        instruction.is_packed = panels is not None
        instruction.weight_stride = weight.stride(0)
        instruction.num_columns = columns
        instruction.num_units = inner * weight.element_size() // 4

    def _quantized_weight(
        self, instruction: Instruction, weight: QuantizedWeight, dtype: torch.dtype
    ) -> None:
        assert self._has_quantized_kernel, "quantized weights need their kernels"
        instruction.weight_format = _WEIGHT_FORMATS[weight.bits]
        instruction.weight = self._fixed_buffer(weight.panels)
        instruction.scales = self._fixed_buffer(weight.scales)
        instruction.num_groups = weight.scales.shape[1]
        instruction.num_columns = weight.num_columns
        instruction.num_units = weight.num_inputs * dtype.itemsize // 4

    def _experts_up(self, instruction: Instruction, operation: ExpertsUp) -> None:
        instruction.kind = _EXPERTS_UP
        instruction.op = operation.activation
        instruction.weight, instruction.second_weight = self._experts(
            instruction, operation, operation.gate, operation.up
        )

    def _experts_down(self, instruction: Instruction, operation: ExpertsDown) -> None:
        instruction.kind = _EXPERTS_DOWN
        (instruction.weight,) = self._experts(instruction, operation, operation.weight)

    def _experts(
        self, instruction: Instruction, operation: Operation, *weights: torch.Tensor
    ) -> Sequence[int]:
        """Encode operands and shape; return the buffers of weights [experts, columns, inner] of one shape."""
        for name, ref in zip(("out", "a", "b", "c"), (operation.out, *operation.inputs), strict=False):
            setattr(instruction, name, self._operand(ref, (0, 0, 1)))
        num_experts, columns, inner = weights[0].shape
        instruction.num_experts, instruction.num_columns = num_experts, columns
        instruction.num_units = inner * weights[0].element_size() // 4
        instruction.num_indices = operation.inputs[1].value.row_size
        instruction.weight_stride = weights[0].stride(1)
        panels = [one for one in map(self._weights.pack, weights) if one is not None]
        if len(panels) == len(weights):
            instruction.is_packed = True
            instruction.expert_stride = panel_bytes(weights[0])
            return [self._fixed_buffer(one) for one in panels]
        instruction.expert_stride = weights[0].stride(0) * weights[0].element_size()
        return [self._fixed_buffer(one) for one in weights]

    def _attention(self, instruction: Instruction, operation: Attention) -> Sequence[Instruction]:
        """Writing K/V, which can go on without waiting, and attending, once everybody has written."""
        layer = self._layers[operation.layer_idx - self._layers[0].layer_idx]
        plan = (layer.num_heads, layer.num_kv_heads, layer.sliding_window)
        query, key, value = (self._heads(ref) for ref in operation.inputs)
        instruction.layer = operation.layer_idx - self._layers[0].layer_idx
        instruction.plan = self._plans.setdefault(plan, len(self._plans))
        write = Instruction.from_buffer_copy(instruction)
        write.kind, write.cut = _WRITE_KV, _CUTS["rows"]
        write.a, write.b = key, value
        instruction.kind, instruction.sync = _ATTENTION, True
        instruction.out, instruction.a = self._heads(operation.out), query
        return [write, instruction]

    def _collective(self, instruction: Instruction, operation: Collective) -> Sequence[Instruction]:
        """Handing rows on, which can go on without waiting, and taking everyone's, once all have."""
        assert self._slots is not None, "a forward over ranks needs their slots"
        (source,) = operation.inputs
        width = math.prod(size for size, _ in source.dims)
        self.meetings.append((operation.is_gather, width * source.dtype.itemsize))
        instruction.meeting = len(self.meetings)
        instruction.extent = (ctypes.c_int32 * _MAX_DIMS)(1, 1, width)
        hand_on = Instruction.from_buffer_copy(instruction)
        hand_on.kind = _HAND_ON
        hand_on.a = self._operand(source, (0, 0, 1))
        instruction.cut, instruction.sync = _CUTS["rows"], True
        instruction.out = self._operand(operation.out, (0, 0, 1))
        fetch = Instruction.from_buffer_copy(instruction)
        fetch.kind = _FETCH
        instruction.kind = _LINE_UP if operation.is_gather else _SUM_UP
        return [hand_on, instruction] if self._slots.is_shared else [hand_on, fetch, instruction]

    def _heads(self, ref: Ref) -> _Operand:
        _, (_, head_stride), _ = ref.dims
        return self._operand(ref, (0, head_stride, 1))

    def _operands(
        self,
        instruction: Instruction,
        refs: Sequence[Ref],
        *,
        sizes: Sequence[tuple[int, int]] | None = None,
        keep_last: bool = False,
    ) -> None:
        """Encode operands that run over the same dimensions, as few of them as possible."""
        dims = [size for size, _ in (refs[0].dims if sizes is None else sizes)]
        strides = [[stride for _, stride in ref.dims] for ref in refs]
        extent, strides = _collapse(dims, strides, keep_last=keep_last)
        instruction.extent = (ctypes.c_int32 * _MAX_DIMS)(*extent)
        for name, ref, its_strides in zip(("out", "a", "b"), refs, strides, strict=False):
            setattr(instruction, name, self._operand(ref, its_strides))

    def _operand(self, ref: Ref, strides: Sequence[int]) -> _Operand:
        value = ref.value
        operand = _Operand(
            dtype=_DTYPES[ref.dtype],
            offset=ref.offset,
            row_stride=ref.row_stride,
            stride=(ctypes.c_int64 * _MAX_DIMS)(*strides),
            by_position=value.kind == "position",
        )
        if value.kind == "row":
            operand.buffer = self._buffers[value]
        else:
            operand.buffer = self._fixed_buffer(
                self._tables[value] if value.kind == "position" else value.tensor
            )
        return operand

    def _fixed_buffer(self, tensor: torch.Tensor) -> int:
        key = (tensor.data_ptr(), tensor.dtype)
        if key not in self._fixed_index:
            self._fixed_index[key] = self.num_buffers
            self.fixed[self.num_buffers] = tensor
            self.num_buffers += 1
        return self._fixed_index[key]


def _collapse(
    sizes: Sequence[int], strides: Sequence[Sequence[int]], *, keep_last: bool
) -> tuple[list[int], list[list[int]]]:
    """Merge dimensions that are one for all operands; return exactly three, the leading ones of size 1.

    Args:
        sizes: of the dimensions.
        strides: per operand, of the dimensions.
        keep_last: the last dimension stays what it is.
    """
    kept: list[tuple[int, list[int]]] = []
    for axis, size in enumerate(sizes):
        here = [operand[axis] for operand in strides]
        is_last = axis == len(sizes) - 1
        if size == 1 and not (is_last and keep_last):
            continue
        if kept and not (is_last and keep_last):
            outer_size, outer = kept[-1]
            if all(above == inner * size for above, inner in zip(outer, here, strict=True)):
                kept[-1] = (outer_size * size, here)
                continue
        kept.append((size, here))
    if len(kept) > _MAX_DIMS:
        raise CannotLower(f"arithmetic over {len(kept)} separate dimensions")
    kept = [(1, [0] * len(strides))] * (_MAX_DIMS - len(kept)) + kept
    return [size for size, _ in kept], [
        [dims[operand] for _, dims in kept] for operand in range(len(strides))
    ]
