"""The contract between whoever decides the shape of a tree and whoever finds tokens for it.

A tree grows level by level: behind some nodes (first the root) children are looked up, all of a level at
once, and the shape says behind which of them it wants to look next. Nodes have numbers of the shape's own
while the tree grows; what is proposed in the end has another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from specdec.core.proposal import MAX_DRAFT_TOKENS
from specdec.tree.topology import pruned_parents


class Child(NamedTuple):
    """A token that may follow."""

    token_id: int
    log_confidence: float
    """Of the log of how likely it is thought to stand, given that what leads to it does."""


class TokenTree(NamedTuple):
    """A tree to propose, the nodes that are worth most first."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    """As `Proposal.parents`."""
    nodes: tuple[int, ...]
    """Their numbers while the tree grew."""


def token_tree(
    nodes: Sequence[int], tokens: Mapping[int, int] | Sequence[int], parents: Sequence[int]
) -> TokenTree:
    """Return the tree of `nodes`, in this order, given tokens and parents by number."""
    return TokenTree(tuple(tokens[node] for node in nodes), pruned_parents(parents, nodes), tuple(nodes))


class GrowingTree(Protocol):
    """One tree on its way."""

    @property
    def num_children(self) -> int:
        """Children wanted behind each of the nodes that were asked about last; more are of no use."""
        ...

    def grow(self, children: Sequence[Sequence[Child]]) -> Sequence[int]:
        """Take the children, likeliest first, of the nodes asked about last (at first, of the root alone).

        Returns:
            nodes to look behind next, by rising number; none when the tree is complete.
        """
        ...

    def token_of(self, node: int) -> int:
        """Return a node's token."""
        ...

    def parent_of(self, node: int) -> int:
        """Return the node before a node, `ROOT` before the first ones."""
        ...

    def best(self) -> TokenTree:
        """Return what is worth to be proposed."""
        ...


class TreeShape(Protocol):
    """How trees of one drafter look. Stateless."""

    @property
    def max_nodes(self) -> int:
        """Nodes of the largest tree."""
        ...

    @property
    def max_depth(self) -> int:
        """Nodes of its longest path."""
        ...

    @property
    def uses_confidence(self) -> bool:
        """Whether `Child.log_confidence` has a say in the shape."""
        ...

    def begin(self, num_nodes: int) -> GrowingTree:
        """Begin a tree of at most so many nodes, which is at least 1."""
        ...

    def num_levels(self, num_nodes: int) -> int:
        """Return how long the longest path of such a tree is, at most: so often children are looked up."""
        ...

    def num_looked_behind(self, num_nodes: int) -> int:
        """Return behind how many nodes of such a tree, at most, children are looked up."""
        ...

    def frugal(self) -> TreeShape:
        """Return what is like it, but looks behind no more nodes than are proposed in the end."""
        ...

    def within(self, max_depth: int) -> TreeShape:
        """Return what is left of it where no path may have more nodes than `max_depth`, at least 1."""
        ...


def levels_of(shape: TreeShape | None) -> tuple[int, ...]:
    """Return how many levels trees of 1, 2, ... nodes have, as far as trees may go; nothing for chains."""
    if shape is None:
        return ()
    most = min(shape.max_nodes, MAX_DRAFT_TOKENS)
    return tuple(shape.num_levels(number) for number in range(1, most + 1))
