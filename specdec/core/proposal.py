"""What a drafter proposes for one sequence, and what verification makes of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from specdec.core.distributions import TokenDistribution
from specdec.core.ids import RequestId
from specdec.core.rows_beside import RowsBeside

NoiseStream = Literal["target", "accept", "residual", "draft"]
MAX_DRAFT_TOKENS = 64
"""Most tokens of one proposal: what a configuration, a request and a worker's peer may ask for."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """Proposed tokens for one sequence: a chain, or a tree given by parents.

    It belongs to exactly one committed prefix, named by (`committed_len`, `prefix_hash`).
    """

    request_id: RequestId
    committed_len: int
    """Number of committed tokens (prompt included) that the proposal continues."""
    prefix_hash: int
    """Hash of those tokens (`core.prefix_hash`)."""
    token_ids: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    """Parent node of each token, -1 for the root (the last committed token); None for a chain.
    Parents precede their children."""
    noise_stream: NoiseStream | None = None
    """Stream the tokens were sampled with; None when they are deterministic given the prefix."""
    q_rows: tuple[TokenDistribution, ...] | None = None
    """What each token was sampled from, only for rules that need it."""
    beside: RowsBeside | None = None
    """Rows that the target shall compute beside those of the tokens, of which there may then be none. Left
    out where a round has no room for them."""
    method: str = ""
    """Name of the proposer, for metrics."""
    is_fallback: bool = False
    """Whether it stands in for one that did not come: it tells nothing of who should have proposed."""

    @property
    def num_tokens(self) -> int:
        """Number of proposed tokens (tree nodes)."""
        return len(self.token_ids)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The accepted path of a proposal plus the token that the target adds to it."""

    accepted_nodes: tuple[int, ...]
    """Indices into the proposal, root to leaf; for a chain always 0..len-1."""
    token_ids: tuple[int, ...]
    """Tokens to commit: the accepted ones, then one correction or bonus token."""

    @property
    def num_accepted(self) -> int:
        """Number of drafted tokens that were accepted."""
        return len(self.accepted_nodes)


class AheadOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the continuations that were prepared for one verdict."""

    request_id: RequestId
    num_pending: int
    """Draft tokens that were being verified; 0 when the round had none for this request."""
    num_accepted: int
    """Of these, how many stood: a."""
    num_prepared: int
    """Tokens that a continuation was prepared for, in case exactly a stand; at most `fan_out[a]`."""
    rank: int | None
    """Which of these the target chose, 0 for the first; None: it chose another one."""
    is_late: bool = False
    """Whether the continuation was prepared, but did not come in time."""
    is_foreign: bool = False
    """Whether the pending tokens were not the drafter's own (`Proposal.is_fallback`)."""
