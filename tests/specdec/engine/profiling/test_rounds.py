"""Profiling: what is measured, within which time, and that nothing stays behind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pytest

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.plan import TargetResult, TargetStep
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.profiling.drafts import budgets_to_measure
from specdec.engine.profiling.plan import LONG_CONTEXT
from specdec.engine.profiling.rounds import measure_profile
from specdec.engine.targets.toy_target import ToyTarget
from specdec.kv.selection import KvBudget, LargestBudget
from specdec.proposers.base import Proposer, ProposerCapabilities
from specdec.proposers.none import NoProposer
from specdec.proposers.self_speculation import SelfSpeculation
from specdec.proposers.several.proposer import SeveralProposers
from specdec.scheduling.speculation.cost import CostModel
from specdec.tree.dynamic import DynamicTree
from specdec.tree.growth import TreeShape, levels_of
from specdec.tree.static import StaticTree
from tests.specdec.engine.profiling.timed_parts import TimedProposer, TimedTarget, big_target, plan
from tests.specdec.engine.toy_engines import (
    MODEL,
    SAMPLED,
    expected_tokens,
    make_proposer,
    request,
    run,
    tokens_of,
    toy_draft_model,
    toy_engine,
)


def test_costs_come_out_as_they_are() -> None:
    clock = ManualClock()
    target, proposer = big_target(clock), TimedProposer(clock)
    profile = measure_profile(target, proposer, plan(), clock=clock)
    assert profile.key == "key"
    assert profile.fault() is None
    costs = CostModel(profile, max_rows=128, max_sequences=16, max_steps=4)
    for number, context, rows in ((1, 64, 5), (4, 2048, 20), (16, 4096, 80)):
        true = 0.004 + 0.001 * rows + 1e-6 * context
        assert costs.verify.table(number, context)[rows] == pytest.approx(true, rel=0.03)
    steps = costs.draft.by_steps(np.full(4, 16), 32)
    assert steps == pytest.approx([0.003, 0.005, 0.007, 0.009], rel=0.05)
    assert {point.num_sequences for point in profile.draft} == {1, 4, 16}


def test_a_profile_says_to_what_rows_are_padded() -> None:
    clock = ManualClock()
    target, buckets = big_target(clock), (1, 2, 4, 8)
    assert measure_profile(target, NoProposer(), plan(), clock=clock).row_buckets == ()
    target.description = dataclasses.replace(target.description, row_buckets=buckets)
    assert measure_profile(target, NoProposer(), plan(), clock=clock).row_buckets == buckets


def test_nothing_stays_behind() -> None:
    clock = ManualClock()
    target, proposer = big_target(clock), TimedProposer(clock)
    measure_profile(target, proposer, plan(), clock=clock)
    assert target.inner.known_requests == frozenset()
    assert proposer.num_read == {}
    assert None not in proposer.salts


def test_a_draft_model_gives_its_blocks_back() -> None:
    clock = ManualClock()
    proposer = toy_draft_model()
    profile = measure_profile(big_target(clock), proposer, plan(), clock=clock)
    proposer.check_integrity()
    assert proposer.sequences.num_held_blocks == 0
    assert len({point.num_sequences for point in profile.draft}) >= 2


def test_an_engine_after_profiling_generates_as_ever() -> None:
    target = ToyTarget(MODEL)
    measure_profile(target, NoProposer(), plan())
    one = request(params=SAMPLED)
    outputs = run(toy_engine(target=target), one)
    assert tokens_of(outputs["r"]) == expected_tokens(one)


@pytest.mark.parametrize("budget_s", [0.05, 0.5, 5.0])
def test_time_is_bounded(budget_s: float) -> None:
    """A slow target: what is left out is what tells least, and one row is always measured."""
    clock = ManualClock()
    target = big_target(clock, per_row_s=0.002)
    profile = measure_profile(target, TimedProposer(clock), plan(budget_s=budget_s), clock=clock)
    longest_s = 0.004 + 0.002 * 128
    assert clock.now_s() <= budget_s + 3 * longest_s
    assert min(point.num_rows for point in profile.verify) == 1


def test_a_longer_time_measures_more() -> None:
    def num_points(budget_s: float) -> int:
        clock = ManualClock()
        return len(
            measure_profile(big_target(clock), NoProposer(), plan(budget_s=budget_s), clock=clock).verify
        )

    assert num_points(0.1) < num_points(1.0) < num_points(20.0)


class RecordingTarget(TimedTarget):
    """Knows which slots were written, by rows or by moves, and which a step reads that never were."""

    def __init__(self, clock: ManualClock, *, per_row_s: float = 0.001) -> None:
        super().__init__(clock, per_row_s=per_row_s, num_blocks=2048, max_model_len=2048)
        self.written: set[int] = set()
        self.tables: dict[RequestId, tuple[int, ...]] = {}
        self.num_unwritten_by_context: dict[int, int] = {}

    def submit(self, step: TargetStep) -> None:
        super().submit(step)
        assert all(move.source in self.written for move in step.moves)
        self.written.update(move.destination for move in step.moves)
        size = self.description.block_size
        for work in step.works:
            table = self.tables.get(work.request_id, ())[: work.table_start] + work.block_ids
            self.tables[work.request_id] = table
            slots = [table[at // size] * size + at % size for at in range(work.start + len(work.token_ids))]
            self.num_unwritten_by_context[work.start] = len(set(slots[: work.start]) - self.written)
            self.written.update(slots[work.start :])


def test_long_contexts_are_in_memory_though_few_tokens_were_read() -> None:
    """Reading four thousand tokens would take longer than everything else, on a slow target."""
    clock = ManualClock()
    target = RecordingTarget(clock, per_row_s=0.002)
    profile = measure_profile(target, NoProposer(), plan(budget_s=3.0), clock=clock)
    assert max(point.context_tokens for point in profile.verify) == 4 * 1024
    assert target.num_unwritten_by_context[1024] == 0
    assert sum(target.num_rows) < 4096
    costs = CostModel(profile, max_rows=128, max_sequences=16, max_steps=4)
    assert costs.verify.table(16, 65536)[80] == pytest.approx(0.004 + 0.002 * 80 + 1e-6 * 65536, rel=0.03)


def test_a_drafter_that_is_not_there_is_not_waited_for() -> None:
    clock = ManualClock()
    profile = measure_profile(big_target(clock), TimedProposer(clock, is_there=False), plan(), clock=clock)
    assert profile.draft == ()
    assert profile.fault() is None


def test_proposals_are_measured_beside_steps_that_are_known() -> None:
    clock = ManualClock()
    known = measure_profile(big_target(clock), TimedProposer(clock, is_there=False), plan(), clock=clock)
    target = big_target(clock)
    ticks: list[tuple[int, int]] = []
    profile = measure_profile(
        target,
        TimedProposer(clock),
        plan(),
        known=known,
        clock=clock,
        progress=lambda *tick: ticks.append(tick),
    )
    assert profile.verify == known.verify
    assert {point.num_sequences for point in profile.draft} == {1, 4, 16}
    assert target.num_rows == []
    assert ticks[-1][0] == ticks[-1][1] == len(profile.draft)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "max_model_len", "max_num_seqs"),
    [(8, 4, 24, 1), (16, 4, 32, 8), (64, 1, 40, 3), (300, 4, 256, 64), (40, 16, 600, 2)],
)
def test_small_pools_are_enough(
    num_blocks: int, block_size: int, max_model_len: int, max_num_seqs: int
) -> None:
    clock = ManualClock()
    target = TimedTarget(clock, num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len)
    profile = measure_profile(target, NoProposer(), plan(max_num_seqs=max_num_seqs), clock=clock)
    assert profile.fault() is None
    assert max(target.num_rows) <= 128
    assert target.inner.known_requests == frozenset()


@pytest.mark.parametrize("name", ["ngram", "draft_model", "oracle"])
def test_every_proposer_can_be_measured(name: str) -> None:
    proposer: Proposer = make_proposer(name)
    profile = measure_profile(ToyTarget(MODEL), proposer, plan(budget_s=2.0, max_num_seqs=4))
    assert profile.draft
    assert profile.fault() is None


def test_progress_is_told() -> None:
    clock = ManualClock()
    heard: list[tuple[int, int]] = []
    measure_profile(
        big_target(clock),
        TimedProposer(clock),
        plan(),
        clock=clock,
        progress=lambda *told: heard.append(told),
    )
    done, totals = zip(*heard, strict=True)
    assert list(done) == list(range(1, len(heard) + 1))
    assert set(totals) == {len(heard)}


BUDGET = KvBudget(300, floor=1)


class ReadingProposer(TimedProposer):
    """Each step takes what reading the last 300 tokens of every sequence does."""

    capabilities = ProposerCapabilities(name="reading", kv="own", max_context=8192)

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        attended = sum(min(one.committed_len, 300) for one in sequences)
        self.clock.advance(max(num_draft_tokens.values(), default=0) * 1e-6 * attended)
        return super().propose(sequences, num_draft_tokens)


class SelfTimedTarget(TimedTarget):
    """Says that it has drafted: each step took 3 ms and what reading its budget does, 300 unless told."""

    def submit(self, step: TargetStep) -> None:
        asked = [work for work in step.works if work.num_self_drafted]
        num_steps = max((work.num_self_drafted for work in asked), default=0)
        attended = sum(min(work.start, work.kv_budget or 300) for work in asked)
        self.draft_s = num_steps * (0.003 + 1e-6 * attended)
        plain = tuple(msgspec.structs.replace(work, num_self_drafted=0) for work in step.works)
        super().submit(msgspec.structs.replace(step, works=plain))

    def collect(self) -> TargetResult:
        return msgspec.structs.replace(super().collect(), draft_s=self.draft_s)


@pytest.mark.parametrize("is_self", [False, True], ids=["model", "self"])
def test_drafts_cost_what_their_budget_leaves(is_self: bool) -> None:
    """Measured at short contexts and at one beyond the budget; told for contexts that were not measured."""
    clock = ManualClock()
    target: TimedTarget = SelfTimedTarget(clock, num_blocks=2048, max_model_len=2048)
    proposer: Proposer = SelfSpeculation() if is_self else ReadingProposer(clock)
    its_plan = dataclasses.replace(plan(), kv_budget=BUDGET)
    profile = measure_profile(target, proposer, its_plan, clock=clock)
    assert max(point.context_tokens // point.num_sequences for point in profile.draft) == 300
    assert max(point.context_tokens // point.num_sequences for point in profile.verify) == 1024
    draft = CostModel(profile, max_rows=128, max_sequences=16, max_steps=4).draft
    start_s, step_s = (0.0, 0.003) if is_self else (0.001, 0.002)
    for number, context in ((1, 20), (4, 100), (16, 250), (4, 5000), (16, 100_000)):
        attended = its_plan.attended(context)
        told = draft.by_steps(np.full(4, number), attended)
        true = start_s + np.arange(1, 5) * (step_s + 1e-6 * number * min(context, 300))
        assert told == pytest.approx(true, rel=0.05), (number, context)


def test_of_several_budgets_the_largest_is_measured() -> None:
    """What a token costs is told best from there, and holds for all of them."""
    clock = ManualClock()
    target = SelfTimedTarget(clock, num_blocks=2048, max_model_len=2048)
    largest = LargestBudget((KvBudget(64, 1), KvBudget(600, 1), KvBudget(0.1, 64)))
    profile = measure_profile(
        target, SelfSpeculation(), dataclasses.replace(plan(), kv_budget=largest), clock=clock
    )
    assert max(point.context_tokens // point.num_sequences for point in profile.draft) == 600
    draft = CostModel(profile, max_rows=128, max_sequences=16, max_steps=4).draft
    for budget in (64, 600, 6_000):
        true = np.arange(1, 5) * (0.003 + 1e-6 * 4 * budget)
        assert draft.by_steps(np.full(4, 4), budget) == pytest.approx(true, rel=0.05), budget


def test_of_several_drafters_one_has_a_budget() -> None:
    clock = ManualClock()
    target = TimedTarget(clock, num_blocks=2048, max_model_len=2048)
    proposer = SeveralProposers([ReadingProposer(clock), ReadingProposer(clock)])
    its_plan = dataclasses.replace(plan(), kv_budget=BUDGET, budgeted_drafter=1)
    profile = measure_profile(target, proposer, its_plan, clock=clock)
    longest = [
        max(point.context_tokens // point.num_sequences for point in points) for points in profile.drafts
    ]
    assert longest == [LONG_CONTEXT, 300]


def test_without_a_budget_everything_counts() -> None:
    """The control of the above: a budget that nobody told of is taken for cheap reading."""
    clock = ManualClock()
    target = SelfTimedTarget(clock, num_blocks=2048, max_model_len=2048)
    profile = measure_profile(target, SelfSpeculation(), plan(), clock=clock)
    draft = CostModel(profile, max_rows=128, max_sequences=16, max_steps=4).draft
    assert draft.by_steps(np.full(4, 16), 100_000)[-1] > 10 * 4 * (0.003 + 16 * 300e-6)


DYNAMIC = DynamicTree(top_k=4, depth=5)
BUSHY = StaticTree.of_paths([[0], [1], [2], [3], [0, 0], [1, 0], [0, 0, 0], [0, 1]])


def drafting(shape: TreeShape | None) -> ProposerCapabilities:
    return ProposerCapabilities(
        name="it", shape="chain" if shape is None else "tree", tree_levels=levels_of(shape)
    )


@pytest.mark.parametrize(
    ("shape", "most", "number", "budgets"),
    [
        (None, 16, 1, (4, 1)),
        (None, 16, 64, (4, 1)),
        (None, 1, 1, (1,)),
        (DYNAMIC, 16, 1, (16, 1, 5)),
        (DYNAMIC, 16, 64, (7, 1, 5)),  # no round has more rows
        (DYNAMIC, 16, 128, (3, 1, 2)),
        (DYNAMIC, 5, 1, (5, 1, 2)),
        (DYNAMIC, 1, 1, (1,)),
        (BUSHY, 8, 1, (8, 1, 7)),  # its seventh node is its deepest
        (BUSHY, 5, 1, (5, 1, 2)),
        (StaticTree.of_widths([4], (0.5,)), 4, 1, (4, 1)),
    ],
)
def test_trees_are_measured_where_they_are_as_deep_as_ever(
    shape: TreeShape | None, most: int, number: int, budgets: tuple[int, ...]
) -> None:
    its_plan = plan(max_draft_tokens=most, max_num_batched_tokens=512)
    assert budgets_to_measure(drafting(shape), its_plan, number) == budgets


def test_trees_without_steps_are_measured_between_too() -> None:
    looked_up = ProposerCapabilities(name="suffix", shape="tree")
    assert budgets_to_measure(looked_up, plan(max_draft_tokens=16), 1) == (16, 1, 4)


class TreeProposer(TimedProposer):
    """Takes 2 ms for each level of a tree, which has five at most."""

    capabilities = dataclasses.replace(drafting(DYNAMIC), kv="own", max_context=600)

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.asked: set[int] = set()

    def num_steps(self, num_draft_tokens: int) -> int:
        self.asked.add(num_draft_tokens)
        return min(num_draft_tokens, 5)


def test_a_tree_costs_what_its_levels_do() -> None:
    clock = ManualClock()
    target, proposer = big_target(clock), TreeProposer(clock)
    profile = measure_profile(target, proposer, plan(max_draft_tokens=12), clock=clock)
    assert {(one.num_sequences, one.num_steps) for one in profile.draft} == {
        *((number, steps) for number in (1, 4) for steps in (1, 5, 12)),
        *((16, steps) for steps in (1, 5, 7)),
    }
    costs = CostModel(profile, max_rows=128, max_sequences=16, max_steps=12, tree_levels=[levels_of(DYNAMIC)])
    true = [0.001 + 0.002 * min(nodes, 5) for nodes in range(1, 13)]
    for number in (1, 4, 16):
        assert costs.draft.by_steps(np.full(12, number), 32) == pytest.approx(true, rel=0.05)


def test_what_was_measured_of_a_tree_as_of_a_chain_is_completed() -> None:
    clock = ManualClock()
    first = measure_profile(big_target(clock), TimedProposer(clock), plan(max_draft_tokens=12), clock=clock)
    proposer = TreeProposer(clock)
    whole = measure_profile(big_target(clock), proposer, plan(max_draft_tokens=12), known=first, clock=clock)
    assert whole.draft[: len(first.draft)] == first.draft
    assert {5, 7, 12} == {one.num_steps for one in whole.draft} - {one.num_steps for one in first.draft}
    assert proposer.asked == {5, 7, 12}


class TreeTarget(SelfTimedTarget):
    """Drafts trees for itself: each level takes 3 ms. It has no place for rows behind a sequence's blocks."""

    def submit(self, step: TargetStep) -> None:
        size = self.description.block_size
        for work in step.works:
            assert work.start + 1 + work.num_self_drafted <= size * (work.table_start + len(work.block_ids))
        assert sum(1 + work.num_self_drafted for work in step.works) <= 128
        super().submit(step)
        self.draft_s = 0.003 * max((min(work.num_self_drafted, 5) for work in step.works), default=0)


def test_trees_of_the_targets_own_have_room() -> None:
    clock = ManualClock()
    target = TreeTarget(clock, num_blocks=2048, max_model_len=2048)
    profile = measure_profile(target, SelfSpeculation(tree=DYNAMIC), plan(max_draft_tokens=40), clock=clock)
    assert max(one.num_steps for one in profile.draft if one.num_sequences == 1) == 40
    levels = [levels_of(DYNAMIC)]
    draft = CostModel(profile, max_rows=128, max_sequences=16, max_steps=40, tree_levels=levels).draft
    for number, most in ((1, 40), (4, 31), (16, 7)):  # as many as there are rows for
        told = draft.by_steps(np.full(most, number), 32)
        assert told == pytest.approx(0.003 * np.minimum(np.arange(1, most + 1), 5), rel=0.05)
    assert target.inner.known_requests == frozenset()
