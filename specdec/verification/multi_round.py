"""Multi-round rejection sampling: the children of a node are tested one after the other.

Each test is against what the rejections before it have left of p, and costs p what the child's q had: accept
with min(1, p(x)/q(x)), on rejection p becomes norm((p - q)+). When no child is left, the token is drawn from
the last p. On a chain this is rejection sampling. The children of one node may have been drawn

- independently of each other, all from one q (SpecInfer: Miao et al., "SpecInfer", 2023, algorithm 2);
- without replacement, q being renormalised after each (recursive rejection sampling: Jeon et al., 2024; Chen
  et al., "Sequoia", 2024, algorithm 2), which wastes no test on a token that was rejected already;
- by no chance at all, as the most likely ones, say (EAGLE: Li et al., 2024): q is then one-hot, a rejection
  takes the child out of p.

A child's q row is what it was drawn from given the siblings before it, so that one rule serves all three. It
must be tested in the order drawn; children may be cut from the end only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.core.proposal import Verdict
from specdec.tree.topology import Topology, topology_of
from specdec.verification.base import Chance, Draft, RuleCapabilities, TargetRows, verdict
from specdec.verification.ratio import acceptance, check_draft, normalised_p_rows, residual

if TYPE_CHECKING:
    import torch


class MultiRound:
    """Exact for trees and chains; needs the q row of every sampled token."""

    capabilities = RuleCapabilities(name="multi_round", needs_p_rows=True, needs_q_rows=True)

    def verify(self, draft: Draft, target: TargetRows, chance: Chance) -> Verdict:
        """Walk down as long as a child is accepted; see `walk`.

        Raises:
            ValueError: p rows are missing; a sampled draft lacks q rows, or a deterministic one has some; it
                was sampled with noise that this rule uses itself; parents are out of order.
        """
        check_draft(draft)
        topology = topology_of(draft.num_tokens, draft.parents)
        return walk(draft, topology, normalised_p_rows(draft, target, self.capabilities.name), chance)


def walk(draft: Draft, topology: Topology, p_rows: torch.Tensor, chance: Chance) -> Verdict:
    """Return the accepted path and the token after it; `p_rows` are float64 [n + 1, vocab], normalised."""
    accepted: list[int] = []
    row, position = 0, draft.first_position
    while children := topology.children[row]:
        p = p_rows[row]
        for test, node in enumerate(children):
            token = draft.token_ids[node]
            q = None if draft.q_rows is None else draft.q_rows[node].double()
            if chance.accept(acceptance(p, q, token), position, test):
                break
            p = residual(p, q, token)
        else:
            return verdict(draft, accepted, chance.draw_residual(p, position))
        accepted.append(node)
        row, position = node + 1, position + 1
    return verdict(draft, accepted, chance.draw_target(p_rows[row], position))
