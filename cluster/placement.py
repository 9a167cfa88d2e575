"""Whether and how the parts fit the cluster: a pure plan, made before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.config import BundleConfig, ClusterConfig
from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """What one node has free."""

    node_id: str
    available: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """The placement group of one kind of replica, as Serve's deployment options want it."""

    bundles: tuple[dict[str, float], ...]
    strategy: str
    label_selectors: tuple[dict[str, str], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Placement of target groups and draft workers."""

    target: GroupPlacement
    draft: GroupPlacement | None


@dataclass(slots=True)
class _Free:
    node: NodeSnapshot
    amounts: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRanks:
    """How many processes one copy of a model takes, and how many of them share a bundle.

    Without stages each rank has a bundle. With stages each stage has one: its ranks talk to each other in
    every layer and stay on one node, whatever the strategy, which places the stages.
    """

    num_ranks: int = 1
    per_bundle: int = 1

    @staticmethod
    def of_target(engine: EngineConfig) -> ModelRanks:
        """Return those of an engine's target."""
        target = engine.target
        per_bundle = target.tensor_parallel_size if target.pipeline_parallel_size > 1 else 1
        return ModelRanks(num_ranks=target.num_ranks, per_bundle=per_bundle)

    @staticmethod
    def of_draft(engine: EngineConfig) -> ModelRanks:
        """Return those of an engine's draft model."""
        return ModelRanks(num_ranks=engine.speculative_config.draft_tensor_parallel_size)

    @property
    def num_bundles(self) -> int:
        """Bundles of one copy."""
        return self.num_ranks // self.per_bundle

    def bundle_of(self, rank: int) -> int:
        """Index of a rank's bundle."""
        return rank // self.per_bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksPerModel:
    """The ranks of one copy of each model."""

    target: ModelRanks = ModelRanks()
    draft: ModelRanks = ModelRanks()

    @staticmethod
    def of(engine: EngineConfig) -> RanksPerModel:
        """Return those that an engine's configuration asks for."""
        return RanksPerModel(target=ModelRanks.of_target(engine), draft=ModelRanks.of_draft(engine))


def plan_placement(
    config: ClusterConfig,
    nodes: Sequence[NodeSnapshot],
    *,
    has_drafter: bool,
    ranks: RanksPerModel | None = None,
) -> PlacementPlan:
    """Check that everything fits onto the nodes together, and return the placement groups.

    The check is first-fit over nodes; Ray decides where bundles really go.

    Raises:
        ResourceError: naming what lacks what, and what the cluster has.
    """
    ranks = ranks or RanksPerModel()
    free = [_Free(node, dict(node.available)) for node in nodes]
    target, draft = config.target_groups, config.draft_pool
    for index in range(target.num_groups):
        what = f"target group {index + 1} of {target.num_groups}"
        _reserve_group(target.bundle, ranks.target, target.strategy, free, what, nodes)
    for index in range(draft.num_workers if has_drafter else 0):
        what = f"draft worker {index + 1} of {draft.num_workers}"
        _reserve_group(draft.bundle, ranks.draft, "PACK", free, what, nodes)
    return PlacementPlan(
        target=_group(target.bundle, ranks.target, target.strategy),
        draft=_group(draft.bundle, ranks.draft, "PACK") if has_drafter else None,
    )


def _group(bundle: BundleConfig, ranks: ModelRanks, strategy: str) -> GroupPlacement:
    return GroupPlacement(
        bundles=tuple(_amounts(bundle, ranks.per_bundle) for _ in range(ranks.num_bundles)),
        strategy=strategy,
        label_selectors=tuple(dict(bundle.labels) for _ in range(ranks.num_bundles))
        if bundle.labels
        else None,
    )


def _amounts(bundle: BundleConfig, num_ranks: int) -> dict[str, float]:
    return {name: num_ranks * amount for name, amount in bundle.amounts().items()}


def _reserve_group(
    bundle: BundleConfig,
    ranks: ModelRanks,
    strategy: str,
    free: Sequence[_Free],
    what: str,
    nodes: Sequence[NodeSnapshot],
) -> None:
    """Reserve the bundles of all ranks of one copy of a model."""
    if strategy == "STRICT_PACK":
        whole = f"{what} ({ranks.num_ranks} ranks on one node)" if ranks.num_ranks > 1 else what
        _reserve(_amounts(bundle, ranks.num_ranks), bundle.labels, free, whole, nodes)
        return
    left = list(free)
    part = "rank" if ranks.per_bundle == 1 else "stage"
    for index in range(ranks.num_bundles):
        name = f"{part} {index + 1} of {ranks.num_bundles} of {what}" if ranks.num_bundles > 1 else what
        place = _reserve(_amounts(bundle, ranks.per_bundle), bundle.labels, left, name, nodes)
        if strategy == "STRICT_SPREAD":
            left.remove(place)


def _reserve(
    wanted: Mapping[str, float],
    labels: Mapping[str, str],
    free: Sequence[_Free],
    what: str,
    nodes: Sequence[NodeSnapshot],
) -> _Free:
    for place in free:
        if _has_labels(place.node, labels) and all(
            place.amounts.get(name, 0.0) >= amount for name, amount in wanted.items()
        ):
            for name, amount in wanted.items():
                place.amounts[name] -= amount
            return place
    raise ResourceError(
        f"{what} needs {_listed(wanted)}{_on_labels(labels)} on one node; "
        f"the cluster has {_cluster(nodes, wanted, labels)}, and {_left(free, wanted, labels)} "
        "of that is left for it"
    )


def _has_labels(node: NodeSnapshot, labels: Mapping[str, str]) -> bool:
    return all(node.labels.get(name) == value for name, value in labels.items())


def _cluster(nodes: Sequence[NodeSnapshot], wanted: Mapping[str, float], labels: Mapping[str, str]) -> str:
    fitting = [node for node in nodes if _has_labels(node, labels)]
    if not fitting:
        return f"no node{_on_labels(labels)} among its {len(nodes)}"
    totals = {name: sum(node.available.get(name, 0.0) for node in fitting) for name in wanted}
    return f"{_listed(totals)} free on {len(fitting)} node{'s' * (len(fitting) > 1)}{_on_labels(labels)}"


def _left(free: Sequence[_Free], wanted: Mapping[str, float], labels: Mapping[str, str]) -> str:
    fitting = [place for place in free if _has_labels(place.node, labels)]
    return _listed({name: max((p.amounts.get(name, 0.0) for p in fitting), default=0.0) for name in wanted})


def _listed(amounts: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _on_labels(labels: Mapping[str, str]) -> str:
    return f" with {', '.join(f'{name}={value}' for name, value in labels.items())}" if labels else ""
