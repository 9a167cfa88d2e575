"""What drafters are weighed by, and the set of them that brings most."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.acceptance import AcceptanceTracker, Floats
from specdec.scheduling.speculation.cost import CostModel
from specdec.scheduling.speculation.drafter_picks import DrafterPicks
from specdec.scheduling.speculation.drafter_worth import (
    DrafterCosts,
    Ints,
    best_assignment,
    drafter_costs,
    worth_of,
)
from tests.specdec.scheduling.simulation import fake_request
from tests.specdec.scheduling.speculation.world import COSTS, profile_of


def exhaustive(values: Floats, fixed: Floats, present: Ints, is_free: np.typing.NDArray[np.bool_]) -> float:
    """The best worth of any assignment at all."""
    free = np.flatnonzero(is_free)
    best = -np.inf
    for places in itertools.product(range(values.shape[1]), repeat=len(free)):
        found = present.copy()
        found[free] = places
        best = max(best, worth_of(values, fixed, found).tokens)
    return best


@pytest.mark.parametrize("seed", range(5))
def test_the_best_set_is_nearly_the_best_assignment(seed: int) -> None:
    generator = np.random.default_rng(seed)
    shares = []
    for _ in range(20):
        values = np.maximum.accumulate(generator.normal(0.5, 1.0, (4, 3, 3)), axis=2)
        fixed = np.cumsum(generator.exponential(0.5, (3, 3)), axis=1)
        present = generator.integers(0, 3, 4)
        is_free = generator.random(4) < 0.8
        found = best_assignment(values, fixed, present, is_free)
        assert (found[~is_free] == present[~is_free]).all()
        worth = worth_of(values, fixed, found).tokens
        assert worth >= worth_of(values, fixed, present).tokens
        best = exhaustive(values, fixed, present, is_free)
        shares.append(1.0 if best == 0.0 else worth / best)
    assert min(shares) > 0.6
    assert sum(shares) / len(shares) > 0.95


def test_fixed_costs_are_shared_by_those_who_need_them() -> None:
    """One request alone does not pay a drafter's fixed costs; four do. Nobody else's are paid beside them."""
    fixed = np.array([[0.0], [1.5]])
    value = np.array([[[0.2], [1.0]]])
    present = np.zeros(1, dtype=np.int64)
    assert best_assignment(value, fixed, present, np.ones(1, dtype=bool)).tolist() == [0]
    four = np.repeat(value, 4, axis=0)
    assert (
        best_assignment(four, fixed, np.zeros(4, dtype=np.int64), np.ones(4, dtype=bool)).tolist() == [1] * 4
    )


def costs_of_two() -> CostModel:
    """A drafter that reads what it attends to, and one that is free of that."""
    reader = replace(COSTS["cpu"], draft=lambda n, c: 1e-4 * n + 2e-7 * c)
    other = replace(COSTS["cpu"], draft=lambda n, c: 3e-4 + 2e-5 * n)
    profile = msgspec.structs.replace(
        profile_of(reader, noise=0.0), other_drafts=(profile_of(other, noise=0.0).draft,)
    )
    return CostModel(profile, max_rows=640, max_sequences=64, max_steps=8, num_drafters=2)


def weighed(costs: CostModel) -> DrafterCosts:
    return drafter_costs(costs, 4, 8_000.0, 8, rate=1_000.0, is_drafting=True)


def test_steps_cost_what_was_measured() -> None:
    costs = costs_of_two()
    found = weighed(costs)
    assert found.sequence_s == pytest.approx([1e-4, 2e-5], rel=0.01)
    assert found.token_s == pytest.approx([2e-7, 0.0], rel=0.01, abs=1e-12)
    assert found.fixed_s[:, 0] == pytest.approx([4e-4, 7e-4], rel=0.05)
    assert found.fixed_s[1, 7] == pytest.approx(4e-4 + 8 * 3e-4, rel=0.05)
    assert found.row_token_s == costs.verify.own_context_s > 0.0


@pytest.mark.parametrize("factor", [2.5, 0.5])
def test_what_rounds_take_longer_holds_for_each_sequence_and_what_it_reads(factor: float) -> None:
    """Of the drafter that took longer, and of no other."""
    costs = costs_of_two()
    before = weighed(costs)
    budgets = {RequestId(f"r{number}"): 4 for number in range(4)}
    usual_s = float(costs.draft.by_steps(np.full(4, 4), 2_000.0)[-1])
    for _ in range(60):
        costs.draft.note(budgets, 2_000.0, 1, factor * usual_s)
    after = weighed(costs)
    for its in ("sequence_s", "token_s"):
        assert getattr(after, its)[0] == pytest.approx(factor * getattr(before, its)[0], rel=0.1)
        assert getattr(after, its)[1] == getattr(before, its)[1]
    assert after.fixed_s[0] == pytest.approx(factor * before.fixed_s[0], rel=0.1)


def test_a_row_costs_what_its_own_text_does() -> None:
    """As one of mean length, and more or less by what it is longer or shorter."""
    costs = DrafterCosts(
        rate=1_000.0,
        row_s=4e-4,
        row_token_s=1e-7,
        fixed_s=np.zeros((2, 1)),
        sequence_s=np.zeros(2),
        token_s=np.zeros(2),
    )
    picks = DrafterPicks((1, 1), AcceptanceTracker(1))
    requests = [fake_request("short", 100), fake_request("long", 6_100)]
    estimate = picks.estimate(requests)
    assert np.ptp(estimate.reached) == np.ptp(estimate.filled) == 0.0, "all else is the same"
    worth = picks._values(requests, costs)[:, 0, 0]
    reached, filled = float(estimate.reached[0, 0]), float(estimate.filled[0, 0])
    assert worth == pytest.approx([reached - 0.1 * filled, reached - 0.7 * filled])
    assert worth[1] < 0.0 < worth[0]
