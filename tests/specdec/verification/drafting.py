"""Drafts over Markov models for exact enumeration: every way to draw them, and what a rule makes of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from scipy import stats

from specdec.tree.topology import ROOT, Topology, chain
from specdec.verification.base import Draft, TargetRows, VerificationRule
from tests.specdec.verification.enumeration import (
    BranchingChance,
    MarkovModel,
    Tokens,
    outcomes,
    total_variation_from,
)

PREFIX = (0,)
EXACT = 1e-12

Drafter = Callable[[MarkovModel, Topology, BranchingChance], Draft]


def trees(num_nodes: int) -> list[Topology]:
    return [
        Topology.from_parents(parents)
        for parents in product(*(range(ROOT, node) for node in range(num_nodes)))
    ]


SMALL_TREES = [tree for num_nodes in range(4) for tree in trees(num_nodes)]
CHAINS = [chain(num_nodes) for num_nodes in range(5)]


def prefix_of(topology: Topology, tokens: list[int], node: int) -> Tokens:
    return (*PREFIX, *(tokens[above] for above in topology.path(node)))


def as_draft(topology: Topology, tokens: list[int], q_rows: torch.Tensor | None) -> Draft:
    return Draft(
        token_ids=tuple(tokens),
        first_position=len(PREFIX),
        parents=topology.parents,
        noise_stream=None if q_rows is None else "draft",
        q_rows=q_rows,
    )


def without_replacement(model: MarkovModel, topology: Topology, chance: BranchingChance) -> Draft:
    """Siblings drawn one after the other; q rows are what each was drawn from."""
    tokens = [0] * topology.num_nodes
    q_rows = torch.zeros(topology.num_nodes, model.matrix.shape[0], dtype=torch.float64)
    for row, children in enumerate(topology.children):
        q = model.row(prefix_of(topology, tokens, row - 1)).clone()
        for node in children:
            q_rows[node] = q = q / q.sum()
            tokens[node] = chance.choose(q.tolist())
            q = q.clone()
            q[tokens[node]] = 0.0
    return as_draft(topology, tokens, q_rows)


def with_replacement(model: MarkovModel, topology: Topology, chance: BranchingChance) -> Draft:
    """Siblings drawn independently from one q (SpecInfer); some may be equal."""
    tokens = [0] * topology.num_nodes
    q_rows = torch.zeros(topology.num_nodes, model.matrix.shape[0], dtype=torch.float64)
    for row, children in enumerate(topology.children):
        for node in children:
            q_rows[node] = model.row(prefix_of(topology, tokens, row - 1))
            tokens[node] = chance.choose(q_rows[node].tolist())
    return as_draft(topology, tokens, q_rows)


def most_likely(model: MarkovModel, topology: Topology, chance: BranchingChance) -> Draft:
    """Deterministic siblings: the most likely ones, best first."""
    del chance
    tokens = [0] * topology.num_nodes
    for row, children in enumerate(topology.children):
        ranking = model.row(prefix_of(topology, tokens, row - 1)).argsort(descending=True).tolist()
        for rank, node in enumerate(children):
            tokens[node] = ranking[rank]
    return as_draft(topology, tokens, None)


def p_rows_of(target: MarkovModel, draft: Draft) -> torch.Tensor:
    assert draft.parents is not None
    topology = Topology.from_parents(draft.parents)
    tokens = list(draft.token_ids)
    prefixes = [prefix_of(topology, tokens, node) for node in range(ROOT, topology.num_nodes)]
    return torch.stack([target.row(prefix) for prefix in prefixes])


def tokens_after(
    rule: VerificationRule, target: MarkovModel, draft: Draft, chance: BranchingChance
) -> Tokens:
    """What one round brings."""
    return rule.verify(draft, TargetRows(p_rows=p_rows_of(target, draft)), chance).token_ids


def emitted_by(
    rule: VerificationRule, target: MarkovModel, model: MarkovModel, topology: Topology, drafter: Drafter
) -> dict[Tokens, float]:
    """Probability of everything that one round may bring."""
    return outcomes(lambda chance: tokens_after(rule, target, drafter(model, topology, chance), chance))


def distance(target: MarkovModel, topology: Topology, emitted: dict[Tokens, float]) -> float:
    """Total variation between one round, continued by p, and p."""
    assert sum(emitted.values()) == pytest.approx(1.0, abs=EXACT)
    return total_variation_from(target, PREFIX, emitted, topology.max_depth + 1)


def mean_length(emitted: dict[Tokens, float]) -> float:
    """Mean number of tokens that a round brings."""
    return sum(probability * len(tokens) for tokens, probability in emitted.items())


def p_value_of_rounds(exact: dict[Tokens, float], draw_round: Callable[[random.Random], Tokens]) -> float:
    """Chi-square of 20,000 sampled rounds (with the prefix) against the probabilities of what they bring."""
    rng = random.Random(5)
    num_rounds = 20_000
    seen = Counter(draw_round(rng)[len(PREFIX) :] for _ in range(num_rounds))
    assert set(seen) <= set(exact)
    expected = [probability * num_rounds for probability in exact.values()]
    return float(stats.chisquare([seen[tokens] for tokens in exact], expected).pvalue)


def all_sequences(vocab_size: int, length: int) -> Iterator[Tokens]:
    return product(range(vocab_size), repeat=length)
