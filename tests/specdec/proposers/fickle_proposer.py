"""A proposer that has drafts for some only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome, Proposal
from specdec.core.sequence import SequenceView
from specdec.proposers.base import AheadWish, ProposerCapabilities


class Fickle:
    """Has drafts for those only whose last token is even; looks ahead."""

    capabilities = ProposerCapabilities(name="fickle", remote=True, looks_ahead=True)

    def __init__(self) -> None:
        self.wishes: list[AheadWish] = []
        self.released: list[RequestId] = []
        self.is_closed = False

    @property
    def counters(self) -> Mapping[str, float]:
        return {"fickle_counts": 1.0}

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        return {
            one.request_id: Proposal(
                request_id=one.request_id,
                committed_len=one.committed_len,
                prefix_hash=one.prefix_hash,
                token_ids=(23,) * budget,
                method="fickle",
            )
            for one in sequences
            if (budget := num_draft_tokens.get(one.request_id, 0)) > 0 and one.token_ids[-1] % 2 == 0
        }

    def look_ahead(self, wishes: Sequence[AheadWish]) -> None:
        self.wishes.extend(wishes)

    def take_ahead_outcomes(self) -> Sequence[AheadOutcome]:
        return (
            AheadOutcome(request_id=RequestId("a"), num_pending=1, num_accepted=0, num_prepared=1, rank=0),
        )

    @property
    def ready_s(self) -> float | None:
        return 0.5

    def take_drafting_s(self) -> float:
        return 0.25

    def take_asking_s(self) -> float:
        return 0.125

    def release(self, request_ids: Iterable[RequestId]) -> None:
        self.released.extend(request_ids)

    def close(self) -> None:
        self.is_closed = True
