"""Nodes that no plan has a use for, given to target groups or to draft workers."""

from __future__ import annotations

import random

import pytest

from cluster.inventory import NodeSnapshot
from cluster.node_sides import shared_out
from cluster.placement import NodeSides, PlacementPlan, left_by
from tests.cluster.gpu_plans import config_of, gpu_nodes, node, place


def sides_of(nodes: list[NodeSnapshot], num_workers: int, *, tensor: int) -> tuple[PlacementPlan, NodeSides]:
    plan = place(config_of(1, num_workers, own_nodes=True), nodes, tensor=tensor)
    return plan, shared_out([plan], left_by(plan, nodes))


def test_the_first_spare_node_is_for_targets_and_the_next_for_draft_workers() -> None:
    nodes = gpu_nodes(4, 4, 4, 4, 4)
    plan, sides = sides_of(nodes, 4, tensor=4)
    assert (plan.sides.targets, plan.sides.drafts) == ({"n4"}, {"n0", "n1", "n2", "n3"}), "drafts are spread"
    plan, sides = sides_of(nodes, 1, tensor=4)
    assert (plan.sides.targets, plan.sides.drafts) == ({"n4"}, {"n0"})
    assert sides == NodeSides(targets=frozenset({"n1", "n3", "n4"}), drafts=frozenset({"n0", "n2"}))


def test_what_can_lose_a_node_needs_no_spare_one() -> None:
    _, sides = sides_of(gpu_nodes(2, 2, 2, 2, 4), 2, tensor=4)
    # Only n4 could take the target, in whatever state the others are: these stay open to draft workers.
    assert sides == NodeSides(targets=frozenset({"n4"}), drafts=frozenset({"n0", "n1"}))
    plan, sides = sides_of(gpu_nodes(2, 2, 4, 4), 2, tensor=2)
    assert plan.sides.drafts == {"n0", "n1"}, "either has room for both"
    assert sides.drafts == plan.sides.drafts
    assert sides.targets == {"n2", "n3"}


def test_a_node_that_others_are_on_has_a_side_too() -> None:
    """They may leave it, and then Ray could put one of each kind there."""
    busy = NodeSnapshot(node_id="z", available={"GPU": 0.0}, total={"GPU": 4.0}, labels={})
    without = node("none", {"CPU": 64.0})
    _, sides = sides_of([*gpu_nodes(4, 4), busy, without], 1, tensor=4)
    assert "z" in sides.targets
    assert "none" not in sides.targets | sides.drafts


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_nodes_does_not_matter_and_all_that_both_could_use_have_a_side(seed: int) -> None:
    """Another answer would have Serve replace what has not changed."""
    nodes = gpu_nodes(4, 4, 4, 4, 4, 4, 1)
    plan = place(config_of(1, 2, own_nodes=True), nodes, tensor=4)
    left = left_by(plan, nodes)
    expected = shared_out([plan], left)
    random.Random(seed).shuffle(left)
    assert shared_out([plan], left) == expected
    assert not expected.targets & expected.drafts
    assert {f"n{index}" for index in range(6)} <= expected.targets | expected.drafts
    kept = plan.kept_to(expected)
    assert kept.draft is not None
    assert (kept.target.kept_off, kept.draft.kept_off) == (expected.drafts, expected.targets)
    open_to = {
        (not one.unmet(kept.target.selectors), not one.unmet(kept.draft.selectors)) for one in nodes[:6]
    }
    assert open_to == {(True, False), (False, True)}, "to one of them, and none to both"
