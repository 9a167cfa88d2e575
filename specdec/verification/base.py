"""The contract of verification rules.

A rule looks at one draft and at what the target computed at its rows (row 0: after the last committed
token, row 1 + i: after node i), and says which nodes stand and what token follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specdec.core.proposal import NoiseStream, Verdict

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCapabilities:
    """What a rule needs and promises."""

    name: str
    needs_p_rows: bool = False
    """Whether it reads the target's p rows, else its sampled tokens. A rule that does runs where they are."""
    needs_q_rows: bool = False
    """Whether it reads the q rows of a sampled draft."""
    draft_stream: NoiseStream = "draft"
    """Noise stream that drafters sample with under this rule."""
    takes_trees: bool = True
    exact: bool = True
    """Whether the output is distributed as the target's."""

    @property
    def needs_independent_drafts(self) -> bool:
        """Whether drafts must not depend on what the request's noise has decided at their own positions.

        A test that accepts x with probability p(x)/q(x) is exact for an x that was proposed without knowing
        its random number; what the same seed has said at the same position before does know it.
        """
        return self.exact and self.draft_stream != "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A proposal as a rule sees it."""

    token_ids: tuple[int, ...]
    """Token of each of n nodes."""
    first_position: int
    """Absolute position of the root's children (`Proposal.committed_len`)."""
    parents: tuple[int, ...] | None = None
    """As `Proposal.parents`. Siblings are in the order that they were drawn in."""
    noise_stream: NoiseStream | None = None
    """Stream the tokens were sampled with; None when they are deterministic given the prefix."""
    q_rows: torch.Tensor | None = None
    """[n, vocab] floating point: what each token was drawn from, given the siblings before it; None when all
    are deterministic, and where the rule does not read it."""

    @property
    def num_tokens(self) -> int:
        """n."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRows:
    """What the target computed for a draft of n nodes. A rule reads what its capabilities say."""

    token_ids: Sequence[int] | None = None
    """The token function's value at each of the n + 1 rows."""
    p_rows: torch.Tensor | None = None
    """[n + 1, vocab] floating point: the distribution at each row, after all sampling transforms."""


class Chance(Protocol):
    """Where a rule's random decisions come from. Positions are absolute positions of the decided token."""

    def accept(self, probability: float, position: int, test: int) -> bool:
        """Decide with this probability (1 or more: surely). `test` numbers the tests at one position."""
        ...

    def draw_residual(self, weights: torch.Tensor, position: int) -> int:
        """Draw a token in proportion to float64 weights [vocab], not all zero."""
        ...

    def draw_target(self, weights: torch.Tensor, position: int) -> int:
        """Draw the token after a fully accepted path, like any token of the target."""
        ...


class VerificationRule(Protocol):
    """One way to verify drafts. Stateless."""

    @property
    def capabilities(self) -> RuleCapabilities:
        """Constant."""
        ...

    def verify(self, draft: Draft, target: TargetRows, chance: Chance) -> Verdict:
        """Return the accepted path and the one token that follows it.

        Raises:
            ValueError: the draft or the target's rows are not what this rule works with.
        """
        ...


def verdict(draft: Draft, accepted: Sequence[int], last: int) -> Verdict:
    """Return the verdict that keeps these nodes and adds the token `last`."""
    return Verdict(
        accepted_nodes=tuple(accepted), token_ids=(*(draft.token_ids[node] for node in accepted), last)
    )
