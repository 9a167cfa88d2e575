"""The arithmetic of the drift, against the rule itself."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.typical_drift import (
    EXACT,
    RULES,
    TYPICAL,
    Estimate,
    Stream,
    headlines,
    kinds_of,
    measure,
    summarise,
    typical_of,
    typical_outcome,
    unreachable_mass,
)
from specdec.core.outputs import SpeculationStats
from specdec.verification.base import Chance, Draft, TargetRows
from specdec.verification.typical import Typical

VOCAB = 5


class NoChance(Chance):
    """Typical leaves nothing to chance."""


def rows(num_rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2.0 * torch.randn(num_rows, VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)


@pytest.mark.parametrize("rule", [Typical(), Typical(0.3, 0.6), Typical(1.0, 1.0), Typical(1e-9, 1e-9)])
def test_the_outcome_is_what_the_rule_emits(rule: Typical) -> None:
    p_RV, q_RV = rows(40, seed=1), rows(40, seed=2)
    emitted_RV = torch.zeros_like(p_RV)
    reached_RV = torch.zeros_like(p_RV, dtype=torch.bool)
    for row, (p_V, q_V) in enumerate(zip(p_RV, q_RV, strict=True)):
        for token_id in range(VOCAB):
            draft = Draft(token_ids=(token_id,), first_position=1, noise_stream="draft")
            verdict = rule.verify(draft, TargetRows(p_rows=torch.stack((p_V, p_V))), NoChance())
            emitted_RV[row, verdict.token_ids[0]] += q_V[token_id]
            reached_RV[row, verdict.token_ids[0]] = True
    assert torch.allclose(typical_outcome(rule, p_RV, q_RV), emitted_RV, atol=1e-14)
    assert torch.allclose(unreachable_mass(rule, p_RV), (p_RV * ~reached_RV).sum(-1), atol=1e-14)


def test_kinds_of_tokens() -> None:
    speculation = SpeculationStats(per_step_drafted=[2, 3], per_step_accepted=[2, 1])
    kinds = ["sampled", "drafted", "drafted", "bonus", "drafted", "drafted", "sampled"]
    assert kinds_of(7, speculation) == kinds
    assert kinds_of(5, speculation) == kinds[:5]


def test_measures_of_a_stream() -> None:
    p_RV, q_RV = rows(6, seed=3), rows(6, seed=4)
    speculation = SpeculationStats(
        num_drafts=2, num_accepted_tokens=2, per_step_drafted=[1, 2], per_step_accepted=[1, 1]
    )
    stream = Stream(prompt=(1, 2), token_ids=(0, 1, 2, 3, 4, 0), speculation=speculation)
    exact = measure(stream, p_RV, q_RV, None)
    terms = [math.log(p_RV[row, token_id]) for row, token_id in enumerate(stream.token_ids)]
    entropies = -(p_RV * p_RV.log()).sum(-1)
    assert exact["loss"] == pytest.approx(-sum(terms) / 6)
    assert exact["loss_excess"] == pytest.approx(exact["loss"] - float(entropies.mean()))
    assert exact["tokens_per_round"] == 2.0
    found = measure(stream, p_RV, q_RV, Typical())
    bonus = 1.0 - float(p_RV[2].max())
    assert found["total_variation_bonus"] == pytest.approx(bonus)
    # One of the six was sampled, one is a bonus, three came of drafts, the last is sampled again.
    assert found["total_variation"] == pytest.approx((3 * found["total_variation_drafted"] + bonus) / 6)
    assert exact.items() <= found.items()


def test_what_is_sampled_has_no_excess() -> None:
    """Control: in the mean, over p."""
    p_RV = rows(1, seed=5)
    excess = 0.0
    for token_id in range(VOCAB):
        stream = Stream(prompt=(1,), token_ids=(token_id,) * 4, speculation=SpeculationStats())
        excess += p_RV[0, token_id] * measure(stream, p_RV.expand(4, -1), p_RV, None)["loss_excess"]
    assert excess == pytest.approx(0.0, abs=1e-12)


def test_drift_is_of_pairs() -> None:
    cells = [
        {
            "rule": rule,
            "temperature": 1.0,
            "per_prompt": [
                {
                    "loss": base + drift,
                    "loss_excess": 0.1 * base,
                    "tokens_per_round": 2.0,
                    "total_variation": 0.5,
                }
                for base in (1.0, 5.0)
            ],
        }
        for rule, drift in ((EXACT, 0.0), ("block", 0.25), (TYPICAL, -0.5))
    ]
    summarise(cells)
    assert cells[1]["summary"]["loss_drift"] == Estimate(mean=0.25, error=0.0)  # type: ignore[index]
    numbers = headlines({"cells": cells})
    assert numbers["typical_loss_drift"] == -0.5
    assert numbers["typical_total_variation"] == 0.5


def test_parameters_are_those_of_the_engine() -> None:
    found = {name: typical_of(name) for name in RULES}
    assert [name for name, rule in found.items() if rule is not None] == [TYPICAL, "typical 0.3 0.6"]
    for rule, expected in ((found[TYPICAL], (0.09, 0.3)), (found["typical 0.3 0.6"], (0.3, 0.6))):
        assert rule is not None
        assert (rule.epsilon, rule.delta) == expected
