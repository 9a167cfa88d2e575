"""Several drafters to choose from, in virtual worlds: what trying costs, and that each gets the right one."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.acceptance import AcceptanceTracker
from specdec.scheduling.speculation.controller import bounded_choice
from specdec.scheduling.speculation.drafter_picks import DrafterPicks
from specdec.scheduling.speculation.drafter_worth import DrafterCosts
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.speculation.settings import ControllerSettings
from tests.specdec.scheduling.simulation import FakeRequest, fake_request
from tests.specdec.scheduling.speculation.several_world import (
    DRAFTERS,
    LOOKUP,
    MODEL,
    Chance,
    controller_of,
    world_of,
)
from tests.specdec.scheduling.speculation.world import COSTS, profile_of


def rate_alone(number: int, chance: Chance, place: int, num_rounds: int = 400) -> float:
    """What one drafter would bring by itself, with its own controller."""
    world = world_of(number, lambda one, _: chance(one, place), drafters=(DRAFTERS[place],))
    controller = controller_of((DRAFTERS[place],))
    world.run(controller, 200)
    return world.run(controller, num_rounds).rate


def plain_rate(number: int) -> float:
    world = world_of(number, lambda one, _: 0.0)
    controller = GoodputController(ControllerSettings(max_draft_tokens=0), profile_of(MODEL, noise=0.01))
    return world.run(controller, 200).rate


CASES: dict[str, tuple[float, ...]] = {
    "lookup": (0.85, 0.5, 0.6),
    "model": (0.1, 0.85, 0.88),
    "slow": (0.05, 0.2, 0.95),
    "alike": (0.6, 0.6, 0.6),
    "nothing": (0.02, 0.03, 0.05),
}


QUICK = [("lookup", 1), ("slow", 4)]


@pytest.mark.parametrize(
    ("case", "number"),
    [
        pytest.param(case, number, marks=() if (case, number) in QUICK else pytest.mark.full)
        for case in CASES
        for number in (1, 4, 16)
    ],
)
def test_nearly_as_good_as_the_best_drafter_alone(number: int, case: str) -> None:
    chances = CASES[case]
    best = max(rate_alone(number, lambda _, place: chances[place], place) for place in range(3))
    controller = controller_of()
    world = world_of(number, lambda _, place: chances[place])
    world.run(controller, 600)
    rate = world.run(controller, 2000).rate
    assert rate >= 0.95 * best, (rate, best, world.by_drafter)
    assert rate >= 0.97 * plain_rate(number)


@pytest.mark.full
def test_each_class_gets_its_own() -> None:
    """Code repeats itself, prose does not: better than any drafter for both."""

    def chance(one: FakeRequest, place: int) -> float:
        return ((0.9, 0.5, 0.5) if one.class_name == "code" else (0.05, 0.8, 0.82))[place]

    best = 0.0
    for place in range(3):
        alone = controller_of((DRAFTERS[place],))
        world = world_of(4, lambda one, _, place=place: chance(one, place), drafters=(DRAFTERS[place],))
        world.class_names = ("code", "prose")
        world.run(alone, 200)
        best = max(best, world.run(alone, 400).rate)
    controller = controller_of()
    world = world_of(4, chance, class_names=("code", "prose"))
    world.run(controller, 800)
    rate = world.run(controller, 1200).rate
    assert rate > 1.05 * best
    pick = controller.pick_drafter
    assert pick is not None
    counts: Counter[tuple[str, int]] = Counter()
    for _ in range(40):
        world.run(controller, 10)
        counts.update((one.class_name, pick(one.request_id, one.class_name)) for one in world.requests)
    # Trials, and moments at which one drafter for all is cheaper than two, apart.
    for name, place in (("code", 0), ("prose", 1)):
        assert counts[name, place] > 0.7 * sum(counts[name, one] for one in range(3))


def test_short_and_long_texts_of_one_batch_get_what_suits_their_length() -> None:
    """A small model that reads everything, and the target with a part of its K/V: as often right."""
    reader = replace(COSTS["cpu"], draft=lambda n, c: 5e-5 * n + 3e-7 * c)
    window = replace(COSTS["cpu"], draft=lambda n, c: 6e-4 * n + 1e-8 * c)
    drafters = (reader, window)
    long = {"contexts": (200, 24_000), "kv_budget": 512, "budgeted": 1}
    counts: Counter[tuple[bool, int]] = Counter()
    for seed in (1, 2):
        world = world_of(8, lambda _one, _place: 0.85, drafters=drafters, seed=seed, **long)
        controller = controller_of(drafters, budgeted=1)
        world.run(controller, 1200)
        pick = controller.pick_drafter
        assert pick is not None
        for _ in range(40):
            world.run(controller, 10)
            counts.update(
                (one.committed_len > 20_000, pick(one.request_id, one.class_name)) for one in world.requests
            )
    assert counts[False, 0] > 0.8 * (counts[False, 0] + counts[False, 1])
    assert counts[True, 1] > 0.8 * (counts[True, 0] + counts[True, 1])


@pytest.mark.full
def test_follows_when_a_drafter_gets_better_and_another_worse() -> None:
    def chance(one: FakeRequest, place: int) -> float:
        return ((0.85, 0.4, 0.4) if world.round_number < 800 else (0.05, 0.85, 0.4))[place]

    controller = controller_of()
    world = world_of(4, chance)
    world.run(controller, 800)
    before = list(world.by_drafter)
    assert before[0] > 0.8 * sum(before)
    world.run(controller, 600)
    between = list(world.by_drafter)
    world.run(controller, 400)
    after = [late - early for late, early in zip(world.by_drafter, between, strict=True)]
    assert after[1] > 0.8 * sum(after)


def test_a_slow_drafter_does_not_keep_a_good_one_from_coming_back() -> None:
    """While nothing is drafted probes ask who is hardly known: whoever is too dear to be asked often."""
    slow = replace(
        MODEL, draft=lambda n, c: 16.0 * MODEL.draft(n, c), draft_start_s=16.0 * MODEL.draft_start_s
    )
    chances = [0.4, 0.5]
    controller = controller_of((LOOKUP, slow))
    world = world_of(1, lambda _, place: chances[place], drafters=(LOOKUP, slow))
    world.run(controller, 1000)
    before = world.run(controller, 1000).rate
    chances[0] = 0.01
    world.run(controller, 3000)
    chances[0] = 0.4
    world.run(controller, 2000)
    assert world.run(controller, 1000).rate >= 0.9 * before


def test_who_has_a_drafter_keeps_it() -> None:
    controller = controller_of()
    world = world_of(4, lambda one, place: (0.9, 0.1, 0.1)[place])
    world.run(controller, 100)
    for one in world.requests[:2]:
        one.own_drafter = 1
    owners = {one.request_id for one in world.requests[:2]}
    chosen = bounded_choice(controller, world.requests)
    assert len(chosen) == 4
    world.run(controller, 3)
    assert {one.request_id for one in world.requests if one.own_drafter == 1} <= owners


def test_a_trial_of_requests_that_have_gone_ends() -> None:
    """Left are those that have a drafter of their own: nothing is tried, and drafting may be given up."""
    controller = controller_of()
    world = world_of(4, lambda _one, place: (0.9, 0.8, 0.8)[place])
    while not controller._facts.has_trial:
        world.run_round(controller)
    for one in world.requests:
        one.num_to_generate = one.num_generated  # they end
    world.chance = lambda _one, _place: 0.02
    replace_ended = world._fill_up

    def fill_up() -> int:
        number = replace_ended()
        for one in world.requests:
            one.own_drafter = 2
        return number

    world._fill_up = fill_up  # type: ignore[method-assign]
    world.run(controller, 300)
    assert not controller._facts.has_trial
    booking = world.run(controller, 300)
    assert booking.speculating_rounds < 0.2 * booking.rounds


def test_who_wants_no_drafts_is_not_asked_for_while_nothing_is_drafted() -> None:
    picks = DrafterPicks((4, 4), AcceptanceTracker(4))
    costs = DrafterCosts(
        rate=100.0,
        row_s=1e-4,
        fixed_s=np.zeros((2, 4)),
        sequence_s=np.zeros(2),
        token_s=np.zeros(2),
        is_drafting=False,
    )
    wants, wants_none = fake_request("wants", 50), fake_request("wants none", 50)
    wants_none.requested_draft_tokens = 0
    picks.review(1, [wants, wants_none], costs)
    for _ in range(100):  # of the first drafter enough is known
        picks.note([], {wants.request_id: 4}, {wants.request_id: 0})
    picks.review(2, [wants, wants_none], costs)
    assert picks.of(wants.request_id, wants.class_name) == 1
    assert picks.of(wants_none.request_id, wants_none.class_name) == 0


def test_another_thread_may_ask_while_requests_are_forgotten() -> None:
    """Who asks for metrics; here it asks of a new request whenever an old one is looked up."""
    picks = DrafterPicks((4, 4), AcceptanceTracker(4))
    numbers = itertools.count()

    class LookedUp(str):
        def __hash__(self) -> int:
            picks.of(RequestId(f"new {next(numbers)}"), "other")
            return super().__hash__()

    for number in range(100):
        picks.of(RequestId(LookedUp(number)), "other")
    costs = DrafterCosts(
        rate=100.0, row_s=1e-4, fixed_s=np.zeros((2, 4)), sequence_s=np.zeros(2), token_s=np.zeros(2)
    )
    picks.review(1, [replace(fake_request("present", 50), own_drafter=1)], costs)
    assert not picks._picks
