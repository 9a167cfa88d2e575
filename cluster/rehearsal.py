"""What Ray would make of a plan: it places one group after the other, each on the emptiest node that fits.

So a plan that fits need not come true. Two nodes of four GPUs have room for a target of four ranks and two
draft workers; but Serve has the draft pool's groups placed first, Ray puts one of them on each node, and the
target never starts. Such a plan is steered: draft workers keep off nodes that are meant for a target group.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cluster.inventory import Amounts, NodeSnapshot, how_many, less
from cluster.placement import GroupPlacement, PlacementPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The replicas of one deployment."""

    placement: GroupPlacement
    planned: tuple[tuple[str, ...], ...]
    """Of each replica: the nodes of its units."""
    is_draft: bool

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that the plan has for it, each once."""
        return tuple(dict.fromkeys(node_id for replica in self.planned for node_id in replica))


@dataclass(frozen=True, slots=True, kw_only=True)
class Steered:
    """Plans with what it takes for them to come true."""

    plans: tuple[PlacementPlan, ...]
    doubtful: int | None
    """The first of them of which a part may yet find no room, whatever was tried; None: none of them."""


def steered(plans: Sequence[PlacementPlan], nodes: Sequence[NodeSnapshot]) -> Steered:
    """Return the plans in which draft workers keep off the nodes of target groups, as far as necessary.

    Where it comes true as it is, a plan is not changed. Nodes that join later stay open to everybody.

    Args:
        plans: of the models of one application, in the order in which Serve deploys them.
        nodes: as the plans found them.
    """
    parts = [part for plan in plans for part in _parts(plan)]
    at_once = 1
    while (failing := _first_without_place(parts, nodes)) is not None:
        intruders = _intruders(parts, failing, nodes)
        if not intruders:
            break
        for node_id in list(intruders)[:at_once]:
            for index in intruders[node_id]:
                parts[index] = replace(parts[index], placement=parts[index].placement.keeping_off([node_id]))
        # Of hundreds of nodes one after the other would take long.
        at_once *= 2
    owners = [index for index, plan in enumerate(plans) for _ in _parts(plan)]
    return Steered(
        plans=tuple(
            _with_parts(plan, [part for owner, part in zip(owners, parts, strict=True) if owner == index])
            for index, plan in enumerate(plans)
        ),
        doubtful=None if failing is None else owners[failing],
    )


def _parts(plan: PlacementPlan) -> list[Part]:
    """Return the deployments of a model as Serve starts them: its draft pool first."""
    parts = []
    if plan.draft is not None and plan.draft_nodes:
        on_one = tuple((node_id,) for node_id in plan.draft_nodes)
        parts.append(Part(placement=plan.draft, planned=on_one, is_draft=True))
    if plan.target_nodes:
        planned = tuple(group[: plan.target.num_units] for group in plan.target_nodes)
        parts.append(Part(placement=plan.target, planned=planned, is_draft=False))
    return parts


def _with_parts(plan: PlacementPlan, parts: Iterable[Part]) -> PlacementPlan:
    for part in parts:
        plan = replace(plan, draft=part.placement) if part.is_draft else replace(plan, target=part.placement)
    return plan


def _intruders(
    parts: Sequence[Part], failing: int, nodes: Sequence[NodeSnapshot]
) -> dict[str, tuple[int, ...]]:
    """Return who of those placed before may take a node of the failing part that the plan has not for them.

    Draft workers, as long as there are any: they are small, and find another place.
    """
    for wanted in (True, False):
        found: dict[str, tuple[int, ...]] = {}
        earlier = [index for index in range(failing) if parts[index].is_draft == wanted]
        for node in nodes:
            if node.node_id not in parts[failing].nodes:
                continue
            indexes = tuple(index for index in earlier if _is_intruder(parts[index], node))
            if indexes:
                found[node.node_id] = indexes
        if found:
            return found
    return {}


def _is_intruder(part: Part, node: NodeSnapshot) -> bool:
    """Whether a part may go to a node that it has no business on, and can be kept off."""
    return (
        part.placement.kept_off is not None
        and node.node_id not in part.nodes
        and not node.unmet(part.placement.selectors)
        and how_many(node.available, part.placement.unit, 1) > 0
    )


def _first_without_place(parts: Sequence[Part], nodes: Sequence[NodeSnapshot]) -> int | None:
    """Return the first part of which a replica finds no room when Ray places all of them in this order."""
    free: dict[str, Amounts] = {node.node_id: node.available for node in nodes}
    for index, part in enumerate(parts):
        open_nodes = [node.node_id for node in nodes if not node.unmet(part.placement.selectors)]
        # Of nodes that are equally empty Ray may take any: here, the one that somebody behind needs.
        needed = {node_id for behind in parts[index + 1 :] for node_id in behind.nodes}
        order = sorted(open_nodes, key=lambda node_id: node_id not in needed)
        if not (_place_whole if part.placement.num_units == 1 else _place_divided)(part, order, free):
            return index
    return None


def _place_whole(part: Part, open_nodes: Sequence[str], free: dict[str, Amounts]) -> bool:
    """Place replicas that are on one node each, and take what they need; return whether there was room."""
    unit = part.placement.unit
    emptiest = [
        (-score, order, node_id)
        for order, node_id in enumerate(open_nodes)
        if (score := _emptiness(free[node_id], unit)) is not None
    ]
    heapq.heapify(emptiest)
    for _ in part.planned:
        if not emptiest:
            return False
        _, order, node_id = emptiest[0]
        free[node_id] = less(free[node_id], unit, 1)
        score = _emptiness(free[node_id], unit)
        if score is None:
            heapq.heappop(emptiest)
        else:
            heapq.heapreplace(emptiest, (-score, order, node_id))
    return True


def _place_divided(part: Part, open_nodes: Sequence[str], free: dict[str, Amounts]) -> bool:
    """As `_place_whole`, for replicas that may be, or have to be, on several nodes each."""
    unit, strategy = part.placement.unit, part.placement.strategy
    for _ in part.planned:
        num_left, used = part.placement.num_units, set[str]()
        while num_left:
            scores = {
                node_id: score
                for node_id in open_nodes
                if (score := _emptiness(free[node_id], unit)) is not None
            }
            fresh = {node_id: score for node_id, score in scores.items() if node_id not in used}
            choice = fresh if fresh or strategy == "STRICT_SPREAD" else scores
            if not choice:
                return False
            node_id = max(choice, key=choice.__getitem__)
            number = how_many(free[node_id], unit, num_left) if strategy == "PACK" else 1
            free[node_id] = less(free[node_id], unit, number)
            used.add(node_id)
            num_left -= number
    return True


def _emptiness(free: Amounts, unit: Amounts) -> float | None:
    """Return Ray's score of a node: which share of each resource would be left. None: it does not fit."""
    if not how_many(free, unit, 1):
        return None
    return sum((free[name] - amount) / free[name] for name, amount in unit.items())
