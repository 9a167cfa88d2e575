"""Rejection sampling of chains: the exact output distribution, and what breaks it."""

from __future__ import annotations

import random

import pytest
import torch
from scipy import stats

from specdec.core.proposal import NoiseStream
from specdec.sampling.noise import row_key
from specdec.sampling.noise_rows import as_signed, gumbel_rows
from specdec.tree.topology import chain
from specdec.verification.base import Draft, TargetRows
from specdec.verification.chance import CounterChance
from specdec.verification.ratio import acceptance, residual
from specdec.verification.reference import draw
from specdec.verification.rejection import Rejection
from tests.specdec.verification.drafting import (
    PREFIX,
    distance,
    without_replacement,
)
from tests.specdec.verification.enumeration import (
    BranchingChance,
    Tokens,
    outcomes,
    random_model,
)

RULE = Rejection()


# ---- what must fail: the statistic sees every classic mistake -----------------------------------


def test_control_a_stale_proposal() -> None:
    """Distributions computed after another prefix: nothing in a round can see it, only the prefix hash."""
    target, model = random_model(3, seed=8), random_model(3, seed=9)

    def run(chance: BranchingChance) -> Tokens:
        draft = without_replacement(model, chain(1), chance)
        stale = torch.stack([target.matrix[1], target.matrix[draft.token_ids[0]]])
        return RULE.verify(draft, TargetRows(p_rows=stale), chance).token_ids

    assert distance(target, chain(1), outcomes(run)) > 0.01


class SharedNoise(CounterChance):
    """Draws residuals with the noise that the drafter has used: the mistake that named streams prevent."""

    def __init__(self, seed: int, stream: NoiseStream) -> None:
        super().__init__(seed)
        self._stream = stream

    def draw_residual(self, weights: torch.Tensor, position: int) -> int:
        return self._draw(weights, position, self._stream)


def p_value_of_counter_noise(stream: NoiseStream, *, shared: bool, with_q: bool) -> float:
    """Chi-square of 20,000 single rounds, drafted and verified with counter-based noise, against p."""
    target, model = random_model(4, seed=8, sharpness=1.0), random_model(4, seed=9, sharpness=1.0)
    p, q = target.row(PREFIX), model.row(PREFIX)
    num_rounds = 20_000
    keys = torch.tensor([as_signed(row_key(seed, 1, stream)) for seed in range(num_rounds)])
    drafts = (q.log() + gumbel_rows(keys, 4)).argmax(-1).tolist()
    counts = [0] * 4
    p_rows = torch.stack([p, p])
    for seed, token in enumerate(drafts):
        chance = SharedNoise(seed, stream) if shared else CounterChance(seed)
        draft = Draft(
            token_ids=(token,),
            first_position=1,
            noise_stream="draft" if with_q else None,
            q_rows=q[None] if with_q else None,
        )
        verdict = RULE.verify(draft, TargetRows(p_rows=p_rows), chance)
        counts[verdict.token_ids[0]] += 1
    return float(stats.chisquare(counts, (p * num_rounds).tolist()).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("with_q", [True, pytest.param(False, marks=pytest.mark.full)])
def test_counter_noise_is_exact(with_q: bool) -> None:
    assert p_value_of_counter_noise("draft", shared=False, with_q=with_q) > 1e-4


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("with_q", [True, False])
def test_control_noise_shared_with_the_drafter(with_q: bool) -> None:
    assert p_value_of_counter_noise("draft", shared=True, with_q=with_q) < 1e-10


# ---- edges --------------------------------------------------------------------------------------


def test_nothing_of_probability_zero_is_accepted() -> None:
    p, q = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
    assert acceptance(p, q, 0) == 0.0
    chance = CounterChance(1)
    assert not any(chance.accept(0.0, position, 0) for position in range(1000))
    assert all(chance.accept(1.0, position, 0) for position in range(1000))


def test_an_empty_residual_falls_back_to_p() -> None:
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.equal(residual(p, p.clone(), 0), p)
    one_hot = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert torch.equal(residual(one_hot, None, 1), one_hot)


def test_residuals_leave_their_inputs_alone() -> None:
    p, q = torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5])
    residual(p, q, 0)
    residual(p, None, 0)
    assert p.tolist() == [0.25, 0.75]
    assert q.tolist() == [0.5, 0.5]


def test_a_token_outside_its_q_is_refused() -> None:
    with pytest.raises(ValueError, match="token 1 was drafted although its q is 0"):
        acceptance(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), 1)
    with pytest.raises(ValueError, match="its q is nan"):
        acceptance(torch.tensor([0.5, 0.5]), torch.tensor([1.0, torch.nan]), 1)


def a_draft(
    tokens: tuple[int, ...],
    stream: NoiseStream | None,
    q_rows: torch.Tensor | None,
    parents: tuple[int, ...] | None = None,
) -> Draft:
    return Draft(token_ids=tokens, first_position=5, parents=parents, noise_stream=stream, q_rows=q_rows)


Q = torch.full((2, 3), 1 / 3)
P = torch.full((3, 3), 1 / 3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (a_draft((0, 1), "target", Q), 'stream "target" is biased'),
        (a_draft((0, 1), "target", None), 'stream "target" is biased'),
        (a_draft((0, 1), "accept", Q), 'stream "accept" is biased'),
        (a_draft((0, 1), "residual", Q), 'stream "residual" is biased'),
        (a_draft((0, 1), "draft", None), "needs its q rows"),
        (a_draft((0, 1), None, Q), "not sampled"),
        (a_draft((0, 1), "draft", Q[:1]), "2 draft tokens with 1 q rows"),
        (a_draft((0, 1), "draft", Q, (-1, 1)), "has parent 1"),
        (a_draft((0,), None, None), "needs 2 p rows"),
    ],
)
def test_what_the_rule_refuses(bad: Draft, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RULE.verify(bad, TargetRows(p_rows=P), CounterChance(1))


def test_p_rows_must_be_there() -> None:
    with pytest.raises(ValueError, match="needs 3 p rows"):
        RULE.verify(a_draft((0, 1), None, None), TargetRows(token_ids=(0, 1, 2)), CounterChance(1))


def test_the_rule_reads_single_precision_rows_and_replays() -> None:
    p_rows = torch.randn(4, 50).softmax(-1)
    q_rows = (p_rows[:3].log() + 0.1 * torch.randn(3, 50)).softmax(-1)
    tokens = tuple(q_rows.argmax(-1).tolist())
    for parents in (None, (-1, 0, 1)):
        verdicts = [
            RULE.verify(
                a_draft(tokens, "draft", q_rows, parents), TargetRows(p_rows=p_rows), CounterChance(seed)
            )
            for seed in (*range(20), *range(20))
        ]
        assert verdicts[:20] == verdicts[20:]
        assert len({verdict.token_ids for verdict in verdicts}) > 1
        for verdict in verdicts:
            assert verdict.token_ids[:-1] == tuple(tokens[node] for node in verdict.accepted_nodes)


def test_draw_of_the_oracle() -> None:
    rng = random.Random(1)
    assert {draw([0.0, 1.0, 0.0], rng) for _ in range(100)} == {1}
