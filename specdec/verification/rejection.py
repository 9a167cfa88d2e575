"""Rejection sampling: keep a drafted token with probability min(1, p/q), else draw from what p has over q.

Chains: Leviathan et al. 2023 and Chen et al. 2023. Trees: the children of a node are tested one after the
other, each against what the rejections before it have left of p (SpecInfer, Miao et al. 2023; children
drawn without replacement as in Sequoia, Chen et al. 2024, whose q rows are then the renormalised ones).
A deterministic proposal is one whose q holds one token: accept with p(x), on rejection drop x from p.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.core.proposal import Proposal, Verdict
from specdec.tree.topology import Topology, topology_of
from specdec.verification.base import Chance, RuleCapabilities, TargetRows

if TYPE_CHECKING:
    import torch


class Rejection:
    """Exact for chains and trees; needs the q row of every sampled token."""

    capabilities = RuleCapabilities(name="rejection", needs_distributions=True, draft_stream="draft")

    def verify(self, proposal: Proposal, target: TargetRows, chance: Chance) -> Verdict:
        """Walk down as long as a child is accepted; see `walk`.

        Raises:
            ValueError: p rows are missing; a sampled proposal lacks q rows, or a deterministic one has some;
                the proposal was sampled with noise that this rule uses itself.
        """
        check_noise(proposal)
        topology = topology_of(proposal.num_tokens, proposal.parents)
        p_rows = target.p_rows
        if p_rows is None or p_rows.shape[0] != proposal.num_tokens + 1:
            raise ValueError(f"rejection needs {proposal.num_tokens + 1} p rows")
        p_rows = p_rows.double()
        p_rows = p_rows / p_rows.sum(-1, keepdim=True)
        return walk(proposal.token_ids, topology, p_rows, proposal.q_rows, chance, proposal.committed_len)


def check_noise(proposal: Proposal) -> None:
    """Refuse proposals that would bias a ratio test.

    Raises:
        ValueError: what is wrong with the proposal's noise stream or q rows.
    """
    stream, q_rows = proposal.noise_stream, proposal.q_rows
    if stream not in (None, "draft"):
        raise ValueError(
            f'a proposal sampled with stream "{stream}" is biased under a ratio rule: use "draft"'
        )
    if (stream is None) != (q_rows is None):
        raise ValueError(
            "a sampled proposal needs its q rows" if stream else "q rows of a proposal that was not sampled"
        )
    if q_rows is not None and q_rows.shape[0] != proposal.num_tokens:
        raise ValueError(f"{proposal.num_tokens} proposed tokens with {q_rows.shape[0]} q rows")


def walk(
    token_ids: tuple[int, ...],
    topology: Topology,
    p_rows: torch.Tensor,
    q_rows: torch.Tensor | None,
    chance: Chance,
    first_position: int,
) -> Verdict:
    """Return the accepted path and the token after it.

    Args:
        token_ids: token of each of n nodes.
        topology: their shape. Siblings are tested in order, which must be the order they were drawn in.
        p_rows: float64 [n + 1, vocab], normalised.
        q_rows: [n, vocab]: what each token was drawn from, given the siblings before it; None when all are
            deterministic.
        chance: source of the decisions.
        first_position: absolute position of the root's children (`committed_len`).
    """
    accepted: list[int] = []
    row, position = 0, first_position
    while children := topology.children[row]:
        p = p_rows[row]
        for test, node in enumerate(children):
            token = token_ids[node]
            q = None if q_rows is None else q_rows[node].double()
            if chance.accept(acceptance(p, q, token), position, test):
                break
            p = residual(p, q, token)
        else:
            return _verdict(token_ids, accepted, chance.draw_residual(p, position))
        accepted.append(node)
        row, position = node + 1, position + 1
    return _verdict(token_ids, accepted, chance.draw_target(p_rows[row], position))


def acceptance(p: torch.Tensor, q: torch.Tensor | None, token: int) -> float:
    """Return p(x)/q(x), to be compared with a uniform by strict "<"; q None is the one-hot q at x.

    Raises:
        ValueError: q(x) is 0, so x cannot have been drawn from q.
    """
    if q is None:
        return float(p[token])
    q_token = float(q[token])
    if not q_token > 0.0:
        raise ValueError(f"token {token} was proposed although its q is {q_token}")
    return float(p[token]) / q_token


def residual(p: torch.Tensor, q: torch.Tensor | None, token: int) -> torch.Tensor:
    """Return norm((p - q)+), drawn from after x was rejected; p itself where rounding leaves nothing."""
    if q is None:
        left = p.clone()
        left[token] = 0.0
    else:
        left = (p - q).clamp_(min=0.0)
    total = left.sum()
    return left / total if total > 0.0 else p


def _verdict(token_ids: tuple[int, ...], accepted: list[int], last: int) -> Verdict:
    return Verdict(accepted_nodes=tuple(accepted), token_ids=(*(token_ids[node] for node in accepted), last))
