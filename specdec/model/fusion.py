"""Replaces runs of row-wise operations that always come together by one native operation.

The results are the same up to the order of the sums in a norm: every rounding of the separate operations
is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specdec.model.lowering import (
    ADD,
    COPY,
    MUL,
    NEG,
    RSQRT,
    SQUARE,
    Elementwise,
    Mean,
    Norm,
    Operation,
    Rotary,
)
from specdec.model.trace import Ref, Value


def fuse(operations: Sequence[Operation], results: Sequence[Value]) -> list[Operation]:
    """Return equivalent operations, in an order that respects their dependencies.

    `results` are read by someone else and stay.
    """
    fused = list(operations)
    for rule in (_rms_norm, _rotary):
        fused = _apply(rule, fused, results)
    return fused


class _Graph:
    """Who writes and who reads each value."""

    def __init__(self, operations: Sequence[Operation], results: Sequence[Value]) -> None:
        self.writers: dict[Value, list[Operation]] = {}
        self.num_reads: Counter[Value] = Counter(results)
        for operation in operations:
            self.writers.setdefault(operation.out.value, []).append(operation)
            self.num_reads.update({ref.value for ref in operation.inputs})

    def elementwise(self, ref: Ref, op: int) -> Elementwise | None:
        """The operation `op` that alone wrote the whole of `ref`, if its result is read only once."""
        writer = self.only_writer(ref)
        return writer if isinstance(writer, Elementwise) and writer.op == op else None

    def only_writer(self, ref: Ref) -> Operation | None:
        """The operation that alone wrote the value of `ref`, if it is read only once."""
        writers = self.writers.get(ref.value, [])
        return writers[0] if len(writers) == 1 and self.num_reads[ref.value] == 1 else None


Rule = Callable[[_Graph, Operation], tuple[Operation, Sequence[Operation]] | None]
"""Given the last operation of a run: its replacement and the operations it absorbs, or None."""


def _apply(rule: Rule, operations: list[Operation], results: Sequence[Value]) -> list[Operation]:
    graph = _Graph(operations, results)
    replaced: dict[int, Operation] = {}
    gone: set[int] = set()
    for operation in operations:
        match = rule(graph, operation)
        if match is not None:
            replacement, absorbed = match
            replaced[id(operation)] = replacement
            gone.update(id(other) for other in absorbed)
    return [replaced.get(id(operation), operation) for operation in operations if id(operation) not in gone]


def _rms_norm(graph: _Graph, last: Operation) -> tuple[Operation, Sequence[Operation]] | None:
    """x / sqrt(mean(x^2) + eps) * weight, rounded before the weight (Llama), after it (Gemma) or not."""
    if not isinstance(last, Elementwise):
        return None
    absorbed: list[Operation] = []
    product = last
    if last.op == COPY:
        inner = graph.elementwise(last.inputs[0], MUL)
        if inner is None or inner.out.dtype is not torch.float32:
            return None
        product = inner
        absorbed.append(inner)
    if product.op != MUL or len(product.inputs) != 2:
        return None
    weights = [ref for ref in product.inputs if ref.value.kind == "constant"]
    others = [ref for ref in product.inputs if ref.value.kind == "row"]
    if len(weights) != 1 or len(others) != 1 or not _is_vector(weights[0]):
        return None
    rounding = graph.elementwise(others[0], COPY) if product is last else None
    if rounding is not None:
        absorbed.append(rounding)
    normed = graph.elementwise(others[0] if rounding is None else rounding.inputs[0], MUL)
    if normed is None or normed.out.dtype is not torch.float32:
        return None
    found = _normalised(graph, normed)
    if found is None:
        return None
    source, epsilon, steps = found
    norm = Norm(
        out=last.out,
        inputs=(source, weights[0]),
        centred=False,
        round_before=rounding is not None,
        epsilon=epsilon,
    )
    return norm, [*absorbed, normed, *steps]


def _normalised(graph: _Graph, normed: Elementwise) -> tuple[Ref, float, list[Operation]] | None:
    """What x * rsqrt(mean(x^2) + eps) normalises, eps, and the operations before the product."""
    if len(normed.inputs) != 2:
        return None
    for x, factor in (normed.inputs, normed.inputs[::-1]):
        root = graph.elementwise(factor, RSQRT)
        shifted = None if root is None else graph.elementwise(root.inputs[0], ADD)
        if root is None or shifted is None or len(shifted.inputs) != 1:
            continue
        mean = graph.only_writer(shifted.inputs[0])
        if not isinstance(mean, Mean) or mean.is_sum:
            continue
        square = graph.elementwise(mean.inputs[0], SQUARE)
        if square is None or square.inputs[0] != x or x.dims[-1][1] != 1:
            continue
        steps: list[Operation] = [square, mean, shifted, root]
        widened = graph.writers.get(x.value, [])
        if len(widened) == 1 and isinstance(widened[0], Elementwise) and widened[0].op == COPY:
            source = widened[0].inputs[0]
            if graph.num_reads[x.value] == 2 and source.dims[-1][1] == 1 and widened[0].out == x:
                return source, shifted.scalar, [*steps, widened[0]]
        return x, shifted.scalar, steps
    return None


def _rotary(graph: _Graph, last: Operation) -> tuple[Operation, Sequence[Operation]] | None:
    """x * cos + cat(-x_high, x_low) * sin."""
    if not isinstance(last, Elementwise) or last.op != ADD or len(last.inputs) != 2:
        return None
    for first, second in (last.inputs, last.inputs[::-1]):
        straight, turned = graph.elementwise(first, MUL), graph.elementwise(second, MUL)
        if straight is None or turned is None or not len(straight.inputs) == len(turned.inputs) == 2:
            continue
        if not straight.out.dtype is turned.out.dtype is last.out.dtype:
            continue
        for half_turned, sines in (turned.inputs, turned.inputs[::-1]):
            for x, cosines in (straight.inputs, straight.inputs[::-1]):
                steps = _rotated_half(graph, x, half_turned)
                if steps is not None and _is_vector(cosines) and _is_vector(sines):
                    rotary = Rotary(out=last.out, inputs=(x, cosines, sines))
                    return rotary, [straight, turned, *steps]
    return None


def _rotated_half(graph: _Graph, x: Ref, turned: Ref) -> Sequence[Operation] | None:
    """The operations that made `turned` = cat(-x_high, x_low), if that is what it is."""
    size, stride = x.dims[-1]
    writers = graph.writers.get(turned.value, [])
    if size % 2 or stride != 1 or len(writers) != 2 or graph.num_reads[turned.value] != 1:
        return None
    low, high = writers
    if not isinstance(low, Elementwise) or not isinstance(high, Elementwise) or not low.op == high.op == COPY:
        return None
    negated = graph.elementwise(low.inputs[0], NEG)
    half = (*x.dims[:-1], (size // 2, 1 if size > 2 else 0))
    x_low = replace(x, dims=half)
    x_high = replace(x_low, offset=x.offset + size // 2)
    fits = (
        negated is not None
        and negated.inputs[0] == x_high
        and high.inputs[0] == x_low
        and low.out.offset == 0
        and high.out.offset == size // 2
    )
    return [low, high, negated] if fits and negated is not None else None


def _is_vector(ref: Ref) -> bool:
    """Whether the elements lie along the innermost dimension, the same for all others."""
    *outer, (size, stride) = ref.dims
    return (stride == 1 or size == 1) and all(other == 0 for _, other in outer)
