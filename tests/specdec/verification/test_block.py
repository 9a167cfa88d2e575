"""Block verification: the exact output distribution, what it gains, and noise that must not be used twice."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest
import torch
from scipy import stats

from specdec.sampling.noise import gumbel, round_seed, uniform
from specdec.tree.topology import chain
from specdec.verification.base import Draft, TargetRows
from specdec.verification.block import Block, weights_of
from specdec.verification.chance import CounterChance
from specdec.verification.rejection import Rejection
from tests.specdec.verification.drafting import (
    EXACT,
    PREFIX,
    as_draft,
    distance,
    emitted_by,
    mean_length,
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

RULE = Block()


def test_a_draft_that_ends_by_what_was_drawn_is_exact() -> None:
    """A drafter may stop early, at a token of its own that ends the text, say."""
    target, model = random_model(3, seed=8), random_model(3, seed=9)

    def run(chance: BranchingChance) -> Tokens:
        tokens: list[int] = []
        while len(tokens) < 3 and 2 not in tokens:
            tokens.append(chance.choose(model.row((*PREFIX, *tokens)).tolist()))
        q_rows = torch.stack([model.row((*PREFIX, *tokens[:index])) for index in range(len(tokens))])
        return tokens_after(RULE, target, as_draft(chain(len(tokens)), tokens, q_rows), chance)

    assert distance(target, chain(3), outcomes(run)) < EXACT


@pytest.mark.parametrize(("num_drafted", "seed"), [*product((1, 2), range(10)), (3, 0), (3, 1)])
def test_it_never_keeps_less_than_rejection(num_drafted: int, seed: int) -> None:
    target, model = random_model(3, seed=seed), random_model(3, seed=30 + seed)
    block, token = (
        mean_length(emitted_by(rule, target, model, chain(num_drafted), without_replacement))
        for rule in (RULE, Rejection())
    )
    if num_drafted == 1:
        assert block == pytest.approx(token, abs=EXACT)
    assert block >= token - EXACT


def test_what_it_gains() -> None:
    """The example of section 2 of the paper: p = (1/3, 2/3), q = (2/3, 1/3) at every position, two tokens."""
    p, q = torch.tensor([1 / 3, 2 / 3]).double(), torch.tensor([2 / 3, 1 / 3]).double()
    target, model = MarkovModel(p.repeat(2, 1)), MarkovModel(q.repeat(2, 1))
    block, token = (
        mean_length(emitted_by(rule, target, model, chain(2), without_replacement)) - 1
        for rule in (RULE, Rejection())
    )
    assert token == pytest.approx(10 / 9, abs=EXACT)
    assert block == pytest.approx(11 / 9, abs=EXACT)


def test_weights() -> None:
    q_rows = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]]).double()
    p_rows = torch.tensor([[0.25, 0.75], [0.5, 0.5], [0.9, 0.1], [0.5, 0.5]]).double()
    draft = Draft(token_ids=(0, 0, 1), first_position=1, noise_stream="draft", q_rows=q_rows)
    assert weights_of(draft, p_rows) == pytest.approx([1.0, 0.5, 1.0, 0.2])
    one_hot = Draft(token_ids=(0, 0, 1), first_position=1)
    assert weights_of(one_hot, p_rows) == pytest.approx([1.0, 0.25, 0.125, 0.0125])


# ---- what must fail -----------------------------------------------------------------------------


def test_control_the_residual_of_rejection() -> None:
    """After a block the residual is of w p: that of p is the token rule's."""
    p = torch.tensor([[0.0, 0.4, 0.6], [1 / 3, 1 / 3, 1 / 3], [1 / 3, 1 / 3, 1 / 3]]).double()
    q = torch.tensor([[0.0, 0.6, 0.4], [0.05, 0.25, 0.7], [0.05, 0.25, 0.7]]).double()
    target, model = MarkovModel(p / p.sum(-1, keepdim=True)), MarkovModel(q)

    def run(chance: BranchingChance) -> Tokens:
        draft = without_replacement(model, chain(2), chance)
        found = RULE.verify(draft, TargetRows(p_rows=p_rows_of_chain(target, draft)), NoResidual(chance))
        if found.num_accepted == 2:
            return found.token_ids
        kept = (*PREFIX, *found.token_ids[:-1])
        weights = (target.row(kept) - model.row(kept)).clamp(min=0.0)
        return (*found.token_ids[:-1], chance.draw_residual(weights, 1))

    assert distance(target, chain(2), outcomes(run)) > 0.01


class NoResidual:
    """Leaves the residual to its user."""

    def __init__(self, chance: BranchingChance) -> None:
        self.accept = chance.accept
        self.draw_target = chance.draw_target

    def draw_residual(self, weights: torch.Tensor, position: int) -> int:
        return 0


def p_rows_of_chain(target: MarkovModel, draft: Draft) -> torch.Tensor:
    return torch.stack([target.row((*PREFIX, *draft.token_ids[:n])) for n in range(draft.num_tokens + 1)])


class UniformsByPosition(CounterChance):
    """Tests draft token i with the uniform of its own position, which the next round looks at again."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._own_seed = seed

    def accept(self, probability: float, position: int, test: int) -> bool:
        return uniform(self._own_seed, position + test, 0, "accept") < probability


def p_value_of_rounds(chance: type[CounterChance], *, keyed_by_round: bool) -> float:
    """Chi-square of four tokens, decoded by rounds of three drafts with counter-based noise, against p."""
    target, model = random_model(3, seed=11, sharpness=0.7), random_model(3, seed=12, sharpness=0.7)
    log_q = model.matrix.log().tolist()
    num_streams, length = 10_000, 4
    counts: Counter[Tokens] = Counter()
    for seed in range(num_streams):
        prefix: Tokens = PREFIX
        while len(prefix) <= length:
            noise_seed = round_seed(seed, len(prefix)) if keyed_by_round else seed
            drafted = prefix
            for _ in range(3):
                scores = [
                    log_q[drafted[-1]][token] + gumbel(noise_seed, len(drafted), token, "draft")
                    for token in range(3)
                ]
                drafted = (*drafted, scores.index(max(scores)))
            before = list(drafted[len(prefix) - 1 :])
            draft = Draft(
                token_ids=drafted[len(prefix) :],
                first_position=len(prefix),
                noise_stream="draft",
                q_rows=model.matrix[before[:-1]],
            )
            verdict = RULE.verify(draft, TargetRows(p_rows=target.matrix[before]), chance(seed))
            prefix = (*prefix, *verdict.token_ids)
        counts[prefix[1 : length + 1]] += 1
    sequences = list(product(range(3), repeat=length))
    expected = [target.sequence_probability(PREFIX, tokens) * num_streams for tokens in sequences]
    assert math.isclose(sum(expected), num_streams)
    return float(stats.chisquare([counts[tokens] for tokens in sequences], expected).pvalue)


@pytest.mark.slow
def test_rounds_are_exact() -> None:
    assert p_value_of_rounds(CounterChance, keyed_by_round=True) > 1e-4


@pytest.mark.full
@pytest.mark.slow
def test_control_draft_noise_used_again_in_the_next_round() -> None:
    """What was drafted behind the kept prefix had a part in its being cut there: it is no fresh noise."""
    assert p_value_of_rounds(CounterChance, keyed_by_round=False) < 1e-10


@pytest.mark.full
@pytest.mark.slow
def test_control_uniforms_used_again_in_the_next_round() -> None:
    assert p_value_of_rounds(UniformsByPosition, keyed_by_round=True) < 1e-10
