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
    ratio = {"median": median, "upper": upper}
    environment = {
        "date": date, "commit": "0123456789", "uncommitted_changes": False, "processor": "some"
    }  # fmt: skip
    cell = {
        "cell": {"deployment": "one", "batch": 4, "context": 128, "acceptance": 0.5},
        "vs_plain": ratio,
        "vs_best_fixed": ratio,
        "cold": {"vs_plain": (0.7, 1.0)},
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
