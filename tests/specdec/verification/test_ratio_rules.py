"""What every rule that weighs p against q must pass on chains, whatever else it does with trees."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from specdec.tree.topology import chain
from specdec.verification.base import VerificationRule
from specdec.verification.block import Block
from specdec.verification.multi_round import MultiRound
from specdec.verification.reference import Model, block_round, multi_round, rejection_round
from specdec.verification.rejection import Rejection
from tests.specdec.verification.drafting import (
    CHAINS,
    EXACT,
    PREFIX,
    Drafter,
    as_draft,
    distance,
    emitted_by,
    most_likely,
    p_value_of_rounds,
    tokens_after,
    without_replacement,
)
from tests.specdec.verification.enumeration import (
    BranchingChance,
    MarkovModel,
    Tokens,
    outcomes,
    random_model,
)

RULES = [Rejection(), Block(), MultiRound()]
EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def multi_round_of_a_chain(
    p: Model, q: Model, prefix: Tokens, num_drafted: int, rng: random.Random
) -> Tokens:
    return multi_round(p, q, prefix, (1,) * num_drafted, rng)


@EACH_RULE
@pytest.mark.parametrize("num_drafted", range(len(CHAINS)))
@pytest.mark.parametrize("drafter", [without_replacement, most_likely])
@pytest.mark.parametrize("holes", [False, True])
def test_chains_are_exact(rule: VerificationRule, num_drafted: int, drafter: Drafter, holes: bool) -> None:
    target = random_model(3, seed=num_drafted, holes=holes)
    model = random_model(3, seed=100 + num_drafted)  # all of it can be drawn
    emitted = emitted_by(rule, target, model, chain(num_drafted), drafter)
    assert distance(target, chain(num_drafted), emitted) < EXACT


@EACH_RULE
@pytest.mark.parametrize("seed", range(10))
def test_larger_vocabularies_are_exact(rule: VerificationRule, seed: int) -> None:
    vocab_size = 4 + seed % 2
    target, model = random_model(vocab_size, seed=seed), random_model(vocab_size, seed=20 + seed)
    emitted = emitted_by(rule, target, model, chain(2), without_replacement)
    assert distance(target, chain(2), emitted) < EXACT


@EACH_RULE
def test_disjoint_supports_are_exact(rule: VerificationRule) -> None:
    halves = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=torch.float64)
    target, model = MarkovModel(halves[[0, 0, 0, 0]]), MarkovModel(halves[[1, 1, 1, 1]])
    emitted = emitted_by(rule, target, model, chain(2), without_replacement)
    assert distance(target, chain(2), emitted) < EXACT


@EACH_RULE
def test_the_same_distributions_are_always_accepted(rule: VerificationRule) -> None:
    model = random_model(4, seed=3)
    emitted = emitted_by(rule, model, model, chain(3), without_replacement)
    assert sum(probability for tokens, probability in emitted.items() if len(tokens) < 4) < EXACT


@EACH_RULE
def test_a_single_draft_is_accepted_as_often_as_theory_says(rule: VerificationRule) -> None:
    target, model = random_model(4, seed=8), random_model(4, seed=9)
    emitted = emitted_by(rule, target, model, chain(1), without_replacement)
    accepted = sum(probability for tokens, probability in emitted.items() if len(tokens) == 2)
    overlap = torch.minimum(target.row(PREFIX), model.row(PREFIX)).sum().item()
    assert accepted == pytest.approx(overlap, abs=EXACT)


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("rule", "oracle"),
    [(RULES[0], rejection_round), (RULES[1], block_round), (RULES[2], multi_round_of_a_chain)],
    ids=["Rejection", "Block", "MultiRound"],
)
@pytest.mark.parametrize("num_drafted", [1, 2, 3])
def test_the_oracle_agrees(
    rule: VerificationRule,
    oracle: Callable[[Model, Model, Tokens, int, random.Random], Tokens],
    num_drafted: int,
) -> None:
    target, model = random_model(3, seed=8), random_model(3, seed=9)
    exact = emitted_by(rule, target, model, chain(num_drafted), without_replacement)

    def draw_round(rng: random.Random) -> Tokens:
        return oracle(
            lambda prefix: target.row(prefix).tolist(),
            lambda prefix: model.row(prefix).tolist(),
            PREFIX,
            num_drafted,
            rng,
        )

    assert p_value_of_rounds(exact, draw_round) > 1e-4


@EACH_RULE
def test_control_q_at_another_temperature(rule: VerificationRule) -> None:
    target, model = random_model(3, seed=8), random_model(3, seed=9)
    sharper = model.matrix.pow(2) / model.matrix.pow(2).sum(-1, keepdim=True)

    def run(chance: BranchingChance) -> Tokens:
        draft = without_replacement(model, chain(2), chance)
        told = as_draft(chain(2), list(draft.token_ids), sharper[[0, draft.token_ids[0]]])
        return tokens_after(rule, target, told, chance)

    assert distance(target, chain(2), outcomes(run)) > 0.01
