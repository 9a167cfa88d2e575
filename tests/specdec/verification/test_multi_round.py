"""Multi-round rejection: the exact output distribution of every small tree, and what breaks it."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from scipy import stats

from specdec.tree.topology import ROOT, Topology, chain
from specdec.verification.base import Draft, TargetRows
from specdec.verification.chance import CounterChance
from specdec.verification.multi_round import MultiRound
from specdec.verification.ratio import acceptance
from specdec.verification.reference import multi_round
from specdec.verification.registry import rule_named
from specdec.verification.rejection import Rejection
from tests.specdec.verification.drafting import (
    CHAINS,
    EXACT,
    PREFIX,
    SMALL_TREES,
    Drafter,
    as_draft,
    distance,
    emitted_by,
    mean_length,
    most_likely,
    p_value_of_rounds,
    tokens_after,
    trees,
    with_replacement,
    without_replacement,
)
from tests.specdec.verification.enumeration import (
    BranchingChance,
    MarkovModel,
    Tokens,
    outcomes,
    random_model,
    total_variation_from,
)

RULE = MultiRound()
SIBLINGS = Topology.from_parents((ROOT, ROOT))


@pytest.mark.cover(1)
@pytest.mark.parametrize("topology", [*SMALL_TREES, *CHAINS[4:]], ids=lambda tree: str(tree.parents))
@pytest.mark.parametrize("drafter", [without_replacement, with_replacement])
@pytest.mark.parametrize("holes", [False, True])
def test_sampled_drafts_are_exact(topology: Topology, drafter: Drafter, holes: bool) -> None:
    target = random_model(3, seed=topology.num_nodes, holes=holes)
    model = random_model(3, seed=100 + sum(topology.parents))  # all of it can be drawn
    assert distance(target, topology, emitted_by(RULE, target, model, topology, drafter)) < EXACT


@pytest.mark.full
@pytest.mark.parametrize("topology", trees(4), ids=lambda tree: str(tree.parents))
@pytest.mark.parametrize("drafter", [without_replacement, with_replacement])
@pytest.mark.parametrize("seed", range(3))
def test_sampled_drafts_of_all_trees_are_exact(topology: Topology, drafter: Drafter, seed: int) -> None:
    if drafter is without_replacement and max(map(len, topology.children)) > 3:
        pytest.skip("more siblings than tokens")
    target, model = random_model(3, seed=seed), random_model(3, seed=50 + seed)
    assert distance(target, topology, emitted_by(RULE, target, model, topology, drafter)) < EXACT


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "topology", [*SMALL_TREES, *trees(4), *CHAINS[4:]], ids=lambda tree: str(tree.parents)
)
@pytest.mark.parametrize("holes", [False, True])
def test_deterministic_drafts_are_exact(topology: Topology, holes: bool) -> None:
    target = random_model(4, seed=topology.num_nodes, holes=holes)
    emitted = emitted_by(RULE, target, random_model(4, seed=5), topology, most_likely)
    assert distance(target, topology, emitted) < EXACT


@pytest.mark.parametrize("drafter", [without_replacement, with_replacement, most_likely])
def test_siblings_raise_acceptance(drafter: Drafter) -> None:
    target, model = random_model(4, seed=8), random_model(4, seed=9)
    lengths = [
        mean_length(emitted_by(RULE, target, model, Topology.from_parents([ROOT] * count), drafter))
        for count in range(4)
    ]
    assert lengths[0] == pytest.approx(1.0, abs=EXACT)
    assert all(more > fewer + 0.01 for fewer, more in pairwise(lengths))


def test_sampling_without_replacement_wastes_no_test() -> None:
    """What was rejected once has nothing left of p: drawing it again is a lost chance."""
    target, model = random_model(4, seed=8), random_model(4, seed=9)
    apart = emitted_by(RULE, target, model, SIBLINGS, without_replacement)
    again = emitted_by(RULE, target, model, SIBLINGS, with_replacement)
    assert mean_length(apart) > mean_length(again) + 0.01


@pytest.mark.parametrize("seed", range(20))
def test_on_a_chain_it_is_rejection(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p_rows = torch.randn(4, 6, generator=generator).softmax(-1)
    q_rows = torch.randn(3, 6, generator=generator).softmax(-1)
    tokens = tuple(q_rows.multinomial(1, generator=generator)[:, 0].tolist())
    draft = Draft(token_ids=tokens, first_position=9, noise_stream="draft", q_rows=q_rows)
    rows = TargetRows(p_rows=p_rows)
    assert RULE.verify(draft, rows, CounterChance(seed)) == Rejection().verify(
        draft, rows, CounterChance(seed)
    )


@pytest.mark.parametrize("replaced", [False, True])
def test_the_oracle_agrees(replaced: bool) -> None:
    target, model = random_model(3, seed=8), random_model(3, seed=9)
    exact = emitted_by(RULE, target, model, SIBLINGS, with_replacement if replaced else without_replacement)

    def draw_round(rng: random.Random) -> Tokens:
        return multi_round(
            lambda prefix: target.row(prefix).tolist(),
            lambda prefix: model.row(prefix).tolist(),
            PREFIX,
            (2,),
            rng,
            replaced=replaced,
        )

    assert p_value_of_rounds(exact, draw_round) > 1e-4


def test_the_oracle_of_deeper_trees_is_exact() -> None:
    """Two children, each with one: the oracle's rounds, continued by p, against p."""
    target, model = random_model(3, seed=8), random_model(3, seed=9)
    rng = random.Random(6)
    num_rounds = 20_000
    seen: Counter[Tokens] = Counter()
    for _ in range(num_rounds):
        prefix = multi_round(
            lambda prefix: target.row(prefix).tolist(),
            lambda prefix: model.row(prefix).tolist(),
            PREFIX,
            (2, 1),
            rng,
        )
        while len(prefix) < 3:
            prefix = (*prefix, rng.choices(range(3), target.row(prefix).tolist())[0])
        seen[prefix[1:3]] += 1
    expected = {
        (a, b): target.sequence_probability(PREFIX, (a, b)) * num_rounds for a in range(3) for b in range(3)
    }
    assert stats.chisquare([seen[pair] for pair in expected], list(expected.values())).pvalue > 1e-4


# ---- what must fail -----------------------------------------------------------------------------


def test_control_sampled_children_ranked_again() -> None:
    target, model = random_model(4, seed=8), random_model(4, seed=9)

    def run(chance: BranchingChance) -> Tokens:
        draft = without_replacement(model, SIBLINGS, chance)
        q = model.row(PREFIX)
        tokens = sorted(draft.token_ids, key=lambda token: -float(q[token]))
        left = q.clone()
        left[tokens[0]] = 0.0
        ranked = as_draft(SIBLINGS, tokens, torch.stack((q, left / left.sum())))
        return tokens_after(RULE, target, ranked, chance)

    assert distance(target, SIBLINGS, outcomes(run)) > 0.01


def test_control_only_the_better_child_is_kept() -> None:
    """Pruning sampled children by their q, not from the end: what EAGLE-2's re-ranking does to them."""
    target, model = random_model(4, seed=8), random_model(4, seed=9)

    def run(chance: BranchingChance) -> Tokens:
        draft = without_replacement(model, SIBLINGS, chance)
        q = model.row(PREFIX)
        best = max(draft.token_ids, key=lambda token: float(q[token]))
        return tokens_after(RULE, target, as_draft(chain(1), [best], q[None]), chance)

    assert distance(target, chain(1), outcomes(run)) > 0.01


def test_children_cut_from_the_end_stay_exact() -> None:
    target, model = random_model(4, seed=8), random_model(4, seed=9)

    def run(chance: BranchingChance) -> Tokens:
        draft = without_replacement(model, SIBLINGS, chance)
        assert draft.q_rows is not None
        cut = as_draft(chain(1), list(draft.token_ids[:1]), draft.q_rows[:1])
        return tokens_after(RULE, target, cut, chance)

    assert distance(target, chain(1), outcomes(run)) < EXACT


def test_control_siblings_drawn_again_but_judged_as_apart() -> None:
    target, model = random_model(4, seed=8), random_model(4, seed=9)

    def run(chance: BranchingChance) -> Tokens:
        draft = without_replacement(model, SIBLINGS, chance)
        q = model.row(PREFIX)
        claimed = as_draft(SIBLINGS, list(draft.token_ids), torch.stack((q, q)))
        return tokens_after(RULE, target, claimed, chance)

    assert distance(target, SIBLINGS, outcomes(run)) > 0.005


def test_control_p_of_another_path() -> None:
    """Every node's rows must be conditioned on its own path."""
    target, model = random_model(3, seed=8), random_model(3, seed=9)
    topology = Topology.from_parents((ROOT, ROOT, 0, 1))

    def run(chance: BranchingChance) -> Tokens:
        draft = without_replacement(model, topology, chance)
        p_rows = torch.stack([target.row(PREFIX)] + [target.matrix[draft.token_ids[0]]] * 4)
        return RULE.verify(draft, TargetRows(p_rows=p_rows), chance).token_ids

    assert distance(target, topology, outcomes(run)) > 0.01


def test_control_residual_without_subtracting_q() -> None:
    target, model = random_model(3, seed=8), random_model(3, seed=9)

    def run(chance: BranchingChance) -> Tokens:
        draft = without_replacement(model, chain(1), chance)
        p, (token,) = target.row(PREFIX), draft.token_ids
        if chance.accept(acceptance(p, model.row(PREFIX), token), 1, 0):
            return draft.token_ids
        return (chance.draw_residual(p, 1),)

    assert total_variation_from(target, PREFIX, outcomes(run), 1) > 0.01


def test_disjoint_siblings_fall_back_to_what_p_has() -> None:
    halves = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=torch.float64)
    target, model = MarkovModel(halves[[0, 0, 0, 0]]), MarkovModel(halves[[1, 1, 1, 1]])
    emitted = emitted_by(RULE, target, model, SIBLINGS, without_replacement)
    assert distance(target, SIBLINGS, emitted) < EXACT
    assert mean_length(emitted) == pytest.approx(1.0, abs=EXACT)


def test_trees_are_for_this_rule() -> None:
    draft = Draft(token_ids=(0, 1), first_position=1, parents=(ROOT, ROOT))
    rows = TargetRows(p_rows=torch.full((3, 3), 1 / 3))
    assert RULE.verify(draft, rows, CounterChance(1)).num_accepted <= 1
    for name in ("rejection", "block"):
        with pytest.raises(ValueError, match="verifies chains; the rule of trees is multi_round"):
            rule_named(name).verify(draft, rows, CounterChance(1))
