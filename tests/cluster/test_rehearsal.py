"""What Ray makes of plans, and what it takes for them to come true."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.inventory import NodeSnapshot
from cluster.placement import PlacementPlan, plan_placement
from cluster.rehearsal import Steered, _first_without_place, _parts, steered
from tests.cluster.gpu_plans import config_of, gpu_nodes, place, ranks_of


def comes_true(plans: Sequence[PlacementPlan], nodes: Sequence[NodeSnapshot]) -> bool:
    return _first_without_place([part for plan in plans for part in _parts(plan)], nodes) is None


def kept_off(outcome: Steered) -> list[tuple[set[str], set[str]]]:
    """Nodes that target groups and draft workers keep off."""
    return [
        (set(plan.target.kept_off or ()), set() if plan.draft is None else set(plan.draft.kept_off or ()))
        for plan in outcome.plans
    ]


def test_draft_workers_keep_off_the_node_that_a_target_needs() -> None:
    nodes = gpu_nodes(4, 4)
    plan = place(config_of(1, 2), nodes, tensor=4)
    assert not comes_true([plan], nodes), "Ray spreads them"
    outcome = steered([plan], nodes)
    assert outcome.doubtful is None
    assert kept_off(outcome) == [(set(), {plan.target_nodes[0][0]})]
    assert comes_true(outcome.plans, nodes)
    assert (outcome.plans[0].target_nodes, outcome.plans[0].draft_nodes) == (
        plan.target_nodes,
        plan.draft_nodes,
    )


def test_what_comes_true_by_itself_is_left_alone() -> None:
    for nodes, tensor in ((gpu_nodes(4, 4), 2), (gpu_nodes(4, 4, 4), 4), (gpu_nodes(8), 4)):
        plan = place(config_of(1, 2), nodes, tensor=tensor)
        assert steered([plan], nodes) == Steered(plans=(plan,), doubtful=None)
    without = place(config_of(2), gpu_nodes(4, 4), tensor=4, drafts=False)
    assert steered([without], gpu_nodes(4, 4)) == Steered(plans=(without,), doubtful=None)


def test_draft_workers_stay_where_the_emptiest_node_has_room_for_both() -> None:
    for nodes, num_groups in ((gpu_nodes(4, 4, 5, 5), 4), (gpu_nodes(4, 4, 6), 3)):
        plan = place(config_of(num_groups, 2), nodes, tensor=4)
        assert steered([plan], nodes) == Steered(plans=(plan,), doubtful=None)


def test_a_small_model_leaves_the_room_that_a_large_one_needs() -> None:
    nodes = gpu_nodes(4, 2)
    small = place(config_of(2), nodes[1:], drafts=False)
    large = place(config_of(1), nodes[:1], tensor=4, drafts=False)
    outcome = steered([small, large], nodes)
    assert outcome.doubtful is None
    assert kept_off(outcome) == [({"n0"}, set()), (set(), set())]


def test_labels_that_are_given_stay_and_what_they_cannot_mend_is_told() -> None:
    nodes = gpu_nodes(4, 4)
    config = config_of(1, 2)
    bundle = config.draft_pool.bundle.model_copy(update={"labels": {"ray.io/node-id": "in(n0,n1)"}})
    pool = config.draft_pool.model_copy(update={"bundle": bundle})
    plan = place(config.model_copy(update={"draft_pool": pool}), nodes, tensor=4)
    assert steered([plan], nodes) == Steered(plans=(plan,), doubtful=0)
    bundle = bundle.model_copy(update={"labels": {"ray.io/node-id": "!gone"}})
    pool = config.draft_pool.model_copy(update={"bundle": bundle})
    plan = place(config.model_copy(update={"draft_pool": pool}), nodes, tensor=4)
    outcome = steered([plan], nodes)
    assert outcome.doubtful is None
    assert kept_off(outcome) == [(set(), {"gone", plan.target_nodes[0][0]})]


def test_where_both_must_share_a_node_nobody_is_sent_away() -> None:
    nodes = gpu_nodes(8, 2)
    plan = place(config_of(1, 5), nodes, tensor=4)
    assert steered([plan], nodes) == Steered(plans=(plan,), doubtful=0)


@given(
    gpus=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    num_groups=st.integers(1, 3),
    num_workers=st.integers(1, 4),
    width=st.integers(1, 4),
    strategy=st.sampled_from(["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]),
)
def test_a_steered_plan_comes_true_unless_it_says_that_it_may_not(
    gpus: list[int], num_groups: int, num_workers: int, width: int, strategy: str
) -> None:
    nodes = gpu_nodes(*gpus)
    plan = plan_placement(
        config_of(num_groups, num_workers, strategy=strategy),
        nodes,
        has_drafter=True,
        ranks=ranks_of(stages=width),
    )
    if not isinstance(plan, PlacementPlan):
        return
    outcome = steered([plan], nodes)
    assert comes_true(outcome.plans, nodes) == (outcome.doubtful is None)
    (then,) = outcome.plans
    assert then.draft is not None
    for placement, places in (
        (then.draft, then.draft_nodes),
        (then.target, itertools.chain(*then.target_nodes)),
    ):
        assert not (placement.kept_off or frozenset()) & set(places), "where it is planned it may go"
    if comes_true([plan], nodes):
        assert outcome.plans == (plan,)


@pytest.mark.parametrize("num_groups", [200, 480])
def test_large_clusters_are_rehearsed_at_once(num_groups: int) -> None:
    nodes = gpu_nodes(*[8.0] * 500)
    plan = place(config_of(num_groups, 100), nodes, tensor=8)
    started_s = time.process_time()
    outcome = steered([plan], nodes)
    assert time.process_time() - started_s < 5.0
    assert outcome.doubtful is None
    assert comes_true([plan], nodes) == (num_groups == 200)
