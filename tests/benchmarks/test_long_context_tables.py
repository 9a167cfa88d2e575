"""That the page says of long contexts what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_context_tables
from benchmarks.long_context_tables import PART, SCRIPT, newest, tables
from benchmarks.pages import begin_of, end_of, put_into

ROOT = Path(__file__).parents[2]
RESULTS = [json.loads((ROOT / "benchmarks" / "results" / "long-context.json").read_text())]
MAIN = {"method": "self", "policy": "streaming", "budget": 256}
OTHER = {"method": "draft_model", "policy": "streaming", "budget": 0.05}


def a_cell(
    batch: int,
    context: int,
    median: float,
    *,
    spread: float = 0.1,
    drafter: dict[str, Any] = MAIN,
    controller: float | None = None,
    temperature: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    def ratio(value: float) -> dict[str, float]:
        return {"median": value, "lower": value - spread, "upper": value + spread}

    with_controller = {} if controller is None else {"controller_vs_plain": ratio(controller)}
    return {
        "cell": {
            "heads": "gqa",
            "drafter": drafter,
            "batch": batch,
            "context": context,
            "temperature": temperature,
            "with_controller": controller is not None,
        },
        "k": 3,
        "vs_plain": ratio(median),
        "vs_ordinary": ratio(median + 0.5),
        "acceptance": 0.875,
        "share_of_predicted": ratio(median / 2),
        "kv_share_of_plain": 0.25 if context < 1000 else 0.75,
        "kernel_bytes_per_s": 4e9 if batch < 32 else 6e9,
        "stream_bytes_per_s": 12e9,
        **with_controller,
        **more,
    }


def a_result(date: str, *cells: dict[str, Any]) -> dict[str, Any]:
    environment = {
        "date": date, "commit": "0123456789", "uncommitted_changes": False, "processor": "some"
    }  # fmt: skip
    return {"environment": environment, "cells": list(cells)}


FIRST = a_result(
    "2026-01-01",
    a_cell(1, 512, 0.90, controller=1.00),
    a_cell(1, 3840, 1.05),
    a_cell(32, 512, 0.80, controller=0.85),
    a_cell(32, 3840, 1.40),
    a_cell(32, 3840, 1.30, drafter=OTHER),
    a_cell(32, 3840, 1.70, temperature=0.0),
)


def test_the_page_says_what_was_measured() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert put_into(page, PART, SCRIPT, tables(RESULTS)) == page


def test_batches_by_contexts_and_the_other_drafters() -> None:
    text = tables([FIRST])
    assert "Measured: 6 cells on 2026-01-01 at commit 0123456, some." in text
    assert "| gqa, self, streaming 256: batch | 512 cached tokens | 3840 |\n|---|---|---|\n" in text
    assert "| 1 | 0.90; 1.00 | 1.05 |\n| 32 | **0.80**; **0.85** | 1.40 |" in text
    assert "| gqa, self, streaming 256 | 0 (0) of 2 | 2 (1) of 2 |" in text
    assert "| 1 | 1.40; 0.25; 0.88 | 1.55; 0.75; 0.88 |\n| 32 | 1.30; 0.25; 0.88 | 1.90;" in text
    assert "| gqa, draft model, streaming 5 % | 1.30; 1.80 | 3 | 0.88 | 0.65 |" in text
    assert "| gqa, self, streaming 256, greedy | 1.70; 2.20 | 3 | 0.88 | 0.85 |" in text


def test_what_it_comes_to() -> None:
    text = tables([FIRST])
    assert "- At 32 x 3840, self, streaming 256: gqa 1.40 (1.30 to 1.50; the aim was 1.5)." in text
    assert (
        "1 of 2 cells are not below 0.97 of plain decoding with 95 % confidence; those that are: gqa" in text
    )
    assert "gqa, self, streaming 256, 32 x 512: 0.85, at most 0.950." in text
    assert "batch 32 or 3840 cached tokens (5 cells): 0.25 to 0.75 (middle 0.75) of a step" in text
    assert "at 4.0 to 6.0 (middle 6.0) GB/s: 0.33 to 0.50 (middle 0.50) of what one stream" in text
    assert "Reading K/V, all other cells (1 cells): 0.25 to 0.25" in text
    assert "Measured speedups are 0.40 to 0.85 (middle 0.59) of what" in text
    assert "others on the same host" not in text


def test_a_cell_that_was_measured_again_is_shown_as_it_was_last() -> None:
    again = a_result("2026-02-02", a_cell(32, 512, 1.20, most_stolen=0.5))
    text = tables([FIRST, again])
    assert "| 32 | 1.20 | 1.40 |" in text
    assert "Measured: 5 cells on 2026-01-01 at commit 0123456, some; 1 cell on 2026-02-02" in text
    assert "In 1 cells others on the same host" in text
    assert len(newest([FIRST, again])) == 6


def test_one_command_writes_the_page_and_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(
        long_context_tables.long_context_plots, "save", lambda cells, folder: drawn.append(len(cells))
    )
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(f"before\n\n{begin_of(PART, SCRIPT)}\n{end_of(PART)}\n\nbehind\n")
    results.write_text(json.dumps(FIRST))
    long_context_tables.main(page, [results], tmp_path)
    assert tables([FIRST]) in page.read_text()
    assert page.read_text().endswith("\n\nbehind\n")
    assert drawn == [6]
    long_context_tables.main(page, [results], None)
    assert drawn == [6]
