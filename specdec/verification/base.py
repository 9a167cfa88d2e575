"""The contract of verification rules.

A rule looks at one proposal and at what the target computed at its rows (row 0: after the last committed
token, row 1 + i: after node i), and says which nodes stand and what token follows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specdec.core.proposal import NoiseStream, Proposal, Verdict

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCapabilities:
    """What a rule needs and promises."""

    name: str
    needs_distributions: bool
    """Whether it reads the target's p rows (else its sampled tokens) and a sampled proposal's q rows."""
    draft_stream: NoiseStream
    """Noise stream that drafters sample with under this rule."""
    exact: bool = True
    """Whether the output is distributed as the target's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRows:
    """What the target computed for one proposal of n nodes. A rule reads what its capabilities say."""

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
    """One way to verify proposals. Stateless."""

    @property
    def capabilities(self) -> RuleCapabilities:
        """Constant."""
        ...

    def verify(self, proposal: Proposal, target: TargetRows, chance: Chance) -> Verdict:
        """Return the accepted path and the one token that follows it.

        Raises:
            ValueError: the proposal or the target's rows are not what this rule can be exact with.
        """
        ...
