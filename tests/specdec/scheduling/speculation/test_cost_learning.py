"""What rounds teach of costs, and what prompts take of a round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.controller import DraftOutcome, RoundObservation
from specdec.scheduling.speculation.cost import CostModel
from specdec.scheduling.speculation.cost_learning import CostLearning
from specdec.scheduling.speculation.evidence import Overheads
from specdec.scheduling.speculation.time_spread import NO_PROMPTS
from tests.specdec.scheduling.speculation.world import COSTS, profile_of

DECISION: Any = SimpleNamespace(batch=SimpleNamespace(context_tokens=400.0, contexts=None), index={})
PLAIN = RoundObservation(
    num_rows=4,
    num_sequences=4,
    num_committed=4,
    draft_s=0.0,
    verify_s=0.02,
    round_s=0.025,
    outcomes=[],
    context_tokens=400,
)


def learning() -> tuple[CostLearning, CostModel, Overheads]:
    costs = CostModel(profile_of(COSTS["cpu"]), max_rows=64, max_sequences=16, max_steps=8)
    overheads = Overheads()
    return CostLearning(costs, overheads, has_several_drafters=False), costs, overheads


def test_steps_that_take_longer_and_what_lies_between_them() -> None:
    learnt, costs, overheads = learning()
    before = float(costs.verify.table(4, 400.0)[4])
    for _ in range(64):
        learnt.note(PLAIN, DECISION)
    after = float(costs.verify.table(4, 400.0)[4])
    assert abs(after - 0.02) < abs(before - 0.02)
    assert overheads.of(4, has_drafts=False) == pytest.approx(0.005)


def test_of_the_way_to_the_target_and_back_a_part_is_the_targets_own() -> None:
    learnt, _, _ = learning()
    assert learnt.way_s(4) == 0.0
    for _ in range(8):
        learnt.note(replace(PLAIN, target_s=0.018), DECISION)
    assert learnt.way_s(4) == pytest.approx(0.001)
    assert 0.0005 < learnt.way_s(2) < 0.001
    learnt.note(replace(PLAIN, target_s=0.001, mode="ping_pong"), DECISION)
    assert learnt.way_s(4) == pytest.approx(0.001), "there an answer waits for the other cohort's"


def test_a_pause_of_the_machine_is_no_way() -> None:
    """Taken for one, it would seem to hide whole steps, and few drafts would look best in ping_pong."""
    learnt, costs, _ = learning()
    for _ in range(8):
        learnt.note(replace(PLAIN, target_s=0.018), DECISION)
    learnt.note(replace(PLAIN, target_s=0.018, verify_s=0.5), DECISION)
    assert learnt.way_s(4) == pytest.approx(0.001)
    for _ in range(200):
        learnt.note(replace(PLAIN, target_s=0.018, mode="ping_pong"), DECISION)
    told_s = float(costs.verify.table(4, 400.0, is_overlapped=True)[4])
    assert told_s == pytest.approx(0.02, rel=0.1)


def test_a_round_without_the_prompts_in_it_is_shorter() -> None:
    learnt, _, _ = learning()
    assert learnt.own_s(PLAIN, "plain", 0.025) == 0.025
    with_prompts = replace(PLAIN, num_rows=44, num_prompt_rows=40)
    assert learnt.own_s(with_prompts, "plain", 0.025) < 0.025


def test_what_prompts_take_of_how_many_rounds() -> None:
    learnt, _, _ = learning()
    assert learnt.prompts == NO_PROMPTS
    with_prompts = replace(PLAIN, num_rows=44, num_prompt_rows=40)
    for at in range(200):
        learnt.note(with_prompts if at % 4 == 0 else PLAIN, DECISION)
    assert learnt.prompts.rounds_per_token == pytest.approx(0.25 / PLAIN.num_committed, rel=0.1)
    assert learnt.prompts.seconds == pytest.approx(
        0.025 - learnt.own_s(with_prompts, "plain", 0.025), rel=0.1
    )


def test_waiting_for_a_busy_drafter_is_not_its_work() -> None:
    learnt, costs, _ = learning()
    budgets = {RequestId(f"r{at}"): 4 for at in range(4)}
    decision: Any = SimpleNamespace(
        batch=SimpleNamespace(context_tokens=400.0, contexts=None, draft_contexts=None),
        index={},
        option=SimpleNamespace(num_branches=1),
    )
    numbers = np.full(4, 4)
    usual_s = float(costs.draft.by_steps(numbers, 100.0)[-1])
    drafted = replace(PLAIN, budgets=budgets, draft_s=usual_s, draft_work_s=usual_s)
    for at in range(200):
        waited_s = usual_s if at % 2 else 3.0 * usual_s
        learnt.note(replace(drafted, draft_ready_s=waited_s), decision)
    assert float(costs.draft.by_steps(numbers, 100.0)[-1]) == pytest.approx(usual_s, rel=0.02)
    assert costs.draft.spread.factors.min() == pytest.approx(1.0, rel=0.02)
    assert costs.draft.spread.factors.max() == pytest.approx(3.0, rel=0.02)


def test_continuations_of_the_decision_before_say_nothing_of_this_one() -> None:
    """The first round after draft_ahead was left still waits for them: nobody knows how many there were."""
    learnt, costs, _ = learning()
    budgets = {RequestId(f"r{at}"): 4 for at in range(4)}
    batch = SimpleNamespace(context_tokens=400.0, contexts=None, draft_contexts=None)
    before = float(costs.draft.by_steps(np.full(4, 16), 100.0, is_overlapped=True)[-1])
    ahead = replace(PLAIN, mode="draft_ahead", budgets=budgets, draft_ready_s=3.0 * before)
    for kind, factor in (("lockstep", 1.0), ("draft_ahead", 3.0)):
        option = SimpleNamespace(num_branches=4, kind=kind)
        decision: Any = SimpleNamespace(batch=batch, index={}, option=option)
        for _ in range(20):
            learnt.note(ahead, decision)
        after = float(costs.draft.by_steps(np.full(4, 16), 100.0, is_overlapped=True)[-1])
        assert after == pytest.approx(factor * before, rel=0.05)


@pytest.mark.parametrize("budgeted", [0, 1, None])
@pytest.mark.parametrize("has_several", [False, True])
def test_who_has_come_since_the_decision_tells_nothing_of_a_part_of_a_text(
    budgeted: int | None, has_several: bool
) -> None:
    """How much its drafts have read nobody knows: the mean length of texts is for who reads everything."""
    costs = CostModel(profile_of(COSTS["cpu"]), max_rows=64, max_sequences=16, max_steps=8)
    learnt = CostLearning(costs, Overheads(), has_several_drafters=has_several, budgeted_drafter=budgeted)
    decision: Any = SimpleNamespace(
        batch=SimpleNamespace(
            context_tokens=400.0, contexts=np.full(1, 400.0), draft_contexts=np.full(1, 64.0)
        ),
        index={RequestId("was there"): 0},
        option=SimpleNamespace(num_branches=1),
    )

    def drafting_s() -> float:
        return float(costs.draft.by_steps(np.full(4, 1), 100.0)[-1])

    before, changed = drafting_s(), {}
    for name in ("new", "was there"):
        budgets = {RequestId(name): 4}
        drafted = replace(PLAIN, budgets=budgets, draft_ready_s=3.0 * before)
        if has_several:
            drafted = replace(drafted, drafters={RequestId(name): 0}, drafting_s={0: 3.0 * before})
        for _ in range(20):
            learnt.note(drafted, decision)
        changed[name] = drafting_s() > 1.5 * before
    assert changed == {"new": budgeted != 0, "was there": True}


def test_the_wire_to_a_drafter_takes_as_long_whatever_is_drafted() -> None:
    """Longer than work on one token: long drafts do not take so many times as long as work on them."""
    learnt, costs, _ = learning()
    names = [RequestId(f"r{at}") for at in range(4)]
    decision: Any = SimpleNamespace(
        batch=SimpleNamespace(context_tokens=400.0, contexts=None, draft_contexts=None),
        index={},
        option=SimpleNamespace(num_branches=1),
    )
    at_first = {k: float(costs.draft.by_steps(np.full(k, 4), 100.0)[-1]) for k in (1, 4, 8)}
    wire_s = 5.0 * at_first[1]
    for _ in range(40):
        for k, work_s in at_first.items():
            drafted = replace(PLAIN, budgets=dict.fromkeys(names, k), draft_work_s=work_s)
            learnt.note(replace(drafted, draft_ready_s=work_s + wire_s), decision)
    for k, work_s in at_first.items():
        usual_s = float(costs.draft.by_steps(np.full(k, 4), 100.0)[-1])
        assert usual_s * costs.draft.spread.factors.mean() == pytest.approx(work_s + wire_s, rel=0.02)


def test_work_that_took_longer_than_the_answer_was_another_one() -> None:
    """What a draft worker read of a prompt meanwhile, say: it does not mean that there is no wire."""
    learnt, costs, _ = learning()
    decision: Any = SimpleNamespace(
        batch=SimpleNamespace(context_tokens=400.0, contexts=None, draft_contexts=None),
        index={},
        option=SimpleNamespace(num_branches=1),
    )
    usual_s = float(costs.draft.by_steps(np.full(4, 4), 100.0)[-1])
    budgets = {RequestId(f"r{at}"): 4 for at in range(4)}
    for at in range(200):
        work_s = 10.0 * usual_s if at % 4 == 3 else usual_s
        drafted = replace(PLAIN, budgets=budgets, draft_work_s=work_s, draft_ready_s=usual_s + 0.01)
        learnt.note(drafted, decision)
    assert float(costs.draft.by_steps(np.full(4, 4), 100.0)[-1]) == pytest.approx(usual_s + 0.01, rel=0.02)


@pytest.mark.parametrize("has_several", [False, True])
def test_rounds_that_read_prompts_show_that_drafts_are_cheap_again(has_several: bool) -> None:
    """What they take beside prompts is an upper bound: where all rounds read some, there is nothing else."""
    costs = CostModel(profile_of(COSTS["cpu"]), max_rows=64, max_sequences=16, max_steps=8)
    learnt = CostLearning(costs, Overheads(), has_several_drafters=has_several)
    decision: Any = SimpleNamespace(
        batch=SimpleNamespace(context_tokens=400.0, contexts=None, draft_contexts=None),
        index={},
        option=SimpleNamespace(num_branches=1),
    )
    budgets = {RequestId(f"r{at}"): 4 for at in range(4)}
    usual_s = float(costs.draft.by_steps(np.full(4, 4), 100.0)[-1])

    def drafted_in(factor: float, num_prompt_rows: int) -> float:
        seconds = factor * usual_s
        drafted = replace(
            PLAIN,
            budgets=budgets,
            draft_ready_s=seconds,
            draft_work_s=seconds,
            num_prompt_rows=num_prompt_rows,
        )
        if has_several:
            drafted = replace(drafted, drafting_s={0: seconds}, drafters=dict.fromkeys(budgets, 0))
        for _ in range(60):
            learnt.note(drafted, decision)
        return float(costs.draft.by_steps(np.full(4, 4), 100.0)[-1]) / usual_s

    assert drafted_in(3.0, 40) == pytest.approx(1.0), "they may be what took so long"
    assert not learnt.doubts_drafts(4)
    assert drafted_in(9.0, 0) == pytest.approx(9.0, rel=0.05)
    assert learnt.doubts_drafts(4)
    assert drafted_in(1.0, 40) == pytest.approx(1.0, rel=0.3)
    if not has_several:
        assert costs.draft.spread.factors.mean() == pytest.approx(1.0, rel=0.05), "drafts alone vary so much"


@pytest.mark.parametrize("factor", [1.0, 0.4])
def test_drafts_behind_short_texts_say_what_steps_cost_at_the_mean(factor: float) -> None:
    """Beside a long one, whose draft rows would cost more: neither counts as if it were of mean context."""
    learnt, costs, _ = learning()
    contexts = [100.0] * 7 + [100_000.0]
    context = sum(contexts)
    names = [RequestId(f"r{at}") for at in range(8)]
    decision: Any = SimpleNamespace(
        batch=SimpleNamespace(context_tokens=context, contexts=np.array(contexts), draft_contexts=None),
        index={name: at for at, name in enumerate(names)},
    )
    first = costs.verify.table(8, context)
    for at in range(60):
        drafted = [(at % 3) if name != names[-1] else 0 for name in names]
        longer = sum(number * (one - context / 8) for number, one in zip(drafted, contexts, strict=True))
        own_s = factor * costs.verify.own_context_s * longer
        outcomes = [
            DraftOutcome(request_id=name, num_drafted=number, num_accepted=0)
            for name, number in zip(names, drafted, strict=True)
            if number
        ]
        rows = 8 + sum(drafted)
        verify_s = factor * float(first[rows]) + own_s
        step = replace(
            PLAIN,
            num_sequences=8,
            num_rows=rows,
            context_tokens=int(context),
            verify_s=verify_s,
            outcomes=outcomes,
        )
        learnt.note(step, decision)
    for rows in (8, 15, 22):
        assert costs.verify.table(8, context)[rows] == pytest.approx(factor * float(first[rows]), rel=0.05)
