"""Where K/V of the path that stands in a tree have to go.

The nodes of a tree lie behind the committed prefix in the order in which they were proposed. What stands is a
path through them; its K/V are needed right behind the prefix. What lies there already is left where it is, so
a proposer that gives its likeliest path first has little moved, and a chain nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.plan import SlotMove
from specdec.kv.block_table import BlockTable


def moves_of_path(
    table: BlockTable, first_place: int, nodes: Sequence[int], *, end_place: int | None = None
) -> list[SlotMove]:
    """Return the moves after which the places from `first_place` on hold K/V of `nodes`, in their order.

    Args:
        table: the sequence's blocks, those of the whole tree included.
        first_place: where node 0 lies; node i lies i places behind it.
        nodes: a path from the root's child on, so that their numbers rise.
        end_place: what would go there or behind it needs not be moved.
    """
    return [
        SlotMove(_slot(table, first_place + node), _slot(table, first_place + index))
        for index, node in enumerate(nodes)
        if node != index and (end_place is None or first_place + index < end_place)
    ]


def _slot(table: BlockTable, place: int) -> int:
    return table.block_ids[table.index_of(place)] * table.block_size + place % table.block_size
