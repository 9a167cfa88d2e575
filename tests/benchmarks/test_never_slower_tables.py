"""That the page says of the controller what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.never_slower_tables import PART, SCRIPT, tables
from benchmarks.pages import put_into

ROOT = Path(__file__).parents[2]
RESULTS = [json.loads((ROOT / "benchmarks" / "results" / "never-slower.json").read_text())]


def a_result(median: float, upper: float, date: str, **more: Any) -> dict[str, Any]:
    ratio = {"median": median, "upper": upper, "values": [median - 0.02, median, median + 0.02]}
    environment = {
        "date": date, "commit": "0123456789", "uncommitted_changes": False, "processor": "some"
    }  # fmt: skip
    cell = {
        "cell": {"deployment": "one", "batch": 4, "context": 128, "acceptance": 0.5},
        "vs_plain": ratio,
        "vs_best_fixed": ratio,
        "cold": {"seconds": (1.0, 1.5), "vs_plain": (0.8, 0.7)},
        "chosen": {"mean_num_draft_tokens": 2.0},
        **more,
    }
    return {"environment": environment, "cells": [cell], "steps": []}


def test_the_page_says_what_was_measured() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert put_into(page, PART, SCRIPT, tables(RESULTS)) == page


def test_a_cell_that_was_measured_again_is_shown_as_it_was_last() -> None:
    first, again = a_result(0.9, 0.95, "2026-01-01"), a_result(1.0, 1.05, "2026-02-02", most_stolen=0.5)
    assert "| 4 | 128 | **0.90** (**0.90**) |" in tables([first])
    assert "0 of 1 cells are not below" in tables([first])
    both = tables([first, again])
    assert "| 4 | 128 | 1.00 (1.00) |" in both
    assert "1 cell on 2026-02-02 at commit 0123456" in both
    assert "In 1 cells others" in both
    assert "2026-01-01" not in both


def test_a_cold_start_is_quoted_by_its_worse_part() -> None:
    text = tables([a_result(1.0, 1.05, "2026-01-01")])
    assert "the first 1 s of a cell" in text
    assert "the 1.5 s behind them, the worse part has 0.70 of plain decoding at worst" in text


def test_cells_that_draft_nothing_are_taken_together() -> None:
    assert "nothing is drafted in the end" not in tables([a_result(0.9, 1.0, "2026-01-01")])
    off = {"mean_num_draft_tokens": 0.0}
    result, other = a_result(1.0, 1.1, "2026-01-01", chosen=off), a_result(0.9, 1.0, "2026-01-01", chosen=off)
    where = {"deployment": "one", "batch": 4, "context": 128}
    same = {**other["cells"][0], "cell": {**where, "acceptance": 0.2}}
    drafts = {**same, "cell": {**where, "acceptance": 0.9}, "chosen": {"mean_num_draft_tokens": 1.0}}
    text = tables([{**result, "cells": [*result["cells"], same, drafts]}])
    assert "taken together, have 0.949 (" in text
    assert (
        "6 pairs) of plain decoding; of those with one batch and context, the lowest are at 4 x 128" in text
    )
