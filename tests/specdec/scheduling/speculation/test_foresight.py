"""How a batch is described from requests, and what is kept of each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from specdec.scheduling.speculation.cost import CostModel, VerifyShape
from specdec.scheduling.speculation.cost_learning import CostLearning
from specdec.scheduling.speculation.evidence import Overheads
from specdec.scheduling.speculation.foresight import Foresight
from specdec.scheduling.speculation.goodput import AheadOutlook, Kind, Option, at_rows
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.speculation.request_facts import RequestFacts
from specdec.scheduling.speculation.settings import ControllerSettings
from tests.specdec.scheduling.simulation import FakeRequest, fake_request
from tests.specdec.scheduling.speculation.world import COSTS, profile_of

SETTINGS = ControllerSettings(max_draft_tokens=8, caps_by_batch=((2, 4, 5),))


def foresight_of(settings: ControllerSettings = SETTINGS) -> Foresight:
    costs, measured = (
        CostModel(profile_of(COSTS["cpu"]), max_rows=64, max_sequences=16, max_steps=8) for _ in range(2)
    )
    overheads = Overheads()
    learning = CostLearning(costs, overheads, has_several_drafters=False)
    return Foresight(settings, RequestFacts(settings), costs, overheads, learning, measured)


def requests() -> list[FakeRequest]:
    first, second = fake_request("a", 100), fake_request("b", 300, generate=4)
    first.requested_draft_tokens, second.itl_s = 12, 0.02
    return [first, second]


def test_bounds_and_wishes_of_a_batch() -> None:
    batch = foresight_of().batch_of(requests())
    assert batch.caps.tolist() == [5, 3]
    assert batch.requested.tolist() == [8, -1]
    assert (batch.context_tokens, batch.itl_s) == (400.0, (0.02,))
    assert batch.drafters is None
    assert foresight_of().batch_of([fake_request("c", 50)]).itl_s == ()


def test_wishes_go_as_far_as_the_drafters_of_those_who_have_them() -> None:
    settings = ControllerSettings(max_draft_tokens=8, drafter_caps=(8, 3))
    sequences = [fake_request(name, 100) for name in "abc"]
    for one, wish, drafter in zip(sequences, (12, 12, 2), (0, 1, 1), strict=True):
        one.requested_draft_tokens, one.own_drafter = wish, drafter
    assert foresight_of(settings).batch_of(sequences).requested.tolist() == [8, 3, 2]


def test_every_target_of_a_batch_counts_once() -> None:
    sequences = [fake_request(name, 100) for name in "abcd"]
    for one, itl_s in zip(sequences, (0.03, None, 0.001, 0.03), strict=True):
        one.itl_s = itl_s
    batch = foresight_of().batch_of(sequences)
    assert batch.itl_s == batch.part(0, 2).itl_s == (0.001, 0.03), "a stream waits for both cohorts"


def test_cohorts_are_asked_apart() -> None:
    foresight = foresight_of()
    sequences = [fake_request(str(number), 100) for number in range(4)]
    batch = foresight.batch_of(sequences)
    plain_s = foresight.evaluate(batch, {}).plain_s
    found = foresight.by_cohort(batch, 1, {}, plain_s)
    assert found is not None
    chosen = found.num_draft_tokens
    assert chosen.shape == (4,)
    assert 0 <= chosen.min() <= chosen.max() <= 5
    # What is expected is what is chosen, of both: nobody else's tokens, nobody else's rows.
    assert 4.0 < found.tokens <= 4.0 + chosen.sum()
    alone = [
        foresight.by_cohort(foresight.batch_of(sequences[:2]), 1, {}, plain_s),
        foresight.evaluate(batch, {}).ping_pong(),
    ]
    assert alone[0] is not None
    assert alone[1] is not None
    assert found.round_s == pytest.approx(alone[1].round_s, rel=0.5)
    assert found.round_s > alone[0].round_s


def test_cohorts_are_not_bound_by_what_a_round_of_all_cannot_keep() -> None:
    foresight = foresight_of()
    sequences = [fake_request(str(number), 20_000) for number in range(4)]
    free = foresight.batch_of(sequences)
    half_s, whole_s = (foresight.evaluate(one, {}).plain_s for one in (free.part(0, 2), free))
    assert half_s < whole_s
    sequences[0].itl_s = 0.5 * (half_s + whole_s)
    bound = foresight.batch_of(sequences)
    expected, found = (foresight.by_cohort(one, 2, {}, whole_s) for one in (free, bound))
    assert expected is not None
    assert found is not None
    assert found.num_draft_tokens.tolist() == expected.num_draft_tokens.tolist()
    assert foresight.by_cohort(bound, 2, {}, half_s) is None, "control: as if a cohort was all"


def test_cohorts_say_what_they_would_bring_if_nobody_had_a_target() -> None:
    foresight = foresight_of()
    sequences = [fake_request(str(number), 100) for number in range(4)]
    free = foresight.batch_of(sequences)
    plain_s = foresight.evaluate(free, {}).plain_s
    unbounded = foresight.by_cohort(free, 2, {}, plain_s)
    assert unbounded is not None
    assert unbounded.unbounded_rate is None
    sequences[0].itl_s = 0.05 * plain_s + 0.95 * unbounded.round_s
    found = foresight.by_cohort(foresight.batch_of(sequences), 2, {}, plain_s)
    assert found is not None
    assert found.unbounded_rate == pytest.approx(unbounded.rate)
    assert found.rate < unbounded.rate


def test_what_targets_would_leave_if_drafts_took_what_was_measured() -> None:
    """At the present price: it is tried for what it costs now, if that is what it still costs."""
    foresight = foresight_of()
    sequences = [fake_request(str(number), 100) for number in range(4)]
    free = foresight.batch_of(sequences)
    evaluation = foresight.evaluate(free, {})
    plain_s, before = evaluation.plain_s, evaluation.lockstep()
    assert before is not None
    for one in sequences:
        one.itl_s = 1.05 * before.round_s
    batch = foresight.batch_of(sequences)
    costs = foresight._costs.draft
    budgets = {one.request_id: 4 for one in sequences}
    for _ in range(40):
        for num_steps in (1, 2, 4, 8):
            steps = dict.fromkeys(budgets, num_steps)
            usual_s = float(foresight._measured.draft.by_steps(np.full(num_steps, 4), 100.0)[-1])
            costs.note(steps, 100.0, 1, 16.0 * usual_s, work_s=16.0 * usual_s)
    assert foresight.evaluate(batch, {}).lockstep() is None
    outlook = AheadOutlook(rates=np.array([0.5]), max_branches=1)
    found = foresight.beyond_targets(batch, plain_s, ("lockstep", "draft_ahead"), outlook)
    assert found is not None
    assert found.kind == "lockstep"
    assert found.round_s == pytest.approx(foresight.price_s(batch, found))
    assert found.round_s > 2.0 * before.round_s
    slower = foresight.beyond_targets(batch, 1.3 * plain_s, ("lockstep",), outlook)
    assert slower is None or slower.num_draft_tokens.sum() < found.num_draft_tokens.sum(), "all is slower"
    for one in sequences:
        one.itl_s = 1.001 * plain_s
    never = foresight.batch_of(sequences)
    assert foresight.beyond_targets(never, plain_s, ("lockstep",), outlook) is None, "it never was possible"


def test_prices_count_what_each_drafter_reads() -> None:
    """That others have long texts makes no drafts of a drafter dearer that has short ones."""
    reader = replace(COSTS["cpu"], draft=lambda n, c: 1e-4 * n + 2e-7 * c)
    free = replace(COSTS["cpu"], draft=lambda n, c: 1e-4 * n)
    profile = msgspec.structs.replace(profile_of(reader), other_drafts=(profile_of(free).draft,))
    costs = CostModel(profile, max_rows=64, max_sequences=16, max_steps=8, num_drafters=2)
    settings = ControllerSettings(max_draft_tokens=8, drafter_caps=(8, 8))
    facts, overheads = RequestFacts(settings), Overheads()
    learning = CostLearning(costs, overheads, has_several_drafters=True)
    foresight = Foresight(settings, facts, costs, overheads, learning, costs)
    sequences = [fake_request(str(number), length) for number, length in enumerate((100, 100, 20_000))]
    for one, drafter in zip(sequences, (0, 0, 1), strict=True):
        one.own_drafter = drafter
    batch = foresight.batch_of(sequences)
    option = Option(
        kind="lockstep",
        num_draft_tokens=np.full(3, 2),
        tokens=6.0,
        round_s=1.0,
        draft_s=0.5,
        verify_s=0.5,
    )
    drafted_s = foresight.price_s(batch, option)
    drafted_s -= foresight.price_s(batch, option._replace(num_draft_tokens=np.array([0, 0, 2])))
    rows = float(batch.estimate.filled[:2, :2].sum())
    table = costs.verify.table(3, 20_200.0)
    others = 3 + float(batch.estimate.filled[2, :2].sum())
    drafted_s -= float(at_rows(table, others + rows)) - float(at_rows(table, others))
    assert drafted_s == pytest.approx(float(costs.drafts[0].by_steps(np.full(2, 2), 100.0)[-1]), rel=1e-6)


def test_between_steps_of_a_target_that_is_elsewhere_another_one_goes_on() -> None:
    """In ping_pong, and in the price of it; in other modes nothing goes on then."""
    here, there = foresight_of(), foresight_of(replace(SETTINGS, is_target_elsewhere=True))
    batch = here.batch_of([fake_request(str(number), 100) for number in range(4)])
    outlook = AheadOutlook(rates=np.array([0.5, 0.3, 0.2, 0.1]), max_branches=4)
    modes: Sequence[OverlapMode] = ("lockstep", "ping_pong", "draft_ahead")
    for foresight in (here, there):
        foresight._overheads.note(2, 0.001, has_drafts=True)
        foresight._overheads.note(4, 0.001, has_drafts=True)
    for kind, option in there.evaluate(batch, {}).options(modes, outlook).items():
        usual = here.evaluate(batch, {}).options(modes, outlook)[kind]
        saved_s = 0.002 if kind == "ping_pong" else 0.0
        assert option.num_draft_tokens.tolist() == usual.num_draft_tokens.tolist()
        assert usual.round_s - option.round_s == pytest.approx(saved_s)
        saved_s = here.price_s(batch, usual) - there.price_s(batch, option)
        assert saved_s == pytest.approx(0.002 if kind == "ping_pong" else 0.0)


@pytest.mark.parametrize("is_target_elsewhere", [False, True])
@pytest.mark.parametrize("kind", ["plain", "lockstep", "ping_pong", "draft_ahead"])
def test_prices_follow_costs(kind: Kind, *, is_target_elsewhere: bool) -> None:
    """What an option was chosen by is about its price, which rises with what its steps cost."""
    number, context = (2, 200.0) if kind == "ping_pong" else (4, 400.0)
    is_overlapped = kind in ("ping_pong", "draft_ahead")
    foresight = foresight_of(replace(SETTINGS, is_target_elsewhere=is_target_elsewhere))
    verify = foresight._costs.verify
    batch = foresight.batch_of([fake_request(str(number), 100) for number in range(4)])
    outlook = AheadOutlook(rates=np.array([0.5, 0.3, 0.2, 0.1]), max_branches=4)
    modes: Sequence[OverlapMode] = ("lockstep", "ping_pong", "draft_ahead")
    option = foresight.evaluate(batch, {}).options(modes, outlook)[kind]
    before_s = foresight.price_s(batch, option)
    assert before_s == pytest.approx(option.round_s, rel=0.15)
    table = verify.table(number, context, is_overlapped=is_overlapped)
    rows = (4 + int(option.num_draft_tokens.sum())) // (2 if kind == "ping_pong" else 1)

    def take(factors: Mapping[int, float]) -> None:
        for _ in range(20):
            for other, factor in factors.items():
                shape = VerifyShape(number, context, other)
                verify.note(shape, factor * float(table[other]), is_overlapped=is_overlapped)

    others = (40, 48, 56)
    take({rows: 1.0} | dict.fromkeys(others, 1.0))
    take({rows: 2.0} | dict.fromkeys(others, 2.0))
    slower_s = foresight.price_s(batch, option)
    parts = 2 if kind == "ping_pong" else 1
    assert slower_s - before_s == pytest.approx(parts * option.verify_s, rel=0.3)
    take({rows: 2.0 * 1.4} | dict.fromkeys(others, 2.0))
    assert foresight.price_s(batch, option) - slower_s > 0.3 * parts * option.verify_s
