"""What is compared of recipes of heads: rows, what agreement is, and that trials learn apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.head_recipes import InTraining, Plan, States, Trial, headlines, rows_of
from benchmarks.head_recipes_table import with_table
from specdec.drafters.eagle3 import Eagle3

MODELS = Path("models/demo")


def test_rows_are_beginnings_of_texts_in_another_order() -> None:
    texts = [[5, 6], [7, 8, 9], list(range(20, 50))]
    rows = rows_of(iter(texts), 1, 6, 3)
    assert sorted(rows.tolist()) == [
        [1, 5, 6],
        [1, 7, 8],
        [9, 1, 20],
        [21, 22, 23],
        [24, 25, 26],
        [27, 28, 29],
    ]
    assert rows.tolist() != sorted(rows.tolist())
    assert torch.equal(rows, rows_of(texts, 1, 6, 3))
    with pytest.raises(AssertionError, match="20 tokens, not 24"):
        rows_of(texts, 1, 8, 3)


def test_trials_differ_in_what_their_lines_say_and_learn() -> None:
    torch.manual_seed(0)
    states = States(MODELS)
    tokens = torch.randint(4, 400, (1, 24))
    rows = states.rows(tokens)
    counts = torch.bincount(tokens.flatten(), minlength=states.parts.vocab_size)
    plan = Plan(num_steps=11)
    trials = (
        Trial(name="own", draft_vocab_size=512, starts_from_target=False),
        Trial(name="late", draft_vocab_size=512, fused_layers=(2, 5, 7)),
        Trial(name="eagle", is_eagle=True),
    )
    heads = [InTraining(trial, plan, states.parts, counts) for trial in trials]
    own, late = (one.head for one in heads[:2])
    assert isinstance(own, Eagle3)
    assert isinstance(late, Eagle3)
    assert own.hidden_layers == (2, 4, 5)
    assert late.hidden_layers == (2, 5, 7)
    known = late.vocabulary
    assert known is not None
    target_rows = states.parts.head.weight[known.target_ids]
    assert torch.equal(late.lm_head.weight, target_rows)
    assert not torch.equal(own.lm_head.weight, target_rows)
    for step in range(plan.num_steps):
        for one in heads:
            one.learn(step, rows.read_by(one.head))
    for one in heads:
        assert one.losses[-1] < one.losses[0], "of the same rows"
    asked = [rows.asked_of(one.head) for one in heads]
    assert asked[2]["known"] == 1.0
    for found in asked:
        assert found["agreement"] <= found["known"]


def test_headlines_name_trials_and_heads() -> None:
    one = {"name": "eagle", "agreement": 0.5, "known": 1.0}
    there = {"eagle3": {"agreement": 0.25}}
    assert headlines({"trials": [one], "there": there}) == {
        "agreement_eagle": 0.5,
        "agreement_there_eagle3": 0.25,
    }


def test_the_page_has_the_table_of_the_raw_results() -> None:
    page = Path("docs/drafters/training.md").read_text()
    results = json.loads(Path("benchmarks/results/head-recipes.json").read_text())
    assert page == with_table(page, results)
    for name in ("eagle3_late_started", "models/demo/heads/eagle3"):
        assert f"| `{name}` |" in page
