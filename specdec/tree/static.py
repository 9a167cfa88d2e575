"""Trees whose shape is known beforehand: each node is the child of some rank of another.

The shape is a list of paths of ranks, as Medusa (Cai et al., 2024) writes them: (0, 2) is the third likeliest
child of the likeliest one. The list is in order of value: with a budget of n nodes its first n are drafted.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.tree.growth import Child, TokenTree, token_tree
from specdec.tree.topology import ROOT, pruned_parents

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StaticTree:
    """Implements `TreeShape`. Make one with `of_paths` or `of_widths`."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    """Of each node among the children of its parent, 0 for the likeliest."""
    uses_confidence = False

    @staticmethod
    def of_paths(paths: Sequence[Sequence[int]]) -> StaticTree:
        """Return the tree with these nodes, in this order.

        Raises:
            ValueError: naming the path before which another one is missing, or that is there twice.
        """
        index: dict[Path, int] = {(): ROOT}
        parents: list[int] = []
        for path in map(tuple, paths):
            if not path or min(path) < 0:
                raise ValueError(
                    f"{list(path)} is no path: write the rank of a child, 0 or more, for each step"
                )
            if path in index:
                raise ValueError(f"path {list(path)} is there twice")
            for before in (path[:-1], (*path[:-1], path[-1] - 1)):
                if before not in index and (len(before) < len(path) or before[-1] >= 0):
                    raise ValueError(f"path {list(path)} comes before {list(before)}, or without it")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
        return StaticTree(tuple(parents), tuple(path[-1] for path in paths))

    @staticmethod
    def of_widths(widths: Sequence[int], acceptance: Sequence[float]) -> StaticTree:
        """Return the tree in which each node at depth d has `widths[d]` children (d is 0 for the root).

        Its order goes by `acceptance` by rank, the last entry counting for all further ones.
        """
        rates = [*acceptance, *[acceptance[-1]] * max(0, max(widths) - len(acceptance))]
        paths: list[tuple[float, Path]] = []
        level: list[tuple[float, Path]] = [(1.0, ())]
        for width in widths:
            level = [(value * rates[rank], (*path, rank)) for value, path in level for rank in range(width)]
            paths += level
        paths.sort(key=lambda one: (-one[0], len(one[1]), one[1]))
        return StaticTree.of_paths([path for _, path in paths])

    @property
    def max_nodes(self) -> int:
        """See `TreeShape`."""
        return len(self.parents)

    @property
    def max_depth(self) -> int:
        """See `TreeShape`."""
        return self.num_levels(self.max_nodes)

    def begin(self, num_nodes: int) -> _StaticGrowth:
        """See `TreeShape`."""
        return _StaticGrowth(self.parents[:num_nodes], self.ranks[:num_nodes])

    def num_levels(self, num_nodes: int) -> int:
        """See `TreeShape`."""
        return max(self._depths()[:num_nodes], default=0)

    def num_looked_behind(self, num_nodes: int) -> int:
        """See `TreeShape`."""
        return len({parent for parent in self.parents[:num_nodes] if parent != ROOT})

    def within(self, max_depth: int) -> StaticTree:
        """See `TreeShape`."""
        nodes = [node for node, depth in enumerate(self._depths()) if depth <= max_depth]
        return StaticTree(pruned_parents(self.parents, nodes), tuple(self.ranks[node] for node in nodes))

    def frugal(self) -> StaticTree:
        """See `TreeShape`; nodes that are looked behind are among those that are proposed."""
        return self

    def _depths(self) -> list[int]:
        """Of each node, 1 for those behind the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths


class _StaticGrowth:
    """Implements `GrowingTree`; nodes have their numbers in the shape."""

    def __init__(self, parents: Sequence[int], ranks: Sequence[int]) -> None:
        self._parents = parents
        self._ranks = ranks
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(node)
        self._asked: Sequence[int] = (ROOT,)
        self._tokens: dict[int, int] = {}

    @property
    def num_children(self) -> int:
        return max(1 + self._ranks[child] for node in self._asked for child in self._children[node])

    def grow(self, children: Sequence[Sequence[Child]]) -> Sequence[int]:
        found: list[int] = []
        for node, its_children in zip(self._asked, children, strict=True):
            for child in self._children[node]:
                if self._ranks[child] < len(its_children):
                    self._tokens[child] = its_children[self._ranks[child]].token_id
                    found.append(child)
        self._asked = sorted(child for child in found if child in self._children)
        return self._asked

    def token_of(self, node: int) -> int:
        return self._tokens[node]

    def parent_of(self, node: int) -> int:
        return self._parents[node]

    def best(self) -> TokenTree:
        return token_tree(sorted(self._tokens), self._tokens, self._parents)


def best_tree(
    acceptance: Sequence[float] | Sequence[Sequence[float]], num_nodes: int, max_depth: int | None = None
) -> StaticTree:
    """Return the tree of so many nodes from which most tokens are expected, its nodes in order of value.

    Args:
        acceptance: entry r: how often the child of rank r stands where its parent does; at one node they
            exclude each other, so they sum to 1 at most. Or such a list for each depth, beginning with that
            of first tokens: there are heads for so many, and no node is deeper.
        num_nodes: of the tree; fewer where `max_depth` and ranks allow no more.
        max_depth: longest path; None: any.

    A child of rank r is drafted with all before it, so one that stands more often than those before it may be
    worth them: the tree is found by dynamic programming over how many nodes each child gets (Sequoia: Chen
    et al., 2024, who measure `acceptance` and do the same).
    """
    by_depth = _by_depth(acceptance, num_nodes if max_depth is None else min(max_depth, num_nodes))
    depth = len(by_depth)
    table = _SubtreeTable(by_depth, num_nodes)
    size = max(range(num_nodes + 1), key=lambda n: (table.value(n, depth), -n))
    paths: list[tuple[float, Path]] = []
    table.collect(size, depth, 1.0, (), paths)
    return StaticTree.of_paths(_in_order(paths))


def _by_depth(
    acceptance: Sequence[float] | Sequence[Sequence[float]], max_depth: int
) -> tuple[tuple[float, ...], ...]:
    """Return the rates by rank of every depth, of `max_depth` at most."""
    of_all: list[float] = []
    of_each: list[tuple[float, ...]] = []
    for one in acceptance:
        if isinstance(one, Sequence):
            of_each.append(tuple(one))
        else:
            of_all.append(one)
    return tuple(of_each[:max_depth]) if of_each else (tuple(of_all),) * max_depth


class _SubtreeTable:
    """Most tokens expected below a node that stands, by nodes below it and depth that is left."""

    def __init__(self, by_depth: Sequence[tuple[float, ...]], num_nodes: int) -> None:
        # By the depth d that is left: _rates[d] of children; _below[d][n]: with exactly n nodes;
        # _shared[d][r][n]: by the children from rank r on, with n nodes.
        self._rates: list[tuple[float, ...]] = [(), *reversed(by_depth)]
        self._below: list[list[float]] = [[0.0, *[-math.inf] * num_nodes]]
        self._shared: list[list[list[float]]] = [[]]
        for rates in self._rates[1:]:
            shared = _share(rates, self._below[-1], num_nodes)
            self._shared.append(shared)
            self._below.append(shared[0])

    def value(self, num_nodes: int, depth: int) -> float:
        return self._below[depth][num_nodes]

    def collect(
        self, num_nodes: int, depth: int, reached: float, path: Path, paths: list[tuple[float, Path]]
    ) -> None:
        """Add the nodes below one that stands with probability `reached`."""
        left = num_nodes
        for rank, rate in enumerate(self._rates[depth]):
            if left == 0:
                return
            size = self._first_size(rank, left, depth)
            paths.append((reached * rate, (*path, rank)))
            self.collect(size - 1, depth - 1, reached * rate, (*path, rank), paths)
            left -= size

    def _first_size(self, rank: int, left: int, depth: int) -> int:
        """Return how many nodes the child of a rank gets of those left for it and the later ones."""
        return max(
            range(1, left + 1),
            key=lambda size: _split_value(
                self._rates[depth][rank], self._below[depth - 1], self._shared[depth][rank + 1], size, left
            ),
        )


def _share(rates: Sequence[float], below: Sequence[float], num_nodes: int) -> list[list[float]]:
    """Return what children with these rates bring from each rank on, by how many nodes they share."""
    shared = [[0.0, *[-math.inf] * num_nodes] for _ in range(len(rates) + 1)]
    for rank in reversed(range(len(rates))):
        for left in range(1, num_nodes + 1):
            shared[rank][left] = max(
                _split_value(rates[rank], below, shared[rank + 1], size, left) for size in range(1, left + 1)
            )
    return shared


def _split_value(rate: float, below: Sequence[float], later: Sequence[float], size: int, left: int) -> float:
    """Return what comes of `left` nodes where a child has `size` of them, and later ones the others."""
    return rate * (1.0 + below[size - 1]) + later[left - size]


def _in_order(paths: Sequence[tuple[float, Path]]) -> list[Path]:
    """Return paths by falling value, none before its parent or a sibling of lower rank."""
    values = {path: value for value, path in paths}
    ready: list[tuple[float, Path]] = [(-values[path], path) for path in values if path == (0,)]
    ordered: list[Path] = []
    while ready:
        _, path = heapq.heappop(ready)
        ordered.append(path)
        following: tuple[Path, Path] = ((*path, 0), (*path[:-1], path[-1] + 1))
        for later in following:
            if later in values:
                heapq.heappush(ready, (-values[later], later))
    return ordered
