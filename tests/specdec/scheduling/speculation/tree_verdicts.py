"""Verdicts on trees by lot."""

from __future__ import annotations

import numpy as np

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.controller import DraftOutcome
from specdec.tree.static import best_tree
from specdec.tree.topology import tree


class Trees:
    """Draws verdicts on trees whose nodes come in order of value, and tells a tracker."""

    def __init__(self, rates: tuple[float, ...], num_nodes: int, seed: int = 0) -> None:
        shape = best_tree(rates, num_nodes)
        self.topology = tree(shape.parents)
        self.ranks = shape.ranks
        self.rates = rates
        self.generator = np.random.default_rng(seed)
        self.values = np.array(
            [
                np.prod([rates[shape.ranks[at]] for at in self.topology.path(node)])
                for node in range(num_nodes)
            ]
        )
        """How often each node stands."""

    def outcome(self, request: str, num_drafted: int) -> DraftOutcome:
        row, path = 0, []
        while True:
            ranks = [*self.rates, max(0.0, 1.0 - sum(self.rates))]
            said = int(self.generator.choice(len(ranks), p=ranks))
            children = [n for n in self.topology.children[row] if n < num_drafted and self.ranks[n] == said]
            if not children:
                break
            path.append(children[0])
            row = children[0] + 1
        return DraftOutcome(
            request_id=RequestId(request),
            num_drafted=num_drafted,
            num_accepted=len(path),
            accepted_nodes=tuple(path),
        )
