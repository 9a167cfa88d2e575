"""Rejection sampling: the exact output distribution of every small chain and tree, and what breaks it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from scipy import stats

from specdec.core.ids import RequestId
from specdec.core.proposal import NoiseStream, Proposal
from specdec.sampling.noise import row_key
from specdec.sampling.noise_rows import as_signed, gumbel_rows
from specdec.tree.topology import ROOT, Topology, chain
from specdec.verification.base import TargetRows
from specdec.verification.chance import CounterChance
from specdec.verification.reference import draw, rejection_round
from specdec.verification.rejection import Rejection, acceptance, residual, walk
from tests.specdec.verification.enumeration import (
    BranchingChance,
    MarkovModel,
    Tokens,
    outcomes,
    random_model,
    total_variation_from,
)

PREFIX = (0,)
EXACT = 1e-12


def trees(num_nodes: int) -> list[Topology]:
    return [
        Topology.from_parents(parents)
        for parents in product(*(range(ROOT, node) for node in range(num_nodes)))
    ]


SMALL_TREES = [tree for num_nodes in range(4) for tree in trees(num_nodes)]
CHAINS = [chain(num_nodes) for num_nodes in range(5)]


@dataclass
class Drafted:
    tokens: tuple[int, ...]
    q_rows: torch.Tensor | None


def prefix_of(topology: Topology, tokens: list[int], node: int) -> Tokens:
    return (*PREFIX, *(tokens[above] for above in topology.path(node)))


def draft_sampled(draft: MarkovModel, topology: Topology, chance: BranchingChance) -> Drafted:
    """Children drawn one after the other without replacement; q rows are what each was drawn from."""
    tokens = [0] * topology.num_nodes
    q_rows = torch.zeros(topology.num_nodes, draft.matrix.shape[0], dtype=torch.float64)
    for row, children in enumerate(topology.children):
        q = draft.row(prefix_of(topology, tokens, row - 1)).clone()
        for node in children:
            q_rows[node] = q = q / q.sum()
            tokens[node] = chance.choose(q.tolist())
            q = q.clone()
            q[tokens[node]] = 0.0
    return Drafted(tuple(tokens), q_rows)


def draft_most_likely(draft: MarkovModel, topology: Topology) -> Drafted:
    """Deterministic children: the most likely ones, best first."""
    tokens = [0] * topology.num_nodes
    for row, children in enumerate(topology.children):
        ranking = draft.row(prefix_of(topology, tokens, row - 1)).argsort(descending=True).tolist()
        for rank, node in enumerate(children):
            tokens[node] = ranking[rank]
    return Drafted(tuple(tokens), None)


def p_rows_of(target: MarkovModel, topology: Topology, tokens: tuple[int, ...]) -> torch.Tensor:
    prefixes = [prefix_of(topology, list(tokens), node) for node in range(ROOT, topology.num_nodes)]
    return torch.stack([target.row(prefix) for prefix in prefixes])


def distance(target: MarkovModel, topology: Topology, emitted: dict[Tokens, float]) -> float:
    assert sum(emitted.values()) == pytest.approx(1.0, abs=EXACT)
    return total_variation_from(target, PREFIX, emitted, topology.max_depth + 1)


def emitted_by_walk(
    target: MarkovModel, topology: Topology, drafted: Drafted, chance: BranchingChance
) -> Tokens:
    p_rows = p_rows_of(target, topology, drafted.tokens)
    return walk(drafted.tokens, topology, p_rows, drafted.q_rows, chance, len(PREFIX)).token_ids


@pytest.mark.parametrize("topology", [*SMALL_TREES, *CHAINS[4:]], ids=lambda tree: str(tree.parents))
@pytest.mark.parametrize("holes", [False, True])
def test_sampled_drafts_are_exact(topology: Topology, holes: bool) -> None:
    vocab_size = 3
    target = random_model(vocab_size, seed=topology.num_nodes, holes=holes)
    draft = random_model(vocab_size, seed=100 + sum(topology.parents))  # all of it can be drawn
    emitted = outcomes(
        lambda chance: emitted_by_walk(target, topology, draft_sampled(draft, topology, chance), chance)
    )
    assert distance(target, topology, emitted) < EXACT


@pytest.mark.parametrize(
    "topology", [*SMALL_TREES, *trees(4), *CHAINS[4:]], ids=lambda tree: str(tree.parents)
)
@pytest.mark.parametrize("holes", [False, True])
def test_deterministic_drafts_are_exact(topology: Topology, holes: bool) -> None:
    vocab_size = 4
    target = random_model(vocab_size, seed=topology.num_nodes, holes=holes)
    drafted = draft_most_likely(random_model(vocab_size, seed=5), topology)
    emitted = outcomes(lambda chance: emitted_by_walk(target, topology, drafted, chance))
    assert distance(target, topology, emitted) < EXACT


def test_five_tokens_and_disjoint_supports_are_exact() -> None:
    target = random_model(5, seed=1)
    emitted = outcomes(
        lambda c: emitted_by_walk(target, chain(2), draft_sampled(random_model(5, seed=2), chain(2), c), c)
    )
    assert distance(target, chain(2), emitted) < EXACT
    halves = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=torch.float64)
    disjoint, draft = MarkovModel(halves[[0, 0, 0, 0]]), MarkovModel(halves[[1, 1, 1, 1]])
    emitted = outcomes(lambda c: emitted_by_walk(disjoint, chain(2), draft_sampled(draft, chain(2), c), c))
    assert distance(disjoint, chain(2), emitted) < EXACT


def test_the_same_distributions_are_always_accepted() -> None:
    model = random_model(4, seed=3)
    emitted = outcomes(lambda c: emitted_by_walk(model, chain(3), draft_sampled(model, chain(3), c), c))
    assert sum(probability for tokens, probability in emitted.items() if len(tokens) < 4) < EXACT


def test_the_first_draft_is_accepted_as_often_as_theory_says() -> None:
    target, draft = random_model(4, seed=8), random_model(4, seed=9)
    emitted = outcomes(lambda c: emitted_by_walk(target, chain(1), draft_sampled(draft, chain(1), c), c))
    accepted = sum(probability for tokens, probability in emitted.items() if len(tokens) == 2)
    overlap = torch.minimum(target.row(PREFIX), draft.row(PREFIX)).sum().item()
    assert accepted == pytest.approx(overlap, abs=EXACT)


def test_the_oracle_agrees() -> None:
    target, draft = random_model(3, seed=8), random_model(3, seed=9)
    exact = outcomes(lambda c: emitted_by_walk(target, chain(2), draft_sampled(draft, chain(2), c), c))
    rng = random.Random(5)
    num_rounds = 20_000
    seen = Counter(
        rejection_round(
            lambda prefix: target.row(prefix).tolist(),
            lambda prefix: draft.row(prefix).tolist(),
            PREFIX,
            2,
            rng,
        )[len(PREFIX) :]
        for _ in range(num_rounds)
    )
    assert set(seen) <= set(exact)
    expected = [probability * num_rounds for probability in exact.values()]
    assert stats.chisquare([seen[tokens] for tokens in exact], expected).pvalue > 1e-4


# ---- what must fail: the statistic sees every classic mistake -----------------------------------


def test_control_q_at_another_temperature() -> None:
    target, draft = random_model(3, seed=8), random_model(3, seed=9)
    sharper = MarkovModel(draft.matrix.pow(2) / draft.matrix.pow(2).sum(-1, keepdim=True))

    def run(chance: BranchingChance) -> Tokens:
        drafted = draft_sampled(draft, chain(1), chance)
        told = Drafted(drafted.tokens, sharper.row(PREFIX)[None])
        return emitted_by_walk(target, chain(1), told, chance)

    assert distance(target, chain(1), outcomes(run)) > 0.01


def test_control_sampled_children_ranked_again() -> None:
    target, draft = random_model(4, seed=8), random_model(4, seed=9)
    siblings = Topology.from_parents((ROOT, ROOT))

    def run(chance: BranchingChance) -> Tokens:
        drafted = draft_sampled(draft, siblings, chance)
        q = draft.row(PREFIX)
        tokens = tuple(sorted(drafted.tokens, key=lambda token: -float(q[token])))
        left = q.clone()
        left[tokens[0]] = 0.0
        return emitted_by_walk(target, siblings, Drafted(tokens, torch.stack((q, left / left.sum()))), chance)

    assert distance(target, siblings, outcomes(run)) > 0.01


def test_control_residual_without_subtracting_q() -> None:
    target, draft = random_model(3, seed=8), random_model(3, seed=9)

    def run(chance: BranchingChance) -> Tokens:
        drafted = draft_sampled(draft, chain(1), chance)
        p, (token,) = target.row(PREFIX), drafted.tokens
        if chance.accept(acceptance(p, draft.row(PREFIX), token), 1, 0):
            return drafted.tokens
        return (chance.draw_residual(p, 1),)

    assert total_variation_from(target, PREFIX, outcomes(run), 1) > 0.01


def test_control_a_stale_proposal() -> None:
    """Distributions computed after another prefix: nothing in a round can see it, only the prefix hash."""
    target, draft = random_model(3, seed=8), random_model(3, seed=9)

    def run(chance: BranchingChance) -> Tokens:
        drafted = draft_sampled(draft, chain(1), chance)
        stale = torch.stack([target.matrix[1], target.matrix[drafted.tokens[0]]])
        return walk(drafted.tokens, chain(1), stale, drafted.q_rows, chance, 1).token_ids

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
    target, draft = random_model(4, seed=8, sharpness=1.0), random_model(4, seed=9, sharpness=1.0)
    p, q = target.row(PREFIX), draft.row(PREFIX)
    num_rounds = 20_000
    keys = torch.tensor([as_signed(row_key(seed, 1, stream)) for seed in range(num_rounds)])
    drafts = (q.log() + gumbel_rows(keys, 4)).argmax(-1).tolist()
    counts = [0] * 4
    p_rows = torch.stack([p, p])
    for seed, token in enumerate(drafts):
        chance = SharedNoise(seed, stream) if shared else CounterChance(seed)
        verdict = walk((token,), chain(1), p_rows, q[None] if with_q else None, chance, 1)
        counts[verdict.token_ids[0]] += 1
    return float(stats.chisquare(counts, (p * num_rounds).tolist()).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("with_q", [True, False])
def test_counter_noise_is_exact(with_q: bool) -> None:
    assert p_value_of_counter_noise("draft", shared=False, with_q=with_q) > 1e-4


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
    with pytest.raises(ValueError, match="token 1 was proposed although its q is 0"):
        acceptance(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), 1)
    with pytest.raises(ValueError, match="its q is nan"):
        acceptance(torch.tensor([0.5, 0.5]), torch.tensor([1.0, torch.nan]), 1)


def proposal(
    tokens: tuple[int, ...],
    stream: NoiseStream | None,
    q_rows: torch.Tensor | None,
    parents: tuple[int, ...] | None = None,
) -> Proposal:
    return Proposal(
        request_id=RequestId("r"),
        committed_len=5,
        prefix_hash=0,
        token_ids=tokens,
        parents=parents,
        noise_stream=stream,
        q_rows=q_rows,
    )


Q = torch.full((2, 3), 1 / 3)
P = torch.full((3, 3), 1 / 3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (proposal((0, 1), "target", Q), 'stream "target" is biased'),
        (proposal((0, 1), "target", None), 'stream "target" is biased'),
        (proposal((0, 1), "accept", Q), 'stream "accept" is biased'),
        (proposal((0, 1), "residual", Q), 'stream "residual" is biased'),
        (proposal((0, 1), "draft", None), "needs its q rows"),
        (proposal((0, 1), None, Q), "not sampled"),
        (proposal((0, 1), "draft", Q[:1]), "2 proposed tokens with 1 q rows"),
        (proposal((0, 1), "draft", Q, (-1, 1)), "has parent 1"),
        (proposal((0,), None, None), "needs 2 p rows"),
    ],
)
def test_what_the_rule_refuses(bad: Proposal, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rejection().verify(bad, TargetRows(p_rows=P), CounterChance(1))


def test_p_rows_must_be_there() -> None:
    with pytest.raises(ValueError, match="needs 3 p rows"):
        Rejection().verify(proposal((0, 1), None, None), TargetRows(token_ids=(0, 1, 2)), CounterChance(1))


def test_the_rule_reads_single_precision_rows_and_replays() -> None:
    p_rows = torch.randn(4, 50).softmax(-1)
    q_rows = (p_rows[:3].log() + 0.1 * torch.randn(3, 50)).softmax(-1)
    tokens = tuple(q_rows.argmax(-1).tolist())
    for parents in (None, (-1, 0, 1), (-1, -1, 1)):
        verdicts = [
            Rejection().verify(
                proposal(tokens, "draft", q_rows, parents), TargetRows(p_rows=p_rows), CounterChance(seed)
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
