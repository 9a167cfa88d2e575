"""Whether what was proposed can be verified: nothing of it is believed."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from specdec.core.distributions import rows_fault
from specdec.core.proposal import Proposal
from specdec.core.rows_beside import RowsBeside
from specdec.core.sequence import SequenceView
from specdec.engine.metrics.engine_metrics import DropReason
from specdec.proposers.base import ProposerCapabilities, require_verifiable
from specdec.tree.topology import topology_of
from specdec.verification.base import RuleCapabilities


class ProposalCheck:
    """Knows what a proposer said it would give, and what the verification rule needs."""

    def __init__(self, capabilities: ProposerCapabilities, rule: RuleCapabilities, vocab_size: int) -> None:
        """Check proposals of such a proposer, for a target with so many tokens.

        Raises:
            ConfigError: the rule cannot work with what the proposer gives.
        """
        require_verifiable(capabilities, rule)
        self._takes_trees = capabilities.shape == "tree"
        self._most_beside = capabilities.num_rows_beside
        self._rule = rule
        self._vocab_size = vocab_size

    def fault(self, proposal: Proposal, view: SequenceView, budget: int) -> DropReason | None:
        """Return why a proposal cannot be used for a sequence and a number of draft tokens, if so."""
        if proposal.committed_len != view.committed_len or proposal.prefix_hash != view.prefix_hash:
            return "stale"
        if proposal.num_tokens > budget or not self._is_shaped(proposal):
            return "malformed"
        if not self._are_tokens(proposal.token_ids) or not self._is_fit_beside(proposal.beside):
            return "malformed"
        if self._rule.needs_p_rows and not self._is_verifiable(proposal):
            return "unverifiable"
        return None

    def _is_shaped(self, proposal: Proposal) -> bool:
        if proposal.parents is None:
            return True
        return self._takes_trees and _is_tree(proposal.num_tokens, proposal.parents)

    def _are_tokens(self, token_ids: Sequence[int]) -> bool:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size)

    def _is_fit_beside(self, beside: RowsBeside | None) -> bool:
        if beside is None:
            return True
        if not 0 <= beside.num_answered <= beside.num_rows <= self._most_beside:
            return False
        return self._are_tokens(beside.token_ids) and _is_tree(beside.num_rows, beside.parents)

    def _is_verifiable(self, proposal: Proposal) -> bool:
        stream, q_rows = proposal.noise_stream, proposal.q_rows
        if stream is None or not self._rule.needs_q_rows:
            return stream in (None, self._rule.draft_stream) and q_rows is None
        return (
            stream == self._rule.draft_stream
            and q_rows is not None
            and rows_fault(q_rows, proposal.token_ids, self._vocab_size) is None
        )


def _is_tree(num_nodes: int, parents: tuple[int, ...]) -> bool:
    try:
        topology_of(num_nodes, parents)
    except ValueError:
        return False
    return True


def plainly(proposal: Proposal) -> Proposal:
    """Return a proposal whose tree, if it is a chain, is said to be one."""
    parents = proposal.parents
    if parents is None or not topology_of(proposal.num_tokens, parents).is_chain:
        return proposal
    return replace(proposal, parents=None)
