"""Rejection sampling of chains: keep a draft token with probability min(1, p/q), else draw from (p - q)+.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1; Chen et al.
(2023), algorithm 2. A deterministic draft is one whose q holds one token: accept with p(x), on rejection drop
x from p. It is `multi_round` with at most one child per node.
"""

from __future__ import annotations

from specdec.core.proposal import Verdict
from specdec.tree.topology import topology_of
from specdec.verification.base import Chance, Draft, RuleCapabilities, TargetRows
from specdec.verification.multi_round import walk
from specdec.verification.ratio import check_draft, normalised_p_rows


class Rejection:
    """Exact for chains; needs the q row of every sampled token."""

    capabilities = RuleCapabilities(name="rejection", needs_p_rows=True, needs_q_rows=True, takes_trees=False)

    def verify(self, draft: Draft, target: TargetRows, chance: Chance) -> Verdict:
        """Keep tokens up to the first rejection.

        Raises:
            ValueError: the draft is a tree; otherwise as `MultiRound.verify`.
        """
        check_draft(draft)
        topology = topology_of(draft.num_tokens, draft.parents)
        if not topology.is_chain:
            raise ValueError("rejection verifies chains; the rule of trees is multi_round")
        return walk(draft, topology, normalised_p_rows(draft, target, self.capabilities.name), chance)
