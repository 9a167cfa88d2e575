"""Nodes with GPUs, clusters that want them, and the plan that comes of it."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config import ClusterConfig
from cluster.inventory import NodeSnapshot
from cluster.placement import ModelRanks, PlacementPlan, RanksPerModel, plan_placement, require_plan


def node(name: str, available: dict[str, float], **labels: str) -> NodeSnapshot:
    return NodeSnapshot(node_id=name, available=available, labels=labels)


def gpu_nodes(*gpus: float) -> list[NodeSnapshot]:
    return [node(f"n{index}", {"CPU": 64.0, "GPU": number}) for index, number in enumerate(gpus)]


def config_of(
    num_groups: int = 1, num_workers: int = 1, *, own_nodes: bool = False, **target: object
) -> ClusterConfig:
    """A GPU for each rank of a target, one for each draft worker."""
    gpu = {"num_cpus": 0, "num_gpus": 1}
    return ClusterConfig.model_validate(
        {
            "target_groups": {"num_groups": num_groups, "bundle": gpu, **target},
            "draft_pool": {"num_workers": num_workers, "bundle": gpu, "own_nodes": own_nodes},
        }
    )


def ranks_of(tensor: int = 1, stages: int = 1) -> RanksPerModel:
    return RanksPerModel(target=ModelRanks(num_ranks=tensor * stages, num_stages=stages))


def place(
    config: ClusterConfig,
    nodes: Sequence[NodeSnapshot],
    *,
    tensor: int = 1,
    stages: int = 1,
    drafts: bool = True,
) -> PlacementPlan:
    ranks = ranks_of(tensor, stages)
    return require_plan(plan_placement(config, nodes, has_drafter=drafts, ranks=ranks))
