"""How the C++ paged attention shares out its work: what is read once, and what company costs a sequence."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import pytest

from specdec.attention.cpu import NativeLayer, native_step
from specdec.attention.metadata import build_metadata
from specdec.attention.native import NativeUnavailable, load_library
from specdec.kv.block_table import num_blocks_for
from tests.specdec.attention.contract import Piece

SOURCE = Path(__file__).parent / "plan_probe.cpp"
BLOCK_SIZE = 16
ROOM = 4096
BOTH_WAYS = pytest.mark.parametrize("way", ["metadata", "slices"])

CHUNK, BRANCHES, LINE = (
    Piece(token_ids=[0] * rows, start=start, block_table=[1] * 200, parents=parents)
    for rows, start, parents in (
        (200, 700, None),
        (9, 1300, [-1, 0, 0, 1, 1, 2, -1, 6, 6]),
        (9, 1300, None),
    )
)


class PlannedItem(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        *((name, ctypes.c_int32) for name in ("sequence", "kv_head", "first_row", "num_rows")),
        *((name, ctypes.c_int32) for name in ("first_key", "last_key")),
        ("cost", ctypes.c_int64),
    ]

    @property
    def rows(self) -> tuple[int, int]:
        return self.first_row, self.first_row + self.num_rows

    @property
    def work(self) -> tuple[int, ...]:
        """All of it, whichever sequence of the step it is of."""
        return (self.kv_head, *self.rows, self.first_key, self.last_key, self.cost)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:  # in a folder of its own: the library's name says nothing of headers of other folders
        return load_library(SOURCE, tmp_path_factory.mktemp("probe"))
    except NativeUnavailable as error:
        pytest.skip(f"C++ cannot be built here: {error}")


def layer_of(heads: tuple[int, int], window: int | None) -> NativeLayer:
    return NativeLayer(None, None, *heads, 64, BLOCK_SIZE, window or 0, 0.125, 0.0, 0)


def plan_of(
    probe: ctypes.CDLL,
    pieces: Sequence[Piece],
    way: str = "metadata",
    *,
    heads: tuple[int, int] = (14, 2),
    window: int | None = None,
    num_shares: int = 1,
) -> list[PlannedItem]:
    """The items of a step, from metadata made in Python or laid out of slices in C++."""
    items = (PlannedItem * ROOM)()
    rest = (ctypes.byref(layer_of(heads, window)), num_shares, items, ROOM)
    if way == "metadata":
        metadata = build_metadata(pieces, block_size=BLOCK_SIZE)
        count = probe.planned_of_step(ctypes.byref(native_step(metadata)), *rest)
    else:
        count = planned_of_slices(probe.planned_of_slices, pieces, rest)
    assert count <= ROOM
    return items[:count]


def planned_of_slices(planned: Callable[..., int], pieces: Sequence[Piece], rest: tuple[Any, ...]) -> int:
    described, kept = array("q"), []
    for piece in pieces:
        table = array("i", piece.block_table)
        parents = array("i", piece.parents or ())
        kept += [table, parents]
        described.extend((table.buffer_info()[0], piece.start, len(piece.token_ids), 1, 0, 0, 0, 0))
        described.extend((parents.buffer_info()[0] if parents else 0, 0))
    return planned(ctypes.c_void_p(described.buffer_info()[0]), ctypes.c_int64(len(pieces)), *rest)


@pytest.mark.parametrize("num_shares", [1, 3, 64])
@pytest.mark.parametrize("heads", [(14, 2), (28, 4), (4, 4), (80, 1)])
def test_whoever_shares_keys_comes_one_after_the_other_in_even_blocks(
    probe: ctypes.CDLL, heads: tuple[int, int], num_shares: int
) -> None:
    pieces = [
        Piece(token_ids=[0] * rows, start=start, block_table=[1] * num_blocks_for(start + rows, BLOCK_SIZE))
        for rows, start in ((5, 4096), (1, 700), (100, 37), (13, 2000))
    ]
    group, most = heads[0] // heads[1], probe.most_rows_of_a_block()
    items = plan_of(probe, pieces, heads=heads, num_shares=num_shares)
    heads_in_turn = [key for key, _ in groupby(items, lambda item: (item.sequence, item.kv_head))]
    assert heads_in_turn == [(s, head) for s in range(len(pieces)) for head in range(heads[1])]
    for (sequence, _), of_head in groupby(items, lambda item: (item.sequence, item.kv_head)):
        # Of a block that is split there are several items.
        blocks = [rows for rows, _ in groupby(of_head, lambda item: item.rows)]
        num_rows = group * len(pieces[sequence].token_ids)
        assert [0, *(end for _, end in blocks)] == [*(first for first, _ in blocks), num_rows]
        sizes = [end - first for first, end in blocks]
        assert len(sizes) == -(-num_rows // most)
        assert max(sizes) - min(sizes) <= 1


def test_verifying_four_drafts_of_a_wide_group_reads_keys_once(probe: ctypes.CDLL) -> None:
    """Qwen2.5 7B: 7 query heads to one of K/V, 5 rows."""
    piece = Piece(token_ids=[0] * 5, start=4096, block_table=[1] * 300)
    assert [item.rows for item in plan_of(probe, [piece], heads=(28, 4))] == [(0, 35)] * 4


@BOTH_WAYS
@pytest.mark.parametrize("window", [None, 100, 1000])
def test_a_chain_costs_beside_a_tree_what_it_costs_alone(
    probe: ctypes.CDLL, way: str, window: int | None
) -> None:
    alone = [item.work for item in plan_of(probe, [CHUNK], way, window=window)]
    for pieces in ([CHUNK, LINE], [CHUNK, BRANCHES], [BRANCHES, CHUNK]):
        number = pieces.index(CHUNK)
        items = plan_of(probe, pieces, way, window=window)
        assert [item.work for item in items if item.sequence == number] == alone


@BOTH_WAYS
def test_a_row_of_a_tree_may_see_what_lies_behind_it(probe: ctypes.CDLL, way: str) -> None:
    """Control: every block of the tree goes up to its last key, and from where its first row sees."""
    pieces = [LINE, BRANCHES, CHUNK]
    items = plan_of(probe, pieces, way, heads=(80, 1), window=100)
    line, branches = ([item for item in items if item.sequence == number] for number in range(2))
    assert len(line) > 1
    assert {item.last_key for item in branches} == {line[-1].last_key}
    assert {item.first_key for item in branches} == {line[0].first_key}
    assert line[0].last_key < line[-1].last_key
