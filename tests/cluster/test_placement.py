"""Plans over inventories of nodes: what fits is placed, what does not is told, node by node."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from ray._private.label_utils import validate_label_selector_value

from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, MembershipConfig, TargetGroupsConfig
from cluster.inventory import NodeSnapshot, how_many, with_changed
from cluster.placement import (
    GroupPlacement,
    ModelRanks,
    PlacementPlan,
    PlacementRefusal,
    place_more,
    plan_placement,
    require_plan,
    unchecked_placement,
)
from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig
from tests.cluster.gpu_plans import config_of, gpu_nodes, node, place, ranks_of


@pytest.mark.parametrize(
    ("free", "amount", "number"),
    [
        (4.0, 0.7, 4),
        (1.0, 0.1, 10),
        (1.0, 0.3, 3),
        (2.0, 0.5, 4),
        (1.6, 0.3, 5),
        (1.5, 0.6, 1),
        (0.4, 0.5, 0),
        (8.0, 2.0, 4),
    ],
)
def test_parts_of_gpus_are_parts_of_one_device(free: float, amount: float, number: int) -> None:
    assert how_many({"GPU": free, "CPU": 64.0}, {"GPU": amount, "CPU": 1.0}, 99) == number


def refused(
    config: ClusterConfig,
    nodes: Sequence[NodeSnapshot],
    *,
    tensor: int = 1,
    stages: int = 1,
    drafts: bool = True,
) -> PlacementRefusal:
    result = plan_placement(config, nodes, has_drafter=drafts, ranks=ranks_of(tensor, stages))
    assert isinstance(result, PlacementRefusal)
    return result


def test_the_demo_fits_two_cpus() -> None:
    plan = place(ClusterConfig(), [node("head", {"CPU": 2.0})])
    assert plan.target.bundles == ({"CPU": 1.0},)
    assert plan.draft is not None
    assert plan.draft.bundles == ({"CPU": 1.0},)
    assert plan.target.label_selectors is None
    assert (plan.target_nodes, plan.draft_nodes) == ((("head",),), ("head",))
    without = place(ClusterConfig(), [node("head", {"CPU": 1.0})], drafts=False)
    assert without.draft is None


def test_a_refusal_names_what_each_node_has_has_free_and_lacks() -> None:
    nodes = [
        NodeSnapshot(
            node_id="a" * 30,
            address="10.0.0.1",
            available={"CPU": 6.0, "GPU": 3.0},
            total={"CPU": 8.0, "GPU": 4.0},
            labels={"pool": "target"},
        ),
        NodeSnapshot(node_id="b" * 30, address="10.0.0.2", available={"CPU": 8.0}, labels={"pool": "target"}),
        NodeSnapshot(node_id="c" * 30, address="10.0.0.3", available={"CPU": 64.0, "GPU": 8.0}, labels={}),
    ]
    bundle = BundleConfig(num_cpus=2, num_gpus=2, labels={"pool": "target"})
    config = ClusterConfig(target_groups=TargetGroupsConfig(num_groups=2, bundle=bundle))
    refusal = refused(config, nodes, drafts=False)
    assert refusal.what == "target group 2 of 2"
    assert str(refusal).splitlines() == [
        "target group 2 of 2 needs 2 CPU + 2 GPU on one node, with label pool=target; "
        "none of the cluster's 3 nodes has that free",
        "  10.0.0.1 (aaaaaaaa): has 8 CPU + 4 GPU, free 4 CPU + 1 GPU, lacks 1 GPU",
        "  10.0.0.2 (bbbbbbbb): has 8 CPU + 0 GPU, free 8 CPU + 0 GPU, lacks 2 GPU",
        "  10.0.0.3 (cccccccc): label pool is not there, not target",
    ]
    with pytest.raises(ResourceError, match="target group 2 of 2 needs 2 CPU"):
        require_plan(refusal)


def test_a_refusal_of_a_draft_worker_counts_what_the_targets_take() -> None:
    refusal = refused(config_of(num_workers=3), gpu_nodes(2, 1))
    assert refusal.what == "draft worker 3 of 3"
    assert [dict(one.free) for one in refusal.nodes] == [{"GPU": 0.0}] * 2
    assert [dict(one.has) for one in refusal.nodes] == [{"GPU": 2.0}, {"GPU": 1.0}]


def test_a_refusal_of_a_large_cluster_can_be_read() -> None:
    text = str(refused(config_of(), gpu_nodes(*[0.0] * 100)))
    assert len(text.splitlines()) == 14
    assert text.endswith("and 88 more, which come no nearer")


def test_a_group_is_on_one_node_where_one_has_room() -> None:
    plan = place(config_of(num_workers=2), gpu_nodes(1, 4, 1), tensor=4)
    assert plan.target.strategy == "STRICT_PACK"
    assert plan.target.bundles == ({"GPU": 1.0},) * 4
    assert plan.target_nodes == (("n1",) * 4,)
    assert set(plan.draft_nodes) == {"n0", "n2"}


def test_ranks_of_a_layer_cross_nodes_only_when_that_is_allowed() -> None:
    nodes = gpu_nodes(2, 2)
    refusal = refused(config_of(), nodes, tensor=4, drafts=False)
    assert "its 4 ranks together: tensor parallelism leaves a node only with" in str(refusal)
    allowed = place(config_of(tensor_parallel_across_nodes=True), nodes, tensor=4, drafts=False)
    assert allowed.target.strategy == "PACK"
    assert sorted(allowed.target_nodes[0]) == ["n0", "n0", "n1", "n1"]
    with pytest.raises(ResourceError, match="rank 5 of 6 of target group 1 of 1 needs 1 GPU"):
        place(config_of(tensor_parallel_across_nodes=True), nodes, tensor=6, drafts=False)


def test_stages_cross_nodes_and_their_ranks_do_not() -> None:
    plan = place(config_of(), gpu_nodes(3, 3), tensor=2, stages=2, drafts=False)
    assert plan.target.strategy == "PACK"
    assert plan.target.bundles == ({"GPU": 2.0},) * 2
    assert sorted(plan.target_nodes[0]) == ["n0", "n1"]
    together = place(config_of(), gpu_nodes(3, 4), tensor=2, stages=2, drafts=False)
    assert together.target.strategy == "STRICT_PACK"
    assert together.target_nodes == (("n1", "n1"),)
    with pytest.raises(ResourceError, match="stage 3 of 3 of target group 1 of 1 needs 2 GPU on one node"):
        place(config_of(), gpu_nodes(3, 3), tensor=2, stages=3, drafts=False)


def test_several_groups_over_nodes_use_few_nodes_each() -> None:
    plan = place(config_of(2), gpu_nodes(2, 2, 2, 2, 2), stages=4, drafts=False)
    assert [len(set(group)) for group in plan.target_nodes] == [2, 2]
    assert not set(plan.target_nodes[0]) & set(plan.target_nodes[1])


def test_groups_are_spread_over_nodes() -> None:
    plan = place(config_of(3), gpu_nodes(8, 8, 8), tensor=2, drafts=False)
    assert {group[0] for group in plan.target_nodes} == {"n0", "n1", "n2"}
    uneven = place(config_of(3), gpu_nodes(8, 2), tensor=2, drafts=False)
    assert Counter(group[0] for group in uneven.target_nodes) == {"n0": 2, "n1": 1}


def test_draft_workers_have_nodes_of_their_own_when_asked() -> None:
    nodes = gpu_nodes(4, 4)
    plan = place(config_of(2, 4, own_nodes=True), nodes, tensor=2)
    (targets,), drafts = {frozenset(group) for group in plan.target_nodes}, set(plan.draft_nodes)
    assert not targets & drafts
    assert plan.draft is not None
    (target_node,), (draft_node,) = targets, drafts
    assert plan.target.label_selectors == ({"ray.io/node-id": f"!in({draft_node})"},) * 2
    assert plan.draft.label_selectors == ({"ray.io/node-id": f"!in({target_node})"},)
    # Without that, both groups would be apart, and drafts beside them.
    shared = place(config_of(2, 4), nodes, tensor=2)
    assert len(set(shared.target_nodes)) == 2
    refusal = refused(config_of(2, 5, own_nodes=True), nodes, tensor=2)
    assert refusal.what == "draft worker 5 of 5"
    assert "has a part of a target group, and draft_pool.own_nodes is true" in str(refusal)


def test_labels_resources_and_kinds_of_accelerators_select_nodes() -> None:
    config = ClusterConfig(
        target_groups=TargetGroupsConfig(
            bundle=BundleConfig(num_cpus=0, num_gpus=1, accelerator_type="H100"), num_groups=2
        ),
        draft_pool=DraftPoolConfig(bundle=BundleConfig(num_cpus=0, resources={"draft_slot": 1})),
    )
    nodes = [
        node("h", {"GPU": 2.0, "accelerator_type:H100": 1.0}),
        node("l", {"GPU": 8.0, "accelerator_type:L4": 1.0, "draft_slot": 1.0}),
    ]
    plan = place(config, nodes)
    assert plan.target.bundles == ({"GPU": 1.0, "accelerator_type:H100": 0.001},)
    assert plan.target_nodes == (("h",),) * 2
    assert plan.draft_nodes == ("l",)
    text = str(refused(config, nodes[1:]))
    assert "target group 1 of 2 needs 1 GPU + H100 on one node" in text
    assert "l: has 8 GPU + no H100, free 8 GPU + no H100, lacks H100" in text


@pytest.mark.parametrize(
    ("selector", "meeting"),
    [("a", {"a"}), ("!a", {"b", None}), ("in(a, b)", {"a", "b"}), ("!in(a,b)", {None})],
)
def test_label_selectors_are_rays(selector: str, meeting: set[str | None]) -> None:
    labels = {value: node("n", {}, **({"pool": value} if value else {})) for value in ("a", "b", None)}
    assert {value for value, one in labels.items() if not one.unmet({"pool": selector})} == meeting


def test_strict_spread_needs_a_node_for_each_bundle() -> None:
    spread = config_of(2, strategy="STRICT_SPREAD")
    plan = place(spread, gpu_nodes(1, 2, 1), stages=2, drafts=False)
    assert all(len(set(group)) == 2 for group in plan.target_nodes)
    with pytest.raises(
        ResourceError, match=r"stage 2 of 2 of target group 1 of 2 .*\n.*takes a part of this"
    ):
        place(spread, gpu_nodes(8), stages=2, drafts=False)
    assert (
        place(config_of(strategy="SPREAD"), gpu_nodes(2), tensor=2, drafts=False).target.strategy == "SPREAD"
    )


def test_every_stage_has_a_bundle() -> None:
    grid = ModelRanks.of_target(
        EngineConfig.model_validate(
            {"target": {"model": "m", "tensor_parallel_size": 2, "pipeline_parallel_size": 3}}
        )
    )
    assert [grid.bundle_of(rank) for rank in range(grid.num_ranks)] == [0, 0, 1, 1, 2, 2]


def test_nodes_to_come_are_not_looked_at() -> None:
    config = ClusterConfig(check_resources=False)
    plan = unchecked_placement(config, has_drafter=True, ranks=ranks_of(tensor=4))
    assert (plan.target.strategy, plan.target_nodes) == ("STRICT_PACK", ())
    assert unchecked_placement(config, has_drafter=True, ranks=ranks_of(stages=4)).target.strategy == "PACK"


NODES = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(
    gpus=NODES,
    num_groups=st.integers(1, 3),
    num_workers=st.integers(0, 3),
    width=st.integers(1, 3),
    strategy=st.sampled_from(["STRICT_PACK", "PACK", "STRICT_SPREAD"]),
    own_nodes=st.booleans(),
)
def test_whatever_fits_is_placed_and_nothing_else(
    gpus: list[int], num_groups: int, num_workers: int, width: int, strategy: str, own_nodes: bool
) -> None:
    """Stages of one GPU each, against every way there is."""
    config = config_of(num_groups, max(num_workers, 1), own_nodes=own_nodes, strategy=strategy)
    result = plan_placement(
        config, gpu_nodes(*gpus), has_drafter=num_workers > 0, ranks=ranks_of(stages=width)
    )
    fits = any(
        is_sound(groups, drafts, gpus, strategy, own_nodes)
        for groups in itertools.combinations_with_replacement(choices(len(gpus), width, strategy), num_groups)
        for drafts in itertools.combinations_with_replacement(range(len(gpus)), num_workers)
    )
    assert isinstance(result, PlacementPlan) == fits
    if isinstance(result, PlacementPlan):
        groups = tuple(tuple(int(name[1:]) for name in group) for group in result.target_nodes)
        drafts = tuple(int(name[1:]) for name in result.draft_nodes)
        assert (len(groups), len(drafts)) == (num_groups, num_workers)
        assert {len(group) for group in groups} == {width}
        assert is_sound(groups, drafts, gpus, result.target.strategy, own_nodes)
    else:
        assert all(one.lacks or one.unfit for one in result.nodes)


@given(
    gpus=NODES,
    num_groups=st.integers(1, 5),
    num_workers=st.integers(1, 4),
    own_nodes=st.booleans(),
)
def test_groups_are_as_even_as_draft_workers_allow(
    gpus: list[int], num_groups: int, num_workers: int, own_nodes: bool
) -> None:
    result = plan_placement(
        config_of(num_groups, num_workers, own_nodes=own_nodes), gpu_nodes(*gpus), has_drafter=True
    )
    if isinstance(result, PlacementPlan):
        counts = Counter(group[0] for group in result.target_nodes)
        assert sum(number * number for number in counts.values()) == min(
            sum(number * number for number in ways)
            for ways in itertools.product(*(range(number + 1) for number in gpus))
            if sum(ways) == num_groups
            and num_workers
            <= sum(
                0 if own_nodes and number else most - number for most, number in zip(gpus, ways, strict=True)
            )
        )


@pytest.mark.parametrize(
    ("num_workers", "gpus", "own_nodes", "what"),
    [
        (50, 8, False, None),
        (100, 8, True, None),
        (3_600, 8, True, None),
        (50, 192, True, None),
        (5_000, 8, False, "draft worker 3801 of 5000"),
    ],
)
def test_large_clusters_are_planned_at_once(
    num_workers: int, gpus: int, own_nodes: bool, what: str | None
) -> None:
    """It took 20 seconds of CPU time, and who runs `serve deploy` waits."""
    config, nodes = config_of(200, num_workers, own_nodes=own_nodes), gpu_nodes(*[float(gpus)] * 500)
    started_s = time.process_time()
    result = plan_placement(config, nodes, has_drafter=True)
    assert time.process_time() - started_s < 5.0
    assert (result.what if isinstance(result, PlacementRefusal) else None) == what


def choices(num_nodes: int, width: int, strategy: str) -> list[tuple[int, ...]]:
    """All ways to place one group, in whatever order."""
    ways = itertools.combinations_with_replacement(range(num_nodes), width)
    return [way for way in ways if is_allowed(way, strategy)]


def is_allowed(group: tuple[int, ...], strategy: str) -> bool:
    if strategy == "STRICT_PACK":
        return len(set(group)) == 1
    return strategy != "STRICT_SPREAD" or len(set(group)) == len(group)


def is_sound(
    groups: tuple[tuple[int, ...], ...],
    drafts: tuple[int, ...],
    gpus: list[int],
    strategy: str,
    own_nodes: bool,
) -> bool:
    load = Counter(itertools.chain(*groups, drafts))
    return (
        all(is_allowed(group, strategy) for group in groups)
        and all(load[index] <= number for index, number in enumerate(gpus))
        and not (own_nodes and set(itertools.chain(*groups)) & set(drafts))
    )


@pytest.mark.parametrize("amount", [0.0, -1.0, float("nan"), float("inf")])
def test_amounts_are_what_can_be_had(amount: float) -> None:
    with pytest.raises(
        ValidationError, match=r"resources\.slot[:\n] *(must be positive|Input should be a finite)"
    ):
        BundleConfig(resources={"slot": amount})


@pytest.mark.parametrize("selector", ["", "!", "a b", "=a", "in(a", "in()", "!in(a,)", "-a", "a_"])
def test_selectors_are_those_that_ray_takes(selector: str) -> None:
    assert validate_label_selector_value(selector) or not selector
    with pytest.raises(ValidationError, match=r"labels\.pool: must be `value`"):
        BundleConfig(labels={"pool": selector})


@pytest.mark.parametrize("selector", ["a", "!a", "in(a)", "in(a,b)", "!in(a, b.c)", "NVIDIA-H100_80", "3"])
def test_every_form_of_a_selector_is_taken(selector: str) -> None:
    assert validate_label_selector_value(selector) is None
    assert BundleConfig(labels={"pool": selector}).labels == {"pool": selector}


def test_configurations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValidationError, match="must take something"):
        BundleConfig(num_cpus=0)
    with pytest.raises(ValidationError, match=r"resources\.GPU"):
        BundleConfig(resources={"GPU": 1})
    with pytest.raises(ValidationError, match="H100 is a kind of GPU, so num_gpus must be positive"):
        BundleConfig(accelerator_type="H100")
    with pytest.raises(ValidationError, match="three times"):
        MembershipConfig(lease_s=2, renew_s=1)
    with pytest.raises(ValidationError, match="Extra inputs"):
        ClusterConfig.model_validate({"num_groups": 2})
    with pytest.raises(ValidationError, match="own_nodes: needs check_resources: true"):
        ClusterConfig.model_validate({"check_resources": False, "draft_pool": {"own_nodes": True}})
    with pytest.raises(ValidationError, match=r"own_nodes: cannot be combined with target_groups\.bundle"):
        ClusterConfig.model_validate(
            {
                "draft_pool": {"own_nodes": True},
                "target_groups": {"bundle": {"labels": {"ray.io/node-id": "x"}}},
            }
        )


def test_what_the_version_before_holds_is_given_back() -> None:
    nodes = [node("a", {"CPU": 1.0, "GPU": 0.0}), node("b", {"CPU": 2.0, "GPU": 4.0})]
    back = with_changed(
        nodes, [("a", {"GPU": 2.0}), ("a", {"GPU": 1.0, "slot": 1.0}), ("gone", {"GPU": 8.0})]
    )
    assert [one.available for one in back] == [
        {"CPU": 1.0, "GPU": 3.0, "slot": 1.0},
        {"CPU": 2.0, "GPU": 4.0},
    ]
    assert nodes[0].available == {"CPU": 1.0, "GPU": 0.0}


def test_an_update_begins_beside_the_old_where_a_group_more_fits() -> None:
    config, ranks = config_of(8, 8), ranks_of(tensor=2)
    placement = unchecked_placement(config, has_drafter=True, ranks=ranks).target
    assert place_more(1, placement, config, gpu_nodes(1, 2), ranks) is not None
    assert place_more(1, placement, config, gpu_nodes(1, 1), ranks) is None


def test_more_groups_go_only_where_ray_may_place_them() -> None:
    """They fit in more places than that: divided, on nodes with other labels, or on those of others."""
    config, ranks = config_of(tensor_parallel_across_nodes=True), ranks_of(tensor=2)
    whole = GroupPlacement(bundles=({"GPU": 1.0},) * 2, strategy="STRICT_PACK", label_selectors=None)
    assert place_more(1, whole, config, gpu_nodes(1, 1), ranks) is None
    divided = replace(whole, strategy="PACK")
    assert place_more(1, divided, config, gpu_nodes(1, 1), ranks) is not None
    assert place_more(2, divided, config, gpu_nodes(1, 1, 1), ranks) is None
    apart = replace(whole, label_selectors=({"ray.io/node-id": "!in(n0)"},) * 2)
    assert place_more(1, apart, config, gpu_nodes(2, 1), ranks) is None
    more = place_more(1, apart, config, gpu_nodes(2, 2), ranks)
    assert more is not None
    assert more.target_nodes == (("n1", "n1"),)
