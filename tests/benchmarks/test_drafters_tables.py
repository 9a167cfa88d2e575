"""The page that compares families of drafters: its tables and its picture come from the raw results alone."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.drafter_claims import CLAIMS, ORDER
from benchmarks.drafter_families import FAMILIES, PLAIN
from benchmarks.drafter_texts import CLASSES
from benchmarks.drafters_plan import FULL, INFLATED
from benchmarks.drafters_plots import NOTHING, PICTURE, SCRIPT, TREES, main, page_of
from benchmarks.drafters_tables import Costs, measured, published, trees, unsure_of
from benchmarks.pages import begin_of, end_of, put_into
from benchmarks.report import PairedRatio, to_plain
from specdec.core.errors import UserError
from tests.benchmarks.drafter_cells import a_cell, some_cells

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "drafters" / "comparison.md"
TREES_PAGE = ROOT / "docs" / "drafters" / "trees.md"
RESULTS = ROOT / "benchmarks" / "results" / "drafters.json"
EMPTY_PAGE = "\n\n".join(
    (
        "before",
        *(line for part in ("measured", "published") for line in (begin_of(part, SCRIPT), end_of(part))),
        "behind\n",
    )
)


def as_read(results: dict[str, Any]) -> dict[str, Any]:
    """As they come back from the file."""
    read: dict[str, Any] = json.loads(json.dumps(to_plain(results)))
    return read


def results_of(cells: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return as_read({"plan": FULL, "cells": cells, **more})


def test_results_become_tables_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = results_of(some_cells(), missing=["medusa"], short=["a"], shortened="b")
    (tmp_path / "results.json").write_text(json.dumps(results))
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text(EMPTY_PAGE)
    other = tmp_path / "trees.md"
    other.write_text(f"{begin_of(TREES, SCRIPT)}\n{end_of(TREES)}\n")
    for _ in range(2):  # what is written can be exchanged again
        main(tmp_path / "results.json", tmp_path / "images", page, other)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("behind\n")
    assert text == page_of(EMPTY_PAGE, results, f"../images/{PICTURE}")
    assert "| `eagle_tree` | `eagle` |" in other.read_text()
    assert "| eagle | 0 | 2 | 1.50 | 0.50 | 1.20 | 0.10 | 1.40 (1.40-1.40) | 1.40 |" in text
    assert "| 1.40 | 1.15 | 1.25 | 1.21 (1.21-1.21) |" in text
    assert "| eagle | 1.40 (140/s, 1.50, 1.21) | 0.90 (90/s, 1.50, 0.78) | 4.00 (" in text
    assert "| eagle | 12.0 | 12.0 | 0.50 M | 4.1 M | 10 |" in text
    assert "Measured 2026-01-02 to 2026-01-03 at commit 000000000000, 111111111111, P, 2 threads" in text
    assert "Below the aim:\n\n- a\n\nCut short, because of the time that a cell may take: b.\n\n###" in text
    picture = (tmp_path / "images" / PICTURE).read_text()
    for label in ("eagle", "ngram", "batch 32", "inflated, temperature 0"):
        assert label in picture


def test_shares_that_say_nothing_are_named_and_are_not_the_worst() -> None:
    cells = some_cells()
    for at, values in ((1, (0.3, 0.9, 1.4, 0.7)), (3, (0.2, 0.9, 1.5, 0.7))):
        cells[at]["share_of_possible"] = PairedRatio(values)
    text = measured(results_of([*cells, a_cell("medusa", dict.fromkeys(CLASSES, 110.0))]), PICTURE)
    assert "4 of 6 drafting cells have bounds that are at most 1.38 apart" in text
    assert "The worst share of these is 0.95 (0.95-0.95): `medusa`, inflated, batch 1, temperature 0." in text
    assert "The other 2 are too uncertain" in text
    assert "By the bounds 4 of all 6 cells have 0.85 of what is possible or more, and 0 have less" in text
    assert "of the other 2 neither is certain" in text
    assert "- inflated, batch 1, temperature 0: `ngram`\n- inflated, batch 32, temperature 0: `eagle`" in text
    assert unsure_of(results_of(cells)["cells"]) == [
        "inflated, batch 1, temperature 0: `ngram`",
        "inflated, batch 32, temperature 0: `eagle`",
    ]


def test_what_was_not_measured_is_said() -> None:
    text = measured(results_of(some_cells(), missing=["hydra_plus"]), PICTURE)
    assert f"| medusa | 0 | not measured |{' - |' * 11}\n" in text
    assert "| medusa | not measured | not measured | not measured |" in text, "by batch size"
    assert f"| medusa |{' not measured |' * 5}\n" in text, "what it takes"
    num_planned = 12 * len(FAMILIES)
    assert f"{num_planned - 6} of the {num_planned} that are planned. For want" in text
    assert "of trained heads: `hydra_plus`.\n\n- inflated, batch 1: all families but `eagle`\n" in text
    assert "- demo, batch 1: all families\n- inflated, batch 8: all families\n" in text


def test_a_plan_that_was_measured_leaves_nothing_to_say() -> None:
    plan = dataclasses.replace(FULL, targets=(INFLATED,), batches=(1,), temperatures=(0.0,))
    cells = [a_cell(family.name, dict.fromkeys(CLASSES, 110.0)) for family in FAMILIES]
    assert "not measured" not in measured(results_of(cells, plan=plan), PICTURE)
    text = measured(results_of([*cells[:3], *cells[4:]], plan=plan), PICTURE)
    assert text.endswith(f"\n\n1 of the {len(cells)} that are planned.\n\n- inflated, batch 1: `suffix_tree`")


def test_a_gpu_is_named() -> None:
    cells = [{**cell, "gpu": "cuda NVIDIA"} for cell in some_cells()]
    assert "at commit 000000000000, 111111111111, cuda NVIDIA, bf16." in measured(results_of(cells), PICTURE)


def test_a_page_needs_places_for_tables() -> None:
    with pytest.raises(UserError, match="needs a line <!-- measured: written"):
        page_of("a page without a place", None, PICTURE)
    with pytest.raises(UserError, match="<!-- published: end"):
        put_into(begin_of("published", SCRIPT), "published", SCRIPT, "")


def test_claims_are_of_all_families_that_are_of_a_paper() -> None:
    claimed = [name for claim in CLAIMS for name in claim.families]
    assert len(set(claimed)) == len(claimed)
    combinations = {"lookup_first", "lookup_first_eagle"}
    assert set(claimed) == {family.name for family in FAMILIES} - {PLAIN, *combinations}
    assert set(ORDER) < set(claimed)


def test_claims_stand_beside_what_was_measured() -> None:
    cells = [
        a_cell("medusa", dict.fromkeys(CLASSES, 90.0)),
        a_cell("medusa_tree", {"code": 100.0, "docstring": 100.0, "repeated": 800.0}),
        a_cell("eagle", dict.fromkeys(CLASSES, 300.0), batch=8),
    ]
    lines = published(results_of(cells)["cells"]).splitlines()
    medusa = next(line for line in lines if line.startswith("| `medusa`, `medusa_tree` |"))
    assert "[2401.10774](https://arxiv.org/abs/2401.10774)" in medusa
    assert "`medusa_tree` 2.00 (code 1.00, docstring 1.00, repeated 8.00)" in medusa, "the best of the line"
    assert "1.50 / (1.20 + 0.10)" in medusa
    eagle = next(line for line in lines if line.startswith("| `eagle` |"))
    assert "| not measured | not measured |" in eagle, "not one request at a time"
    assert len(published([]).splitlines()) == 2 + len(CLAIMS)


def test_a_factor_between_two_families_is_taken_apart() -> None:
    cells = [
        a_cell("medusa", dict.fromkeys(CLASSES, 120.0)),
        a_cell("hydra", dict.fromkeys(CLASSES, 180.0), tokens_per_pass=2.0, draft_s=0.008),
        a_cell("eagle3", dict.fromkeys(CLASSES, 150.0), tokens_per_pass=2.0, draft_s=0.008),
    ]
    results = results_of(cells)
    medusa, hydra, _ = (Costs.of(cell) for cell in results["cells"])
    assert (medusa.tokens, hydra.tokens) == (pytest.approx(1.5), pytest.approx(2.0))
    assert hydra.verify == pytest.approx(1.2)
    assert hydra.draft == pytest.approx(0.8)
    assert hydra.tokens / hydra.whole * hydra.rest == pytest.approx(1.8), "the speedup"
    text = measured(results, PICTURE)
    tokens, cost = 2.0 / 1.5, 2.0 / 1.3
    rest = 1.5 / (tokens / cost)
    assert f"| 1.50 = {tokens:.2f} / {cost:.2f} x {rest:.2f} |" in text
    assert "As published: `hydra` over `medusa`. The other way round: `eagle3` over `hydra`." in text
    assert "As published" not in measured(results_of(cells[:1]), PICTURE)
    wide = copy.deepcopy(results["cells"])
    wide[2]["speedup"]["upper"] = 1.9
    wide[0]["measured"] = {**wide[0]["measured"], "cpu_capability": "AVX2"}
    vague = measured({**results, "cells": wide}, PICTURE)
    apart = "Not told apart: `hydra` over `medusa` (measured on different processors); "
    assert f"{apart}`eagle3` over `hydra` (bounds overlap)." in vague


def test_trees_stand_beside_chains_of_the_same_drafter() -> None:
    cells = [
        *some_cells(),
        a_cell("eagle_tree", dict.fromkeys(CLASSES, 120.0)),
        a_cell("eagle_tree", dict.fromkeys(CLASSES, 70.0), batch=32),
    ]
    head, _, *lines = trees(results_of(cells)["cells"]).splitlines()
    assert head == (
        "| trees | chains | chains, temperature 0 | trees, temperature 0 "
        "| chains, temperature 0.7 | trees, temperature 0.7 |"
    )
    speedups = "1.40 (1.40-1.40) | 1.20 (1.20-1.20) | 4.00 (4.00-4.00) | not measured"
    assert f"| `eagle_tree` | `eagle` | {speedups} |" in lines
    drafting_trees = {one.name for one in FAMILIES if "'tree'" in str(one.settings)}
    assert {one.name for one in FAMILIES if one.chain is not None} == drafting_trees
    assert len(lines) == len(drafting_trees)


def test_the_page_of_trees_is_what_the_results_say() -> None:
    page = TREES_PAGE.read_text()
    table = trees(json.loads(RESULTS.read_text())["cells"])
    assert page == put_into(page, TREES, SCRIPT, table)


def test_the_page_is_what_the_results_say() -> None:
    """After a change of claims or results: `python -m benchmarks.drafters_plots` (its docstring says how)."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else None
    page = PAGE.read_text()
    assert page == page_of(page, results, f"../images/{PICTURE}")
    if results is None:
        assert NOTHING in page
    else:
        assert (ROOT / "docs" / "images" / PICTURE).exists()
