"""The Serve deployments of the cluster, without the HTTP door on top."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import DeploymentID, ReplicaID  # Ray has no public form of these
from ray.util import placement_group_table

from cluster.autoscaling.serve_policy import DraftPoolPolicy, TargetGroupPolicy, autoscaling_options
from cluster.config import ClusterConfig
from cluster.coordinator import CoordinatorReplica
from cluster.directory_actor import application_of, current_members
from cluster.draft_pool import DraftPoolReplica
from cluster.inventory import Amounts, NodeSnapshot, listed, with_changed
from cluster.node_sides import shared_out
from cluster.placement import (
    GroupPlacement,
    NodeSides,
    PlacementPlan,
    RanksPerModel,
    left_by,
    place_more,
    plan_placement,
    require_plan,
    unchecked_placement,
)
from cluster.pool_drafter import drafter_of_pool
from cluster.rehearsal import steered
from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig

logger = logging.getLogger(__name__)

COORDINATOR = "Coordinator"
DRAFT_POOL = "DraftPool"

_SURGE_PERCENT = 100
"""All at once, as far as there is room: whoever has none waits until an old one has ended."""

Bundles = Sequence[tuple[str, Amounts]]
"""Of one replica: what it holds, by node."""

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


def build_applications(
    models: Sequence[ModelPools], own: Collection[str] | None = None
) -> list[serve.Application]:
    """Return the coordinators, bound to their draft pools, of several models that share a cluster.

    Args:
        models: in the order in which they are to be deployed.
        own: names that the application may have, so that what others run is not taken for a version of it;
            None: nobody knows them.

    Raises:
        ResourceError: they do not fit the cluster together, or another application has a namespace of theirs.
    """
    return [_bound(placed, surge_percent) for placed, surge_percent in _placements(models, own)]


def _bound(placed: _Placed, surge_percent: int) -> serve.Application:
    model, plan = placed.model, placed.plan
    engine, cluster = model.engine, model.cluster
    coordinator = _deployment(
        CoordinatorReplica,
        COORDINATOR + model.suffix,
        _scale_of_targets(cluster, engine.scheduler.max_num_seqs, is_running=bool(placed.targets)),
        plan.target,
        cluster,
        surge_percent=surge_percent,
    )
    drafter = drafter_of_pool(engine)
    if plan.draft is None or drafter is None:
        return coordinator.bind(engine, cluster)
    pool_scale = _scale_of_pool(cluster, is_running=bool(placed.drafts))
    pool = _deployment(DraftPoolReplica, DRAFT_POOL + model.suffix, pool_scale, plan.draft, cluster)
    return coordinator.bind(engine, cluster, pool.bind(drafter, cluster))


def snapshot_nodes() -> list[NodeSnapshot]:
    """Return what is free on each live node now.

    In an order that stays: another plan for the same nodes could keep parts off other ones than before, and
    Serve would replace what has not changed.
    """
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
        for node in sorted(ray.nodes(), key=lambda node: str(node["NodeID"]))
        if node["Alive"]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """What becomes of one model, and what its replicas hold that there are already."""

    model: ModelPools
    plan: PlacementPlan
    targets: Sequence[Bundles]
    drafts: Sequence[Bundles]
    others: Sequence[Bundles]
    """All of the application's but the model's target groups."""

    def place_more(self, number: int, nodes: Sequence[NodeSnapshot]) -> PlacementPlan | None:
        """Return where so many target groups more go; None: they do not fit."""
        return place_more(number, self.plan.target, self.model.cluster, nodes, self.model.ranks)

    @property
    def num_more(self) -> int:
        """Target groups that an update starts before it ends any: those that are more than there are.

        With autoscaling it leaves their number alone.
        """
        groups, num_running = self.model.cluster.target_groups, len(self.targets)
        return max(0, groups.num_groups - num_running) if num_running and groups.autoscaling is None else 0


def _placements(models: Sequence[ModelPools], own: Collection[str] | None) -> list[tuple[_Placed, int]]:
    """Return where everything goes, and how many percent of target groups an update starts beside the old."""
    free = snapshot_nodes()
    running = _running_replicas([model.cluster.namespace for model in models], own)
    # What the version before holds is given back while this one starts.
    nodes = with_changed(free, itertools.chain(*itertools.chain(*running.values())))
    all_placed = []
    for model, plan in zip(models, _plans(models, nodes), strict=True):
        coordinators, pool = COORDINATOR + model.suffix, DRAFT_POOL + model.suffix
        placed = _Placed(
            model=model,
            plan=plan,
            targets=running.get(coordinators, ()),
            drafts=running.get(pool, ()),
            others=[one for name, replicas in running.items() if name != coordinators for one in replicas],
        )
        all_placed.append(placed)
    return [
        (placed, _surge_percent(placed, free, _left_by_updates(free, all_placed, but=placed)))
        for placed in all_placed
    ]


def _plans(models: Sequence[ModelPools], nodes: Sequence[NodeSnapshot]) -> Sequence[PlacementPlan]:
    """Return a plan for each model, together with what keeps Ray to it."""
    plans: list[PlacementPlan] = []
    sides, left = NodeSides(), nodes
    for model in models:
        plan = _plan(model, left, sides)
        left = left_by(plan, left)
        plans.append(plan)
        if model.cluster.draft_pool.own_nodes:
            sides |= plan.sides
    is_apart = [model.cluster.draft_pool.own_nodes for model in models]
    sides = shared_out([plan for plan, apart in zip(plans, is_apart, strict=True) if apart], left)
    plans = [plan.kept_to(sides) if apart else plan for plan, apart in zip(plans, is_apart, strict=True)]
    outcome = steered(plans, nodes)
    if outcome.doubtful is not None:
        model = models[outcome.doubtful]
        logger.warning(
            "%s: everything fits, but Ray places one group after the other, each on the emptiest node, and "
            "may leave no room for a target group; give target_groups.bundle and draft_pool.bundle different "
            "labels, or set draft_pool.own_nodes",
            f"model {model.suffix.removeprefix('-')}" if model.suffix else "the first model",
        )
    return outcome.plans


def _plan(model: ModelPools, nodes: Sequence[NodeSnapshot], sides: NodeSides) -> PlacementPlan:
    cluster, ranks = model.cluster.at_most(), model.ranks
    if not cluster.check_resources:
        return unchecked_placement(cluster, has_drafter=model.has_drafter, ranks=ranks)
    try:
        has_drafter = model.has_drafter
        return require_plan(plan_placement(cluster, nodes, has_drafter=has_drafter, ranks=ranks, sides=sides))
    except ResourceError as error:
        raise _refusal(model, str(error)) from None


def _refusal(model: ModelPools, message: str) -> ResourceError:
    return ResourceError(f"model {model.suffix.removeprefix('-')}: {message}" if model.suffix else message)


def _left_by_updates(
    free: Sequence[NodeSnapshot], all_placed: Iterable[_Placed], *, but: _Placed
) -> Sequence[NodeSnapshot]:
    """Return what is free once all models but one have started a target group, and ended an old one."""
    for placed in all_placed:
        one = placed.place_more(1, free) if placed is not but and placed.targets else None
        if one is not None:
            free = with_changed(left_by(one, free), placed.targets[0])
    return free


def _surge_percent(placed: _Placed, free: Sequence[NodeSnapshot], free_later: Sequence[NodeSnapshot]) -> int:
    """Return how many percent of target groups an update starts beside the old.

    Args:
        placed: a model.
        free: what no version holds.
        free_later: what is left of it where other models take room first.
    """
    cluster, num_more = placed.model.cluster, placed.num_more
    if not cluster.check_resources:
        return _SURGE_PERCENT if cluster.updates == "surge" else 0
    has_room = placed.place_more(num_more + 1, free) is not None
    if cluster.updates == "surge":
        if placed.targets and not has_room:
            groups = "one target group" if not num_more else f"{num_more + 1} target groups"
            raise _refusal(
                placed.model,
                f"cluster.updates: surge needs room for {groups} more than there are, which no node has "
                "free; make room, or write in_place",
            )
        return _SURGE_PERCENT
    if cluster.updates == "auto" and has_room and placed.place_more(1, free_later) is not None:
        return _SURGE_PERCENT
    # What else ends at the same time may make room.
    at_most = with_changed(free, itertools.chain(*placed.others))
    if num_more and placed.place_more(num_more, at_most) is None:
        raise _refusal(
            placed.model,
            f"cluster.target_groups.num_groups: {num_more} more than there are, which an update starts "
            "before it ends any, and no node has room for that; make room, or deploy with "
            f"num_groups: {len(placed.targets)} first",
        )
    return 0


def _running_replicas(
    namespaces: Sequence[str], own: Collection[str] | None = None
) -> dict[str, list[Bundles]]:
    """Return what an application's replicas hold, by deployment: those that serve, and those that start.

    Who is only starting is in no directory yet, but has its place. Serve calls the placement group of a
    replica as it calls the replica, so that it says of which application it is.

    Raises:
        ResourceError: one of the namespaces belongs to another application than those named `own`.
    """
    groups = list(_groups_of_replicas())
    if not groups:
        return {}
    applications: set[str] = set()
    for namespace in namespaces:
        members = {member.placement_group for member in current_members(namespace)}
        owners = {one.deployment.app_name for one in groups if one.group in members}
        # It may have been deleted: what is there counts, and not what the directory remembers.
        owners |= {application_of(namespace)} & {one.deployment.app_name for one in groups}
        if own is not None and (others := sorted(owners.difference(own))):
            raise ResourceError(
                f"cluster.namespace: {namespace} belongs to the application {others[0]}, which runs on this "
                f"cluster; this one ({' or '.join(sorted(own))}) needs another: give each a "
                f"cluster.namespace of its own, or end {others[0]} first"
            )
        applications |= owners
    replicas: dict[str, list[Bundles]] = {}
    for one in groups:
        if one.deployment.app_name in applications:
            nodes = one.table["bundles_to_node_id"].items()
            bundles = [(node_id, dict(one.table["bundles"][index])) for index, node_id in nodes]
            replicas.setdefault(one.deployment.name, []).append(bundles)
    return replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupOfReplica:
    """A placement group that Serve has made for a replica."""

    group: str
    deployment: DeploymentID
    table: Mapping[str, Any]
    """What Ray says of it."""


def _groups_of_replicas() -> Iterator[_GroupOfReplica]:
    for group, table in placement_group_table().items():
        deployment = _deployment_of(table["name"])
        if deployment is not None and table["state"] != "REMOVED":
            yield _GroupOfReplica(group=group, deployment=deployment, table=table)


def pending_groups(application: str) -> tuple[str, ...]:
    """Return what an application's replicas wait for that have no place yet, in words.

    As in `Coordinator: 1 placement group with 4 x (1 CPU + 1 GPU), STRICT_PACK`.
    """
    waiting = Counter(
        (one.deployment.name, _asked(one.table))
        for one in _groups_of_replicas()
        if one.deployment.app_name == application and one.table["state"] in {"PENDING", "RESCHEDULING"}
    )
    return tuple(
        f"{name}: {number} placement group{'s' if number > 1 else ''} with {asked}"
        for (name, asked), number in sorted(waiting.items())
    )


def _asked(table: Mapping[str, Any]) -> str:
    bundles = Counter(listed(bundle) for bundle in table["bundles"].values())
    amounts = " and ".join(f"{number} x ({bundle})" for bundle, number in bundles.items())
    return f"{amounts}, {table['strategy']}"


def _deployment_of(placement_group: str) -> DeploymentID | None:
    """Return whose replica has a placement group of this name; None: no replica's."""
    try:
        is_replica = ReplicaID.is_full_id_str(placement_group)
        return ReplicaID.from_full_id_str(placement_group).deployment_id if is_replica else None
    except ValueError:  # of an application or deployment with a # in its name, as none of ours has
        return None


def _scale_of_targets(cluster: ClusterConfig, max_num_seqs: int, *, is_running: bool) -> dict[str, Any]:
    """Return the options that say how many target groups there are.

    With autoscaling, an update leaves their number alone: told how many to begin with, Serve would go back to
    that, and end the others before it starts any.
    """
    groups, scaling = cluster.target_groups, cluster.target_groups.autoscaling
    if scaling is None:
        return {"num_replicas": groups.num_groups}
    arguments = {
        "config": scaling.model_dump(),
        "max_num_seqs": max_num_seqs,
        "namespace": cluster.namespace,
    }
    return {
        "autoscaling_config": autoscaling_options(
            TargetGroupPolicy,
            arguments,
            bounds=(scaling.min_groups, scaling.max_groups),
            initial=None if is_running else groups.initial_groups,
        )
    }


def _scale_of_pool(cluster: ClusterConfig, *, is_running: bool) -> dict[str, Any]:
    """Return the options that say how many draft workers there are; as for target groups."""
    pool, scaling = cluster.draft_pool, cluster.draft_pool.autoscaling
    if scaling is None:
        return {"num_replicas": pool.num_workers}
    return {
        "autoscaling_config": autoscaling_options(
            DraftPoolPolicy,
            {"config": scaling.model_dump(), "namespace": cluster.namespace},
            bounds=(scaling.min_workers, scaling.max_workers),
            initial=None if is_running else pool.initial_workers,
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
