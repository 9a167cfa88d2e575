"""Typical acceptance: keep what the target finds plausible. LOSSY: the output is not distributed as p.

Cai et al., "Medusa" (2024), section 2.3.1: a draft token x stands when

    p(x) > min(epsilon, delta exp(-H(p)))

with H the entropy of p in nats, and every token before it stands. What follows the longest such path is the
most likely token of its row, which is there in any case, so that a round brings at least one token. Of paths
of equal length the first counts. At temperature 0 this is greedy decoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.core.proposal import Verdict
from specdec.tree.topology import ROOT, topology_of
from specdec.verification.base import Chance, Draft, RuleCapabilities, TargetRows, verdict
from specdec.verification.ratio import normalised_p_rows

if TYPE_CHECKING:
    import torch

POSTERIOR_THRESHOLD = 0.09
POSTERIOR_ALPHA = 0.3


class Typical:
    """Chains and trees; needs no q. Deterministic given the draft."""

    capabilities = RuleCapabilities(name="typical", needs_p_rows=True, exact=False)

    def __init__(
        self, posterior_threshold: float = POSTERIOR_THRESHOLD, posterior_alpha: float = POSTERIOR_ALPHA
    ) -> None:
        """Accept above `posterior_threshold` (epsilon), or less where the entropy is high
        (`posterior_alpha`: delta); both in (0, 1].
        """
        if not (0.0 < posterior_threshold <= 1.0 and 0.0 < posterior_alpha <= 1.0):
            raise ValueError(f"thresholds must be in (0, 1], got {posterior_threshold}, {posterior_alpha}")
        self.epsilon = posterior_threshold
        self.delta = posterior_alpha

    def verify(self, draft: Draft, target: TargetRows, chance: Chance) -> Verdict:
        """Keep the longest path of plausible tokens; nothing here is left to chance.

        Raises:
            ValueError: p rows are missing, or parents are out of order.
        """
        del chance
        topology = topology_of(draft.num_tokens, draft.parents)
        p_rows = normalised_p_rows(draft, target, self.capabilities.name)
        limits = self.limits(p_rows)
        stands: list[bool] = []
        last = ROOT
        for node, (token, parent) in enumerate(zip(draft.token_ids, topology.parents, strict=True)):
            row = parent + 1
            plausible = float(p_rows[row, token]) > limits[row]
            stands.append(plausible and (parent == ROOT or stands[parent]))
            if stands[node] and topology.depths[node] > (topology.depths[last] if last != ROOT else 0):
                last = node
        return verdict(draft, topology.path(last), int(p_rows[last + 1].argmax()))

    def limits(self, p_rows: torch.Tensor) -> list[float]:
        """Return what the probability of a token must exceed, for each of the rows [n, vocab]."""
        entropies = -p_rows.xlogy(p_rows).sum(-1)
        limits: list[float] = ((-entropies).exp() * self.delta).clamp(max=self.epsilon).tolist()
        return limits
