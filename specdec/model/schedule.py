"""Decides in which order a team of threads runs operations, who does what, and where all must wait.

An operation is shared out by rows (each thread some rows), by columns (each thread some columns of all
rows: linear layers, experts, and arithmetic that directly follows linear layers), or by its own plan
(attention). A thread may go on to the next operation without waiting as long as it reads only what it wrote
itself since everybody last waited, or what was written before that. The order keeps dependencies and puts
off waiting as long as something can be done without.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from specdec.model.lowering import (
    Attention,
    Collective,
    Elementwise,
    ExpertsDown,
    ExpertsUp,
    LinearLayer,
    Operation,
    domain_of,
)
from specdec.model.trace import Ref, Value

Share = Literal["rows", "columns", "own"]

_PANEL_COLUMNS = 32


@dataclass(frozen=True, slots=True)
class Step:
    """One operation in its place."""

    operation: Operation
    share: Share
    sync: bool
    """All threads wait for each other before it."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Who wrote a value since everybody last waited."""

    share: Share
    num_columns: int = 0


def schedule(operations: Sequence[Operation]) -> list[Step]:
    """Order `operations`; every value is written before it is read."""
    return _Scheduler(operations).run()


class _Scheduler:
    def __init__(self, operations: Sequence[Operation]) -> None:
        self._readers: dict[Value, list[int]] = {}
        self._missing = [0] * len(operations)
        self._operations = operations
        writers: dict[Value, list[int]] = {}
        for index, operation in enumerate(operations):
            writers.setdefault(operation.out.value, []).append(index)
        for index, operation in enumerate(operations):
            sources = {source for ref in operation.inputs for source in writers.get(ref.value, [])}
            self._missing[index] = len(sources)
            for value in {ref.value for ref in operation.inputs}:
                self._readers.setdefault(value, []).append(index)
        # Ranks meet in the same order, whatever else each of them can do first.
        collectives = [index for index, one in enumerate(operations) if isinstance(one, Collective)]
        self._next_collective = dict(pairwise(collectives))
        for index in collectives[1:]:
            self._missing[index] += 1
        self._unsynced: dict[Value, _Part] = {}

    def run(self) -> list[Step]:
        """Take whatever is ready and needs no waiting, else the oldest that is ready."""
        ready = deque(index for index, missing in enumerate(self._missing) if missing == 0)
        steps: list[Step] = []
        while ready:
            index = next((i for i in ready if self._share(self._operations[i]) is not None), None)
            sync = index is None
            if index is None:
                index = ready[0]
                self._unsynced.clear()
            ready.remove(index)
            operation = self._operations[index]
            share = self._share(operation)
            assert share is not None
            steps.append(Step(operation, share, sync))
            self._note(operation, share)
            readers = list(self._readers.get(operation.out.value, ()))
            if index in self._next_collective:
                readers.append(self._next_collective[index])
            for reader in readers:
                self._missing[reader] -= 1
                if self._missing[reader] == 0:
                    ready.append(reader)
            ready = deque(sorted(ready))
        assert len(steps) == len(self._operations), "operations depend on each other in a circle"
        return steps

    def _share(self, operation: Operation) -> Share | None:
        """How the operation can be shared out without waiting first; None: not at all."""
        written = [self._unsynced[ref.value] for ref in operation.inputs if ref.value in self._unsynced]
        if isinstance(operation, LinearLayer | ExpertsUp | ExpertsDown):
            return None if written else "columns"
        if isinstance(operation, Collective):
            # The team waits between handing its rows on, as they were written, and taking everyone's.
            columns = _whole_row(operation.inputs[0])
            if all(part.share == "rows" for part in written):
                return "rows"
            is_cut_alike = columns is not None and all(part == _Part("columns", columns) for part in written)
            return "columns" if is_cut_alike else None
        if isinstance(operation, Attention):
            # The team waits between writing keys and values, by rows, and reading queries.
            rows = all(part.share == "rows" for part in written)
            return "own" if rows else None
        if all(part.share == "rows" for part in written) and self._same_rows(operation):
            return "rows"
        columns = _columns(operation)
        if columns is not None and all(part == _Part("columns", columns) for part in written):
            return "columns"
        return None

    def _same_rows(self, operation: Operation) -> bool:
        """Whether unsynced inputs have the operation's own rows (a gather reads others')."""
        domain = domain_of(operation)
        return all(ref.value.domain == domain for ref in operation.inputs if ref.value in self._unsynced)

    def _note(self, operation: Operation, share: Share) -> None:
        if share == "own" or isinstance(operation, Collective):
            self._unsynced.clear()  # the team has waited inside
        if isinstance(operation, Collective):
            self._unsynced[operation.out.value] = _Part("rows")
            return
        # Columns of experts are those of each expert: nothing else is cut like them.
        is_cut_alike = share == "columns" and not isinstance(operation, ExpertsUp)
        num_columns = operation.out.value.row_size if is_cut_alike else 0
        self._unsynced[operation.out.value] = _Part(share, num_columns)


def _columns(operation: Operation) -> int | None:
    """Columns of an elementwise operation on whole rows, which can be shared out like a linear layer's."""
    if not isinstance(operation, Elementwise) or not _is_row(operation.out, operation.out.value.row_size):
        return None
    size = operation.out.value.row_size
    for ref in operation.inputs:
        is_number = ref.value.kind == "constant" and all(stride == 0 for _, stride in ref.dims)
        if ref.value.kind == "position" or not (is_number or _is_row(ref, size)):
            return None
        if ref.value.kind == "row" and ref.value.row_size != size:
            return None
    return size if size >= _PANEL_COLUMNS else None


def _whole_row(ref: Ref) -> int | None:
    """Number of columns of a ref to the whole of a row value."""
    size = ref.value.row_size
    return size if ref.value.kind == "row" and _is_row(ref, size) else None


def _is_row(ref: Ref, size: int) -> bool:
    """Whether a row of `ref` is `size` consecutive elements from the row's start (constants: any)."""
    expected = 1
    for length, stride in reversed(ref.dims):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return ref.offset == 0 and math.prod(length for length, _ in ref.dims) == size


def place(steps: Sequence[Step], results: Sequence[Value]) -> dict[Value, int]:
    """Give every value a buffer; values whose lives do not meet share one.

    A buffer is taken over only after everybody has waited since its last use. `results` keep theirs.
    """
    touched = [{ref.value for ref in (*step.operation.inputs, step.operation.out)} for step in steps]
    last_use = {value: at for at, values in enumerate(touched) for value in values}
    for value in results:
        last_use[value] = len(steps)
    buffers: dict[Value, int] = {}
    free: dict[tuple[str, int], list[int]] = {}
    retiring: list[Value] = []
    count = 0
    for at, step in enumerate(steps):
        if step.sync:
            for retired in retiring:
                free.setdefault(_size_key(retired), []).append(buffers[retired])
            retiring.clear()
        value = step.operation.out.value
        if value not in buffers:
            candidates = free.get(_size_key(value))
            if candidates:
                buffers[value] = candidates.pop()
            else:
                buffers[value] = count
                count += 1
        retiring.extend(used for used in touched[at] if used in buffers and last_use[used] == at)
    return buffers


def _size_key(value: Value) -> tuple[str, int]:
    return value.domain or "", value.row_size * value.dtype.itemsize
