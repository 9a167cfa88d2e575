"""Tables of what a GPU has shown of drafters: what the raw results say, and what the pages hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_drafter_tables import FAMILIES, HEADS, SCRIPT, families_table, heads_table
from benchmarks.pages import put_into

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DRAFTERS = ROOT / "docs" / "drafters"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_the_pages_are_what_the_results_say() -> None:
    training, comparison = ((DRAFTERS / name).read_text() for name in ("training.md", "comparison.md"))
    heads = heads_table(read("gpu-heads"))
    families = families_table(read("drafters-gpu"), read("drafters-gpu-before"))
    assert training == put_into(training, HEADS, SCRIPT, heads)
    assert comparison == put_into(comparison, FAMILIES, SCRIPT, families)


def test_heads_read_as_many_tokens_each_and_accept_in_the_published_order() -> None:
    heads = read("gpu-heads")["heads"]
    assert len({one["trained_tokens"] for one in heads.values()}) == 1
    ladder = ("medusa", "hydra", "hydra_plus", "eagle", "eagle3_paper")
    for temperature in ("0.0", "0.7"):
        accepted = [heads[name]["acceptance"][temperature] for name in ladder]
        assert {one["k"] for one in accepted} == {4}
        assert [one["tokens_per_round"] for one in accepted] == sorted(
            one["tokens_per_round"] for one in accepted
        )


def test_what_was_not_measured_is_no_number() -> None:
    before = read("drafters-gpu-before")
    (now,) = (cell for cell in read("drafters-gpu")["cells"] if cell["cell"]["family"] == "eagle3")
    lines = families_table({"cells": [now]}, before).splitlines()
    (eagle3,) = (line for line in lines if line.startswith("| `eagle3`"))
    assert eagle3.endswith("| - | - |")
    (lookahead,) = (line for line in lines if line.startswith("| `lookahead` | 0 |"))
    assert "| - | - | - |" in lookahead
    assert not any("| 8 |" in line and "`hydra_plus`" in line for line in lines), "one request at a time"
