"""Trees that grow where the drafter is confident (EAGLE-2: Li et al., 2024).

At each depth the nodes with the highest confidence along their path are looked behind; of all that was found
the best are proposed. A node is never worth more than its parent, so what is best is a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.tree.growth import Child, TokenTree, token_tree
from specdec.tree.topology import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicTree:
    """Implements `TreeShape`."""

    top_k: int
    """Nodes looked behind at each depth, and children of each."""
    depth: int
    """Longest path."""
    is_frugal: bool = False
    """Whether no more nodes are looked behind than there are nodes to propose."""
    uses_confidence = True

    @property
    def max_nodes(self) -> int:
        """See `TreeShape`."""
        return self.top_k + self.top_k * self.top_k * (self.depth - 1)

    @property
    def max_depth(self) -> int:
        """See `TreeShape`."""
        return self.depth

    def begin(self, num_nodes: int) -> _DynamicGrowth:
        """See `TreeShape`."""
        return _DynamicGrowth(self, num_nodes)

    def num_levels(self, num_nodes: int) -> int:
        """See `TreeShape`."""
        return min(self.depth, num_nodes)

    def num_looked_behind(self, num_nodes: int) -> int:
        """See `TreeShape`."""
        looked_behind = self.top_k * (self.num_levels(num_nodes) - 1)
        return min(looked_behind, num_nodes) if self.is_frugal else looked_behind

    def within(self, max_depth: int) -> DynamicTree:
        """See `TreeShape`."""
        return replace(self, depth=min(self.depth, max_depth))

    def frugal(self) -> DynamicTree:
        """See `TreeShape`."""
        return replace(self, is_frugal=True)

    def num_kept(self, children: Sequence[Child]) -> int:
        """Return how many of a node's children, likeliest first, become nodes."""
        return len(children)

    def looks_behind(self, log_confidence: float) -> bool:
        """Whether a node is worth to be looked behind, whose path is thought to stand with this."""
        return True


class _DynamicGrowth:
    """Implements `GrowingTree`."""

    def __init__(self, shape: DynamicTree, num_nodes: int) -> None:
        self._shape = shape
        self._num_nodes = num_nodes
        self._num_levels = 0
        self._num_asked = 0
        self._asked: Sequence[int] = (ROOT,)
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._values: list[float] = []
        """Log-confidence of the whole path."""

    @property
    def num_children(self) -> int:
        return min(self._shape.top_k, self._num_nodes)

    def grow(self, children: Sequence[Sequence[Child]]) -> Sequence[int]:
        first = len(self._tokens)
        for node, its_children in zip(self._asked, children, strict=True):
            before = 0.0 if node == ROOT else self._values[node]
            wanted = its_children[: self.num_children]
            for child in wanted[: self._shape.num_kept(its_children)]:
                self._tokens.append(child.token_id)
                self._parents.append(node)
                self._values.append(before + min(child.log_confidence, 0.0))
        self._num_levels += 1
        if self._num_levels >= self._shape.num_levels(self._num_nodes):
            return ()
        # What is not among the best now has no child that could be: it is not looked behind.
        among_best = set(self._ranked()[: self._num_nodes - 1])
        level = [
            node
            for node in range(first, len(self._tokens))
            if node in among_best and self._shape.looks_behind(self._values[node])
        ]
        level.sort(key=lambda node: (-self._values[node], node))
        most = self._shape.top_k
        if self._shape.is_frugal:
            most = min(most, self._num_nodes - self._num_asked)
        self._asked = sorted(level[:most])
        self._num_asked += len(self._asked)
        return self._asked

    def token_of(self, node: int) -> int:
        return self._tokens[node]

    def parent_of(self, node: int) -> int:
        return self._parents[node]

    def best(self) -> TokenTree:
        return token_tree(self._ranked()[: self._num_nodes], self._tokens, self._parents)

    def _ranked(self) -> list[int]:
        """Return all nodes by falling value, each behind its parent (whose number is lower)."""
        return sorted(range(len(self._tokens)), key=lambda node: (-self._values[node], node))
