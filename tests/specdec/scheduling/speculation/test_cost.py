"""The cost model: what it makes of measured points, and how rounds correct it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.corrections import CorrectionGrid
from specdec.scheduling.speculation.cost import (
    CostModel,
    DraftCost,
    VerifyCost,
    VerifyShape,
    assumed_profile,
    rising,
)
from specdec.scheduling.speculation.cost_profile import CostProfile, DraftPoint, VerifyPoint
from specdec.tree.dynamic import DynamicTree
from specdec.tree.growth import levels_of
from specdec.tree.static import StaticTree
from tests.specdec.scheduling.speculation.world import COSTS, profile_of


def model_of(name: str, *, noise: float = 0.0, seed: int = 0) -> CostModel:
    return CostModel(
        profile_of(COSTS[name], noise=noise, seed=seed), max_rows=512, max_sequences=256, max_steps=8
    )


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("num_sequences", [1, 4, 16, 64])
@pytest.mark.parametrize("context", [128, 4096])
def test_verification_is_predicted_between_measured_points(
    name: str, num_sequences: int, context: int
) -> None:
    table = model_of(name).verify.table(num_sequences, num_sequences * context)
    for per_sequence in (1, 2, 3, 5, 9):
        rows = min(num_sequences * per_sequence, 512)
        true = COSTS[name].verify(num_sequences, num_sequences * context, rows)
        assert table[rows] == pytest.approx(true, rel=0.08), rows


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("num_sequences", [1, 4, 10, 64])
@pytest.mark.parametrize("num_steps", [1, 3, 8])
def test_drafting_is_predicted(name: str, num_sequences: int, num_steps: int) -> None:
    true = COSTS[name].drafting([num_steps] * num_sequences, 512)
    taking_part = np.full(8, num_sequences)
    assert model_of(name).draft.by_steps(taking_part, 512)[num_steps - 1] == pytest.approx(true, rel=0.25)


def test_a_step_of_few_sequences_costs_less() -> None:
    draft = model_of("cpu").draft
    few = draft.by_steps(np.array([64, 2, 2, 2]), 64)[3]
    many = draft.by_steps(np.array([64, 64, 64, 64]), 64)[3]
    assert few < 0.6 * many
    assert (draft.by_steps(np.array([0, 0, 0]), 64) == 0.0).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", COSTS)
def test_tables_never_fall_whatever_rounds_say(name: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    model = model_of(name, noise=0.5, seed=seed)
    for _ in range(300):
        rows = int(generator.integers(1, 600))
        number = int(generator.integers(1, rows + 1))
        seconds = float(np.exp(generator.normal(-5.0, 2.0)))
        model.verify.note(VerifyShape(number, float(generator.integers(1, 1 << 20)), rows), seconds)
    for number, context in itertools.product((1, 16, 64), (10, 5000, 1 << 20)):
        table = model.verify.table(number, context)
        assert (table > 0.0).all()
        assert (np.diff(table) >= -1e-15).all()
        assert np.isfinite(table).all()


@pytest.mark.parametrize("is_told", [True, False])
def test_rows_cost_what_they_are_padded_to(is_told: bool) -> None:
    """Whether a bucket was measured or not; rows beyond the largest one are not padded."""
    points = [
        VerifyPoint(num_sequences=1, context_tokens=64, num_rows=rows, seconds=0.001 * rows)
        for rows in (1, 4, 8, 16, 32)
    ]
    buckets = (4, 8, 12, 16) if is_told else ()
    profile = CostProfile(key="", verify=tuple(points), row_buckets=buckets)
    table = CostModel(profile, max_rows=64, max_sequences=4, max_steps=1).verify.table(1, 64)
    padded = [4, 4, 8, 8, 12, 12, 16] if is_told else [1, 4, 5, 8, 9, 12, 13]
    assert table[[1, 4, 5, 8, 9, 12, 13]] == pytest.approx([0.001 * rows for rows in padded])
    assert table[17] == pytest.approx(0.017)
    assert table[24] == pytest.approx(0.024)
    assert table[64] == pytest.approx(0.064)


def test_the_last_rows_are_padded_beyond_what_rounds_may_have() -> None:
    points = [
        VerifyPoint(num_sequences=1, context_tokens=64, num_rows=rows, seconds=0.001 * rows)
        for rows in (1, 8, 16)
    ]
    table = VerifyCost(points, 10, (1, 8, 16, 32)).table(1, 64)
    assert table[[8, 9, 10]] == pytest.approx([0.008, 0.016, 0.016])


def test_rounds_correct_the_model_where_they_were_and_nearby() -> None:
    """Everything takes 1.8 times as long as it was measured."""
    model = model_of("cpu")
    before = model.verify.table(4, 512)
    for _ in range(20):
        model.verify.note(VerifyShape(4, 512, 20), 1.8 * float(before[20]))
    after = model.verify.table(4, 512)
    assert after[20] == pytest.approx(1.8 * before[20], rel=0.1)
    assert after[4] > 1.3 * before[4]


def test_what_is_slower_beside_others_is_not_slower_alone() -> None:
    """Alone as it was measured, beside the drafter half as fast again."""
    model = model_of("cpu")
    before = model.verify.table(4, 512)
    for _ in range(20):
        for rows in (4, 20):
            model.verify.note(VerifyShape(4, 512, rows), 1.5 * float(before[rows]), is_overlapped=True)
        model.verify.note(VerifyShape(4, 512, 4), float(before[4]))
    alone = model.verify.table(4, 512)
    beside = model.verify.table(4, 512, is_overlapped=True)
    for rows in (4, 20):
        assert alone[rows] == pytest.approx(before[rows], rel=0.1)
        assert beside[rows] == pytest.approx(1.5 * before[rows], rel=0.1)


def test_what_is_seen_beside_others_tells_of_steps_that_were_never_seen_alone() -> None:
    """A machine that is slower than it was: there is no reason to think that it is so for some."""
    model = model_of("cpu")
    before = model.verify.table(4, 512)
    for _ in range(20):
        model.verify.note(VerifyShape(4, 512, 20), 2.0 * float(before[20]), is_overlapped=True)
    assert model.verify.table(4, 512)[20] == pytest.approx(2.0 * before[20], rel=0.2)


def test_a_region_keeps_its_own_correction() -> None:
    model = model_of("cpu")
    before = model.verify.table(4, 512)
    for _ in range(20):
        model.verify.note(VerifyShape(4, 512, 128), 2.0 * float(before[128]))
        model.verify.note(VerifyShape(4, 512, 4), float(before[4]))
    after = model.verify.table(4, 512)
    assert after[128] == pytest.approx(2.0 * before[128], rel=0.1)
    assert after[4] == pytest.approx(before[4], rel=0.1)


def test_pauses_move_nothing() -> None:
    """One observation in five takes 50 times as long."""
    model = model_of("cpu")
    before = model.verify.table(4, 512)
    for number in range(100):
        model.verify.note(VerifyShape(4, 512, 20), float(before[20]) * (50.0 if number % 5 == 0 else 1.0))
    assert model.verify.table(4, 512) == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("slower", [1.4, 0.7])
def test_a_machine_that_changes_changes_what_was_seen_before(slower: float) -> None:
    """Nothing of other numbers of rows is seen since: they would look better, or worse, than they are."""
    model = model_of("cpu")
    before = model.verify.table(4, 512)
    for _ in range(20):
        for rows, own in ((4, 1.0), (12, 1.2), (24, 1.5)):
            model.verify.note(VerifyShape(4, 512, rows), own * float(before[rows]))
    for _ in range(12):
        model.verify.note(VerifyShape(4, 512, 12), slower * 1.2 * float(before[12]))
    after = model.verify.table(4, 512)
    for rows, own in ((4, 1.0), (12, 1.2), (24, 1.5)):
        assert after[rows] == pytest.approx(slower * own * before[rows], rel=0.08)


def test_what_is_new_of_a_region_says_nothing_of_others() -> None:
    """Steps of 24 rows were never seen, and are slower than thought: those of 4 rows are not."""
    model = model_of("cpu")
    before = model.verify.table(4, 512)
    for rows, own in ((4, 1.0), (24, 1.25)):
        for _ in range(20):
            model.verify.note(VerifyShape(4, 512, rows), own * float(before[rows]))
    after = model.verify.table(4, 512)
    assert after[4] == pytest.approx(before[4], rel=0.05)
    assert after[24] == pytest.approx(1.25 * before[24], rel=0.05)


def test_the_first_observation_of_a_region_moves_nothing_if_it_is_alone() -> None:
    grid = CorrectionGrid(6, 3)
    grid.note(2, 1, 50.0)
    assert grid.factors == pytest.approx(np.ones((6, 3)), rel=1e-6)
    for _ in range(8):
        grid.note(2, 1, 50.0)
    assert grid.factors[2, 1] > 20.0


def test_drafting_is_corrected() -> None:
    model = model_of("cpu")
    taking_part = np.full(8, 4)
    before = model.draft.by_steps(taking_part, 64)
    budgets = {RequestId(f"r{index}"): 4 for index in range(4)}
    for _ in range(20):
        model.draft.note(budgets, 64, 1, 3.0 * float(before[3]))
    after = model.draft.by_steps(taking_part, 64)
    assert after[3] == pytest.approx(3.0 * before[3], rel=0.15)
    assert (np.diff(after) >= 0.0).all()


def test_drafts_longer_than_any_that_were_measured_say_nothing_of_others() -> None:
    """A request may ask for more than is configured: 32 steps do not take what the last known one does."""
    model = model_of("cpu")
    taking_part = np.full(8, 4)
    before = model.draft.by_steps(taking_part, 64)
    budgets = {RequestId(f"r{index}"): 32 if index == 0 else 4 for index in range(4)}
    for _ in range(20):
        model.draft.note(budgets, 64, 1, 4.0 * float(before[7]))
    assert model.draft.by_steps(taking_part, 64) == pytest.approx(before)


@pytest.mark.parametrize("seen", [(1, 2, 4, 8), (4,)])
@pytest.mark.parametrize("step_s", [0.001, 0.003])
def test_a_wire_that_was_not_measured_bends_nothing(seen: tuple[int, ...], step_s: float) -> None:
    """Ten times as long as the work on one token: taken for work, it would be so many times as long, too."""
    draft = CostModel(assumed_profile(), max_rows=64, max_sequences=16, max_steps=8).draft
    for _ in range(40):
        for k in seen:
            draft.note({RequestId("a"): k}, 64, 1, 0.01 + step_s * k, work_s=step_s * k)
    true = 0.01 + step_s * np.arange(1, 9)
    assert draft.by_steps(np.ones(8), 64) == pytest.approx(true, rel=0.03)
    assert draft.spread.factors == pytest.approx(np.ones(6), rel=0.25)


def test_a_wire_that_was_measured_is_part_of_what_drafts_take() -> None:
    """Also where nobody says for how long they worked."""
    points = [
        DraftPoint(
            num_sequences=1,
            context_tokens=1,
            num_steps=steps,
            num_unseen=1,
            wire_s=wire_s,
            seconds=0.001 * steps,
        )
        for steps, wire_s in ((1, 0.011), (4, 0.01))
    ]
    verify = VerifyPoint(num_sequences=1, context_tokens=1, num_rows=1, seconds=0.01)
    profile = CostProfile(key="", verify=(verify,), draft=tuple(points))
    assert profile.fault() is None
    draft = CostModel(profile, max_rows=16, max_sequences=4, max_steps=8).draft
    true = 0.01 + 0.001 * np.arange(1, 9)
    assert draft.by_steps(np.ones(8), 1) == pytest.approx(true, rel=0.02)
    for _ in range(20):
        draft.note({RequestId("a"): 4}, 1, 1, 0.018)  # steps take twice as long
    slower = 0.01 + 0.002 * np.arange(1, 9)
    assert draft.by_steps(np.ones(8), 1) == pytest.approx(slower, rel=0.03)
    assert (draft.by_steps(np.zeros(8), 1) == 0.0).all()


def test_without_a_profile_rounds_tell_the_scale() -> None:
    model = CostModel(assumed_profile(), max_rows=512, max_sequences=64, max_steps=8)
    for rows in (1, 5, 9):
        for _ in range(12):
            model.verify.note(VerifyShape(1, 512, rows), 0.2)
    assert model.verify.table(1, 512)[5] == pytest.approx(0.2, rel=0.1)


def test_few_points_are_enough() -> None:
    profile = CostProfile(
        key="",
        verify=(VerifyPoint(num_sequences=1, context_tokens=1, num_rows=1, seconds=0.01),),
        draft=(DraftPoint(num_sequences=1, context_tokens=1, num_steps=1, num_unseen=1, seconds=0.002),),
    )
    model = CostModel(profile, max_rows=16, max_sequences=4, max_steps=2)
    assert model.verify.table(1, 10) == pytest.approx(np.full(17, 0.01))
    assert model.draft.by_steps(np.array([1, 1]), 10)[0] == pytest.approx(0.002, rel=0.2)


def test_rising_values_pool_those_that_fall() -> None:
    values = rising(np.array([1.0, 3.0, 2.0, 4.0]), np.array([1.0, 1.0, 3.0, 1.0]))
    assert values == pytest.approx([1.0, 2.25, 2.25, 4.0])
    assert rising(np.array([3.0, 2.0, 1.0]), np.ones(3)) == pytest.approx([2.0, 2.0, 2.0])


def short_of_time(*others: VerifyPoint) -> list[VerifyPoint]:
    """Points of a start whose time ran out: no more than 64 rows, the last two sizes by chance alike."""
    return [
        *(
            VerifyPoint(num_sequences=rows, context_tokens=32 * rows, num_rows=rows, seconds=0.001 * rows)
            for rows in (1, 4, 16, 64)
        ),
        *others,
    ]


def test_more_rows_than_were_measured_cost_more() -> None:
    """However alike the last two measurements are: their difference is noise."""
    alike = VerifyPoint(num_sequences=56, context_tokens=32 * 56, num_rows=56, seconds=0.0639)
    for points in (short_of_time(), short_of_time(alike)):
        table = VerifyCost(points, 512).table(64, 64 * 32)
        assert table[384] == pytest.approx(0.384, rel=0.05)


def test_what_large_steps_take_is_not_held_against_small_ones() -> None:
    """Nor the other way round, whether or not so many rows were measured at the start."""
    cost = VerifyCost(short_of_time(), 512)
    for _ in range(9):
        cost.note(VerifyShape(64, 64 * 32, 64), 0.048)
        cost.note(VerifyShape(64, 64 * 32, 384), 0.768)
    table = cost.table(64, 64 * 32)
    assert table[64] == pytest.approx(0.048, rel=0.15)
    assert table[384] == pytest.approx(0.768, rel=0.15)


STEP_S, NODE_S, LEVEL_READS_S = 0.003, 0.00002, 2e-7
LEVELS = levels_of(DynamicTree(top_k=4, depth=5))


def tree_s(num_sequences: int, num_nodes: int, context: float) -> float:
    """A drafter of trees: a forward for each of five levels, and a little for each node."""
    levels = min(num_nodes, 5)
    rows_s = num_sequences * num_nodes * NODE_S
    return 0.001 + levels * (STEP_S + LEVEL_READS_S * num_sequences * context) + rows_s


def tree_points(budgets: Sequence[int]) -> list[DraftPoint]:
    """What is measured of it at a start, at short contexts and, for 4 sequences, at long ones."""
    shapes = [(number, steps, 32) for number in (1, 4, 16) for steps in budgets]
    return [
        DraftPoint(
            num_sequences=number,
            context_tokens=context * number,
            num_steps=steps,
            num_unseen=1,
            seconds=tree_s(number, steps, context),
        )
        for number, steps, context in [*shapes, *((4, steps, 512) for steps in budgets if steps > 1)]
    ]


def tree_cost(budgets: Sequence[int] = (1, 5, 16)) -> DraftCost:
    return DraftCost(tree_points(budgets), 64, 16, LEVELS)


@pytest.mark.parametrize("number", [1, 4, 10, 16])
@pytest.mark.parametrize("context", [32, 512, 4096])
def test_nodes_of_a_tree_cost_what_its_levels_do(number: int, context: int) -> None:
    told = tree_cost().by_steps(np.full(16, number), context)
    true = [tree_s(number, nodes, context) for nodes in range(1, 17)]
    assert told == pytest.approx(true, rel=0.03)


def test_what_was_measured_of_small_trees_tells_of_large_ones() -> None:
    """There was no time for more: levels are known."""
    told = tree_cost((1, 4)).by_steps(np.full(16, 4), 32)
    assert told == pytest.approx([tree_s(4, nodes, 32) for nodes in range(1, 17)], rel=0.05)


def test_control_without_levels_16_nodes_are_priced_as_16_forwards() -> None:
    told = DraftCost(tree_points((1, 4)), 64, 16).by_steps(np.full(16, 4), 32)
    assert told[15] > 2.5 * tree_s(4, 16, 32)
    assert told[:4] == pytest.approx([tree_s(4, nodes, 32) for nodes in range(1, 5)], rel=0.03)


def test_trees_of_different_sizes_take_as_many_forwards_as_the_deepest() -> None:
    """One of 16 nodes beside seven of 5: what further nodes add is theirs alone."""
    draft = tree_cost()
    taking_part = np.array([8] * 5 + [1] * 11)
    told = float(draft.by_steps(taking_part, 32)[-1])
    assert told == pytest.approx(tree_s(8, 5, 32) + 11 * NODE_S, rel=0.03)
    assert told < float(draft.by_steps(np.full(16, 8), 32)[-1])


def test_rounds_correct_what_trees_cost() -> None:
    draft = tree_cost()
    before = draft.by_steps(np.full(16, 4), 64)
    budgets = {RequestId(f"r{index}"): 16 for index in range(4)}
    for _ in range(20):
        draft.note(budgets, 64, 1, 1.7 * float(before[15]))
    after = draft.by_steps(np.full(16, 4), 64)
    assert after[15] == pytest.approx(1.7 * before[15], rel=0.1)
    assert (np.diff(after) >= 0.0).all()
    for _ in range(20):
        draft.note(budgets, 64, 1, float(before[15]))
    assert draft.by_steps(np.full(16, 4), 64)[15] == pytest.approx(before[15], rel=0.1)


def test_larger_trees_cost_no_less_whatever_was_measured() -> None:
    """Time of 16 nodes was measured in a lucky moment."""
    points = [
        replace(one, seconds=0.4 * one.seconds) if one.num_steps == 16 else one
        for one in tree_points((1, 5, 16))
    ]
    told = DraftCost(points, 64, 16, LEVELS).by_steps(np.full(16, 4), 32)
    assert told[:5] == pytest.approx([tree_s(4, nodes, 32) for nodes in range(1, 6)], rel=0.03)
    assert told[5:] == pytest.approx(told[4], rel=0.01)


def test_what_there_was_no_time_for_bends_little() -> None:
    """Of 16 sequences the number between is missing: of one it is there."""
    points = [one for one in tree_points((1, 5, 16)) if (one.num_sequences, one.num_steps) != (16, 5)]
    told = DraftCost(points, 64, 16, LEVELS).by_steps(np.full(16, 1), 32)
    assert told == pytest.approx([tree_s(1, nodes, 32) for nodes in range(1, 17)], rel=0.08)


def test_a_node_costs_most_where_it_is_the_first_of_its_level() -> None:
    """Of a static tree, whose levels begin anywhere."""
    levels = levels_of(StaticTree.of_paths([[0], [1], [2], [0, 0], [1, 0], [0, 1], [0, 0, 0], [3]]))
    assert levels == (1, 1, 1, 2, 2, 2, 3, 3)

    def true_s(nodes: int) -> float:
        return 0.001 + STEP_S * levels[nodes - 1] + NODE_S * nodes

    points = [
        DraftPoint(num_sequences=1, context_tokens=1, num_steps=nodes, num_unseen=1, seconds=true_s(nodes))
        for nodes in (1, 7, 8)
    ]
    told = DraftCost(points, 4, 8, levels).by_steps(np.ones(8), 1)
    assert told == pytest.approx([true_s(nodes) for nodes in range(1, 9)], rel=0.03)
    as_a_line = DraftCost(points, 4, 8).by_steps(np.ones(8), 1)
    assert as_a_line[2] > 1.4 * true_s(3)


def test_without_a_profile_levels_are_known_all_the_same() -> None:
    model = CostModel(assumed_profile(), max_rows=64, max_sequences=16, max_steps=16, tree_levels=[LEVELS])
    told = model.draft.by_steps(np.ones(16), 64)
    assert told[15] == pytest.approx(told[4], rel=0.1)
    assert told[4] > 1.15 * told[3]


@pytest.mark.parametrize("name", COSTS)
def test_chains_cost_a_step_for_each_token(name: str) -> None:
    """By the line through what was measured, as ever, for any number of sequences."""
    points = profile_of(COSTS[name], noise=0.0).draft
    draft = DraftCost(points, 64, 8)
    for number in (1, 4, 16, 64):
        short, long = (
            next(
                one.seconds
                for one in points
                if (one.num_sequences, one.num_steps, one.context_tokens) == (number, steps, 64 * number)
            )
            for steps in (1, 8)
        )
        line = short + (long - short) / 7 * np.arange(8)
        assert draft.by_steps(np.full(8, number), 64) == pytest.approx(line, rel=1e-9)
