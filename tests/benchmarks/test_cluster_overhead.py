"""The arithmetic of the comparison."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.cluster_overhead import Pair, headlines, summarise
from benchmarks.streams import StreamedRun


def run(seconds: float, first_token_s: float, token_ids: tuple[int, ...] = (1, 2)) -> StreamedRun:
    return StreamedRun(token_ids=(token_ids,), seconds=seconds, first_token_s=first_token_s, num_outputs=11)


def test_what_is_added_is_per_round_after_the_first_token() -> None:
    pair = Pair(local=run(0.150, 0.050), cluster=run(0.167, 0.052))
    assert pair.added_ms_per_round == pytest.approx(1.5)  # 115 - 100 ms, ten rounds after the first token
    assert pair.added_ms_first_token == pytest.approx(2.0)


def test_medians_are_of_pairs_and_texts_are_compared() -> None:
    pairs = [Pair(run(1.0, 0.1), run(seconds, 0.1)) for seconds in (2.0, 1.25, 4.0)]
    result = summarise(pairs, {})
    assert result["cluster_vs_inprocess"].median == 0.5
    assert result["same_text"]
    assert not summarise([*pairs, Pair(run(1, 0), run(1, 0, (1, 3)))], {})["same_text"]


def test_every_cell_has_headlines_of_its_own() -> None:
    cell = summarise([Pair(run(1.0, 0.1), run(2.0, 0.2))], {})
    cells = [{"target": t, "batch": b, **cell} for t in ("demo", "inflated") for b in (1, 8)]
    numbers = headlines({"cells": cells})
    assert len(numbers) == 12
    assert numbers["cluster_vs_inprocess_b1"] == numbers["cluster_vs_inprocess_demo_b8"] == 0.5
    assert all(a != b for a, b in pairwise(sorted(numbers)))
