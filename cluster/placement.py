"""Whether and how the parts fit the cluster: a pure plan, made before anything is started.

`plan_placement` looks at what the nodes have free and returns either a plan or a refusal that says, node by
node, what is missing. The plan becomes the options of Serve's deployments, whose placement groups Ray makes;
which of several nodes that fit it takes for which group is up to Ray, which prefers the emptiest
(`rehearsal`), unless `draft_pool.own_nodes` says where which kind may go (`node_sides`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from cluster.config import BundleConfig, ClusterConfig
from cluster.inventory import (
    NODE_ID_LABEL,
    Amounts,
    NodeSnapshot,
    all_but,
    excluded_by,
    how_many,
    lacking,
    less,
    listed,
    times,
    with_changed,
)
from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig

Strategy = Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"]

_MAX_NODES_SHOWN = 12
"""Nodes that a refusal lists; the fullest cluster must still give a message that can be read."""
_MOST_STEPS = 200_000_000
"""Of looking for the cheapest way to place everything where there is hardly any room: about a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """The placement group of one kind of replica, as Serve's deployment options want it."""

    bundles: tuple[dict[str, float], ...]
    strategy: Strategy
    label_selectors: tuple[dict[str, str], ...] | None

    @property
    def selectors(self) -> Mapping[str, str]:
        """Label selectors of each of its bundles."""
        return {} if self.label_selectors is None else self.label_selectors[0]

    @property
    def unit(self) -> dict[str, float]:
        """What it takes of one node: all of it where it must not be divided, else a bundle."""
        num_together = len(self.bundles) if self.strategy == "STRICT_PACK" else 1
        return times(self.bundles[0], num_together)

    @property
    def num_units(self) -> int:
        """Into how many parts it can be divided."""
        return 1 if self.strategy == "STRICT_PACK" else len(self.bundles)

    @property
    def kept_off(self) -> frozenset[str] | None:
        """The nodes that it must not go to; None: those that it may go to are named, and no others."""
        selector = self.selectors.get(NODE_ID_LABEL)
        return frozenset() if selector is None else excluded_by(selector)

    def keeping_off(self, nodes: Iterable[str]) -> GroupPlacement:
        """Return the same that goes to none of these nodes either. Nodes that are still to come stay open."""
        kept_off = self.kept_off
        assert kept_off is not None, "it goes where it was told to"
        if not (kept_off := kept_off.union(nodes)):
            return self
        selectors = {**self.selectors, NODE_ID_LABEL: all_but(kept_off)}
        return replace(self, label_selectors=tuple(dict(selectors) for _ in self.bundles))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSides:
    """The nodes that have parts of target groups, or are theirs, and those of draft workers."""

    targets: frozenset[str] = frozenset()
    drafts: frozenset[str] = frozenset()

    def __or__(self, other: NodeSides) -> NodeSides:
        return NodeSides(targets=self.targets | other.targets, drafts=self.drafts | other.drafts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """Placement of target groups and draft workers."""

    target: GroupPlacement
    draft: GroupPlacement | None
    target_nodes: tuple[tuple[str, ...], ...] = ()
    """Of each target group: the node of each of its bundles. Empty when nobody looked at nodes."""
    draft_nodes: tuple[str, ...] = ()
    """Of each draft worker: its node."""

    @property
    def sides(self) -> NodeSides:
        """The nodes that it takes."""
        targets = frozenset(node_id for group in self.target_nodes for node_id in group)
        return NodeSides(targets=targets, drafts=frozenset(self.draft_nodes))

    def kept_to(self, sides: NodeSides) -> PlacementPlan:
        """Return the plan in which each kind keeps off the other's side."""
        return replace(
            self,
            target=self.target.keeping_off(sides.drafts),
            draft=None if self.draft is None else self.draft.keeping_off(sides.targets),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShortfall:
    """Why one node cannot take what does not fit."""

    node: str
    has: Amounts
    free: Amounts
    """Of what is asked for: what is left when everything before it has its place."""
    lacks: Amounts
    unfit: str | None = None
    """What else speaks against it: a label, or who else is there."""

    def __str__(self) -> str:
        if self.unfit is not None:
            return f"{self.node}: {self.unfit}"
        return f"{self.node}: has {listed(self.has)}, free {listed(self.free)}, lacks {listed(self.lacks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRefusal:
    """What does not fit, and what every node has, has free, and lacks for it."""

    what: str
    """The first part that has no place: `target group 2 of 2`."""
    needs: Amounts
    """What it needs on one node."""
    labels: Mapping[str, str]
    nodes: tuple[NodeShortfall, ...]
    """Those that come nearest first."""
    advice: str | None = None

    def __str__(self) -> str:
        wanted = "".join(
            f", with label {name}={value}" for name, value in self.labels.items() if name != NODE_ID_LABEL
        )
        advice = f" ({self.advice})" if self.advice else ""
        lines = [
            f"{self.what} needs {listed(self.needs)} on one node{wanted}{advice}; "
            f"none of the cluster's {len(self.nodes)} nodes has that free"
        ]
        lines += [f"  {node}" for node in self.nodes[:_MAX_NODES_SHOWN]]
        if (num_more := len(self.nodes) - _MAX_NODES_SHOWN) > 0:
            lines.append(f"  and {num_more} more, which come no nearer")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRanks:
    """How many processes one copy of a model takes, and how many of them share a bundle.

    Without stages each rank has a bundle. With stages each stage has one: its ranks talk to each other in
    every layer and stay on one node, whatever the strategy, which places the stages.
    """

    num_ranks: int = 1
    num_stages: int = 1

    @staticmethod
    def of_target(engine: EngineConfig) -> ModelRanks:
        """Return those of an engine's target."""
        target = engine.target
        return ModelRanks(num_ranks=target.num_ranks, num_stages=target.pipeline_parallel_size)

    @staticmethod
    def of_draft(engine: EngineConfig) -> ModelRanks:
        """Return those of an engine's draft model."""
        return ModelRanks(num_ranks=engine.speculative_config.draft_tensor_parallel_size)

    @property
    def per_bundle(self) -> int:
        """Ranks that share a bundle."""
        return self.num_ranks // self.num_stages if self.num_stages > 1 else 1

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
    sides: NodeSides = NodeSides(),
) -> PlacementPlan | PlacementRefusal:
    """Find places for all target groups and draft workers together.

    A target group goes onto one node where it fits (`strategy: PACK`), else over several, if its strategy and
    its kind of parallelism allow that. Groups are spread over as many nodes as there are. A draft worker is
    always on one node; with `draft_pool.own_nodes` on one that has no part of a target group, and both then
    keep to the side of their kind, of which `sides` are the nodes that other models have taken.
    """
    ranks = ranks or RanksPerModel()
    sides = sides if config.draft_pool.own_nodes else NodeSides()
    refusal: PlacementRefusal | None = None
    for layout in _layouts(config, ranks.target):
        result = _plan(config, nodes, layout, ranks, sides, has_drafter=has_drafter)
        if isinstance(result, PlacementPlan):
            return result
        refusal = result
    assert refusal is not None
    return refusal


def left_by(plan: PlacementPlan, nodes: Sequence[NodeSnapshot]) -> list[NodeSnapshot]:
    """Return the nodes as they are when everything is where the plan has it."""
    taken = [
        (node_id, times(bundle, -1))
        for group in plan.target_nodes
        for node_id, bundle in zip(group, plan.target.bundles, strict=True)
    ]
    if plan.draft is not None:
        taken += [
            (node_id, times(bundle, -1)) for node_id in plan.draft_nodes for bundle in plan.draft.bundles
        ]
    return with_changed(nodes, taken)


def place_more(
    number: int,
    placement: GroupPlacement,
    config: ClusterConfig,
    nodes: Sequence[NodeSnapshot],
    ranks: RanksPerModel,
) -> PlacementPlan | None:
    """Return where so many target groups more go, of what is free on nodes now; None: they do not fit.

    `placement` is what Ray is asked for: a group may fit where it must not go, or divided as it must not be.
    """
    selectors = placement.label_selectors
    groups = config.target_groups
    more = groups.model_copy(
        update={
            "num_groups": number,
            "strategy": placement.strategy,
            "bundle": groups.bundle.model_copy(update={"labels": {} if selectors is None else selectors[0]}),
        }
    )
    alone = config.model_copy(update={"target_groups": more})
    plan = plan_placement(alone, nodes, has_drafter=False, ranks=ranks)
    return plan if isinstance(plan, PlacementPlan) else None


def require_plan(result: PlacementPlan | PlacementRefusal) -> PlacementPlan:
    """Return the plan.

    Raises:
        ResourceError: it is a refusal; says all that the refusal does.
    """
    if isinstance(result, PlacementRefusal):
        raise ResourceError(str(result))
    return result


def unchecked_placement(config: ClusterConfig, *, has_drafter: bool, ranks: RanksPerModel) -> PlacementPlan:
    """Return what to ask Ray for where nodes are still to come, so that nobody can look at them."""
    target = config.target_groups
    strategy: Strategy = target.strategy
    if strategy == "PACK" and not _may_cross_nodes(config, ranks.target):
        strategy = "STRICT_PACK"
    return PlacementPlan(
        target=_group(target.bundle, ranks.target, strategy),
        draft=_group(config.draft_pool.bundle, ranks.draft, "STRICT_PACK") if has_drafter else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """One way to place target groups: as a number of equal units, any of which goes onto one node."""

    strategy: Strategy
    """What Ray is asked for."""
    unit: dict[str, float]
    per_group: int
    num_groups: int
    is_apart: bool
    """No two units of a group share a node."""
    cost: Callable[[int], float]
    """Of so many units on one node."""

    @property
    def num_units(self) -> int:
        return self.per_group * self.num_groups

    def deal(self, counts: Sequence[int], nodes: Sequence[NodeSnapshot]) -> tuple[tuple[str, ...], ...]:
        """Return the nodes of each group's units, where node i takes `counts[i]` of them."""
        order = sorted(range(len(nodes)), key=lambda index: (-counts[index], index))
        units = [nodes[index].node_id for index in order for _ in range(counts[index])]
        if self.strategy in {"SPREAD", "STRICT_SPREAD"}:
            # Neighbours in this row, which are the units of one node, go to different groups.
            return tuple(tuple(units[group :: self.num_groups]) for group in range(self.num_groups))
        return tuple(
            tuple(units[group * self.per_group : (group + 1) * self.per_group])
            for group in range(self.num_groups)
        )


def _layouts(config: ClusterConfig, ranks: ModelRanks) -> Iterable[_Layout]:
    """Yield the ways to place target groups that the configuration allows, best first."""
    groups = config.target_groups
    per_rank = groups.bundle.amounts()
    if groups.strategy in {"PACK", "STRICT_PACK"}:
        yield _Layout(
            strategy="STRICT_PACK",
            unit=times(per_rank, ranks.num_ranks),
            per_group=1,
            num_groups=groups.num_groups,
            is_apart=False,
            cost=_for_even_load,
        )
        if groups.strategy == "STRICT_PACK" or ranks.num_bundles == 1 or not _may_cross_nodes(config, ranks):
            return
    yield _Layout(
        strategy=groups.strategy,
        unit=times(per_rank, ranks.per_bundle),
        per_group=ranks.num_bundles,
        num_groups=groups.num_groups,
        is_apart=groups.strategy == "STRICT_SPREAD",
        cost=_for_few_nodes if groups.strategy == "PACK" else _for_even_load,
    )


def _may_cross_nodes(config: ClusterConfig, ranks: ModelRanks) -> bool:
    return ranks.num_stages > 1 or config.target_groups.tensor_parallel_across_nodes


def _for_even_load(num_units: int) -> float:
    return float(num_units * num_units)


def _for_few_nodes(num_units: int) -> float:
    return float(num_units > 0)


def _plan(
    config: ClusterConfig,
    nodes: Sequence[NodeSnapshot],
    layout: _Layout,
    ranks: RanksPerModel,
    sides: NodeSides,
    *,
    has_drafter: bool,
) -> PlacementPlan | PlacementRefusal:
    groups, pool = config.target_groups, config.draft_pool
    num_workers = pool.num_workers if has_drafter else 0
    worker = times(pool.bundle.amounts(), ranks.draft.num_ranks)
    most = layout.num_groups if layout.is_apart else layout.num_units
    room = [_room(node, layout, groups.bundle.labels, sides, most) for node in nodes]

    def draft_room(index: int, num_units: int) -> int:
        """How many draft workers a node takes beside so many target units."""
        is_of_targets = pool.own_nodes and (num_units or nodes[index].node_id in sides.targets)
        if is_of_targets or nodes[index].unmet(pool.bundle.labels):
            return 0
        return how_many(less(nodes[index].available, layout.unit, num_units), worker, num_workers)

    chosen = _share_out(room, layout, draft_room, num_workers)
    if chosen is None:
        return _without_target(config, nodes, layout, ranks.target, sides)
    if chosen.num_drafts < num_workers:
        return _without_draft(config, nodes, layout, worker, chosen, sides)
    target_nodes = layout.deal(chosen.counts, nodes)
    plan = PlacementPlan(
        target=_group(groups.bundle, ranks.target, layout.strategy),
        draft=_group(pool.bundle, ranks.draft, "STRICT_PACK") if has_drafter else None,
        target_nodes=tuple(
            group * ranks.target.num_bundles if layout.per_group == 1 else group for group in target_nodes
        ),
        draft_nodes=_draft_nodes(nodes, chosen.counts, draft_room, num_workers),
    )
    return plan.kept_to(plan.sides | sides) if pool.own_nodes else plan


def _room(
    node: NodeSnapshot, layout: _Layout, labels: Mapping[str, str], sides: NodeSides, at_most: int
) -> int:
    """Return how many target units a node can take."""
    if node.node_id in sides.drafts or node.unmet(labels):
        return 0
    return how_many(node.available, layout.unit, at_most)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shares:
    """How many target units each node takes, and how many draft workers fit beside all of them."""

    counts: tuple[int, ...]
    num_drafts: int


def _share_out(
    room: Sequence[int],
    layout: _Layout,
    draft_room: Callable[[int, int], int],
    num_drafts: int,
) -> _Shares | None:
    """Return the cheapest way to place all target units that leaves room for most of the draft workers.

    In clusters of thousands of nodes with hardly any room, not the cheapest, but the one that leaves most
    room (`_MOST_STEPS`). None: the target units alone do not fit.
    """
    if sum(room) < layout.num_units:
        return None
    beside = [
        np.array([draft_room(index, number) for number in range(most + 1)]) for index, most in enumerate(room)
    ]
    costs = np.array([layout.cost(number) for number in range(max(room) + 1)])
    above_all_costs = 1.0 + float(costs[list(room)].sum())

    def weighing(room_of_drafts: float) -> _Shares:
        worth = [room_of_drafts * rooms - costs[: len(rooms)] for rooms in beside]
        counts = _best(worth, layout.num_units)
        places = sum(int(rooms[number]) for rooms, number in zip(beside, counts, strict=True))
        return _Shares(counts=counts, num_drafts=min(places, num_drafts))

    shares = weighing(0.0)
    if shares.num_drafts == num_drafts:
        return shares
    shares = weighing(above_all_costs)
    num_steps = sum(len(rooms) for rooms in beside) * layout.num_units * num_drafts
    if shares.num_drafts == num_drafts and num_steps <= _MOST_STEPS:
        return _Shares(counts=_cheapest(beside, costs, layout.num_units, num_drafts), num_drafts=num_drafts)
    return shares


def _best(worth: Sequence[npt.NDArray[np.float64]], num_units: int) -> tuple[int, ...]:
    """Return how many units each node takes where their worth, `worth[node][number]`, is most in all.

    Node by node, from the last to the first: what so many units are worth at most on a node and those behind
    it follows from the same of the next one.
    """
    behind = np.full(num_units + 1, -np.inf)
    behind[0] = 0.0
    choices = []
    for own in reversed(worth):
        padded = np.concatenate((np.full(len(own) - 1, -np.inf), behind))
        # A row for each number of units to place, a column for each number that this node takes of them.
        values = sliding_window_view(padded, len(own))[:, ::-1] + own
        choices.append(values.argmax(axis=1))
        behind = values.max(axis=1)
    counts: list[int] = []
    for choice in reversed(choices):
        counts.append(int(choice[num_units - sum(counts)]))
    return tuple(counts)


def _cheapest(
    beside: Sequence[npt.NDArray[np.int64]],
    costs: npt.NDArray[np.float64],
    num_units: int,
    num_drafts: int,
) -> tuple[int, ...]:
    """Return how many units each node takes, at least cost, where there is room for all draft workers beside.

    As `_best`, for so many units and at least so many draft workers. There is a way.

    Args:
        beside: room for draft workers on each node, by the units that it takes.
        costs: of so many units on one node.
        num_units: to place.
        num_drafts: to leave room for.
    """
    wanted = np.arange(num_drafts + 1)
    prices = np.full((num_units + 1, num_drafts + 1), np.inf)
    prices[0, 0] = 0.0
    choices = []
    for rooms in reversed(beside):
        behind, prices = prices, np.full_like(prices, np.inf)
        choice = np.zeros(prices.shape, np.int32)
        for number, num_beside in enumerate(rooms[: num_units + 1]):
            rest = behind[: num_units + 1 - number, np.maximum(wanted - num_beside, 0)] + costs[number]
            is_cheaper = rest < prices[number:]
            prices[number:][is_cheaper] = rest[is_cheaper]
            choice[number:][is_cheaper] = number
        choices.append(choice)
    counts: list[int] = []
    for rooms, choice in zip(beside, reversed(choices), strict=True):
        counts.append(int(choice[num_units, num_drafts]))
        num_units -= counts[-1]
        num_drafts = max(0, num_drafts - int(rooms[counts[-1]]))
    return tuple(counts)


def _draft_nodes(
    nodes: Sequence[NodeSnapshot],
    counts: Sequence[int],
    draft_room: Callable[[int, int], int],
    num_workers: int,
) -> tuple[str, ...]:
    """Return the node of each draft worker: nodes without targets first, one after the other."""
    turns = (
        (number > 0, turn, index)
        for index, number in enumerate(counts)
        for turn in range(draft_room(index, number))
    )
    return tuple(nodes[index].node_id for _, _, index in heapq.nsmallest(num_workers, turns))


def _group(bundle: BundleConfig, ranks: ModelRanks, strategy: Strategy) -> GroupPlacement:
    """Return the placement group of one copy of a model."""
    selectors = bundle.labels
    return GroupPlacement(
        bundles=tuple(times(bundle.amounts(), ranks.per_bundle) for _ in range(ranks.num_bundles)),
        strategy=strategy,
        label_selectors=tuple(dict(selectors) for _ in range(ranks.num_bundles)) if selectors else None,
    )


def _without_target(
    config: ClusterConfig,
    nodes: Sequence[NodeSnapshot],
    layout: _Layout,
    ranks: ModelRanks,
    sides: NodeSides,
) -> PlacementRefusal:
    """Say which target group is the first that has no place when all nodes take what they can."""
    groups = config.target_groups

    def room_for(num_groups: int) -> list[int]:
        most = num_groups if layout.is_apart else num_groups * layout.per_group
        return [_room(node, layout, groups.bundle.labels, sides, most) for node in nodes]

    def unfit(node: NodeSnapshot, taken: int) -> str | None:
        if node.node_id in sides.drafts:
            return "has a draft worker of another model, and draft_pool.own_nodes is true"
        return "takes a part of this group already" if layout.is_apart and taken == number else None

    number = next(
        number
        for number in range(1, layout.num_groups + 1)
        if sum(room_for(number)) < number * layout.per_group
    )
    room = room_for(number)
    what = f"target group {number} of {layout.num_groups}"
    advice = None
    if layout.per_group > 1:
        part = "stage" if ranks.num_stages > 1 else "rank"
        index = sum(room) - (number - 1) * layout.per_group + 1
        what = f"{part} {index} of {layout.per_group} of {what}"
    elif ranks.num_ranks > 1:
        advice = f"its {ranks.num_ranks} ranks together"
        if groups.strategy == "PACK":
            advice += (
                ": tensor parallelism leaves a node only with "
                "cluster.target_groups.tensor_parallel_across_nodes: true, or as stages, "
                "target.pipeline_parallel_size"
            )
    shortfalls = [
        _shortfall(
            node,
            less(node.available, layout.unit, taken),
            layout.unit,
            groups.bundle.labels,
            unfit(node, taken),
        )
        for node, taken in zip(nodes, room, strict=True)
    ]
    return _refusal(what, layout.unit, groups.bundle.labels, shortfalls, advice)


def _without_draft(
    config: ClusterConfig,
    nodes: Sequence[NodeSnapshot],
    layout: _Layout,
    worker: dict[str, float],
    shares: _Shares,
    sides: NodeSides,
) -> PlacementRefusal:
    """Say which draft worker is the first that has no place beside all target groups."""
    pool = config.draft_pool
    shortfalls = []
    for node, taken in zip(nodes, shares.counts, strict=True):
        free = less(node.available, layout.unit, taken)
        unfit = None
        if pool.own_nodes and (taken or node.node_id in sides.targets):
            unfit = "has a part of a target group, and draft_pool.own_nodes is true"
        if unfit is None and not node.unmet(pool.bundle.labels):
            free = less(free, worker, how_many(free, worker, pool.num_workers))
        shortfalls.append(_shortfall(node, free, worker, pool.bundle.labels, unfit))
    what = f"draft worker {shares.num_drafts + 1} of {pool.num_workers}"
    return _refusal(what, worker, pool.bundle.labels, shortfalls, None)


def _shortfall(
    node: NodeSnapshot, free: Amounts, unit: Amounts, labels: Mapping[str, str], unfit: str | None
) -> NodeShortfall:
    unmet = ", ".join(
        f"label {name} is {node.labels.get(name, 'not there')}, not {selector}"
        for name, selector in node.unmet(labels).items()
    )
    return NodeShortfall(
        node=node.name,
        has={name: node.has.get(name, 0.0) for name in unit},
        free={name: free.get(name, 0.0) for name in unit},
        lacks=lacking(free, unit),
        unfit=unmet or unfit,
    )


def _refusal(
    what: str,
    unit: Amounts,
    labels: Mapping[str, str],
    shortfalls: Iterable[NodeShortfall],
    advice: str | None,
) -> PlacementRefusal:
    def distance(node: NodeShortfall) -> tuple[bool, float]:
        return node.unfit is not None, sum(node.lacks[name] / unit[name] for name in node.lacks)

    return PlacementRefusal(
        what=what,
        needs=unit,
        labels=labels,
        nodes=tuple(sorted(shortfalls, key=distance)),
        advice=advice,
    )
