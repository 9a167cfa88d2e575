"""Several budgets to choose from, in virtual worlds: the best one is found, for each class and length."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from specdec.core.ids import RequestId
from specdec.kv.selection import KvBudget
from specdec.scheduling.speculation.acceptance import AcceptanceTracker
from specdec.scheduling.speculation.budget_picks import BudgetCosts, BudgetPicks
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.speculation.settings import ControllerSettings
from tests.specdec.scheduling.simulation import FakeRequest, fake_request
from tests.specdec.scheduling.speculation.world import LONG_COSTS, World, profile_of

BUDGETS = tuple(KvBudget(amount, 1) for amount in (256, 1024, 8192))
Chance = Callable[[FakeRequest], float]


def by_budget(*chances: float) -> Chance:
    return lambda one: chances[[256, 1024, 8192].index(one.kv_budget)]


def controller_of(name: str, budgets: Sequence[KvBudget] = (), *, is_kept: bool = False) -> GoodputController:
    settings = ControllerSettings(
        max_draft_tokens=8, max_rows=640, kv_budgets=tuple(budgets), keeps_kv_budgets=is_kept
    )
    return GoodputController(settings, profile_of(LONG_COSTS[name], noise=0.01))


def world_of(name: str, number: int, chance: Chance, *, picks: bool, budget: int = 0, seed: int = 1) -> World:
    return World(
        costs=LONG_COSTS[name],
        acceptance=lambda _round, one: chance(one),
        num_sequences=number,
        contexts=(32_768,),
        kv_budget=budget,
        picks_budgets=picks,
        seed=seed,
    )


CASES = {
    "more is better": by_budget(0.4, 0.6, 0.9),
    "enough is enough": by_budget(0.5, 0.85, 0.86),
    "all are alike": by_budget(0.8, 0.8, 0.8),
    "nothing helps": by_budget(0.05, 0.05, 0.06),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("number", [1, 4, 16])
@pytest.mark.parametrize("name", LONG_COSTS)
@pytest.mark.parametrize("case", CASES)
def test_nearly_as_good_as_the_best_budget_alone(name: str, number: int, case: str) -> None:
    chance = CASES[case]
    rates = []
    for budget in BUDGETS:
        alone = controller_of(name)
        world = world_of(name, number, chance, picks=False, budget=int(budget.amount))
        world.run(alone, 300)
        rates.append(world.run(alone, 500).rate)
    controller = controller_of(name, BUDGETS)
    world = world_of(name, number, chance, picks=True)
    world.run(controller, 1200)
    rate = world.run(controller, 1200).rate
    assert rate >= (0.97 if number > 1 else 0.95) * max(rates), (rates, rate)


def test_each_class_gets_its_own() -> None:
    def chance(one: FakeRequest) -> float:
        needed = 8192 if one.class_name == "wide" else 256
        return 0.9 if one.kv_budget >= needed else 0.3

    controller = controller_of("self", BUDGETS)
    world = world_of("self", 16, chance, picks=True)
    world.class_names = ("wide", "narrow")
    world.run(controller, 2500)
    picked = {
        name: [one.kv_budget for one in world.requests if one.class_name == name]
        for name in ("wide", "narrow")
    }
    assert np.median(picked["wide"]) == 8192
    assert np.median(picked["narrow"]) == 256


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_request_keeps_its_window_where_that_cannot_grow_back(is_kept: bool) -> None:
    num_best: list[int] = []
    for seed in (1, 2, 3):
        controller = controller_of("model", BUDGETS, is_kept=is_kept)
        world = world_of("model", 8, by_budget(0.4, 0.6, 0.9), picks=True, seed=seed)
        seen: dict[str, set[int]] = {}
        for number in range(1500):
            world.run_round(controller)
            for one in world.requests:
                seen.setdefault(one.request_id, set()).add(one.kv_budget)
            if number >= 1200:
                num_best.append(sum(one.kv_budget == 8192 for one in world.requests))
        changed = [name for name, budgets in seen.items() if len(budgets) > 1]
        assert bool(changed) != is_kept
    assert np.mean(num_best) >= 6


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_drafting_is_not_given_up_before_every_budget_was_looked_at(seed: int) -> None:
    """Only the last one pays: probes find it, while nothing is drafted with the others."""
    controller = controller_of("self", BUDGETS)
    world = world_of("self", 4, CASES["more is better"], picks=True, seed=seed)
    world.run(controller, 900)
    assert world.run(controller, 300).speculating_rounds >= 200, (
        "trials of the others may end it for a moment"
    )
    assert [one.kv_budget for one in world.requests].count(8192) >= 3


def test_trials_are_few() -> None:
    """Once it is known what is best, few rounds of few requests go to anything else."""
    controller = controller_of("self", BUDGETS)
    world = world_of("self", 16, CASES["enough is enough"], picks=True)
    world.run(controller, 1500)
    others = 0
    for _ in range(1800):
        world.run_round(controller)
        others += sum(one.kv_budget != 1024 for one in world.requests)
    assert others < 0.05 * 1800 * 16
    assert others > 0


def test_with_one_budget_there_is_nothing_to_pick() -> None:
    assert controller_of("self").pick_kv_budget is None
    assert controller_of("self", BUDGETS[:1]).pick_kv_budget is None


def test_another_thread_may_ask_while_requests_are_forgotten() -> None:
    """Who asks for metrics; here it asks of a new request whenever an old one is looked up."""
    picks = BudgetPicks(BUDGETS, AcceptanceTracker(4), is_kept=False)
    numbers = itertools.count()

    class LookedUp(str):
        def __hash__(self) -> int:
            picks.of(RequestId(f"new {next(numbers)}"), "other")
            return super().__hash__()

    for number in range(100):
        picks.of(RequestId(LookedUp(number)), "other")
    costs = BudgetCosts(read_s=1e-7, rate=100.0, num_draft_tokens=4)
    picks.review(1, [replace(fake_request("present", 50), has_own_kv_budget=False)], costs)
    assert sum(picks.counts) == 1
