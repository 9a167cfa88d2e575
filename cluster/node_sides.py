"""`draft_pool.own_nodes`: which nodes are whose, those included that no plan has a use for.

Where Ray may choose, a spare node could get a target group of one deployment and a draft worker of another
at once, or when something has died. So each spare one is given to one side, and the other keeps off it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cluster.inventory import NODE_ID_LABEL, Amounts, NodeSnapshot, how_many
from cluster.placement import GroupPlacement, NodeSides, PlacementPlan


def shared_out(plans: Sequence[PlacementPlan], nodes: Sequence[NodeSnapshot]) -> NodeSides:
    """Return the sides of several plans, with every node that both kinds could be on given to one of them.

    What dies must find room on its own side: a spare node is for target groups until they can lose any node
    of theirs, then for draft workers until these can, and then for target groups again, which more depends
    on. The same nodes are shared out in the same way, whatever their order.

    Args:
        plans: of the models that ask for nodes of their own; their nodes are on one side each.
        nodes: as they are when everything is where the plans have it.
    """
    sides = NodeSides()
    for plan in plans:
        sides |= plan.sides
    targets, drafts = _Side(_targets(plans), nodes), _Side(_drafts(plans), nodes)
    spare = (node for node in nodes if node.node_id not in sides.targets | sides.drafts)
    for node in sorted(spare, key=lambda node: node.node_id):
        if not (targets.could_use(node) and drafts.could_use(node)):
            continue
        own = frozenset({node.node_id})
        if drafts.may_lose_a_node(sides.drafts) or not targets.may_lose_a_node(sides.targets):
            sides |= NodeSides(targets=own)
        else:
            sides |= NodeSides(drafts=own)
    return sides


_Placed = tuple[GroupPlacement, Counter[str]]
"""Replicas of one deployment: how many of its units are on each node."""


def _targets(plans: Iterable[PlacementPlan]) -> Iterator[_Placed]:
    for plan in plans:
        num_units = plan.target.num_units
        yield plan.target, Counter(node_id for group in plan.target_nodes for node_id in group[:num_units])


def _drafts(plans: Iterable[PlacementPlan]) -> Iterator[_Placed]:
    for plan in plans:
        if plan.draft is not None:
            yield plan.draft, Counter(plan.draft_nodes)


class _Side:
    """What there is of one kind."""

    def __init__(self, placed: Iterable[_Placed], nodes: Sequence[NodeSnapshot]) -> None:
        self._placed = tuple(placed)
        self._nodes = {node.node_id: node for node in nodes}

    def could_use(self, node: NodeSnapshot) -> bool:
        """Whether a part of this kind may be on a node, now or when others have left it."""
        return any(_room(node, node.has, placement, 1) for placement, _ in self._placed)

    def may_lose_a_node(self, side: frozenset[str]) -> bool:
        """Whether what any one of its nodes has finds room on the rest of the side."""
        return all(
            sum(self._room(other, placement, number) for other in side - {node_id}) >= number
            for placement, counts in self._placed
            for node_id, number in counts.items()
        )

    def _room(self, node_id: str, placement: GroupPlacement, at_most: int) -> int:
        node = self._nodes[node_id]
        return _room(node, node.available, placement, at_most)


def _room(node: NodeSnapshot, amounts: Amounts, placement: GroupPlacement, at_most: int) -> int:
    return 0 if node.unmet(_labels(placement)) else how_many(amounts, placement.unit, at_most)


def _labels(placement: GroupPlacement) -> Mapping[str, str]:
    """Return what is asked of a node but that it is of the right side."""
    return {name: value for name, value in placement.selectors.items() if name != NODE_ID_LABEL}
