"""Dynamic trees whose width follows what the drafter is unsure about, and that end where it has no hope.

A node gets as many children as its distribution is worth of equally likely ones, the exponential of its
entropy: one where the drafter is sure, all of `top_k` where it is not. Nothing is looked behind whose path is
thought to stand with less than `least_confidence`. So a tree has the nodes that are worth something, and
often fewer than it may: what is saved are forwards of the drafter and rows of the target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.tree.dynamic import DynamicTree
from specdec.tree.growth import Child


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyTree(DynamicTree):
    """Implements `TreeShape`."""

    least_confidence: float
    """Of a path that is looked behind, more than 0 and less than 1."""

    def num_kept(self, children: Sequence[Child]) -> int:
        """See `DynamicTree.num_kept`."""
        return min(self.top_k, max(1, round(math.exp(entropy_of(children)))))

    def looks_behind(self, log_confidence: float) -> bool:
        """See `DynamicTree.looks_behind`."""
        return log_confidence >= math.log(self.least_confidence)


def entropy_of(children: Sequence[Child]) -> float:
    """Return the entropy, in nats, of what may come next; all that is not among `children` counts as one."""
    shares = [math.exp(min(child.log_confidence, 0.0)) for child in children]
    shares.append(max(0.0, 1.0 - sum(shares)))
    return -sum(share * math.log(share) for share in shares if share > 0.0)
