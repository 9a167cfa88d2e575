"""No drafting: every round commits one token per sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.proposers.base import ProposerCapabilities


class NoProposer:
    """Never proposes anything."""

    capabilities = ProposerCapabilities(name="none")

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Return nothing."""
        return {}

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""
