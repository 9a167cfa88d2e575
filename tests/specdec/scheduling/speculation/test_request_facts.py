"""What is kept of requests."""

from __future__ import annotations

import pytest

from specdec.kv.selection import KvBudget
from specdec.scheduling.speculation.acceptance import MAX_CLASSES
from specdec.scheduling.speculation.controller import DraftOutcome, RoundObservation
from specdec.scheduling.speculation.request_facts import RequestFacts
from specdec.scheduling.speculation.settings import ControllerSettings
from tests.specdec.scheduling.simulation import fake_request


def test_verdicts_change_what_is_expected() -> None:
    facts = RequestFacts(ControllerSettings(max_draft_tokens=4))
    good, bad = fake_request("good", 100), fake_request("bad", 100)
    facts.take_over([good])
    assert facts.welcome(bad) is None
    for now in range(40):
        outcomes = [
            DraftOutcome(request_id=good.request_id, num_drafted=4, num_accepted=4),
            DraftOutcome(request_id=bad.request_id, num_drafted=4, num_accepted=0),
        ]
        budgets = {good.request_id: 4, bad.request_id: 4}
        observation = RoundObservation(
            num_rows=10, num_sequences=2, num_committed=6, draft_s=0.0, verify_s=0.01, outcomes=outcomes
        )
        facts.note(now, observation, budgets)
    accepted = facts.estimate([good, bad]).accepted
    assert accepted[0, 0] > 0.8 > 0.2 > accepted[1, 0]


def test_who_is_picked_for() -> None:
    one = fake_request("a", 1000)
    plain = RequestFacts(ControllerSettings(max_draft_tokens=4))
    assert plain.budgets is plain.drafters is plain.drafters_of([one]) is None
    assert not plain.has_trial
    several = RequestFacts(ControllerSettings(max_draft_tokens=8, drafter_caps=(8, 3)))
    drafters = several.drafters_of([one])
    assert drafters is not None
    assert several.welcome(one) == (8, 3)[drafters[0]]
    budgets = (KvBudget(256, 1), KvBudget(512, 1))
    assert RequestFacts(ControllerSettings(max_draft_tokens=8, kv_budgets=budgets)).budgets is not None
    both = RequestFacts(
        ControllerSettings(max_draft_tokens=8, drafter_caps=(8, 3), kv_budgets=budgets, budgeted_drafter=1)
    )
    assert both.budgets is None
    assert both.drafters is not None
    assert both.drafters.picks_budgets


@pytest.mark.parametrize("num_classes", [3, MAX_CLASSES])
def test_every_class_is_learnt_of_by_each_budget(num_classes: int) -> None:
    budgets = tuple(KvBudget(amount, 1) for amount in (128, 256, 512, 1024))
    facts = RequestFacts(ControllerSettings(max_draft_tokens=4, kv_budgets=budgets))
    assert facts.budgets is not None
    for at in range(num_classes):
        for option in range(len(budgets)):
            one = fake_request(f"{at}-{option}", 2000)
            one.class_name, one.has_own_kv_budget = f"class {at}", False
            facts.budgets._picks[one.request_id] = option
            facts.take_over([one])
            outcome = DraftOutcome(request_id=one.request_id, num_drafted=4, num_accepted=2)
            observation = RoundObservation(
                num_rows=5, num_sequences=1, num_committed=3, draft_s=0.0, verify_s=0.01, outcomes=[outcome]
            )
            facts.note(0, observation, {one.request_id: 4})
            facts.estimate([one])
            assert facts.acceptance.num_trials(facts.budgets.class_of(one)) > 0.0, (at, option)


@pytest.mark.parametrize("num_classes", [3, MAX_CLASSES])
def test_every_class_is_learnt_of_by_each_drafter_and_budget(num_classes: int) -> None:
    budgets = tuple(KvBudget(amount, 1) for amount in (128, 256, 512))
    facts = RequestFacts(
        ControllerSettings(max_draft_tokens=4, drafter_caps=(4, 4, 4), kv_budgets=budgets, budgeted_drafter=1)
    )
    picks = facts.drafters
    assert picks is not None
    for at in range(num_classes):
        for number, arm in enumerate(picks._arms):
            one = fake_request(f"{at}-{number}", 2000)
            one.class_name, one.own_drafter = f"class {at}", arm.drafter
            one.has_own_kv_budget = arm.budget is None
            if arm.budget is not None:
                assert picks._budgets is not None
                picks._budgets.give(one.request_id, arm.budget)
            assert picks._arm(one, arm.drafter) == arm
            facts.welcome(one)
            num_accepted = number % 2 * 4
            outcome = DraftOutcome(request_id=one.request_id, num_drafted=4, num_accepted=num_accepted)
            observation = RoundObservation(
                num_rows=5,
                num_sequences=1,
                num_committed=1 + num_accepted,
                draft_s=0.0,
                verify_s=0.01,
                outcomes=[outcome],
                drafters={one.request_id: arm.drafter},
            )
            for _ in range(10):
                facts.note(0, observation, {one.request_id: 4})
    for at in range(num_classes):
        for number, arm in enumerate(picks._arms):
            new = fake_request("new", 2000)
            new.class_name = f"class {at}"
            accepted = float(picks._estimate([new], [arm]).accepted[0, 0])
            assert accepted > 0.72 if number % 2 else accepted < 0.55, (at, arm)


def test_a_budget_that_is_set_is_learnt_of_as_such() -> None:
    """Also of requests that had others before: `set_kv_budget`."""
    budgets = (KvBudget(256, 1), KvBudget(512, 1))
    facts = RequestFacts(ControllerSettings(max_draft_tokens=4, kv_budgets=budgets))
    one = fake_request("a", 2000)
    one.has_own_kv_budget = False

    def see(num_accepted: int) -> None:
        facts.take_over([one])
        outcome = DraftOutcome(request_id=one.request_id, num_drafted=4, num_accepted=num_accepted)
        observation = RoundObservation(
            num_rows=5,
            num_sequences=1,
            num_committed=1 + num_accepted,
            draft_s=0.0,
            verify_s=0.01,
            outcomes=[outcome],
        )
        for _ in range(40):
            facts.note(0, observation, {one.request_id: 4})

    see(4)
    one.has_own_kv_budget = True
    see(0)
    assert facts.acceptance.num_trials("other") > 20.0
    assert facts.estimate([one]).accepted[0, 0] < 0.4
