"""Drafts that keep to a request's grammar, and the masks of the rows that verify them."""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from specdec.core.proposal import Proposal
from specdec.engine.requests.live_request import LiveRequest
from specdec.engine.targets.proposal_check import plainly
from specdec.sampling.grammar import GrammarState
from specdec.tree.topology import pruned_parents


class MaskedDraft(NamedTuple):
    """A proposal and what a grammar allows at each row that verifies it."""

    proposal: Proposal
    masks: tuple[bytes, ...]


def masked_draft(
    live: LiveRequest, grammar: GrammarState, proposal: Proposal | None, room: int, *, needs_p_rows: bool
) -> MaskedDraft:
    """Return what of a proposal keeps to the grammar, and what it forces behind a chain.

    Args:
        live: the request.
        grammar: how far it has come.
        proposal: of at most `room` tokens; None: there is none.
        room: most tokens in the answer.
        needs_p_rows: whether the rule looks at distributions (`RuleCapabilities.needs_p_rows`).
    """
    if proposal is None:
        proposal = Proposal(
            request_id=live.request_id,
            committed_len=live.committed_len,
            prefix_hash=live.prefix_hash,
            token_ids=(),
            method="grammar",
        )
    is_sampled = needs_p_rows and proposal.noise_stream is not None
    if proposal.parents is not None:
        kept, masks = grammar.constrain_tree(proposal.token_ids, proposal.parents, is_sampled=is_sampled)
        proposal = plainly(_pruned(proposal, kept))
        if proposal.parents is not None or is_sampled:
            return MaskedDraft(proposal, masks)
    token_ids, masks = grammar.constrain(proposal.token_ids, room, is_sampled=is_sampled)
    q_rows = None if proposal.q_rows is None else proposal.q_rows[: len(token_ids)]
    return MaskedDraft(replace(proposal, token_ids=token_ids, q_rows=q_rows), masks)


def _pruned(proposal: Proposal, kept: tuple[int, ...]) -> Proposal:
    assert proposal.parents is not None
    if len(kept) == proposal.num_tokens:
        return proposal
    q_rows = proposal.q_rows
    return replace(
        proposal,
        token_ids=tuple(proposal.token_ids[node] for node in kept),
        parents=pruned_parents(proposal.parents, kept),
        q_rows=None if q_rows is None else tuple(q_rows[node] for node in kept),
    )
