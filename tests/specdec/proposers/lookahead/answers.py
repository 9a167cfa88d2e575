"""What a target says at the rows beside drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.core.rows_beside import RowsBeside
from specdec.tree.topology import topology_of

Say = Callable[[Sequence[int]], int]
"""What a target says to a text."""


def say_by_last(text: Sequence[int]) -> int:
    return (text[-1] * 2 + 5) % 101


def answers_of(beside: RowsBeside, text: Sequence[int], target: Say) -> list[int]:
    """What the target says at the answered rows, each behind its own path."""
    topology = topology_of(beside.num_rows, beside.parents)
    return [
        target([*text, *(beside.token_ids[node] for node in topology.path(row))])
        for row in range(beside.num_rows - beside.num_answered, beside.num_rows)
    ]
