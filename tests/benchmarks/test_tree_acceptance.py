"""The counting of what trees bring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.tree_acceptance import SHAPES, Tally, chain, headlines, path_along, summarise
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal


def test_the_path_that_a_text_goes_along() -> None:
    proposal = Proposal(
        request_id=RequestId("a"),
        committed_len=3,
        prefix_hash=0,
        token_ids=(5, 6, 7, 8),
        parents=(-1, -1, 1, 2),
    )
    assert path_along(proposal, [6, 7, 9]) == (1, 2)
    assert path_along(proposal, [6, 7, 8, 1]) == (1, 2, 3)
    assert path_along(proposal, [1]) == ()


def test_tokens_per_pass_are_those_of_all_rounds_and_errors_those_of_streams() -> None:
    summary = summarise([Tally(30, 10), Tally(10, 10), Tally(0, 0)])
    assert summary["tokens_per_pass"] == 2.0
    assert summary["error"] == pytest.approx(1.0)
    assert summary["num_rounds"] == 20
    cells = [{"temperature": 0.7, "by": "noise", "shape": "static 4, 2, 1", **summary}]
    assert headlines({"cells": cells}) == {"tokens_per_pass_static_4_t0.7_noise": 2.0}


def test_shapes() -> None:
    assert chain(3).parents == (-1, 0, 1)
    assert all(shape.max_nodes >= 4 for shape in SHAPES.values())


def test_the_page_says_what_was_measured() -> None:
    root = Path(__file__).parents[2]
    cells = json.loads((root / "benchmarks" / "results" / "tree-acceptance.json").read_text())["cells"]
    page = (root / "docs" / "drafters" / "trees.md").read_text()
    for by in ("noise", "probability"):
        for temperature in (0.7, 1.0):
            own = [cell for cell in cells if (cell["by"], cell["temperature"]) == (by, temperature)]
            assert {cell["shape"] for cell in own} == {*SHAPES, "best"}
            row = next(line for line in page.splitlines() if line.startswith(f"| {temperature:g}, {by} |"))
            said = [float(column.split()[0]) for column in row.strip("|").split("|")[1:]]
            assert sorted(said) == sorted(round(cell["tokens_per_pass"], 2) for cell in own)
