"""Typical acceptance: what it keeps, that it is greedy decoding without temperature, and that it is lossy."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specdec.tree.topology import ROOT, Topology, chain
from specdec.verification.base import Draft, TargetRows
from specdec.verification.chance import CounterChance
from specdec.verification.reference import typical_round
from specdec.verification.typical import Typical
from tests.specdec.verification.drafting import (
    PREFIX,
    as_draft,
    distance,
    emitted_by,
    p_rows_of,
    trees,
    without_replacement,
)
from tests.specdec.verification.enumeration import random_model

RULE = Typical()
CHANCE = CounterChance(0)


def test_limits() -> None:
    sure, even = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.full((4,), 0.25)
    limits = RULE.limits(torch.stack((sure, even)).double())
    assert limits == pytest.approx([0.09, 0.3 / 4])  # exp(-H) of an even row is 1 / vocabulary
    assert Typical(1.0, 1.0).limits(even[None].double()) == pytest.approx([0.25])


@pytest.mark.parametrize("seed", range(30))
def test_the_oracle_agrees(seed: int) -> None:
    target = random_model(6, seed=seed, holes=seed % 2 == 0)
    rng = random.Random(seed)
    tokens = rng.choices(range(6), k=4)
    draft = as_draft(chain(4), tokens, None)
    for epsilon, delta in ((0.09, 0.3), (0.4, 0.9), (0.01, 0.05)):
        found = Typical(epsilon, delta).verify(draft, TargetRows(p_rows=p_rows_of(target, draft)), CHANCE)
        wanted = typical_round(lambda prefix: target.row(prefix).tolist(), tokens, PREFIX, epsilon, delta)
        assert (*PREFIX, *found.token_ids) == wanted


@pytest.mark.parametrize("topology", trees(4), ids=lambda tree: str(tree.parents))
def test_the_longest_path_of_a_tree(topology: Topology) -> None:
    target, rng = random_model(4, seed=3), random.Random(1)
    for _ in range(20):
        draft = as_draft(topology, rng.choices(range(4), k=4), None)
        found = RULE.verify(draft, TargetRows(p_rows=p_rows_of(target, draft)), CHANCE)
        by_path = [
            typical_round(
                lambda prefix: target.row(prefix).tolist(),
                [draft.token_ids[node] for node in topology.path(leaf)],
                PREFIX,
                0.09,
                0.3,
            )
            for leaf in range(ROOT, 4)
        ]
        assert len(found.token_ids) == max(map(len, by_path)) - 1
        assert (*PREFIX, *found.token_ids) in by_path
        assert found.accepted_nodes == topology.path(found.accepted_nodes[-1] if found.num_accepted else ROOT)


def test_without_temperature_it_is_greedy() -> None:
    p_rows = torch.zeros(4, 5)
    p_rows[range(4), [2, 4, 0, 3]] = 1.0
    for tokens, kept in (((2, 4, 0), 3), ((2, 4, 1), 2), ((2, 1, 0), 1), ((0, 4, 0), 0)):
        found = RULE.verify(Draft(token_ids=tokens, first_position=1), TargetRows(p_rows=p_rows), CHANCE)
        assert found.token_ids == (2, 4, 0, 3)[: kept + 1]


def test_ties_of_the_last_token_go_to_the_lowest_id() -> None:
    p_rows = torch.tensor([[0.1, 0.45, 0.45]])
    found = RULE.verify(Draft(token_ids=(), first_position=1), TargetRows(p_rows=p_rows), CHANCE)
    assert found.token_ids == (1,)


def test_it_is_lossy() -> None:
    """The statistic that calls the other rules exact sees that this one is not; its capabilities say so."""
    target, model = random_model(4, seed=8), random_model(4, seed=9)
    emitted = emitted_by(RULE, target, model, chain(2), without_replacement)
    assert distance(target, chain(2), emitted) > 0.05
    assert not RULE.capabilities.exact


def test_it_keeps_more_than_any_exact_rule() -> None:
    """Two plausible tokens, and a draft that always says the less likely one."""
    p_rows = torch.tensor([[0.6, 0.4]] * 3)
    draft = Draft(token_ids=(1, 1), first_position=1, noise_stream="draft")
    assert RULE.verify(draft, TargetRows(p_rows=p_rows), CHANCE).token_ids == (1, 1, 0)
    assert math.isclose(RULE.limits(p_rows.double())[0], 0.09, abs_tol=1e-9)


def test_p_rows_must_be_there() -> None:
    with pytest.raises(ValueError, match="typical needs 2 p rows"):
        RULE.verify(Draft(token_ids=(1,), first_position=1), TargetRows(token_ids=(0, 1)), CHANCE)
