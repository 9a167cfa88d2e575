"""Drafters of which one has several KV budgets: who drafts, and with how much of a text, for each request."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from specdec.core.ids import RequestId
from specdec.kv.selection import KvBudget
from specdec.scheduling.speculation.acceptance import AcceptanceTracker
from specdec.scheduling.speculation.controller import DraftOutcome, bounded_choice
from specdec.scheduling.speculation.drafter_budgets import (
    TRIED_SHARE,
    BudgetedDrafter,
    DrafterBudgets,
)
from specdec.scheduling.speculation.drafter_picks import Arm, DrafterPicks, _class_name, _key
from specdec.scheduling.speculation.drafter_worth import DrafterCosts
from specdec.scheduling.speculation.goodput_controller import GoodputController
from tests.specdec.scheduling.simulation import FakeRequest, fake_request
from tests.specdec.scheduling.speculation.several_world import SeveralWorld, controller_of, world_of
from tests.specdec.scheduling.speculation.world import COSTS

READER = replace(COSTS["gpu"], draft=lambda n, c: 3e-5 * n + 1.5e-7 * c, draft_start_s=2e-4)
"""A small model: cheap, but it reads everything."""
WINDOW = replace(COSTS["gpu"], draft=lambda n, c: 2e-4 * n + 6e-8 * c)
"""The target itself, with a part of its K/V."""
DRAFTERS = (READER, WINDOW)
BUDGETS = (KvBudget(512, 1), KvBudget(0.5, 512))
SHORT, MIDDLE, LONG = 200, 3_000, 24_000
Choice = tuple[int, int]
"""Drafter, and which of the budgets."""


def chance(one: FakeRequest, drafter: int) -> float:
    """Of a long text half has to be seen."""
    is_enough = drafter == 0 or one.committed_len < 1_500 or 2 * one.draft_context >= one.committed_len
    return 0.85 if is_enough else 0.65


def budgeted_world(number: int, *, seed: int = 1, **more: object) -> SeveralWorld:
    settings: dict[str, object] = {
        "chance": chance,
        "costs": COSTS["gpu"],
        "drafters": DRAFTERS,
        "contexts": (SHORT, MIDDLE, LONG),
        "budgeted": 1,
        "picks_budgets": True,
    }
    return world_of(number, seed=seed, **(settings | more))  # type: ignore[arg-type]


def picks_of(controller: GoodputController) -> DrafterPicks:
    drafters = controller._facts.drafters
    assert drafters is not None
    return drafters


def choice(picks: DrafterPicks, one: FakeRequest) -> Choice:
    arm = picks._arm(one, picks.drafter(one))
    return arm.drafter, -1 if arm.budget is None else arm.budget


def choices(
    controller: GoodputController, world: SeveralWorld, num_rounds: int, by: Callable[[FakeRequest], object]
) -> dict[object, Counter[Choice]]:
    """What requests of each kind had, now and then."""
    found: dict[object, Counter[Choice]] = {}
    for _ in range(num_rounds // 10):
        world.run(controller, 10)
        for one in world.requests:
            found.setdefault(by(one), Counter())[choice(picks_of(controller), one)] += 1
    return found


def share(counts: Counter[Choice], wanted: Choice) -> float:
    return counts[wanted] / counts.total()


def test_lengths_of_one_batch_get_the_drafter_and_the_budget_that_suit_them() -> None:
    """Requests of one class, all of them alike but for their length: costs decide, and k follows them."""
    controller = controller_of(DRAFTERS, 1, BUDGETS)
    world = budgeted_world(9)
    world.run(controller, 600)
    found = choices(controller, world, 400, lambda one: world._prompts[one.request_id])
    assert share(found[SHORT], (0, -1)) > 0.75, found
    assert share(found[MIDDLE], (1, 1)) > 0.75, found
    assert share(found[LONG], (1, 0)) > 0.75, found
    chosen = bounded_choice(controller, world.requests)
    drafted = {
        length: [
            k
            for one, k in zip(world.requests, chosen, strict=True)
            if world._prompts[one.request_id] == length
        ]
        for length in (SHORT, LONG)
    }
    assert np.mean(drafted[LONG]) < np.mean(drafted[SHORT])


@pytest.mark.full
def test_better_than_any_one_of_them_for_all() -> None:
    rates = []
    for drafter, budgets in ((0, ()), (1, BUDGETS[:1]), (1, BUDGETS[1:])):
        controller = controller_of((DRAFTERS[drafter],), 0 if budgets else None, budgets)
        world = budgeted_world(
            9,
            drafters=(DRAFTERS[drafter],),
            chance=lambda one, _, drafter=drafter: chance(one, drafter),
            budgeted=0 if budgets else None,
            picks_budgets=False,
        )
        world.budget = budgets[0] if budgets else None
        world.run(controller, 300)
        rates.append(world.run(controller, 600).rate)
    controller = controller_of(DRAFTERS, 1, BUDGETS)
    world = budgeted_world(9)
    world.run(controller, 600)
    assert world.run(controller, 1200).rate > 1.02 * max(rates)


def test_each_class_gets_its_own_budget() -> None:
    """Of texts as long as each other, some look back further than others."""

    def by_class(one: FakeRequest, drafter: int) -> float:
        is_enough = one.class_name == "near" or one.draft_context > 4_000
        return 0.1 if drafter == 0 else 0.85 if is_enough else 0.3

    budgets = (KvBudget(512, 1), KvBudget(8_192, 1))
    controller = controller_of(DRAFTERS, 1, budgets)
    world = budgeted_world(8, chance=by_class, contexts=(LONG,), class_names=("near", "far"))
    world.run(controller, 900)
    found = choices(controller, world, 300, lambda one: one.class_name)
    assert share(found["near"], (1, 0)) > 0.75, found
    assert share(found["far"], (1, 1)) > 0.75, found
    acceptance = controller._facts.acceptance
    far = [float(acceptance.class_acceptance(f"far\x001\x00{place}")[0]) for place in range(2)]
    assert far[0] < 0.5 < 0.7 < far[1]


@pytest.mark.parametrize("seed", [1, 2])
def test_drafting_is_not_given_up_before_every_budget_was_looked_at(seed: int) -> None:
    """Only the last one pays: probes find it, while nothing is drafted with the others."""

    def only_the_last(one: FakeRequest, drafter: int) -> float:
        return 0.9 if drafter == 1 and one.draft_context > 4_000 else 0.02

    budgets = (KvBudget(512, 1), KvBudget(1_024, 1), KvBudget(8_192, 1))
    controller = controller_of(DRAFTERS, 1, budgets)
    world = budgeted_world(4, chance=only_the_last, contexts=(LONG,), seed=seed)
    world.run(controller, 900)
    assert controller.state.is_speculating
    assert sum(choice(picks_of(controller), one) == (1, 2) for one in world.requests) >= 3


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_request_keeps_its_window_where_that_cannot_grow_back(is_kept: bool) -> None:
    """Whoever drafts for it. Those that come begin with what is best for their class, but for a few."""

    def wide_is_better(one: FakeRequest, drafter: int) -> float:
        return 0.05 if drafter == 0 else 0.9 if one.draft_context > 4_000 else 0.5

    budgets = (KvBudget(512, 1), KvBudget(8_192, 1))
    controller = controller_of(DRAFTERS, 1, budgets, is_kept=is_kept)
    world = budgeted_world(8, chance=wide_is_better, contexts=(LONG,), lifetime=64)
    seen: dict[str, set[int]] = {}
    for _ in range(1000):
        world.run_round(controller)
        for one in world.requests:
            seen.setdefault(one.request_id, set()).add(one.kv_budget)
    assert any(len(budgets) > 1 for budgets in seen.values()) != is_kept
    found = choices(controller, world, 200, lambda _: "all")["all"]
    assert share(found, (1, 1)) > 0.6, found


# ------------------------------------------------------------------------------------ without a world

COSTS_OF_TWO = DrafterCosts(
    rate=1_000.0,
    row_s=1e-5,
    fixed_s=np.full((2, 4), 1e-4),
    sequence_s=np.full(2, 1e-5),
    token_s=np.array([1e-7, 1e-7]),
)


def free_request(name: str, length: int = 1_000, **more: object) -> FakeRequest:
    return replace(fake_request(name, length), has_own_kv_budget=False, **more)  # type: ignore[arg-type]


def picks_among(budgets: Sequence[KvBudget] = BUDGETS, *, is_kept: bool = False) -> DrafterPicks:
    budgeted = BudgetedDrafter(place=1, budgets=budgets, is_kept=is_kept)
    return DrafterPicks((4, 4), AcceptanceTracker(4, 64), budgeted)


def play(
    picks: DrafterPicks, requests: Sequence[FakeRequest], now: int, costs: DrafterCosts = COSTS_OF_TWO
) -> None:
    """A round in which everybody's drafter is asked for four tokens, of which two stand."""
    picks.review(now, requests, costs)
    names = [one.request_id for one in requests]
    picks.note(
        [DraftOutcome(request_id=name, num_drafted=4, num_accepted=2) for name in names],
        dict.fromkeys(names, 4),
        {one.request_id: picks.drafter(one) for one in requests},
    )


@pytest.mark.parametrize(
    ("token_s", "usual", "others"),
    [
        ((1e-7, 1e-7), (1, 0), {(0, -1), (1, 1)}),
        ((0.0, 1e-7), (0, -1), {(1, 0), (1, 1)}),
        ((0.0, 0.0), (0, -1), {(1, 0), (1, 1)}),
    ],
    ids=["reading costs", "one is free", "reading is free"],
)
def test_who_tries_gets_back_what_it_had(
    token_s: tuple[float, float], usual: Choice, others: set[Choice]
) -> None:
    """Drafter and budget, after twelve rounds; every arm in turn, by one of few requests at a time."""
    picks = picks_among()
    requests = [free_request(f"r{number}", 4_000) for number in range(4)]
    costs = replace(COSTS_OF_TWO, token_s=np.array(token_s))
    trials: list[tuple[Choice, int]] = []
    num_rounds = 0
    for now in range(400):
        play(picks, requests, now, costs)
        trying = [one for one in requests if picks.is_trying(one.request_id)]
        num_rounds = num_rounds + 1 if trying else 0
        if len(trying) == num_rounds == 1:
            trials.append((choice(picks, trying[0]), now))
        assert len(trying) <= 1
        assert num_rounds <= 12
        for one in requests:
            if one not in trying:
                assert choice(picks, one) == usual
                assert picks.budget(one.request_id, "other") == BUDGETS[0]
    assert {arm for arm, _ in trials} == others
    assert len(trials) <= 8
    gaps = [later - earlier for (_, earlier), (_, later) in itertools.pairwise(trials)]
    assert gaps[0] < 40 < 96 < gaps[-1], "soon at first, seldom once they are known"


@pytest.mark.parametrize("number", [1, 2, 4])
def test_another_budget_of_a_drafter_that_is_asked_anyway_costs_no_more_than_it_reads(number: int) -> None:
    """What it costs however many take part (1 ms, a token of all requests) is not for the trial to pay."""
    picks = picks_among()
    requests = [free_request(f"r{index}", 4_000, own_drafter=1) for index in range(number)]
    costs = replace(COSTS_OF_TWO, fixed_s=np.full((2, 4), 1e-3), token_s=np.zeros(2))
    begun: list[int] = []
    was_trying = False
    for now in range(1000):
        play(picks, requests, now, costs)
        if picks.has_trial and not was_trying:
            begun.append(now)
        was_trying = picks.has_trial
    assert begun[-1] - begun[-2] < 120


def test_who_wants_no_drafts_tries_nothing() -> None:
    """It would be asked for none, and nothing be learnt."""
    picks = picks_among()
    never = free_request("never", 4_000, requested_draft_tokens=0)
    asked = [free_request(f"r{number}", 4_000) for number in range(3)]
    for now in range(400):
        picks.review(now, [*asked, never], COSTS_OF_TWO)
        assert not picks.is_trying(never.request_id)
        names = [one.request_id for one in asked]
        picks.note(
            [DraftOutcome(request_id=name, num_drafted=4, num_accepted=2) for name in names],
            dict.fromkeys(names, 4),
            {one.request_id: picks.drafter(one) for one in asked},
        )
    known = picks._num_wishes({"other"})
    assert all(known[picks._arms.index(arm)] for arm in (Arm(0), Arm(1, 0), Arm(1, 1)))


def test_a_budget_that_is_set_during_a_trial_stays() -> None:
    picks = picks_among()
    requests = [free_request(f"r{number}", 4_000, own_drafter=1) for number in range(4)]
    now = 0
    while not picks.has_trial:
        play(picks, requests, now)
        now += 1
    (trying,) = (one for one in requests if picks.is_trying(one.request_id))
    for one in requests:
        one.has_own_kv_budget, one.kv_budget = True, 700
    while picks.has_trial:
        play(picks, requests, now)
        now += 1
    assert picks._classes[_key(trying.request_id, 1)] == _class_name("other", Arm(1))
    assert picks.draft_context(trying) == 700


def test_who_has_a_drafter_of_its_own_has_its_budget_picked() -> None:
    """By `share`, or by wish; of whose budget is its own nothing is picked but the drafter."""
    picks = picks_among()
    small, large = (KvBudget(512, 1).tokens(1_000), KvBudget(0.5, 512).tokens(4_000))
    named = [free_request(f"named{number}", 4_000, own_drafter=1) for number in range(4)]
    bounded = replace(fake_request("bounded", 4_000), kv_budget=64)
    elsewhere = free_request("elsewhere", 4_000, own_drafter=0)
    seen: dict[str, set[int]] = {}
    for now in range(400):
        requests = [*named, bounded, elsewhere]
        picks.review(now, requests, COSTS_OF_TWO)
        outcomes = []
        for one in requests:
            seen.setdefault(one.request_id, set()).add(picks.draft_context(one))
            # Half of the text has to be seen.
            stands = 4 if picks.draft_context(one) in (large, 4_000) else 0
            outcomes.append(DraftOutcome(request_id=one.request_id, num_drafted=4, num_accepted=stands))
        names = [one.request_id for one in requests]
        picks.note(
            outcomes, dict.fromkeys(names, 4), {one.request_id: picks.drafter(one) for one in requests}
        )
    assert [picks.draft_context(one) for one in named].count(large) >= 3
    assert set().union(*(seen[one.request_id] for one in named)) == {small, large}
    assert seen["elsewhere"] == {4_000}
    assert seen["bounded"] <= {64, 4_000}
    assert picks.draft_context(bounded) == 4_000, "its own budget is too small to be of use"
    known = {arm: picks._num_wishes({"other"})[at] for at, arm in enumerate(picks._arms)}
    assert known[picks._arm(bounded, 1)] > 0.0, "learnt of apart"
    assert picks._arm(bounded, 1).budget is None


def test_those_who_left_are_forgotten() -> None:
    picks = picks_among()
    for now in range(300):
        play(picks, [free_request(f"r{now}-{number}") for number in range(2)], 16 * now)
    assert picks._budgets is not None
    assert max(len(picks._picks), len(picks._budgets._picks), len(picks._classes)) <= 4 * 2 + 64 + 2
    assert len(picks._trying) <= 1


def test_another_thread_may_ask_while_requests_are_forgotten() -> None:
    """Who asks for metrics; here it asks of a new request whenever an old one is looked up."""
    picks = picks_among()
    numbers = itertools.count()

    class LookedUp(str):
        def __hash__(self) -> int:
            picks.budget(RequestId(f"new {next(numbers)}"), "other")
            return super().__hash__()

    for number in range(100):
        picks.budget(RequestId(LookedUp(number)), "other")
    picks.review(1, [free_request("present")], COSTS_OF_TWO)
    assert picks._budgets is not None
    assert len(picks._budgets._picks) < 100


def test_with_one_budget_there_is_none_to_pick() -> None:
    assert controller_of(DRAFTERS, 1, BUDGETS[:1]).pick_kv_budget is None
    assert controller_of(DRAFTERS).pick_kv_budget is None
    assert controller_of(DRAFTERS, 1, BUDGETS).pick_kv_budget is not None


def test_new_ones_begin_as_their_class_does() -> None:
    for is_kept in (False, True):
        budgets = DrafterBudgets(BudgetedDrafter(place=1, budgets=BUDGETS, is_kept=is_kept))
        budgets.note_class("other", best=1, least_known=0)
        begun = Counter(budgets.of(RequestId(f"r{number}"), "other") for number in range(4 * TRIED_SHARE))
        assert begun == ({1: 60, 0: 4} if is_kept else {1: 64})
        assert budgets.of(RequestId("unknown"), "unheard of") == 0
