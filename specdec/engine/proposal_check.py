"""Whether what was proposed can be verified: nothing of it is believed."""

from __future__ import annotations

from dataclasses import replace

from specdec.core.distributions import rows_fault
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.metrics import DropReason
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
        self._rule = rule
        self._vocab_size = vocab_size

    def fault(self, proposal: Proposal, view: SequenceView, budget: int) -> DropReason | None:
        """Return why a proposal cannot be used for a sequence and a number of draft tokens, if so."""
        if proposal.committed_len != view.committed_len or proposal.prefix_hash != view.prefix_hash:
            return "stale"
        if proposal.num_tokens > budget or not self._is_shaped(proposal):
            return "malformed"
        if not all(0 <= token_id < self._vocab_size for token_id in proposal.token_ids):
            return "malformed"
        if self._rule.needs_p_rows and not self._is_verifiable(proposal):
            return "unverifiable"
        return None

    def _is_shaped(self, proposal: Proposal) -> bool:
        if proposal.parents is None:
            return True
        if not self._takes_trees:
            return False
        try:
            topology_of(proposal.num_tokens, proposal.parents)
        except ValueError:
            return False
        return True

    def _is_verifiable(self, proposal: Proposal) -> bool:
        stream, q_rows = proposal.noise_stream, proposal.q_rows
        if stream is None or not self._rule.needs_q_rows:
            return stream in (None, self._rule.draft_stream) and q_rows is None
        return (
            stream == self._rule.draft_stream
            and q_rows is not None
            and rows_fault(q_rows, proposal.token_ids, self._vocab_size) is None
        )


def plainly(proposal: Proposal) -> Proposal:
    """Return a proposal whose tree, if it is a chain, is said to be one."""
    parents = proposal.parents
    if parents is None or not topology_of(proposal.num_tokens, parents).is_chain:
        return proposal
    return replace(proposal, parents=None)
