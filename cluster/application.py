"""The Serve deployments of the cluster, without the HTTP door on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.util import placement_group_table

from cluster.autoscaling.serve_policy import DraftPoolPolicy, TargetGroupPolicy, autoscaling_options
from cluster.config import ClusterConfig, DraftPoolConfig, TargetGroupsConfig
from cluster.coordinator import CoordinatorReplica
from cluster.directory_actor import current_members
from cluster.draft_pool import DraftPoolReplica
from cluster.inventory import NodeSnapshot, with_changed
from cluster.placement import (
    GroupPlacement,
    PlacementPlan,
    RanksPerModel,
    has_room_for_another,
    left_by,
    plan_placement,
    require_plan,
    unchecked_placement,
)
from cluster.pool_drafter import drafter_of_pool
from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig

COORDINATOR = "Coordinator"
DRAFT_POOL = "DraftPool"

_SURGE_PERCENT = 100
"""All at once, as far as there is room: whoever has none waits until an old one has ended."""

_MAX_ONGOING_CALLS = 16
"""Calls that Serve lets into one replica at once: they are control calls only, tokens travel on channels."""


def resolve(config: ClusterConfig) -> ClusterConfig:
    """Return the configuration with everything automatic decided from the cluster as it is now."""
    if config.channels.bind != "auto":
        return config
    bind = "loopback" if len(snapshot_nodes()) <= 1 else "node"
    channels = config.channels.model_copy(update={"bind": bind})
    return config.model_copy(update={"channels": channels})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPools:
    """One model of an application: an engine, and the pools that it runs in."""

    engine: EngineConfig
    cluster: ClusterConfig
    suffix: str = ""
    """Behind the names of its deployments."""

    @property
    def has_drafter(self) -> bool:
        """Whether there is a draft pool."""
        return drafter_of_pool(self.engine) is not None

    @property
    def ranks(self) -> RanksPerModel:
        """The processes of its models."""
        return RanksPerModel.of(self.engine)


def build_application(engine: EngineConfig, cluster: ClusterConfig) -> serve.Application:
    """Return the coordinator bound to the draft pool, where the method needs one.

    `serve.run` takes it as it is; a door on top takes it as an argument of its own deployment's `bind`, so
    that Serve starts all of it as one application. `cluster` should be the result of `resolve`, and the
    door's `ClusterService` be given the same.

    Raises:
        ResourceError: it does not fit the cluster.
    """
    (application,) = build_applications([ModelPools(engine=engine, cluster=resolve(cluster))])
    return application


def build_applications(models: Sequence[ModelPools]) -> list[serve.Application]:
    """Return the coordinators, bound to their draft pools, of several models that share a cluster.

    Raises:
        ResourceError: they do not fit the cluster together.
    """
    return [
        _bound(model, plan, surge_percent)
        for model, (plan, surge_percent) in zip(models, _placements(models), strict=True)
    ]


def _bound(model: ModelPools, plan: PlacementPlan, surge_percent: int) -> serve.Application:
    engine, cluster = model.engine, model.cluster
    coordinator = _deployment(
        CoordinatorReplica,
        COORDINATOR + model.suffix,
        _scale_of_targets(cluster.target_groups, engine.scheduler.max_num_seqs),
        plan.target,
        cluster,
        surge_percent=surge_percent,
    )
    drafter = drafter_of_pool(engine)
    if plan.draft is None or drafter is None:
        return coordinator.bind(engine, cluster)
    pool_scale = _scale_of_pool(cluster.draft_pool)
    pool = _deployment(DraftPoolReplica, DRAFT_POOL + model.suffix, pool_scale, plan.draft, cluster)
    return coordinator.bind(engine, cluster, pool.bind(drafter, cluster))


def snapshot_nodes() -> list[NodeSnapshot]:
    """Return what is free on each live node now."""
    from ray._private.state import available_resources_per_node  # Ray has no public form of this

    available = available_resources_per_node()
    return [
        NodeSnapshot(
            node_id=node["NodeID"],
            available=dict(available.get(node["NodeID"], {})),
            labels=dict(node.get("Labels", {})),
            total=dict(node.get("Resources", {})),
            address=node["NodeManagerAddress"],
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _placements(models: Sequence[ModelPools]) -> list[tuple[PlacementPlan, int]]:
    """Return where everything goes, and how many percent of target groups an update starts beside the old."""
    free = snapshot_nodes()
    # What the version before holds is given back while this one starts.
    held = [bundle for model in models for bundle in _held_by_deployment(model.cluster.namespace)]
    nodes = with_changed(free, held)
    placements = []
    for model in models:
        plan = _plan(model, nodes)
        nodes = left_by(plan, nodes)
        placements.append((plan, _surge_percent(model, free, is_update=bool(held))))
    return placements


def _plan(model: ModelPools, nodes: Sequence[NodeSnapshot]) -> PlacementPlan:
    cluster, ranks = model.cluster.at_most(), model.ranks
    if not cluster.check_resources:
        return unchecked_placement(cluster, has_drafter=model.has_drafter, ranks=ranks)
    try:
        return require_plan(plan_placement(cluster, nodes, has_drafter=model.has_drafter, ranks=ranks))
    except ResourceError as error:
        if not model.suffix:
            raise
        raise ResourceError(f"model {model.suffix.removeprefix('-')}: {error}") from None


def _surge_percent(model: ModelPools, free: Sequence[NodeSnapshot], *, is_update: bool) -> int:
    cluster = model.cluster
    if not cluster.check_resources:
        return _SURGE_PERCENT if cluster.updates == "surge" else 0
    has_room = has_room_for_another(cluster, free, model.ranks)
    if cluster.updates == "surge" and is_update and not has_room:
        raise ResourceError(
            "cluster.updates: surge needs room for one target group more than there are, which no node has "
            "free; make room, or write in_place"
        )
    does_surge = cluster.updates == "surge" or (cluster.updates == "auto" and has_room)
    return _SURGE_PERCENT if does_surge else 0


def _held_by_deployment(namespace: str) -> list[tuple[str, dict[str, float]]]:
    """Return the bundles, with their nodes, of the target groups and draft workers that run there now."""
    own = {member.placement_group for member in current_members(namespace)} - {""}
    tables = placement_group_table()
    return [
        (node_id, dict(tables[group]["bundles"][index]))
        for group in own & tables.keys()
        for index, node_id in tables[group]["bundles_to_node_id"].items()
    ]


def _scale_of_targets(groups: TargetGroupsConfig, max_num_seqs: int) -> dict[str, Any]:
    """Return the options that say how many target groups there are."""
    scaling = groups.autoscaling
    if scaling is None:
        return {"num_replicas": groups.num_groups}
    arguments = {"config": scaling.model_dump(), "max_num_seqs": max_num_seqs}
    return {
        "autoscaling_config": autoscaling_options(
            TargetGroupPolicy,
            arguments,
            bounds=(scaling.min_groups, scaling.max_groups),
            initial=groups.initial_groups,
        )
    }


def _scale_of_pool(pool: DraftPoolConfig) -> dict[str, Any]:
    """Return the options that say how many draft workers there are."""
    scaling = pool.autoscaling
    if scaling is None:
        return {"num_replicas": pool.num_workers}
    return {
        "autoscaling_config": autoscaling_options(
            DraftPoolPolicy,
            {"config": scaling.model_dump()},
            bounds=(scaling.min_workers, scaling.max_workers),
            initial=pool.initial_workers,
        )
    }


def _deployment(
    replica: type,
    name: str,
    scale: dict[str, Any],
    placement: GroupPlacement,
    cluster: ClusterConfig,
    *,
    surge_percent: int = 0,
) -> serve.Deployment:
    options: dict[str, Any] = {
        "name": name,
        **scale,
        # The replica itself only coordinates; the bundles are for its worker's ranks.
        "ray_actor_options": {"num_cpus": 0},
        "placement_group_bundles": list(placement.bundles),
        "placement_group_strategy": placement.strategy,
        "max_ongoing_requests": _MAX_ONGOING_CALLS,
        "health_check_period_s": cluster.health_checks.period_s,
        "health_check_timeout_s": cluster.health_checks.timeout_s,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": cluster.drain_timeout_s + 10.0,
        # A model that cannot be loaded will not load at the twentieth attempt either.
        "max_constructor_retry_count": 2,
        "max_surge_percent": surge_percent,
    }
    if placement.label_selectors is not None:
        options["placement_group_bundle_label_selector"] = list(placement.label_selectors)
    return serve.deployment(**options)(replica)
