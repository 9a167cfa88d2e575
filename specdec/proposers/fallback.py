"""A proposer with another one to stand in where it has nothing.

A draft that did not come (a verdict that nothing was prepared for, a draft worker that is late, dead or full)
leaves its request with one token for that round. A lookup in the request's own text costs next to nothing and
may bring more. It is exact for every verification rule, as proposals that are deterministic given the prefix
always are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from specdec.core.idle_work import IdleWork, idle_work_of
from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome, Proposal
from specdec.core.sequence import SequenceView
from specdec.proposers.base import (
    AheadWish,
    AsksAhead,
    AsksOthers,
    Proposer,
    ProposerCapabilities,
    ReadsAlong,
    counters_of,
)


class FallbackProposer:
    """Implements `Proposer`: what `primary` proposes, and for whoever gets nothing what `fallback` does.

    To its caller it is the primary, capabilities and overlap included; proposals of the fallback say that
    they are (`Proposal.is_fallback`), because they tell nothing of the primary.
    """

    def __init__(self, primary: Proposer, fallback: Proposer) -> None:
        """Own both. The fallback's proposals must be deterministic given the prefix, and made here.

        Raises:
            ValueError: they are not.
        """
        capabilities = fallback.capabilities
        if capabilities.sampled or capabilities.remote or capabilities.shape != "chain":
            raise ValueError(f"{capabilities.name} cannot stand in: chains that are not sampled, made here")
        self._primary = primary
        self._fallback = fallback
        self._ahead = primary if isinstance(primary, AsksAhead) else None
        self._asks = primary if isinstance(primary, AsksOthers) else None
        self._reader = primary if isinstance(primary, ReadsAlong) else None

    @property
    def capabilities(self) -> ProposerCapabilities:
        """The primary's."""
        return self._primary.capabilities

    @property
    def counters(self) -> Mapping[str, float]:
        """Both proposers'."""
        return {**counters_of(self._primary), **counters_of(self._fallback)}

    @property
    def idle_work(self) -> Sequence[IdleWork]:
        """Both proposers'."""
        return idle_work_of(self._primary, self._fallback)

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Ask the primary; look up whoever is left without; see the contract."""
        proposals = self._primary.propose(sequences, num_draft_tokens)
        left = [
            sequence
            for sequence in sequences
            if sequence.request_id not in proposals and num_draft_tokens.get(sequence.request_id, 0) > 0
        ]
        if left:
            found = self._fallback.propose(left, num_draft_tokens)
            proposals.update({one: replace(its, is_fallback=True) for one, its in found.items()})
        return proposals

    def look_ahead(self, wishes: Sequence[AheadWish]) -> None:
        """See `AsksAhead`. What is pending may be the fallback's."""
        if self._ahead is not None:
            self._ahead.look_ahead(wishes)

    def take_ahead_outcomes(self) -> Sequence[AheadOutcome]:
        """See `AsksAhead`."""
        return () if self._ahead is None else self._ahead.take_ahead_outcomes()

    @property
    def ready_s(self) -> float | None:
        """See `AsksAhead`."""
        return None if self._ahead is None else self._ahead.ready_s

    def take_drafting_s(self) -> float:
        """See `AsksAhead`."""
        return 0.0 if self._ahead is None else self._ahead.take_drafting_s()

    def take_asking_s(self) -> float:
        """See `AsksOthers`. A lookup is drafting."""
        return 0.0 if self._asks is None else self._asks.take_asking_s()

    def num_unread(self, view: SequenceView) -> int:
        """See `ReadsAlong`. A lookup reads nothing before it is asked."""
        return 0 if self._reader is None else self._reader.num_unread(view)

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget these sequences in both."""
        released = tuple(request_ids)
        self._primary.release(released)
        self._fallback.release(released)

    def close(self) -> None:
        """Close both."""
        self._primary.close()
        self._fallback.close()
