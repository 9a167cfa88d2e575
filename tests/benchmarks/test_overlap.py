"""The arithmetic of the benchmark of overlapped groups, and that the page says what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overlap_tables
from benchmarks.in_process import RunRecord
from benchmarks.kept_cells import KeptCells
from benchmarks.overlap import (
    FULL,
    MODES,
    QUICK,
    Cell,
    acceptance_of,
    headlines_of,
    parts_of,
    summarise,
    together,
)
from benchmarks.overlap_tables import quoted_draft, tables
from benchmarks.pages import put_into

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "overlap.json"
HEADLINES = {
    "round_over_max_hit",
    "draft_ahead_vs_lockstep",
    "ping_pong_vs_lockstep_b16",
    "vs_colocated_equal_devices",
    "coordinator_ms_b1",
    "coordinator_ms_b64",
}
VARIANTS = ("plain", "colocated", "colocated_plain", *MODES)


def run_of(tokens_per_s: float) -> RunRecord:
    """Ten decoded tokens at this speed, behind a first one that took a second."""
    return RunRecord(
        token_ids=(tuple(range(11)),),
        seconds=1.0 + 10 / tokens_per_s,
        prefill_s=1.0,
        num_rounds=5,
        num_prefill_rounds=1,
        draft_s=0.1,
        verify_s=0.2,
        coordinator_s=0.01,
        num_drafts=4,
        num_accepted=6,
    )


def records_of(speeds: Mapping[str, float], *, first: float = 1.0) -> dict[str, list[RunRecord]]:
    return {name: [run_of(first), run_of(speed), run_of(speed)] for name, speed in speeds.items()}


def test_modes_are_compared_by_decoding_alone_and_without_the_first_run() -> None:
    speeds = dict(zip(VARIANTS, (10.0, 40.0, 25.0, 20.0, 24.0, 30.0), strict=True))
    found = summarise(records_of(speeds))
    assert found["vs_lockstep"]["draft_ahead"].median == pytest.approx(1.5)
    assert found["vs_lockstep"]["ping_pong"].median == pytest.approx(1.2)
    assert found["vs_plain"]["lockstep"].median == pytest.approx(2.0)
    assert found["best_mode"] == "draft_ahead"
    assert found["vs_colocated"].median == pytest.approx(0.75)
    assert found["vs_colocated_plain"].median == pytest.approx(1.2)


def some_results(ratios: Sequence[float]) -> list[dict[str, Any]]:
    """A draft model for each ratio of T_draft to T_verify at batch 16."""
    summary = summarise(records_of(dict.fromkeys(VARIANTS, 2.0)))
    return [
        {
            "num_parameters": number,
            "on_hits": [
                {"batch": 1, "draft_over_verify": 1.0, "round_over_max": 1.5 + number},
                {"batch": 16, "draft_over_verify": ratio, "round_over_max": 1.1},
            ],
            "cells": [{"cell": Cell(batch=16, temperature=0.0, acceptance=0.95), **summary}],
            "coordinator_ms": {1: 0.25 + number, 64: 1.5},
            "coordinator_goodput_ms": {1: 0.5, 64: 2.5},
        }
        for number, ratio in enumerate(ratios)
    ]


def test_the_draft_model_is_quoted_that_costs_what_the_target_costs() -> None:
    results = some_results([0.1, 0.9, 1.2])
    assert quoted_draft(results)["num_parameters"] == 1
    found = headlines_of(results)
    assert found.keys() >= HEADLINES
    assert found["coordinator_ms_b1"] == 1.25
    assert found["round_over_max_hit"] == 2.5, "the worst of its batches"
    assert found["round_over_max_hit_worst"] == 3.5, "the worst of all draft models"


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95])
def test_more_guesses_are_right_more_often(rate: float) -> None:
    made_up = acceptance_of(rate)
    assert made_up.acceptance == (rate,)
    assert made_up.bonus_after_all[0] == rate, "the first guess behind a chain is what would be drafted"
    for rising in (made_up.bonus_after_miss, made_up.bonus_after_all):
        assert list(rising) == sorted(rising)
        assert rising[-1] <= 1.0


def test_a_run_that_was_cut_goes_on(tmp_path: Path) -> None:
    """What is read from disk comes to the same as what was measured just now."""
    (draft,) = QUICK.drafts
    whole = some_results([1.0])[0]
    hits = {one["batch"]: one for one in whole["on_hits"]}
    cell = whole["cells"][0]
    speeds = dict.fromkeys(VARIANTS, 10.0)
    file = tmp_path / "overlap.json"
    kept = KeptCells(file, {}, resume=False)
    for number, part in enumerate(parts_of(draft)):
        if number == 3:
            kept = KeptCells(file, {}, resume=True)
        assert not kept.is_kept(part)
        if isinstance(part.where, Cell):
            measured = {"cell": part.where, **summarise(records_of(speeds))}
        elif part.what == "hits":
            measured = dict(next(iter(hits.values())), batch=part.where)
        else:
            measured = {"fixed_ms": 0.1 * part.where, "goodput_ms": 0.2 * part.where}
        kept.keep(part, {"num_parameters": 7, **measured})
    found = together(draft, KeptCells(file, {}, resume=True))
    assert [one["batch"] for one in found["on_hits"]] == [1, 16]
    assert [one["cell"] for one in found["cells"]] == list(draft.cells)
    assert found["coordinator_ms"] == {1: 0.1, 64: pytest.approx(6.4)}
    assert headlines_of([found])["coordinator_goodput_ms_b64"] == pytest.approx(12.8)
    assert all(one["measured"]["date"] for one in (*found["on_hits"], *found["cells"]))
    assert len(found["coordinator_measured"]) == 2
    assert cell.keys() - found["cells"][0].keys() == set()


def test_parts_have_names_of_their_own() -> None:
    for draft in FULL.drafts:
        names = [part.name for part in parts_of(draft)]
        assert len(set(names)) == len(names)


def test_the_page_says_what_was_measured() -> None:
    """Who measures again runs benchmarks/overlap_plots.py with --page."""
    results = json.loads(RESULTS.read_text())
    assert results["headlines"].keys() >= HEADLINES
    page = (ROOT / "docs" / "performance.md").read_text()
    assert put_into(page, "overlap", overlap_tables.SCRIPT, tables(results)) == page


def test_both_sides_of_the_aims_are_in_the_tables() -> None:
    results = json.loads(RESULTS.read_text())
    assert len(results["drafts"]) >= 3
    text = tables(results)
    for draft in results["drafts"]:
        for hits in draft["on_hits"]:
            assert f"| {hits['round_over_max']:.2f} |" in text
    for temperature in ("0", "1"):
        assert f"| 0.95 | {temperature} |" in text
