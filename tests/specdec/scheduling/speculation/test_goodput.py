"""The choice of k: against every choice there is, on small batches, and by what each mode is said to cost."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from specdec.scheduling.speculation.acceptance import AcceptanceEstimate
from specdec.scheduling.speculation.cost import CostModel, VerifyShape
from specdec.scheduling.speculation.goodput import AheadOutlook, Batch, Evaluation, Kind, Option
from specdec.scheduling.speculation.guesses import GuessRanks
from specdec.scheduling.speculation.time_spread import NO_PROMPTS, PromptLoad
from tests.specdec.scheduling.speculation.world import COSTS, profile_of

OUTLOOK = AheadOutlook(rates=GuessRanks().rates, max_branches=4)
OVERHEADS = {"plain": 0.0003, "lockstep": 0.0003, "ping_pong": 0.0002, "draft_ahead": 0.0003}


def costs_of(name: str) -> CostModel:
    return CostModel(profile_of(COSTS[name], noise=0.0), max_rows=640, max_sequences=256, max_steps=8)


def batch_of(
    accepted: Sequence[Sequence[float]],
    *,
    caps: Sequence[int] | None = None,
    requested: Sequence[int] | None = None,
    present: float = 1.0,
    context: int = 500,
    itl_s: Sequence[float] = (),
    contexts: Sequence[int] | None = None,
    draft_contexts: Sequence[int] | None = None,
) -> Batch:
    chances = np.array(accepted, dtype=np.float64)
    number, depth = chances.shape
    return Batch(
        estimate=AcceptanceEstimate(chances, np.full_like(chances, 1.0) * _first(present, depth)),
        caps=np.array([depth] * number if caps is None else caps),
        requested=np.array([-1] * number if requested is None else requested),
        context_tokens=float(number * context if contexts is None else sum(contexts)),
        itl_s=tuple(itl_s),
        contexts=None if contexts is None else np.array(contexts, dtype=np.float64),
        draft_contexts=None if draft_contexts is None else np.array(draft_contexts, dtype=np.float64),
    )


def _first(present: float, depth: int) -> np.ndarray:
    return np.array([present] + [1.0] * (depth - 1))


def evaluate(batch: Batch, name: str = "cpu", num_rows_beside: int = 0) -> Evaluation:
    costs = costs_of(name)
    return Evaluation(batch, costs, OVERHEADS, max_rows=640, num_rows_beside=num_rows_beside)  # type: ignore[arg-type]


def lockstep_rate(batch: Batch, chosen: Sequence[int], name: str = "cpu", num_rows_beside: int = 0) -> float:
    """Goodput of one choice by its definition."""
    costs = costs_of(name)
    number, depth = batch.estimate.accepted.shape
    reached = np.cumprod(batch.estimate.accepted, axis=1)
    tokens = number + sum(float(reached[index, :k].sum()) for index, k in enumerate(chosen))
    taking_part = np.array([sum(k > step for k in chosen) for step in range(depth)])
    mean_context = batch.context_tokens / number
    contexts = [mean_context] * number if batch.contexts is None else batch.contexts.tolist()
    drafted = contexts if batch.draft_contexts is None else batch.draft_contexts.tolist()
    attended = [
        sum(context for context, k in zip(drafted, chosen, strict=True) if k > step) for step in range(depth)
    ]
    draft_s = float(costs.draft.by_steps(taking_part, np.array(attended) / np.maximum(taking_part, 1))[-1])
    table = costs.verify.table(number, batch.context_tokens)
    verify_s = float(table[number + sum(chosen) + num_rows_beside * sum(k > 0 for k in chosen)])
    verify_s += costs.verify.own_context_s * sum(
        k * (context - mean_context) for k, context in zip(chosen, contexts, strict=True)
    )
    return tokens / (draft_s + verify_s + OVERHEADS["lockstep"])


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all(name: str, seed: int) -> None:
    """Two or three requests, up to four tokens each: every combination is tried."""
    generator = np.random.default_rng(seed)
    number = 2 + seed % 2
    batch = batch_of(generator.uniform(0.05, 0.97, (number, 4)))
    found = evaluate(batch, name).lockstep()
    assert found is not None
    best = max(
        lockstep_rate(batch, chosen, name)
        for chosen in itertools.product(range(5), repeat=number)
        if any(chosen)
    )
    assert lockstep_rate(batch, found.num_draft_tokens.tolist(), name) >= 0.985 * best
    assert found.rate == pytest.approx(lockstep_rate(batch, found.num_draft_tokens.tolist(), name), rel=0.02)


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("seed", range(4))
def test_rows_beside_count_for_everyone_who_drafts(name: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    batch = batch_of(generator.uniform(0.3, 0.97, (2, 4)))
    found = evaluate(batch, name, num_rows_beside=14).lockstep()
    assert found is not None
    chosen = found.num_draft_tokens.tolist()
    assert found.rate == pytest.approx(lockstep_rate(batch, chosen, name, 14), rel=0.02)
    best = max(
        lockstep_rate(batch, one, name, 14) for one in itertools.product(range(5), repeat=2) if any(one)
    )
    assert found.rate >= 0.95 * best


def test_rows_beside_count_for_those_who_ask_for_drafts() -> None:
    asking = batch_of([[0.5] * 4] * 3, requested=[2, 0, 4])
    with_rows, without = (evaluate(asking, "cpu", rows).plain.verify_s for rows in (10, 0))
    table = costs_of("cpu").verify.table(3, asking.context_tokens)
    assert with_rows - without == pytest.approx(float(table[9 + 20] - table[9]), rel=1e-6)


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [None, 512])
def test_the_choice_is_the_best_of_all_whatever_the_contexts(
    name: str, seed: int, budget: int | None
) -> None:
    """Short and very long texts side by side: a token of a long one costs more, its draft by its budget."""
    generator = np.random.default_rng(seed)
    number = 2 + seed % 2
    contexts = generator.choice([100, 2000, 60_000, 400_000], number).tolist()
    batch = batch_of(
        generator.uniform(0.3, 0.97, (number, 4)),
        contexts=contexts,
        draft_contexts=[min(one, budget or one) for one in contexts],
    )
    found = evaluate(batch, name).lockstep()
    assert found is not None
    best = max(
        lockstep_rate(batch, chosen, name)
        for chosen in itertools.product(range(5), repeat=number)
        if any(chosen)
    )
    assert lockstep_rate(batch, found.num_draft_tokens.tolist(), name) >= 0.985 * best
    assert found.rate == pytest.approx(lockstep_rate(batch, found.num_draft_tokens.tolist(), name), rel=0.02)


def test_each_gets_what_its_own_context_is_worth() -> None:
    """Alike but for their length: where drafts read everything, short texts get more; by budget, as much."""
    contexts = [200] * 4 + [400_000] * 4
    accepted = [[0.8] * 8] * 8
    whole = evaluate(batch_of(accepted, contexts=contexts), "expensive").lockstep()
    assert whole is not None
    short, long = whole.num_draft_tokens[:4], whole.num_draft_tokens[4:]
    assert short.min() > long.max()
    bounded = batch_of(accepted, contexts=contexts, draft_contexts=[200] * 4 + [512] * 4)
    costs = costs_of("gpu")
    assert costs.verify.own_context_s == pytest.approx(0.0, abs=1e-9)
    by_budget = Evaluation(bounded, costs, OVERHEADS, max_rows=640).lockstep()  # type: ignore[arg-type]
    assert by_budget is not None
    assert by_budget.num_draft_tokens.min() >= by_budget.num_draft_tokens.max() - 1
    assert by_budget.num_draft_tokens.min() > 2


@pytest.mark.parametrize("factor", [0.5, 0.2, 0.02])
def test_short_texts_beside_a_long_one_make_no_step_shorter(factor: float) -> None:
    """Steps that take less than was measured at the start: those with drafts take no less than plain ones."""
    costs = costs_of("cpu")
    contexts, context = [100] * 7 + [200_000], 200_700
    for rows in (8, 16, 24, 32, 64):
        before = costs.verify.table(8, context)[rows]
        for _ in range(12):
            costs.verify.note(VerifyShape(8, context, rows), factor * float(before))
    for requested in ([-1] * 8, [4] * 7 + [-1]):
        batch = batch_of([[0.9] * 8] * 8, contexts=contexts, requested=requested)
        evaluation = Evaluation(batch, costs, OVERHEADS, max_rows=640)  # type: ignore[arg-type]
        found = evaluation.lockstep()
        assert found is not None
        least_s = float(costs.verify.table(8, context)[8])
        assert evaluation.plain.verify_s >= least_s > 0.0
        assert found.verify_s >= least_s


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_what_contexts_of_their_own_cost_is_corrected_as_all_else(factor: float) -> None:
    costs = costs_of("cpu")
    contexts, context = [100] * 7 + [50_000], 50_700
    table = costs.verify.table(8, context)
    for rows in (8, 16, 24, 32, 64) * 12:
        costs.verify.note(VerifyShape(8, context, rows), factor * float(table[rows]))
    batch = batch_of([[0.9] * 8] * 8, contexts=contexts, requested=[2] * 7 + [0])
    its_s = Evaluation(batch, costs, OVERHEADS, max_rows=640).plain.verify_s  # type: ignore[arg-type]
    longer = 2 * 7 * (100 - context / 8)
    expected_s = factor * (float(table[8 + 14]) + costs.verify.own_context_s * longer)
    assert its_s == pytest.approx(expected_s, rel=0.03)


@pytest.mark.parametrize(
    ("reading_s", "contexts"),
    [(2e-7, (200, 24_000, 24_000, 300)), (5e-9, (480, 510, 510, 480))],
    ids=["mixed", "alike"],
)
def test_each_drafter_reads_what_its_own_requests_have(reading_s: float, contexts: Sequence[int]) -> None:
    """One reads all of short texts, another a part of long ones: neither reads the mean of both."""
    usual = COSTS["cpu"]
    reader = dataclasses.replace(usual, draft=lambda n, c: usual.draft(n, c) + reading_s * c)
    profile = msgspec.structs.replace(
        profile_of(reader, noise=0.0), other_drafts=(profile_of(usual, noise=0.0).draft,)
    )
    costs = CostModel(profile, max_rows=640, max_sequences=256, max_steps=6, num_drafters=2)
    drafters = np.array([0, 1, 1, 0])
    attended = np.minimum(contexts, 512)
    batch = dataclasses.replace(
        batch_of([[0.9] * 6, [0.8] * 6, [0.9] * 6, [0.7] * 6], contexts=contexts, draft_contexts=attended),
        drafters=drafters,
    )
    option = Evaluation(batch, costs, OVERHEADS, max_rows=640).lockstep()  # type: ignore[arg-type]
    assert option is not None
    chosen = option.num_draft_tokens
    takes_part = chosen[:, None] > np.arange(chosen.max())
    expected_s = 0.0
    for place in (0, 1):
        its = takes_part[drafters == place]
        number = its.sum(0)
        assert number[0] > 0
        context = (its * attended[drafters == place, None]).sum(0) / np.maximum(number, 1)
        expected_s += float(costs.drafts[place].by_steps(number, context)[-1])
    assert option.draft_s == pytest.approx(expected_s)


def test_who_is_accepted_more_gets_more() -> None:
    batch = batch_of([[0.95] * 8, [0.5] * 8, [0.05] * 8] * 6)
    found = evaluate(batch).lockstep()
    assert found is not None
    good, middling, bad = found.num_draft_tokens[:3]
    assert good > middling >= bad


def test_bounds_are_kept() -> None:
    batch = batch_of([[0.95] * 8] * 4, caps=[0, 1, 3, 8], requested=[-1, -1, -1, -1])
    for option in options_of(evaluate(batch)):
        assert (option.num_draft_tokens <= np.array([0, 1, 3, 8])).all()


def options_of(evaluation: Evaluation) -> list[Option]:
    return list(evaluation.options(("lockstep", "ping_pong", "draft_ahead"), OUTLOOK).values())


@pytest.mark.parametrize("requested", [[3, -1, 0], [8, 8, 8], [0, 0, 0], [-1, 5, -1]])
def test_what_requests_ask_for_is_done_whatever_it_brings(requested: list[int]) -> None:
    batch = batch_of([[0.03] * 8] * 3, requested=requested)
    for option in options_of(evaluate(batch)):
        for chosen, asked in zip(option.num_draft_tokens.tolist(), requested, strict=True):
            assert asked < 0 or chosen == asked
    plain = evaluate(batch).plain
    assert plain.num_draft_tokens.tolist() == [max(asked, 0) for asked in requested]
    nobody = evaluate(batch_of([[0.03] * 8] * 3)).plain
    assert (plain.round_s > nobody.round_s) == any(asked > 0 for asked in requested)


def test_there_is_no_option_where_nobody_may_draft() -> None:
    batch = batch_of([[0.9] * 4] * 3, caps=[0, 0, 0])
    assert [option.kind for option in options_of(evaluate(batch))] == ["plain"]


def test_rows_are_bounded() -> None:
    batch = batch_of([[0.99] * 8] * 16)
    evaluation = Evaluation(batch, costs_of("gpu"), OVERHEADS, max_rows=40)  # type: ignore[arg-type]
    for option in options_of(evaluation):
        assert int(option.num_draft_tokens.sum()) <= 24


def test_k_falls_with_the_batch_where_rows_cost() -> None:
    """The same acceptance: worth drafting for one request, not for 64, on a CPU."""
    means = []
    for number in (1, 4, 16, 64):
        evaluation = evaluate(batch_of([[0.8] * 8] * number))
        found = evaluation.lockstep()
        assert found is not None
        gains = found.rate > evaluation.plain.rate
        means.append(float(found.num_draft_tokens.mean()) if gains else 0.0)
    assert means == sorted(means, reverse=True)
    assert means[0] >= 3
    assert means[-1] == 0


def test_missing_proposals_cost_time_but_no_rows() -> None:
    always = evaluate(batch_of([[0.8] * 8] * 4)).lockstep()
    seldom = evaluate(batch_of([[0.8] * 8] * 4, present=0.2)).lockstep()
    assert always is not None
    assert seldom is not None
    assert seldom.tokens < always.tokens
    assert seldom.verify_s < always.verify_s


def test_between_the_steps_of_a_target_that_is_elsewhere_nothing_is_lost_in_ping_pong() -> None:
    """It works on the other cohort meanwhile, and while its answer is under way. Drafting waits for both."""
    costs, batch = costs_of("cpu"), batch_of([[0.8] * 4] * 4)
    overheads: dict[Kind, float] = {"ping_pong": 0.0002, "lockstep": 0.0002}

    def half_s(way_s: float | None, costs: CostModel = costs, batch: Batch = batch) -> float:
        evaluation = Evaluation(batch, costs, overheads, max_rows=640, way_s=way_s)
        option = evaluation.ping_pong()
        assert option is not None
        cohort = Evaluation(batch.part(0, 2), costs, overheads, max_rows=640, way_s=way_s).cohort()
        assert cohort is not None
        assert cohort.round_s == pytest.approx(option.round_s)
        assert option.verify_s > option.draft_s
        return 0.5 * option.round_s

    here_s = half_s(None)
    assert half_s(0.0) == pytest.approx(here_s - 0.0002)
    assert half_s(0.0001) == pytest.approx(here_s - 0.0003)
    dear = costs_of("expensive")
    drafting = Evaluation(batch, dear, overheads, max_rows=640, way_s=0.001).ping_pong()
    assert drafting is not None
    assert drafting.draft_s > drafting.verify_s - 0.001
    assert 0.5 * drafting.round_s == pytest.approx(drafting.draft_s + 0.0002)


def test_ping_pong_needs_two() -> None:
    assert evaluate(batch_of([[0.8] * 4])).ping_pong() is None
    assert evaluate(batch_of([[0.8] * 4] * 2)).ping_pong() is not None


def test_modes_hide_drafting() -> None:
    """With an expensive drafter and cheap rows, both ways to overlap beat lockstep, and neither the
    maximum.
    """
    batch = batch_of([[0.8] * 8] * 4)
    evaluation = evaluate(batch, "expensive")
    lockstep, ahead = evaluation.lockstep(), evaluation.draft_ahead(OUTLOOK)
    assert lockstep is not None
    assert ahead is not None
    assert ahead.rate > lockstep.rate
    assert ahead.round_s >= max(ahead.draft_s, ahead.verify_s)
    assert ahead.num_branches >= 2
    late = evaluation.draft_ahead(AheadOutlook(rates=OUTLOOK.rates, max_branches=4, in_time=0.3))
    assert late is not None
    assert late.rate < ahead.rate


def test_a_latency_target_bounds_rounds() -> None:
    batch = batch_of([[0.95] * 8] * 4)
    free = evaluate(batch, "expensive")
    unbound = free.lockstep()
    assert unbound is not None
    limit = 0.5 * (free.plain.round_s + unbound.round_s)
    bound = evaluate(batch_of([[0.95] * 8] * 4, itl_s=[limit]), "expensive")
    for option in options_of(bound):
        assert option.round_s <= limit
        if option.kind == "lockstep":
            assert option.unbounded_rate == pytest.approx(unbound.rate)
    assert unbound.unbounded_rate is None
    tight = evaluate(batch_of([[0.95] * 8] * 4, itl_s=[1.001 * free.plain.round_s]), "expensive")
    assert [option.kind for option in options_of(tight)] == ["plain"]


def test_a_latency_target_bounds_what_rounds_really_take() -> None:
    """Of each kind as much longer than expected as it lately was; what is expected stays as it is."""
    free = evaluate(batch_of([[0.95] * 8] * 4), "cpu")
    unbound = free.lockstep()
    assert unbound is not None
    limit = 0.25 * free.plain.round_s + 0.75 * unbound.round_s
    batch = batch_of([[0.95] * 8] * 4, itl_s=[limit])

    def bound(**factors: float) -> dict[str, Option]:
        evaluation = Evaluation(batch, costs_of("cpu"), OVERHEADS, max_rows=640, time_factors=factors)  # type: ignore[arg-type]
        return {option.kind: option for option in options_of(evaluation)}

    usual, longer, shorter = bound(), bound(lockstep=1.2), bound(lockstep=0.8)
    assert limit / 1.2 < usual["lockstep"].round_s <= limit
    assert longer["lockstep"].round_s <= limit / 1.2
    assert limit < shorter["lockstep"].round_s <= limit / 0.8
    assert longer["draft_ahead"].round_s == usual["draft_ahead"].round_s
    assert bound(plain=2.5)["lockstep"].round_s == unbound.round_s, "no round at all keeps the promise"


def test_a_latency_target_that_no_round_can_keep_is_left_to_goodput() -> None:
    free = evaluate(batch_of([[0.95] * 8] * 4), "expensive")
    hopeless = evaluate(batch_of([[0.95] * 8] * 4, itl_s=[0.5 * free.plain.round_s]), "expensive").lockstep()
    unbound = free.lockstep()
    assert hopeless is not None
    assert unbound is not None
    assert hopeless.num_draft_tokens.tolist() == unbound.num_draft_tokens.tolist()


def test_a_latency_target_that_no_round_can_keep_leaves_the_others_theirs() -> None:
    accepted = [[0.95] * 8] * 4
    free = evaluate(batch_of(accepted), "expensive")
    unbound = free.lockstep()
    assert unbound is not None
    limit = 0.5 * (free.plain.round_s + unbound.round_s)
    targets = (0.5 * free.plain.round_s, limit, 2.0 * unbound.round_s)
    alone, among_others = (
        {one.kind: one for one in options_of(evaluate(batch_of(accepted, itl_s=bounds), "expensive"))}
        for bounds in ([limit], targets)
    )
    assert among_others.keys() == alone.keys() >= {"plain", "lockstep"}
    for kind, option in among_others.items():
        assert option.round_s <= limit
        assert option.num_draft_tokens.tolist() == alone[kind].num_draft_tokens.tolist()


def test_a_latency_target_bounds_rounds_that_read_prompts() -> None:
    """Drafts fit beside it in other rounds; rounds with prompts keep it without them."""
    accepted = [[0.95] * 8] * 4
    free = evaluate(batch_of(accepted), "expensive")
    unbound = free.lockstep()
    assert unbound is not None
    plain_s, draft_s = free.plain.round_s, unbound.round_s - free.plain.round_s
    limit = plain_s + 1.5 * draft_s

    def options(prompts: PromptLoad, *bounds: float) -> dict[str, Option]:
        batch = batch_of(accepted, itl_s=bounds)
        evaluation = Evaluation(batch, costs_of("expensive"), OVERHEADS, max_rows=640, prompts=prompts)  # type: ignore[arg-type]
        return {one.kind: one for one in options_of(evaluation)}

    def lockstep_s(prompts: PromptLoad, *bounds: float) -> float:
        return options(prompts, *bounds)["lockstep"].round_s

    beside = PromptLoad(rounds_per_token=0.05, seconds=draft_s)
    found = options(beside, limit)
    assert found.keys() >= {"plain", "lockstep"}
    for kind, option in found.items():
        if option.beside_prompts_s is not None:
            num_steps = 2 if kind == "ping_pong" else 1
            assert option.beside_prompts_s + num_steps * beside.seconds <= limit
    assert lockstep_s(NO_PROMPTS, limit) == unbound.round_s
    assert lockstep_s(PromptLoad(0.0001, draft_s), limit) == unbound.round_s, "hardly ever"
    long = PromptLoad(0.05, 3.0 * draft_s)
    assert lockstep_s(long, limit) == unbound.round_s, "such rounds break it without drafts, too"
    longer_limit = plain_s + 3.5 * draft_s
    assert lockstep_s(long, limit, longer_limit) + long.seconds <= longer_limit, "but not the other one"


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_drafts_that_one_asks_for_make_no_round_longer_than_another_wants_it(name: str, share: float) -> None:
    accepted, wishes = [[0.9] * 8] * 2, [8, -1]
    nobody, free = (evaluate(batch_of(accepted, requested=asked), name).plain for asked in ([-1, -1], wishes))
    limit = nobody.round_s + share * (free.round_s - nobody.round_s) + 1e-9
    evaluation = evaluate(batch_of(accepted, requested=wishes, itl_s=[limit]), name)
    assert evaluation.bound_s == limit, "rounds without any drafts keep it"
    for option in options_of(evaluation):
        assert option.round_s <= limit
        assert option.num_draft_tokens[0] == evaluation.batch.requested[0]
    kept = int(evaluation.plain.num_draft_tokens[0])
    assert (kept == 8) == (share == 1.0)
    assert kept == 0 or share > 0.0
    assert evaluation.batch.requested.tolist() == [kept, -1]
    one_more = evaluate(batch_of(accepted, requested=[min(kept + 1, 8), -1]), name).plain
    assert kept == 8 or one_more.round_s > limit, "no fewer than there is time for"


def test_of_drafts_that_are_asked_for_the_likely_ones_are_left() -> None:
    accepted = [[0.3] * 8, [0.95] * 8]
    free = evaluate(batch_of(accepted, requested=[6, 6])).plain
    nobody = evaluate(batch_of(accepted)).plain
    limit = 0.5 * (free.round_s + nobody.round_s)
    unlikely, likely = evaluate(batch_of(accepted, requested=[6, 6], itl_s=[limit])).plain.num_draft_tokens
    assert unlikely < likely <= 6
    hopeless = evaluate(batch_of(accepted, requested=[6, 6], itl_s=[0.5 * nobody.round_s])).plain
    assert hopeless.num_draft_tokens.tolist() == [6, 6], "a target that nothing keeps bounds nothing"


def test_what_one_asks_for_bounds_rounds_that_read_prompts_too() -> None:
    accepted, wishes = [[0.9] * 8] * 2, [8, -1]
    nobody, free = (evaluate(batch_of(accepted, requested=asked)).plain for asked in ([-1, -1], wishes))
    prompts = PromptLoad(rounds_per_token=0.05, seconds=0.5 * (free.round_s - nobody.round_s))
    batch = batch_of(accepted, requested=wishes, itl_s=[free.round_s])
    for load in (NO_PROMPTS, prompts):
        evaluation = Evaluation(batch, costs_of("cpu"), OVERHEADS, max_rows=640, prompts=load)  # type: ignore[arg-type]
        plain = evaluation.plain
        assert plain.round_s + load.seconds <= free.round_s + 1e-12
        assert (plain.num_draft_tokens[0] == 8) == (load is NO_PROMPTS)


def test_what_goes_without_drafts_is_known_whatever_requests_ask_for() -> None:
    asking = evaluate(batch_of([[0.9] * 8] * 4, requested=[4] * 4))
    free = evaluate(batch_of([[0.9] * 8] * 4))
    assert asking.undrafted_rate == free.undrafted_rate == pytest.approx(free.plain.rate)
    assert asking.plain.rate > 1.5 * asking.undrafted_rate


def test_drafts_that_are_late_now_and_then_are_shorter() -> None:
    """Where both sides take as long in the mean, the target often waits."""
    batch = batch_of([[0.8] * 8] * 8)
    costs = costs_of("cpu")
    punctual = Evaluation(batch, costs, OVERHEADS, max_rows=640).draft_ahead(OUTLOOK)  # type: ignore[arg-type]
    for _ in range(100):
        costs.draft.spread.note(0.5)
        costs.draft.spread.note(2.5)
    late = Evaluation(batch, costs, OVERHEADS, max_rows=640).draft_ahead(OUTLOOK)  # type: ignore[arg-type]
    assert punctual is not None
    assert late is not None
    assert late.draft_s < punctual.draft_s
    assert late.rate < punctual.rate


def test_prompts_hide_drafting_in_modes_that_overlap() -> None:
    batch = batch_of([[0.8] * 8] * 8)
    costs = costs_of("expensive")

    def options(prompts: PromptLoad) -> list[Option]:
        return options_of(Evaluation(batch, costs, OVERHEADS, max_rows=640, prompts=prompts))  # type: ignore[arg-type]

    quiet = {one.kind: one for one in options(NO_PROMPTS)}
    for one in options(PromptLoad(rounds_per_token=0.02, seconds=0.1)):
        before = quiet[one.kind]
        if one.kind in {"plain", "lockstep"}:
            assert one.rate == before.rate
        else:
            assert one.rate > before.rate
            assert one.num_draft_tokens.sum() >= before.num_draft_tokens.sum()
            assert one.alone_s is not None
            assert one.beside_prompts_s is not None
            assert one.beside_prompts_s < one.round_s < one.alone_s
