"""Tables over positions: whatever the forward computes from position ids and parameters alone.

Rotary cosines and sines, or learned position embeddings, are functions of a row's position id. They are
computed once for all positions by replaying the recorded operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from specdec.model.recording import CannotLower
from specdec.model.trace import BatchSize, Trace, Value


@torch.inference_mode()
def position_tables(trace: Trace, values: Iterable[Value], num_positions: int) -> dict[Value, torch.Tensor]:
    """Return for every position value [num_positions, elements of a row], row-major.

    Raises:
        CannotLower: a value at one position depends on the other positions of the batch.
    """
    wanted = list(values)
    if not wanted:
        return {}
    ascending = torch.arange(num_positions)
    forward = _replay(trace, ascending)
    backward = _replay(trace, ascending.flip(0))
    tables: dict[Value, torch.Tensor] = {}
    for value in wanted:
        assert value.row_axis is not None
        table, reverse = (
            results[id(value.tensor)].movedim(value.row_axis, 0).reshape(num_positions, -1).contiguous()
            for results in (forward, backward)
        )
        if not torch.equal(table, reverse.flip(0)):
            raise CannotLower("what is computed from a position id depends on the other positions")
        tables[value] = table
    return tables


def _replay(trace: Trace, positions: torch.Tensor) -> dict[int, torch.Tensor]:
    """Results of the operations on position ids, for other ids; by identity of the recorded tensor."""
    results: dict[int, torch.Tensor] = {id(trace.positions): positions[None]}
    for node in trace.nodes:
        if not node.outputs or trace.value_of(node.outputs[0]).kind != "position":
            continue
        args, kwargs = (_substituted(part, results, len(positions)) for part in (node.args, node.kwargs))
        outputs = node.function(*args, **kwargs)
        replayed = outputs if isinstance(outputs, tuple | list) else (outputs,)
        results.update({id(tensor): result for tensor, result in zip(node.outputs, replayed, strict=True)})
    return results


def _substituted(argument: Any, results: dict[int, torch.Tensor], num_rows: int) -> Any:
    if isinstance(argument, torch.Tensor):
        return results.get(id(argument), argument)
    if isinstance(argument, BatchSize):
        return num_rows
    if isinstance(argument, list | tuple):
        return type(argument)(_substituted(item, results, num_rows) for item in argument)
    if isinstance(argument, dict):
        return {key: _substituted(value, results, num_rows) for key, value in argument.items()}
    return argument
