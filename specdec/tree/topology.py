"""The shape of a proposal: a chain or a tree of nodes below the last committed token.

Nodes are numbered 0..n-1, parents before children. Rows are what the target computes for a proposal:
row 0 belongs to the root (the last committed token), row 1 + i to node i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

ROOT = -1
"""Parent of the nodes that follow the last committed token directly."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Parents and what follows from them. Make one with `Topology.from_parents` or `chain`."""

    parents: tuple[int, ...]
    """Parent node of each node, `ROOT` below the root."""
    depths: tuple[int, ...]
    """Distance from the root, 1 for its children: node i stands at position committed_len - 1 + depths[i]."""
    children: tuple[tuple[int, ...], ...]
    """Child nodes by row, in ascending (that is, proposed) order: [0] the root's, [1 + i] those of node i."""
    ancestors: tuple[int, ...]
    """Bit rows: bit j of ancestors[i] is set when node j is node i or one of its ancestors."""
    is_chain: bool
    """Whether node i + 1 is the only child of node i (true of no nodes at all)."""

    @staticmethod
    def from_parents(parents: Sequence[int]) -> Topology:
        """Build the topology of these parents.

        Raises:
            ValueError: a parent is not `ROOT` or an earlier node.
        """
        depths: list[int] = []
        ancestors: list[int] = []
        children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
        for node, parent in enumerate(parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; it must be {ROOT} or an earlier node")
            depths.append(1 if parent == ROOT else depths[parent] + 1)
            ancestors.append((1 << node) | (0 if parent == ROOT else ancestors[parent]))
            children[parent + 1].append(node)
        return Topology(
            parents=tuple(parents),
            depths=tuple(depths),
            children=tuple(map(tuple, children)),
            ancestors=tuple(ancestors),
            is_chain=all(parent == node - 1 for node, parent in enumerate(parents)),
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root not counted."""
        return len(self.parents)

    @property
    def max_depth(self) -> int:
        """Length of the longest path, 0 without nodes."""
        return max(self.depths, default=0)

    def is_ancestor(self, ancestor: int, node: int) -> bool:
        """Return whether `ancestor` is `node` itself or lies on its path from the root."""
        return bool(self.ancestors[node] >> ancestor & 1)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root's child down to `node`; nothing for `ROOT`."""
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))


@lru_cache(maxsize=1024)
def tree(parents: tuple[int, ...]) -> Topology:
    """Return the topology of these parents; the same trees are drafted over and over again.

    Raises:
        ValueError: as `Topology.from_parents`.
    """
    return Topology.from_parents(parents)


@lru_cache(maxsize=256)
def chain(num_nodes: int) -> Topology:
    """Return the topology in which each node follows the one before."""
    return Topology.from_parents(range(ROOT, num_nodes - 1))


def topology_of(num_nodes: int, parents: tuple[int, ...] | None) -> Topology:
    """Return the topology of a proposal's fields: `parents`, or a chain where they are None.

    Raises:
        ValueError: the number of parents differs from the number of nodes, or a parent is out of order.
    """
    if parents is None:
        return chain(num_nodes)
    if len(parents) != num_nodes:
        raise ValueError(f"{num_nodes} nodes with {len(parents)} parents")
    return tree(parents)


def path_of_tokens(
    topology: Topology, token_ids: Sequence[int], path: Sequence[int]
) -> tuple[int, ...] | None:
    """Return nodes from a child of the root on whose tokens are `path`; None where there is no such path.

    Siblings of equal tokens continue the same text: any path that spells it is as good as another.
    """
    nodes = longest_path(topology, token_ids, path)
    return nodes if len(nodes) == len(path) else None


def longest_path(topology: Topology, token_ids: Sequence[int], path: Sequence[int]) -> tuple[int, ...]:
    """Return nodes from a child of the root on whose tokens are the first of `path`: as many as there are."""
    ends: tuple[int, ...] = (ROOT,)
    for token_id in path:
        further = tuple(
            child for end in ends for child in topology.children[end + 1] if token_ids[child] == token_id
        )
        if not further:
            break
        ends = further
    return topology.path(ends[0])


def pruned_parents(parents: Sequence[int], kept: Sequence[int]) -> tuple[int, ...]:
    """Return the parents of the nodes `kept`, numbered by their order there: all but `ROOT` are kept too."""
    place = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
    return tuple(place[parents[node]] for node in kept)
