from __future__ import annotations

import pytest
from pydantic import ValidationError

from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, MembershipConfig, TargetGroupsConfig
from cluster.placement import ModelRanks, NodeSnapshot, RanksPerModel, plan_placement
from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig


def node(name: str, available: dict[str, float], **labels: str) -> NodeSnapshot:
    return NodeSnapshot(node_id=name, available=available, labels=labels)


def test_the_demo_fits_two_cpus() -> None:
    plan = plan_placement(ClusterConfig(), [node("head", {"CPU": 2.0})], has_drafter=True)
    assert plan.target.bundles == ({"CPU": 1.0},)
    assert plan.draft is not None
    assert plan.draft.bundles == ({"CPU": 1.0},)
    assert plan.target.label_selectors is None


def test_without_a_drafter_one_cpu_is_enough() -> None:
    plan = plan_placement(ClusterConfig(), [node("head", {"CPU": 1.0})], has_drafter=False)
    assert plan.draft is None


def test_what_does_not_fit_is_named_with_what_there_is() -> None:
    with pytest.raises(
        ResourceError, match=r"draft worker 1 of 1 needs 1 CPU on one node; the cluster has 1 CPU"
    ):
        plan_placement(ClusterConfig(), [node("head", {"CPU": 1.0})], has_drafter=True)
    gpus = ClusterConfig(target_groups=TargetGroupsConfig(bundle=BundleConfig(num_cpus=4, num_gpus=2)))
    with pytest.raises(
        ResourceError, match=r"target group 1 of 1 needs 4 CPU \+ 2 GPU .* 16 CPU \+ 0 GPU free"
    ):
        plan_placement(gpus, [node("a", {"CPU": 8.0}), node("b", {"CPU": 8.0})], has_drafter=False)


def test_two_halves_on_two_nodes_are_not_a_whole() -> None:
    config = ClusterConfig(target_groups=TargetGroupsConfig(bundle=BundleConfig(num_cpus=2)))
    with pytest.raises(ResourceError, match="2 CPU free on 2 nodes, and 1 CPU"):
        plan_placement(config, [node("a", {"CPU": 1.0}), node("b", {"CPU": 1.0})], has_drafter=False)


TWO_RANKS = RanksPerModel(target=ModelRanks(num_ranks=2))


def test_every_rank_has_a_bundle() -> None:
    config = ClusterConfig(target_groups=TargetGroupsConfig(bundle=BundleConfig(labels={"pool": "target"})))
    nodes = [node(name, {"CPU": 1.0}, pool="target") for name in "abc"]
    ranks = RanksPerModel(target=ModelRanks(num_ranks=2), draft=ModelRanks(num_ranks=3))
    plan = plan_placement(config, [*nodes, node("d", {"CPU": 3.0})], has_drafter=True, ranks=ranks)
    assert plan.target.bundles == ({"CPU": 1.0},) * 2
    assert plan.target.label_selectors == ({"pool": "target"},) * 2
    assert plan.draft is not None
    assert plan.draft.bundles == ({"CPU": 1.0},) * 3
    with pytest.raises(ResourceError, match="rank 2 of 2 of target group 1 of 1 needs 1 CPU"):
        plan_placement(config, nodes[:1], has_drafter=False, ranks=TWO_RANKS)


def test_every_stage_has_a_bundle() -> None:
    config = ClusterConfig(target_groups=TargetGroupsConfig(strategy="STRICT_SPREAD"))
    grid = ModelRanks.of_target(
        EngineConfig.model_validate(
            {"target": {"model": "m", "tensor_parallel_size": 2, "pipeline_parallel_size": 3}}
        )
    )
    assert [grid.bundle_of(rank) for rank in range(grid.num_ranks)] == [0, 0, 1, 1, 2, 2]
    nodes = [node(name, {"CPU": 3.0}) for name in "abc"]
    plan = plan_placement(config, nodes, has_drafter=False, ranks=RanksPerModel(target=grid))
    assert plan.target.bundles == ({"CPU": 2.0},) * 3
    with pytest.raises(ResourceError, match="stage 3 of 3 of target group 1 of 1 needs 2 CPU on one node"):
        plan_placement(config, nodes[:2], has_drafter=False, ranks=RanksPerModel(target=grid))


def test_strict_strategies_need_one_node_or_several() -> None:
    def plan(strategy: str, *cpus: float) -> None:
        groups = TargetGroupsConfig.model_validate({"strategy": strategy})
        nodes = [node(f"n{index}", {"CPU": count}) for index, count in enumerate(cpus)]
        plan_placement(ClusterConfig(target_groups=groups), nodes, has_drafter=False, ranks=TWO_RANKS)

    plan("STRICT_PACK", 2.0)
    with pytest.raises(ResourceError, match=r"2 ranks on one node\) needs 2 CPU"):
        plan("STRICT_PACK", 1.0, 1.0)
    plan("STRICT_SPREAD", 1.0, 1.0)
    with pytest.raises(ResourceError, match="rank 2 of 2"):
        plan("STRICT_SPREAD", 4.0)
    plan("PACK", 1.0, 1.0)
    plan("SPREAD", 2.0)


def test_labels_and_custom_resources_select_nodes() -> None:
    config = ClusterConfig(
        target_groups=TargetGroupsConfig(bundle=BundleConfig(labels={"pool": "target"}), num_groups=2),
        draft_pool=DraftPoolConfig(bundle=BundleConfig(num_cpus=0, resources={"draft_slot": 1})),
    )
    nodes = [
        node("t", {"CPU": 2.0}, pool="target"),
        node("d", {"CPU": 8.0, "draft_slot": 1.0}, pool="draft"),
    ]
    plan = plan_placement(config, nodes, has_drafter=True)
    assert plan.target.label_selectors == ({"pool": "target"},)
    assert plan.draft is not None
    assert plan.draft.bundles == ({"draft_slot": 1},)
    with pytest.raises(ResourceError, match="no node with pool=target among its 1"):
        plan_placement(config, nodes[1:], has_drafter=True)
    three = config.model_copy(
        update={"target_groups": config.target_groups.model_copy(update={"num_groups": 3})}
    )
    with pytest.raises(ResourceError, match=r"target group 3 of 3 .* 2 CPU free on 1 node with pool=target"):
        plan_placement(three, nodes, has_drafter=True)


def test_configurations_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValidationError, match="must take something"):
        BundleConfig(num_cpus=0)
    with pytest.raises(ValidationError, match=r"resources\.GPU"):
        BundleConfig(resources={"GPU": 1})
    with pytest.raises(ValidationError, match="three times"):
        MembershipConfig(lease_s=2, renew_s=1)
    with pytest.raises(ValidationError, match="Extra inputs"):
        ClusterConfig.model_validate({"num_groups": 2})
