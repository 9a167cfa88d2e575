"""Several proposers as one: each sequence is proposed for by the drafter that it has at the moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.idle_work import IdleWork, idle_work_of
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.proposers.base import AsksOthers, Proposer, ProposerCapabilities, counters_of


@runtime_checkable
class HasDrafter(Protocol):
    """A sequence that says which of several drafters proposes for it."""

    @property
    def drafter(self) -> int:
        """Its place among them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowDrafter:
    """A drafter that drafts for a share of the requests, and is not heard."""

    name: str
    proposer: Proposer
    share: float
    num_draft_tokens: int
    """k."""


class SeveralProposers:
    """Implements `Proposer` by `members`, and notes how long each takes.

    A drafter hears of the sequences that are its own at the time. Nothing is lost when a sequence changes:
    its former drafter keeps what it knows, and is told what it has missed once it is asked again.
    """

    def __init__(
        self,
        members: Sequence[Proposer],
        *,
        shadows: Sequence[ShadowDrafter] = (),
        clock: Clock | None = None,
    ) -> None:
        """Own `members`, and `shadows`, which others ask (`engine.shadows`).

        What could overlap with verification is used one after the other here.
        """
        assert members, "nobody drafts"
        assert not any(one.capabilities.num_rows_beside for one in members), "rows beside are for one alone"
        self.members = tuple(members)
        self.shadows = tuple(shadows)
        self._all = (*self.members, *(one.proposer for one in shadows))
        self._asking = [one for one in members if isinstance(one, AsksOthers)]
        self._clock = clock or MonotonicClock()
        self._seconds: dict[int, float] = {}
        each = [one.capabilities for one in members]
        self._capabilities = ProposerCapabilities(
            name="several",
            shape="tree" if any(one.shape == "tree" for one in each) else "chain",
            sampled=any(one.sampled for one in each),
            at_target=all(one.at_target for one in each),
        )

    @property
    def capabilities(self) -> ProposerCapabilities:
        """Of all together; who verifies asks for those of each (`capabilities_of_each`)."""
        return self._capabilities

    @property
    def counters(self) -> Mapping[str, float]:
        """Of all, those of one name added up."""
        total: Counter[str] = Counter()
        for one in self._all:
            total.update(counters_of(one))
        return total

    @property
    def idle_work(self) -> Sequence[IdleWork]:
        """Of all."""
        return idle_work_of(*self._all)

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Ask each for its own; see the contract."""
        own: dict[int, list[SequenceView]] = {}
        for view in sequences:
            own.setdefault(drafter_of(view), []).append(view)
        self._seconds = {}
        proposals: dict[RequestId, Proposal] = {}
        for place, its in own.items():
            budgets = {
                view.request_id: num_draft_tokens[view.request_id]
                for view in its
                if view.request_id in num_draft_tokens
            }
            started_s = self._clock.now_s()
            proposals.update(self.members[place].propose(its, budgets))
            self._seconds[place] = self._clock.now_s() - started_s
        return proposals

    def take_seconds(self) -> Mapping[int, float]:
        """Return how long each drafter took that the last `propose` has asked, once."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def take_asking_s(self) -> float:
        """See `AsksOthers`: of all."""
        return sum([one.take_asking_s() for one in self._asking])

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget these sequences in all."""
        released = tuple(request_ids)
        for one in self._all:
            one.release(released)

    def close(self) -> None:
        """Close all."""
        for one in self._all:
            one.close()


def drafter_of(view: SequenceView) -> int:
    """Return which of several drafters proposes for a sequence: the first, if it does not say."""
    return view.drafter if isinstance(view, HasDrafter) else 0


def members_of(proposer: Proposer) -> Sequence[Proposer]:
    """Return the drafters behind a proposer: those of several, or itself."""
    return proposer.members if isinstance(proposer, SeveralProposers) else (proposer,)


def capabilities_of_each(proposer: Proposer) -> Sequence[ProposerCapabilities]:
    """Return what each drafter behind a proposer needs and gives."""
    return tuple(one.capabilities for one in members_of(proposer))
