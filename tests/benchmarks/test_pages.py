"""What scripts write into pages."""

from __future__ import annotations

import pytest

from benchmarks.pages import begin_of, end_of, origin_of, origins_of, put_into, table
from specdec.core.errors import UserError

FIRST, LAST = begin_of("a", "s.py"), end_of("a")


def test_only_one_part_is_exchanged() -> None:
    other = f"{begin_of('b', 's.py')}\n\nof another\n\n{end_of('b')}"
    page = f"before\n\n{FIRST}\nold\n{LAST}\n\nbetween\n\n{other}\n"
    once = put_into(page, "a", "s.py", "new")
    assert once == f"before\n\n{FIRST}\n\nnew\n\n{LAST}\n\nbetween\n\n{other}\n"
    assert put_into(once, "a", "s.py", "new") == once


@pytest.mark.parametrize("page", ["no place", begin_of("a", "t.py") + LAST, FIRST, LAST + FIRST])
def test_a_page_without_a_place_is_refused(page: str) -> None:
    with pytest.raises(UserError, match=r"needs a line <!-- a: written by s\.py -->"):
        put_into(page, "a", "s.py", "new")


def test_a_table() -> None:
    assert table(("x", "y"), [(1, "a"), (2.5, "b")]) == "| x | y |\n|---|---|\n| 1 | a |\n| 2.5 | b |"


def test_where_a_result_is_from() -> None:
    clean = {
        "date": "2026-02-03T04:05:06",
        "commit": "0123456789abcdef",
        "uncommitted_changes": False,
        "processor": "P",
    }
    assert origin_of(clean) == "2026-02-03 at commit 0123456, P"
    changed = {**clean, "uncommitted_changes": True}
    assert origin_of(changed, with_processor=False) == (
        "2026-02-03 at commit 0123456 with changes that were not committed"
    )
    later = {**clean, "date": "2026-02-04T00:00:00"}
    assert (
        origins_of([clean, later, clean])
        == "2026-02-03 at commit 0123456, P; 2026-02-04 at commit 0123456, P"
    )
