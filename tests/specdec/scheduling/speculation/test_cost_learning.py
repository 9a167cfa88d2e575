"""What rounds teach of costs, and what prompts take of a round."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.scheduling.speculation.controller import RoundObservation
from specdec.scheduling.speculation.cost import CostModel
from specdec.scheduling.speculation.cost_learning import CostLearning
from specdec.scheduling.speculation.evidence import Overheads
from tests.specdec.scheduling.speculation.world import COSTS, profile_of

DECISION: Any = SimpleNamespace(batch=SimpleNamespace(context_tokens=400.0))
PLAIN = RoundObservation(
    num_rows=4,
    num_sequences=4,
    num_committed=4,
    draft_s=0.0,
    verify_s=0.02,
    round_s=0.025,
    outcomes=[],
    context_tokens=400,
)


def learning() -> tuple[CostLearning, CostModel, Overheads]:
    costs = CostModel(profile_of(COSTS["cpu"]), max_rows=64, max_sequences=16, max_steps=8)
    overheads = Overheads()
    return CostLearning(costs, overheads, has_several_drafters=False), costs, overheads


def test_steps_that_take_longer_and_what_lies_between_them() -> None:
    learnt, costs, overheads = learning()
    before = float(costs.verify.table(4, 400.0)[4])
    for _ in range(64):
        learnt.note(PLAIN, DECISION)
    after = float(costs.verify.table(4, 400.0)[4])
    assert abs(after - 0.02) < abs(before - 0.02)
    assert overheads.of(4, has_drafts=False) == pytest.approx(0.005)


def test_a_round_without_the_prompts_in_it_is_shorter() -> None:
    learnt, _, _ = learning()
    assert learnt.own_s(PLAIN, "plain", 0.025) == 0.025
    with_prompts = replace(PLAIN, num_rows=44, num_prompt_rows=40)
    assert learnt.own_s(with_prompts, "plain", 0.025) < 0.025
