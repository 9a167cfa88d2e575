"""Block verification of chains: the draft is judged as a whole, and more of it stands than token by token.

Sun et al., "Block Verification Accelerates Speculative Decoding" (2024), algorithm 2. With x_1 .. x_k drawn
from q_1 .. q_k, p_i and q_i being the rows that token i is decided by, and p_{k+1} that of the bonus token:

    w_0 = 1,   w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))
    Z_i = sum_v (w_i p_{i+1}(v) - q_{i+1}(v))+                              i < k
    h_i = Z_i / (Z_i + 1 - w_i), or 1 where that is 0/0;   h_k = w_k

The last i is kept for which u_i < h_i, 0 where there is none, and the next token drawn from
norm((w_i p_{i+1} - q_{i+1})+), or from p_{k+1} when all are kept. The paper proves it
exact, and that no exact rule of this kind keeps more tokens of a round in the mean.

Whether a round ends at i depends on the draft behind i. So neither the uniforms nor the draft's noise at
positions that were not committed may be used again in a later round: the uniforms belong to the position that
the round begins at, which is committed in any case, and drafters key their noise by the round
(`sampling.noise.round_seed`). Both matter; the tests show what happens otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.core.proposal import Verdict
from specdec.tree.topology import topology_of
from specdec.verification.base import Chance, Draft, RuleCapabilities, TargetRows, verdict
from specdec.verification.ratio import acceptance, check_draft, excess, normalised_p_rows

if TYPE_CHECKING:
    import torch


class Block:
    """Exact for chains; needs the q row of every sampled token."""

    capabilities = RuleCapabilities(name="block", needs_p_rows=True, needs_q_rows=True, takes_trees=False)

    def verify(self, draft: Draft, target: TargetRows, chance: Chance) -> Verdict:
        """Keep the longest prefix that passes its test.

        Raises:
            ValueError: as `Rejection.verify`.
        """
        check_draft(draft)
        if not topology_of(draft.num_tokens, draft.parents).is_chain:
            raise ValueError("block verifies chains; the rule of trees is multi_round")
        p_rows = normalised_p_rows(draft, target, self.capabilities.name)
        weights = weights_of(draft, p_rows)
        length = _num_kept(draft, p_rows, weights, chance)
        position = draft.first_position + length
        if length == draft.num_tokens:
            return verdict(draft, range(length), chance.draw_target(p_rows[length], position))
        left = _excess_after(draft, p_rows, weights, length)
        if not left.sum() > 0.0:  # by rounding only
            left = p_rows[length]
        return verdict(draft, range(length), chance.draw_residual(left, position))


def _num_kept(draft: Draft, p_rows: torch.Tensor, weights: list[float], chance: Chance) -> int:
    """Return the last i whose test succeeds, looking from the end; 0 when none does."""
    for length in range(draft.num_tokens, 0, -1):
        probability = weights[length]  # h_k
        if length < draft.num_tokens:
            total = float(_excess_after(draft, p_rows, weights, length).sum())
            spread = total + 1.0 - weights[length]
            probability = total / spread if spread > 0.0 else 1.0
        if chance.accept(probability, draft.first_position, length):
            return length
    return 0


def weights_of(draft: Draft, p_rows: torch.Tensor) -> list[float]:
    """Return w_0 .. w_k."""
    weights = [1.0]
    for index, token in enumerate(draft.token_ids):
        q = None if draft.q_rows is None else draft.q_rows[index]
        weights.append(min(1.0, weights[-1] * acceptance(p_rows[index], q, token)))
    return weights


def _excess_after(draft: Draft, p_rows: torch.Tensor, weights: list[float], length: int) -> torch.Tensor:
    """Return (w_i p_{i+1} - q_{i+1})+ for i = length < k."""
    q = None if draft.q_rows is None else draft.q_rows[length].double()
    return excess(weights[length] * p_rows[length], q, draft.token_ids[length])
