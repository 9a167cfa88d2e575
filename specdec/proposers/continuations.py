"""The most likely continuations of a string, by how often each occurred: a chain, or the best tree.

As in SuffixDecoding (Oliaro et al., 2024) the value of a node is the product of the shares that its path
has had among what followed, so an estimate of the probability that the node is reached. Nodes come in order
of value: parents before children, and the first n of them are the best tree of n nodes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Protocol

from specdec.tree.topology import ROOT


@dataclass(frozen=True, slots=True)
class Continuation:
    """Draft tokens and their parents, as in `Proposal`."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...] | None = None


class Followers(Protocol):
    """Says what came behind a place."""

    def __call__(self, place: int, /) -> list[tuple[float, int, int]]:
        """Return (share, token, place behind it), the largest share first; nothing where nothing came."""
        ...


def likely_chain(followers: Followers, place: int, num_tokens: int, min_probability: float) -> Continuation:
    """Return at most `num_tokens` tokens, each the most frequent one behind those before."""
    tokens: list[int] = []
    value = 1.0
    while len(tokens) < num_tokens and (behind := followers(place)):
        share, token_id, place = behind[0]
        value *= share
        if value < min_probability:
            break
        tokens.append(token_id)
    return Continuation(tuple(tokens))


def likely_tree(followers: Followers, place: int, num_nodes: int, min_probability: float) -> Continuation:
    """Return the tree of at most `num_nodes` nodes of the greatest value."""
    tokens: list[int] = []
    parents: list[int] = []
    # Of equal values what was found first: the order must not depend on token ids.
    found: list[tuple[float, int, int, int, int]] = []
    parent, value, num_found = ROOT, 1.0, 0
    while True:
        for share, token_id, behind in followers(place)[:num_nodes]:
            if value * share < min_probability:
                break
            heapq.heappush(found, (-value * share, num_found, token_id, behind, parent))
            num_found += 1
        if not found or len(tokens) == num_nodes:
            break
        negative, _, token_id, place, above = heapq.heappop(found)
        value, parent = -negative, len(tokens)
        tokens.append(token_id)
        parents.append(above)
    return Continuation(tuple(tokens), tuple(parents))
