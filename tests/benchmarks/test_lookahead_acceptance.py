"""The counting of what Lookahead decoding brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lookahead_acceptance import SETTINGS, PassCounter, headlines, prompts_by_class, summarise
from specdec.engine.targets.toy_target import ToyTarget
from tests.specdec.engine.toy_engines import GREEDY, MODEL, OracleProposer, request, run, toy_engine


def test_passes_are_verifications_of_a_request() -> None:
    counter = PassCounter(ToyTarget(MODEL))
    engine = toy_engine(OracleProposer(), target=counter, num_draft_tokens=4, max_num_batched_tokens=12)  # type: ignore[arg-type]
    run(engine, request("a", range(16), GREEDY), request("b", [1, 2, 3], GREEDY))
    assert counter.passes == {"a": 5, "b": 5}  # one token behind the prompt, then 19 by 5


def test_tokens_per_pass_are_those_of_all_requests_and_errors_those_of_each() -> None:
    summary = summarise([30, 10], [10, 10])
    assert summary["tokens_per_pass"] == 2.0
    assert summary["error"] == pytest.approx(1.0)
    assert summary["num_passes"] == 20
    cell = {"temperature": 0.7, "class": "code", "setting": "W 3, N 3, G 4", **summary}
    assert headlines({"cells": [cell]}) == {"tokens_per_pass_w_3_n_3_g_4_code_t0.7": 2.0}


def test_prompts_are_taken_class_by_class(tmp_path: Path) -> None:
    lines = [{"class": name, "prompt": f"{name}{index}"} for index in range(3) for name in ("x", "y")]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert prompts_by_class(path, 2) == {"x": ["x0", "x1"], "y": ["y0", "y1"]}


def test_settings() -> None:
    assert {name: one.num_rows_beside for name, one in SETTINGS.items()} == {
        "W 3, N 3, G 4": 5,
        "W 5, N 4, G 5": 14,
        "W 5, N 4, G 5, window alone": 14,
        "W 7, N 5, G 7": 27,
        "ngram, k 4": 0,
    }
