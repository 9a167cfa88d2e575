"""Turns a trace into native operations: linear layers, attention, gathers and row-wise arithmetic.

Anything else in the forward raises `CannotLower` with its name; such a model keeps running eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from specdec.model.quantized_linear import QuantizedWeight
from specdec.model.recording import (
    ALL_GATHER,
    ALL_REDUCE,
    ATTEND,
    EXPERTS,
    SPREAD,
    CannotLower,
    EmbeddingShard,
)
from specdec.model.trace import BatchSize, Domain, Node, Ref, Trace, Value, tensors_in

FLOATS = (torch.float32, torch.bfloat16)
_NUMBERS = (*FLOATS, torch.int64)
"""What a value of an operation may be; int64 only as places of largest elements."""

# The numbers are those of `dh::Op`.
_UNARY = {
    "neg": 5,
    "sqrt": 8,
    "rsqrt": 9,
    "reciprocal": 10,
    "exp": 11,
    "tanh": 12,
    "sigmoid": 13,
    "silu": 14,
    "relu": 15,
}
_BINARY = {"add": 1, "sub": 2, "mul": 3, "div": 4}
_POWERS = {2: 6, 3: 7, 0.5: 8, -0.5: 9, -1: 10}
COPY, NEG, ADD, MUL, SQUARE, RSQRT = 0, 5, 1, 3, 6, 9
_GELU, _GELU_TANH, _CLAMP = 16, 17, 18
_ACTIVATIONS = {"silu": 14, "gelu": _GELU, "gelu_pytorch_tanh": _GELU_TANH, "relu": 15}
_CASTS = frozenset({"_to_copy", "to", "type_as"})

Index = Literal["tokens", "logit_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Reads `inputs`, writes `out`: all of a value, or a part that nobody else writes."""

    out: Ref
    inputs: tuple[Ref, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elementwise(Operation):
    """Arithmetic with broadcasting; without a second input, `scalar` takes its place."""

    op: int
    scalar: float = 0.0
    scalar2: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean(Operation):
    """Mean over the innermost dimension, or its sum when `is_sum`."""

    is_sum: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Softmax(Operation):
    """Softmax over the innermost dimension; sums in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest(Operation):
    """The largest elements of the innermost dimension, falling, the first of equal ones first.

    Their values, or (int64) their places.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm(Operation):
    """RMS norm, or layer norm when `centred`, over the innermost dimension; inputs: x [, weight [, bias]]."""

    centred: bool
    round_before: bool
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary(Operation):
    """x * cos + rotate_half(x) * sin; inputs: x, cos, sin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather(Operation):
    """Rows of the input (a constant table or a row value) by token ids or logit rows."""

    index: Index
    shard: EmbeddingShard | None = None
    """Which rows of the whole table the constant holds; others are zeros. None: it is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread(Operation):
    """Elements of the innermost dimension at their places in a wider one, -inf elsewhere."""

    places: torch.Tensor
    """int64, of each element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer(Operation):
    """inputs: x [, bias]."""

    weight: torch.Tensor | QuantizedWeight
    """[columns, inner]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsUp(Operation):
    """inputs: x [T, hidden], experts of each row [T, K] (int64); out [T, K, inner].

    activation(gate x) * up x of every expert chosen.
    """

    gate: torch.Tensor
    """[experts, inner, hidden]"""
    up: torch.Tensor
    """[experts, inner, hidden]"""
    activation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsDown(Operation):
    """inputs: h [T, K, inner], experts of each row [T, K], their weights [T, K]; out [T, hidden].

    The weighted sum over a row's experts, by ascending number, in fp32.
    """

    weight: torch.Tensor
    """[experts, hidden, inner]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Operation):
    """inputs: this rank's rows; every rank gets the sum, or (`is_gather`) everyone's side by side."""

    is_gather: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Operation):
    """inputs: query, key, value with dims (..., heads, ..., head size)."""

    layer_idx: int


@dataclass(frozen=True, slots=True)
class Lowered:
    """A whole forward."""

    operations: list[Operation]
    output: Ref
    """All of a value: fp32 logits with one row per logit row, or hidden states with one row per token."""
    hidden: Ref | None
    """All of a value: hidden states that are handed out beside the output, one row per token."""


def lower(trace: Trace, output: Domain = "logit_rows") -> Lowered:
    """Return the operations that yield the trace's output: logits, or (`output` "rows") hidden states.

    Raises:
        CannotLower: naming what has no native form.
    """
    return _Lowering(trace).run(output)


class _Lowering:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._operations: list[Operation] = []

    def run(self, domain: Domain) -> Lowered:
        wanted = _needed(self._trace)
        for node in self._trace.nodes:
            values = [value for value in node.creates if value is not None]
            if any(value in wanted and value.kind == "row" for value in values):
                self._node(node)
        output = self._trace.ref(self._trace.output)
        if output.value.domain != domain or output.value.kind != "row":
            what = "logits" if domain == "logit_rows" else "hidden states"
            row = "logit row" if domain == "logit_rows" else "token"
            raise CannotLower(f"the {what} do not have one row per {row}")
        dtype = torch.float32 if domain == "logit_rows" else output.dtype
        if output.dtype is not dtype or not _is_whole(output):
            output = self._elementwise(COPY, self._fresh(self._trace.output, output, dtype), output)
        return Lowered(self._operations, output, self._hidden())

    def _hidden(self) -> Ref | None:
        tensor = self._trace.hidden
        if tensor is None:
            return None
        hidden = self._trace.ref(tensor)
        if hidden.value.domain != "rows" or hidden.value.kind != "row":
            raise CannotLower("the hidden states do not have one row per token")
        if _is_whole(hidden) and hidden.value is not self._trace.incoming:
            return hidden
        return self._elementwise(COPY, self._fresh(tensor, hidden, hidden.dtype), hidden)

    def _node(self, node: Node) -> None:
        own = {
            ATTEND: self._attention,
            EXPERTS: self._experts,
            ALL_REDUCE: self._collective,
            ALL_GATHER: self._collective,
            SPREAD: self._spread,
        }.get(node.name)
        if own is not None:
            own(node)
            return
        _, name, overload = node.name.split(".")
        handler: Callable[[Node], None] | None = getattr(self, f"_lower_{name}", None)
        if name in _UNARY:
            self._unary(node, _UNARY[name])
        elif name in _BINARY:
            self._binary(node, _BINARY[name])
        elif name in _CASTS:
            self._copy(node)
        elif handler is not None:
            handler(node)
        else:
            raise CannotLower(f"{name}.{overload} has no native form")

    def _copy(self, node: Node) -> None:
        self._elementwise(COPY, self._own(node.outputs[0]), self._trace.ref(node.args[0]))

    def _lower_reshape(self, node: Node) -> None:
        """A copy that merges dimensions which are not next to each other: written as the source is shaped."""
        source, output = node.args[0], node.outputs[0]
        if not output.is_contiguous():
            raise CannotLower(f"{node.name} that is not row-major")
        self._elementwise(COPY, self._trace.ref(output.view(source.shape)), self._trace.ref(source))

    _lower_flatten = _lower_reshape

    def _unary(self, node: Node, op: int) -> None:
        self._elementwise(op, self._own(node.outputs[0]), self._trace.ref(node.args[0]))

    def _binary(self, node: Node, op: int) -> None:
        first, second = node.args[:2]
        if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
            raise CannotLower(f"{node.name} with {node.kwargs}")
        if not isinstance(first, torch.Tensor):
            raise CannotLower(f"{node.name} of a number and a tensor")
        if isinstance(second, torch.Tensor):
            self._elementwise(op, self._own(node.outputs[0]), self._trace.ref(first), self._trace.ref(second))
        else:
            self._elementwise(op, self._own(node.outputs[0]), self._trace.ref(first), scalar=_number(second))

    def _lower_pow(self, node: Node) -> None:
        exponent = node.args[1]
        if exponent not in _POWERS:
            raise CannotLower(f"pow with exponent {exponent}")
        self._unary(node, _POWERS[exponent])

    def _lower_square(self, node: Node) -> None:
        self._unary(node, SQUARE)

    def _lower_gelu(self, node: Node) -> None:
        self._unary(node, _GELU_TANH if node.kwargs.get("approximate", "none") == "tanh" else _GELU)

    def _lower_clamp(self, node: Node) -> None:
        low, high = (_argument(node, position, name) for position, name in ((1, "min"), (2, "max")))
        self._elementwise(
            _CLAMP,
            self._own(node.outputs[0]),
            self._trace.ref(node.args[0]),
            scalar=-math.inf if low is None else _number(low),
            scalar2=math.inf if high is None else _number(high),
        )

    def _lower_mean(self, node: Node) -> None:
        self._reduction(node, is_sum=False)

    def _lower_sum(self, node: Node) -> None:
        self._reduction(node, is_sum=True)

    def _reduction(self, node: Node, *, is_sum: bool) -> None:
        source = self._trace.ref(node.args[0])
        axes = [axis % len(source.dims) for axis in _argument(node, 1, "dim") or ()]
        keeps = bool(_argument(node, 2, "keepdim"))
        if axes != [len(source.dims) - 1] or not keeps or source.row_axis == axes[0]:
            raise CannotLower(f"a {'sum' if is_sum else 'mean'} over anything but the last dimension")
        self._emit(Mean(out=self._own(node.outputs[0]), inputs=(source,), is_sum=is_sum))

    def _lower_softmax(self, node: Node) -> None:
        source = self._over_last(node.args[0], node.args[1], "a softmax")
        self._emit(Softmax(out=self._own(node.outputs[0]), inputs=(source,)))

    def _lower_topk(self, node: Node) -> None:
        axis, largest = _argument(node, 2, "dim"), _argument(node, 3, "largest")
        source = self._over_last(node.args[0], -1 if axis is None else axis, "a top-k")
        if largest is False:
            raise CannotLower("a top-k of the smallest")
        for output in node.outputs:
            out = self._trace.ref(output)
            self._emit(Largest(out=out, inputs=(source,)))

    def _over_last(self, tensor: torch.Tensor, axis: int, what: str) -> Ref:
        """`tensor` in one piece, when `axis` is its last and holds no rows."""
        source = self._contiguous(tensor)
        if axis % len(source.dims) != len(source.dims) - 1 or source.row_axis == len(source.dims) - 1:
            raise CannotLower(f"{what} over anything but the last dimension")
        return source

    def _lower_layer_norm(self, node: Node) -> None:
        epsilon = _argument(node, 4, "eps")
        self._norm(node, centred=True, epsilon=1e-5 if epsilon is None else epsilon)

    def _lower_rms_norm(self, node: Node) -> None:
        epsilon = _argument(node, 3, "eps")
        default = torch.finfo(node.args[0].dtype).eps
        self._norm(node, centred=False, epsilon=default if epsilon is None else epsilon)

    def _norm(self, node: Node, *, centred: bool, epsilon: float) -> None:
        if len(node.args[1]) != 1:
            raise CannotLower("a norm over several dimensions")
        inputs = [self._contiguous(node.args[0])]
        for position, name in ((2, "weight"), (3, "bias"))[: 2 if centred else 1]:
            parameter = _argument(node, position, name)
            if parameter is None:
                break
            inputs.append(self._trace.ref(parameter))
        self._emit(
            Norm(
                out=self._own(node.outputs[0]),
                inputs=tuple(inputs),
                centred=centred,
                round_before=False,
                epsilon=float(epsilon),
            )
        )

    def _lower_cat(self, node: Node) -> None:
        out = self._own(node.outputs[0])
        axis = (_argument(node, 1, "dim") or 0) % len(out.dims)
        start = 0
        for tensor in node.args[0]:
            size = tensor.shape[axis]
            if size:
                self._copy_into(out, axis, start, size, tensor)
            start += size

    def _lower_stack(self, node: Node) -> None:
        out = self._own(node.outputs[0])
        axis = (_argument(node, 1, "dim") or 0) % len(out.dims)
        for index, tensor in enumerate(node.args[0]):
            self._copy_into(out, axis, index, 1, tensor.unsqueeze(axis))

    def _copy_into(self, out: Ref, axis: int, start: int, size: int, tensor: torch.Tensor) -> None:
        if axis == out.row_axis:
            raise CannotLower("a concatenation of rows")
        dims = list(out.dims)
        stride = dims[axis][1]
        dims[axis] = (size, 0 if size == 1 else stride)
        part = replace(out, offset=out.offset + start * stride, dims=tuple(dims))
        self._emit(Elementwise(op=COPY, out=part, inputs=(_broadcast(self._trace.ref(tensor), part),)))

    def _lower_embedding(self, node: Node) -> None:
        table, ids = node.args[:2]
        if self._trace.value_of(ids).tensor is not self._trace.input_ids:
            raise CannotLower("an embedding of something other than token ids")
        self._gather(node, self._trace.ref(table), "tokens", self._trace.shards.get(table.data_ptr()))

    def _lower_index(self, node: Node) -> None:
        source, indices = node.args
        given = [index for index in indices if index is not None]
        if len(given) != 1 or self._trace.value_of(given[0]).tensor is not self._trace.logit_rows:
            raise CannotLower("an index that is not the rows of the logits")
        ref = self._contiguous(source)
        if ref.row_axis != len(indices) - 1:
            raise CannotLower("an index of the logit rows into something other than rows")
        self._gather(node, ref, "logit_rows")

    def _lower_index_select(self, node: Node) -> None:
        source, axis, indices = node.args
        ref = self._contiguous(source)
        if (
            self._trace.value_of(indices).tensor is not self._trace.logit_rows
            or ref.row_axis != axis % source.dim()
        ):
            raise CannotLower("an index_select that is not the rows of the logits")
        self._gather(node, ref, "logit_rows")

    def _gather(self, node: Node, source: Ref, index: Index, shard: EmbeddingShard | None = None) -> None:
        out = self._own(node.outputs[0])
        if source.dtype is not out.dtype:
            raise CannotLower(f"{node.name} that changes the dtype")
        self._emit(Gather(out=out, inputs=(source,), index=index, shard=shard))

    def _lower_linear(self, node: Node) -> None:
        bias = _argument(node, 2, "bias")
        self._linear(node, node.args[0], node.args[1], bias)

    def _lower_addmm(self, node: Node) -> None:
        if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
            raise CannotLower("addmm with factors")
        self._linear(node, node.args[1], node.args[2].t(), node.args[0])

    def _lower_matmul(self, node: Node) -> None:
        if node.args[1].dim() != 2:
            raise CannotLower("a matrix product of two activations")
        self._lower_mm(node)

    def _lower_mm(self, node: Node) -> None:
        self._linear(node, node.args[0], node.args[1].t(), None)

    def _linear(self, node: Node, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        trace = self._trace
        parameters = [weight] if bias is None else [weight, bias]
        if any(trace.value_of(tensor).kind != "constant" for tensor in parameters) or weight.dim() != 2:
            raise CannotLower("a matrix product of two activations")
        if x.dtype not in FLOATS or any(tensor.dtype is not x.dtype for tensor in parameters):
            raise CannotLower(f"a linear layer of {weight.dtype} on {x.dtype}")
        if weight.shape[1] * x.element_size() % 4:
            raise CannotLower("a bf16 linear layer with an odd number of inputs")
        inputs = [self._contiguous(x)]
        if bias is not None:
            inputs.append(trace.ref(bias.contiguous()))
        self._emit(LinearLayer(out=self._own(node.outputs[0]), inputs=tuple(inputs), weight=weight))

    def _experts(self, node: Node) -> None:
        gate_up, down, activation, x, index, weights = node.args
        inner = down.shape[2]
        if gate_up.shape[1] != 2 * inner or any(w.dtype is not x.dtype for w in (gate_up, down)):
            raise CannotLower("experts of an unknown form")
        if any(size * x.element_size() % 4 for size in (inner, x.shape[1])):
            raise CannotLower("bf16 experts with an odd number of inputs")
        chosen = self._trace.ref(index)
        num_rows, num_chosen = index.shape
        hidden = self._trace.ref(x)
        middle = torch.empty(num_rows, num_chosen * inner, dtype=x.dtype)
        out = self._fresh(middle, hidden, x.dtype)
        self._emit(
            ExpertsUp(
                out=out,
                inputs=(self._contiguous(x), chosen),
                gate=gate_up[:, :inner],
                up=gate_up[:, inner:],
                activation=_ACTIVATIONS[activation],
            )
        )
        inputs = (out, chosen, self._contiguous(weights))
        self._emit(ExpertsDown(out=self._own(node.outputs[0]), inputs=inputs, weight=down))

    def _lower_quantized_linear(self, node: Node) -> None:
        x, panels, scales, bias, num_columns, bits = node.args
        parameters = [tensor for tensor in (panels, scales, bias) if tensor is not None]
        if any(self._trace.value_of(tensor).kind != "constant" for tensor in parameters):
            raise CannotLower("a quantized linear layer whose weights are computed")
        if x.dtype not in FLOATS or (bits == 4 and scales.dtype is not x.dtype):
            raise CannotLower(f"a quantized linear layer with scales of {scales.dtype} on {x.dtype}")
        inputs = [self._contiguous(x)]
        if bias is not None:
            if bias.dtype is not x.dtype:
                raise CannotLower(f"a quantized linear layer with a bias of {bias.dtype} on {x.dtype}")
            inputs.append(self._trace.ref(bias.contiguous()))
        weight = QuantizedWeight(bits=bits, num_columns=num_columns, panels=panels, scales=scales)
        self._emit(LinearLayer(out=self._own(node.outputs[0]), inputs=tuple(inputs), weight=weight))

    def _collective(self, node: Node) -> None:
        inputs = (self._contiguous(node.args[0]),)
        self._emit(
            Collective(out=self._own(node.outputs[0]), inputs=inputs, is_gather=node.name == ALL_GATHER)
        )

    def _spread(self, node: Node) -> None:
        source, places = node.args
        out = self._own(node.outputs[0])
        ref = self._contiguous(source)
        if ref.dtype is not out.dtype or not _is_whole(out) or ref.value.row_size != len(places):
            raise CannotLower("a spread of several dimensions")
        self._emit(Spread(out=out, inputs=(ref,), places=places.contiguous()))

    def _attention(self, node: Node) -> None:
        layer_idx, *tensors = node.args
        refs = tuple(self._heads(tensor) for tensor in tensors)
        self._emit(Attention(out=self._own(node.outputs[0]), inputs=refs, layer_idx=layer_idx))

    def _heads(self, tensor: torch.Tensor) -> Ref:
        ref = self._trace.ref(tensor)
        if ref.row_axis != 0 or len(ref.dims) != 3 or ref.dtype not in FLOATS:
            raise CannotLower(f"attention on {ref.dtype} of shape {list(tensor.shape)}")
        if ref.value.kind == "row" and (ref.dims[2][1] == 1 or ref.dims[2][0] == 1):
            return ref
        return self._elementwise(COPY, self._fresh(tensor, ref, ref.dtype), ref)

    def _elementwise(
        self,
        op: int,
        out: Ref,
        first: Ref,
        second: Ref | None = None,
        *,
        scalar: float = 0.0,
        scalar2: float = 0.0,
    ) -> Ref:
        inputs = tuple(_broadcast(ref, out) for ref in (first, second) if ref is not None)
        self._emit(Elementwise(op=op, out=out, inputs=inputs, scalar=scalar, scalar2=scalar2))
        return out

    def _own(self, output: torch.Tensor) -> Ref:
        """All of the value that a node's output is."""
        ref = self._trace.ref(output)
        if ref.dtype not in FLOATS:
            raise CannotLower(f"activations of {ref.dtype}")
        return ref

    def _fresh(self, tensor: torch.Tensor, like: Ref, dtype: torch.dtype) -> Ref:
        """A new value with the shape of `tensor` and the rows of `like`, row-major."""
        assert like.row_axis is not None
        inner = [size for axis, size in enumerate(tensor.shape) if axis != like.row_axis]
        value = Value("row", like.value.domain, tuple(tensor.shape), like.row_axis, dtype, tensor)
        strides = [math.prod(inner[index + 1 :]) for index in range(len(inner))]
        dims = list(zip(inner, strides, strict=True))
        dims.insert(like.row_axis, (1, 0))
        return Ref(value, 0, value.row_size, tuple(dims), like.row_axis)

    def _contiguous(self, tensor: torch.Tensor) -> Ref:
        """`tensor` with its innermost dimensions in one piece, copied if need be."""
        ref = self._trace.ref(tensor)
        if ref.value.kind == "row" and ref.dtype in FLOATS and _is_dense(ref):
            return ref
        return self._elementwise(COPY, self._fresh(tensor, ref, ref.dtype), ref)

    def _emit(self, operation: Operation) -> None:
        allowed = _NUMBERS if isinstance(operation, ExpertsUp | ExpertsDown) else FLOATS
        if any(ref.dtype not in allowed for ref in operation.inputs):
            raise CannotLower(f"arithmetic on {operation.inputs[0].dtype}")
        self._operations.append(operation)


def _needed(trace: Trace) -> set[Value]:
    """Values that the output, and what is handed out beside it, depend on."""
    creator = {value: node for node in trace.nodes for value in node.creates if value is not None}
    wanted: set[Value] = set()
    pending = [trace.value_of(tensor) for tensor in (trace.output, trace.hidden) if tensor is not None]
    while pending:
        value = pending.pop()
        if value in wanted:
            continue
        wanted.add(value)
        node = creator.get(value)
        if node is not None:
            pending.extend(trace.value_of(tensor) for tensor in tensors_in((node.args, node.kwargs)))
    return wanted


def _broadcast(ref: Ref, out: Ref) -> Ref:
    """`ref` with the dimensions of `out`: missing ones and those of size 1 get stride 0."""
    missing = len(out.dims) - len(ref.dims)
    row_axis = None if ref.row_axis is None else ref.row_axis + missing
    if row_axis is not None and row_axis != out.row_axis:
        raise CannotLower("operands whose rows are different dimensions")
    if ref.value.domain is not None and ref.value.domain != out.value.domain:
        raise CannotLower("operands with different numbers of rows")
    dims = [(1, 0)] * missing + list(ref.dims)
    aligned = tuple(
        (1, 0) if axis == out.row_axis else (out_size, stride if size == out_size else 0)
        for axis, ((size, stride), (out_size, _)) in enumerate(zip(dims, out.dims, strict=True))
    )
    return replace(ref, dims=aligned, row_axis=out.row_axis)


def _is_dense(ref: Ref) -> bool:
    """Whether a row's elements are consecutive, in order."""
    expected = 1
    for size, stride in reversed(ref.dims):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_whole(ref: Ref) -> bool:
    return (
        ref.offset == 0 and _is_dense(ref) and math.prod(size for size, _ in ref.dims) == ref.value.row_size
    )


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _number(argument: Any) -> float:
    if isinstance(argument, BatchSize) or not isinstance(argument, int | float):
        raise CannotLower("arithmetic with a number that depends on the batch")
    return float(argument)


def domain_of(operation: Operation) -> Domain:
    """Which rows the operation runs over."""
    domain = operation.out.value.domain
    assert domain is not None
    return domain
