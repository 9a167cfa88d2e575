"""The arithmetic of the benchmark of a draft model's memory, and that the page says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.draft_memory import FULL, Case, Policy, Taken, draft_for_long_texts, headlines_of, measure

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "draft-memory.json"


def taken(policy: Policy, length: int, size: int) -> Taken:
    return Taken(
        case=Case(policy=policy, length=length),
        pool_bytes=2 * size,
        held_bytes=size,
        grown_bytes=3 * size,
        read_s=1.0,
    )


def test_the_longest_texts_are_compared_with_the_shortest() -> None:
    cases = [taken("streaming", 512, 10), taken("streaming", 4096, 11), taken("streaming", 32768, 12)]
    assert headlines_of([*cases, taken("full", 512, 99)]) == {
        "draft_pool_bytes_longest_vs_shortest": pytest.approx(1.2),
        "draft_held_bytes_longest_vs_shortest": pytest.approx(1.2),
        "draft_peak_bytes_longest_vs_shortest": pytest.approx(1.2),
    }


def test_a_window_holds_less_than_everything(tmp_path: Path) -> None:
    draft = draft_for_long_texts(ROOT / "models" / "demo" / "draft", tmp_path / "draft", 1024)
    windowed, whole = (
        measure(draft, Case(policy=policy, length=1024), num_threads=1) for policy in ("streaming", "full")
    )
    assert 0 < windowed.held_bytes <= windowed.pool_bytes
    assert windowed.held_bytes < 0.8 * whole.held_bytes


def test_what_was_measured_is_what_the_page_says() -> None:
    results = json.loads(RESULTS.read_text())
    assert [one["case"] for one in results["taken"]] == [
        {"policy": case.policy, "length": case.length} for case in FULL
    ]
    page = (ROOT / "docs" / "drafters" / "magicdec.md").read_text()
    for one in results["taken"]:
        row = f"| {one['case']['policy']} | {one['case']['length']} | "
        row += " | ".join(f"{one[name] / 2**20:.1f}" for name in ("pool_bytes", "held_bytes", "grown_bytes"))
        assert row in page
    assert results["headlines"]["draft_pool_bytes_longest_vs_shortest"] == 1.0
