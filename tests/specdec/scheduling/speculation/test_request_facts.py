"""What is kept of requests."""

from __future__ import annotations

from specdec.kv.selection import KvBudget
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
