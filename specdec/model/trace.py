"""What a recording means: which values it computes, what each depends on, and where its elements lie.

A value belongs to one of four kinds:

    constant   computed from parameters alone; the recorded tensor is the value
    position   computed from parameters and position ids: row by row a function of the position id, kept as a
               table over all positions
    row        everything else; one row per token of the batch (or per logit row)
    unknown    not one row per token (a sum over rows, an `arange`): refused where it is used

A row value has a memory of its own, row-major over its row dimension whatever the recorded layout was.
Views of it, and copies that only change the layout, are `Ref`s: affine in the row and in the other
dimensions. A copy that is not affine is a value of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.model.recording import NUM_LOGIT_ROWS, NUM_ROWS, CannotLower, Recording

Domain = Literal["rows", "logit_rows"]
_DOMAINS: dict[tuple[int, int], Domain] = {NUM_ROWS: "rows", NUM_LOGIT_ROWS: "logit_rows"}

_LAYOUT_COPIES = frozenset(
    {
        "aten.clone.default",
        "aten.contiguous.default",
        "aten.reshape.default",
        "aten._unsafe_view.default",
        "aten.flatten.using_ints",
    }
)
_HARMLESS_IN_PLACE = frozenset({"aten.detach_.default", "aten.lift_fresh.default"})

Kind = Literal["constant", "position", "row", "unknown"]


@dataclass(eq=False, slots=True)
class Value:
    """Something that has memory of its own."""

    kind: Kind
    domain: Domain | None
    shape: tuple[int, ...]
    """Recorded shape (first recording)."""
    row_axis: int | None
    dtype: torch.dtype
    tensor: torch.Tensor
    """As recorded first."""
    origin: str = ""
    """Unknown: the operation that made the first of the values it comes from."""

    @property
    def row_size(self) -> int:
        """Elements per row."""
        return math.prod(size for axis, size in enumerate(self.shape) if axis != self.row_axis)


@dataclass(frozen=True, slots=True)
class Ref:
    """A view of a value: element (row, i...) is at offset + row * row_stride + sum of i * stride."""

    value: Value
    offset: int
    row_stride: int
    """Elements; 0 for constants."""
    dims: tuple[tuple[int, int], ...]
    """(size, stride) of every dimension; the row dimension's entry is (1, 0)."""
    row_axis: int | None

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self.value.dtype


@dataclass(frozen=True, slots=True)
class Node:
    """One operation on tensors of the first recording, with integers that depend on the batch marked."""

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]
    creates: tuple[Value | None, ...]
    """Per output: the value it is, None when it is a view of an input."""


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Stands in recorded arguments where a number of rows was."""

    domain: Domain


class Trace:
    """The two recordings, matched."""

    def __init__(self, first: Recording, second: Recording) -> None:
        self.input_ids = first.input_ids
        self.positions = first.positions
        self.logit_rows = first.logit_rows
        self.output = first.output
        self.hidden = first.hidden
        self.incoming: Value | None = None
        """What comes out of the stage before."""
        self.shards = first.shards
        self._keep_alive = (first, second)
        self._storages: dict[int, tuple[Value, NDArray[np.int64] | None]] = {}
        for tensor in (first.input_ids, first.positions, first.logit_rows):
            domain: Domain = "logit_rows" if tensor is first.logit_rows else "rows"
            kind: Kind = "position" if tensor is first.positions else "row"
            value = Value(kind, domain, tuple(tensor.shape), tensor.dim() - 1, tensor.dtype, tensor)
            self._register(tensor, value)
        if first.incoming is not None:
            shape = tuple(first.incoming.shape)
            self.incoming = Value("row", "rows", shape, 1, first.incoming.dtype, first.incoming)
            self._register(first.incoming, self.incoming)
        self.nodes: list[Node] = []
        for call, other in zip(first.calls, second.calls, strict=True):
            args, kwargs = _mark(call.args, other.args), _mark(dict(call.kwargs), dict(other.kwargs))
            if call.mutates and call.name not in _HARMLESS_IN_PLACE:
                self._check_mutation(call.name, call.args)
            creates = tuple(
                self._define(call.name, args, kwargs, output, counterpart)
                for output, counterpart in zip(call.outputs, other.outputs, strict=True)
            )
            self.nodes.append(Node(call.name, call.function, args, kwargs, call.outputs, creates))

    def value_of(self, tensor: torch.Tensor) -> Value:
        """The value that `tensor` is a view of; a parameter is met here first."""
        key = _storage_key(tensor)
        found = self._storages.get(key)
        if found is None:
            value = Value("constant", None, tuple(tensor.shape), None, tensor.dtype, tensor)
            self._storages[key] = (value, None)
            return value
        return found[0]

    def ref(self, tensor: torch.Tensor) -> Ref:
        """How `tensor` lies in the memory of its value.

        Raises:
            CannotLower: it is not an affine view, or its rows are not one dimension.
        """
        value = self.value_of(tensor)
        if value.kind == "constant":
            strides = [
                0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            ]
            constant = Value("constant", None, tuple(tensor.shape), None, tensor.dtype, tensor)
            return Ref(constant, 0, 0, tuple(zip(tensor.shape, strides, strict=True)), None)
        if value.kind == "unknown":
            raise CannotLower(f"{value.origin} does not give one row per token")
        places = self._places(tensor)
        offset, strides = _affine(places)
        row_axes = [axis for axis, stride in enumerate(strides) if stride and stride % value.row_size == 0]
        row_axes = [axis for axis in row_axes if tensor.shape[axis] == value.shape[value.row_axis or 0]]
        if len(row_axes) != 1 or strides[row_axes[0]] != value.row_size:
            raise CannotLower(f"rows of a tensor of shape {list(tensor.shape)} are not one of its dimensions")
        axis = row_axes[0]
        dims = tuple(
            (1, 0) if index == axis else (size, 0 if size == 1 else stride)
            for index, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True))
        )
        return Ref(value, offset, value.row_size, dims, axis)

    def _places(self, tensor: torch.Tensor) -> NDArray[np.int64]:
        """For every element of `tensor`, its offset in the memory of its value."""
        _, storage = self._storages[_storage_key(tensor)]
        assert storage is not None
        itemsize = storage.itemsize
        return np.lib.stride_tricks.as_strided(
            storage[tensor.storage_offset() :],
            shape=tuple(tensor.shape),
            strides=tuple(stride * itemsize for stride in tensor.stride()),
            writeable=False,
        )

    def _register(self, tensor: torch.Tensor, value: Value, places: NDArray[np.int64] | None = None) -> None:
        """Note that `tensor`, fresh, holds `value`.

        `places`: where its elements are in the value's memory; None: row by row, in order.
        """
        if places is None:
            assert value.row_axis is not None
            row_first = np.arange(tensor.numel(), dtype=np.int64).reshape(
                [
                    value.shape[value.row_axis],
                    *(s for axis, s in enumerate(value.shape) if axis != value.row_axis),
                ]
            )
            places = np.moveaxis(row_first, 0, value.row_axis)
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        storage = np.full(size, -1, dtype=np.int64)
        view = np.lib.stride_tricks.as_strided(
            storage[tensor.storage_offset() :],
            shape=tuple(tensor.shape),
            strides=tuple(stride * storage.itemsize for stride in tensor.stride()),
        )
        view[...] = places
        self._storages[_storage_key(tensor)] = (value, storage)

    def _define(
        self, name: str, args: Any, kwargs: Any, output: torch.Tensor, counterpart: torch.Tensor
    ) -> Value | None:
        if _storage_key(output) in self._storages:
            return None
        inputs = [self.value_of(tensor) for tensor in tensors_in((args, kwargs))]
        kind = _kind_of(inputs)
        domain, row_axis = _row_axis(output, counterpart)
        if domain is None and kind != "constant":
            kind = "unknown"
        if domain is not None and kind == "constant":
            kind = "unknown"
        if kind in ("row", "position") and name in _LAYOUT_COPIES and len(inputs) == 1:
            places = self._places(next(iter(tensors_in(args)))).reshape(tuple(output.shape))
            if _is_affine(places):
                self._register(output, inputs[0], places)
                return None
        value = Value(kind, domain, tuple(output.shape), row_axis, output.dtype, output)
        if kind == "unknown":
            value.origin = next((source.origin for source in inputs if source.origin), name)
        if kind in ("row", "position"):
            self._register(output, value)
        else:
            self._storages[_storage_key(output)] = (value, None)
        return value

    def _check_mutation(self, name: str, args: tuple[Any, ...]) -> None:
        target = next(iter(tensors_in(args)), None)
        if target is None or self.value_of(target).kind != "unknown":
            raise CannotLower(f"{name} changes a tensor in place")


def tensors_in(structure: Any) -> list[torch.Tensor]:
    """All tensors in nested arguments, in order."""
    if isinstance(structure, torch.Tensor):
        return [structure]
    if isinstance(structure, list | tuple):
        return [tensor for item in structure for tensor in tensors_in(item)]
    if isinstance(structure, dict):
        return [tensor for item in structure.values() for tensor in tensors_in(item)]
    return []


def _mark(first: Any, second: Any) -> Any:
    """`first` with `BatchSize` in the place of integers that are row counts; the rest must be equal."""
    if isinstance(first, torch.Tensor):
        return first
    if isinstance(first, list | tuple):
        if len(first) != len(second):
            raise CannotLower("an operation takes another number of arguments in a larger batch")
        return type(first)(_mark(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict):
        return {key: _mark(value, second[key]) for key, value in first.items()}
    if first == second:
        return first
    if isinstance(first, int) and (first, second) in _DOMAINS:
        return BatchSize(_DOMAINS[first, second])
    raise CannotLower(f"an argument depends on the batch: {first} against {second}")


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _kind_of(inputs: Sequence[Value]) -> Kind:
    kinds = {value.kind for value in inputs}
    weightiest_first: tuple[Kind, ...] = ("unknown", "row", "position")
    for kind in weightiest_first:
        if kind in kinds:
            return kind
    return "constant"


def _row_axis(first: torch.Tensor, second: torch.Tensor) -> tuple[Domain | None, int | None]:
    different = [
        axis for axis, sizes in enumerate(zip(first.shape, second.shape, strict=True)) if sizes[0] != sizes[1]
    ]
    if len(different) != 1:
        return None, None
    axis = different[0]
    domain = _DOMAINS.get((first.shape[axis], second.shape[axis]))
    return (domain, axis) if domain is not None else (None, None)


def _is_affine(places: NDArray[np.int64]) -> bool:
    try:
        _affine(places)
    except CannotLower:
        return False
    return True


def _affine(places: NDArray[np.int64]) -> tuple[int, list[int]]:
    """Offset and strides such that places[i...] = offset + sum of i * stride.

    Raises:
        CannotLower: there are none.
    """
    origin = int(places[(0,) * places.ndim]) if places.size else 0
    strides: list[int] = []
    expected = np.full((1,) * places.ndim, origin, dtype=np.int64)
    for axis, size in enumerate(places.shape):
        index = [0] * places.ndim
        index[axis] = min(1, size - 1)
        stride = int(places[tuple(index)]) - origin
        strides.append(stride)
        steps = np.arange(size, dtype=np.int64) * stride
        expected = expected + steps.reshape([-1 if other == axis else 1 for other in range(places.ndim)])
    if not np.array_equal(places, expected):
        raise CannotLower(f"a view of shape {list(places.shape)} is not affine")
    return origin, strides
