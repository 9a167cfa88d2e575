"""That the page says of the attention kernel what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.cpu_attention import Cell, Machine, rated
from benchmarks.cpu_attention_tables import NOT_YET, PART, SCRIPT, main, tables
from benchmarks.pages import begin_of, end_of, put_into
from benchmarks.report import Spread, to_plain

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-attention.json"
MACHINE = Machine(bytes_per_s=10e9, operations_per_s=50e9)
ENVIRONMENT = {
    "date": "2026-01-01", "commit": "0123456789", "uncommitted_changes": False, "processor": "some",
    "num_threads": 2,
}  # fmt: skip
SPEEDS = {
    "stream_bytes_per_s": 10e9,
    "product_fp32_operations_per_s": 50e9,
    "product_bf16_operations_per_s": 20e9,
}


def a_result() -> dict[str, object]:
    cells = []
    for batch, rows, slowdown in ((1, 1, 2.0), (1, 5, 2.0), (32, 1, 2.0), (32, 5, 4.0)):
        cell = Cell(heads="gqa", dtype="bf16", batch=batch, context=4096, rows=rows)
        seconds = slowdown * MACHINE.bound_s(cell)
        times = {"ours": Spread((seconds,)), "portable": Spread((3 * seconds,))}
        cells.append(rated({"cell": cell, "layer_s": times}, MACHINE))
    result: dict[str, object] = to_plain({"environment": ENVIRONMENT, "machine": SPEEDS, "cells": cells})
    return result


def test_the_page_says_what_was_measured() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    result = json.loads(RESULTS.read_text()) if RESULTS.exists() else None
    assert put_into(page, PART, SCRIPT, tables(result)) == page


def test_rates_stand_beside_those_of_the_machine() -> None:
    text = tables(a_result())
    assert "Measured on 2026-01-01 at commit 0123456, some, 2 threads." in text
    assert "one stream of reads 10.0 GB/s, products of large matrices fp32 50, bf16 20 GFLOP/s" in text
    assert "| heads | numbers | batch x context | 1 row of each sequence | 5 rows of each sequence |" in text
    # Reading bounds one row (0.52 ms and 2 operations a byte); multiplying bounds five (10 a byte).
    assert "| gqa | bf16 | 1 x 4096 | 5.0 (0.50), 10.0 (0.20), 0.50 | 2.5 (0.25), 25.0 (0.50), 0.50 |" in text
    assert (
        "| gqa | bf16 | 32 x 4096 | 5.0 (0.50), 10.0 (0.20), 0.50 | 1.2 (0.12), 12.5 (0.25), 0.25 |" in text
    )
    assert "- gqa, bf16, 32 x 4096: 5 rows of each sequence take 4.00 times as long as 1." in text
    assert "- The portable attention takes 3.0 to 3.0 times as long." in text


def test_it_is_written_into_its_place(tmp_path: Path) -> None:
    assert tables(None) == NOT_YET
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text(f"before\n\n{begin_of(PART, SCRIPT)}\n\n{NOT_YET}\n\n{end_of(PART)}\n")
    results.write_text(json.dumps(a_result()))
    main(page, results)
    assert tables(a_result()) in page.read_text()
    assert NOT_YET not in page.read_text()
