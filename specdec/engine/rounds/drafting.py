"""Who drafts in an engine: asks for proposals, and lets through what can be verified.

There is one drafter, or several, of which each request has one at a time (`LiveRequest.drafter`). Those that
draft in the target's step (one, or several heads) are not asked here: the target is, by the number of tokens
it shall draft. Where a lookup goes before them, it is, and the target drafts for whoever gets nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from specdec.core.errors import ConfigError, TransportError
from specdec.core.ids import RequestId
from specdec.core.plan import TargetResult, WorkResult
from specdec.core.proposal import Proposal
from specdec.engine.metrics.draft_counts import DrafterCounts
from specdec.engine.metrics.engine_metrics import DropReason, EngineMetrics
from specdec.engine.requests.live_request import LiveRequest
from specdec.engine.targets.proposal_check import ProposalCheck, plainly
from specdec.engine.targets.target import TargetDescription
from specdec.proposers.base import Proposer, ReadsAlong
from specdec.proposers.several.proposer import SeveralProposers, capabilities_of_each, members_of
from specdec.scheduling.state import RoundPlan
from specdec.verification.base import RuleCapabilities

Proposals = dict[RequestId, Proposal]

_KEPT_UP_TOKENS = 48
"""While nothing is drafted for a request, those who would draft elsewhere are told of so many tokens at a
time: they read them meanwhile, and can go on at once when they are asked again."""
_KEPT_UP_TOGETHER = 24
"""Once somebody has so many that somebody is told of, all are told of whose tokens are so many: one message
costs as much as many entries of it, and so does one batch of whoever reads."""


class Drafting:
    """The drafters of one engine, as its rounds see them."""

    def __init__(
        self,
        proposer: Proposer,
        description: TargetDescription,
        rule: RuleCapabilities,
        metrics: EngineMetrics,
        names: tuple[str, ...] = (),
    ) -> None:
        """Ask `proposer`; `names` are those of several drafters.

        Raises:
            ConfigError: the rule cannot work with what a drafter gives, or the target shall draft and cannot.
        """
        self._proposer = proposer
        self._several = proposer if isinstance(proposer, SeveralProposers) else None
        self._metrics = metrics
        each = capabilities_of_each(proposer)
        self._methods = tuple(one.name for one in each)
        self._checks = tuple(ProposalCheck(one, rule, description.vocab_size) for one in each)
        self._at_target = tuple(place for place, one in enumerate(each) if one.at_target)
        self.tells_tokens = any(one.at_target and one.hidden_layers for one in each)
        """Whether what drafts at the target reads the tokens of sequences."""
        self._looks_first = proposer.capabilities.looks_first
        self._keeps_up = tuple(one.remote for one in each)
        self._readers = tuple(one if isinstance(one, ReadsAlong) else None for one in members_of(proposer))
        self.num_behind = 0
        """Committed tokens that those who were asked last had yet to read, beyond what a round brings."""
        metrics.method = proposer.capabilities.name
        metrics.drafts_elsewhere = any(one.remote for one in each)
        self._counts = [metrics.by_drafter.setdefault(name, DrafterCounts()) for name in names]
        for place in self._at_target:
            if not description.drafts_itself:
                raise ConfigError(
                    f"speculative_config.method: {self._methods[place]} needs a target that drafts for "
                    "itself, and this one does not"
                )

    def is_at_target(self, live: LiveRequest) -> bool:
        """Whether the target drafts for a request."""
        return live.drafter in self._at_target

    def drafter_at_target(self, live: LiveRequest) -> int:
        """Return which of the drafters at the target a request has, counted among these; one alone reads all
        requests along, of several none reads what others draft for: -1.
        """
        place = live.drafter  # once: who picks may change his mind
        if place in self._at_target:
            return self._at_target.index(place)
        return -1 if len(self._at_target) > 1 else 0

    def drafters_of(
        self, request_ids: Mapping[RequestId, int], running: Mapping[RequestId, LiveRequest]
    ) -> Mapping[RequestId, int]:
        """Return which of several drafters each of these has; nothing, where there is but one."""
        if self._several is None:
            return {}
        return {request_id: running[request_id].drafter for request_id in request_ids}

    def propose(self, plan: RoundPlan, running: Mapping[RequestId, LiveRequest]) -> Proposals:
        """Ask for proposals. Whatever does not fit is dropped: that request goes on with one token."""
        # Prompts that are still being read, and what goes on without drafts, come with a budget of 0: a
        # proposer may read them too.
        lives = [live for request_id in plan.num_tokens if self._is_asked_for(live := running[request_id])]
        wanting = {
            live.request_id
            for live in lives
            if live.request_id in plan.num_draft_tokens or live.awaits_drafts
        }
        told = wanting | self._kept_up(live for live in lives if live.request_id not in wanting)
        sequences = [live for live in lives if live.request_id in told]
        if not sequences:
            self.num_behind = 0
            return {}
        for live in sequences:
            live.told_len = live.committed_len
        budgets = {
            request_id: budget
            for request_id, budget in plan.num_draft_tokens.items()
            if self._is_asked_for(running[request_id])
        }
        self.num_behind = sum(self._num_behind(running[one], budget) for one, budget in budgets.items())
        try:
            proposals = self._proposer.propose(sequences, budgets)
        except TransportError:
            self._drop("late", len(budgets))
            return {}
        usable: Proposals = {}
        for request_id, budget in budgets.items():
            live, proposal = running[request_id], proposals.get(request_id)
            if proposal is None:
                self._metrics.num_missing_proposals += not (self._looks_first and self.is_at_target(live))
            elif (reason := self._checks[live.drafter].fault(proposal, live, budget)) is not None:
                self._drop(reason, 1)
            elif proposal.token_ids or proposal.beside is not None:
                usable[request_id] = plainly(proposal)
        return usable

    def take_seconds(self) -> Mapping[int, float]:
        """Return what each of several drafters took that was asked last, once."""
        seconds = {} if self._several is None else self._several.take_seconds()
        for place, its_s in seconds.items():
            self._note_seconds(place, its_s)
        return seconds

    def with_target_seconds(self, seconds: Mapping[int, float], result: TargetResult) -> Mapping[int, float]:
        """Return what each of several drafters took, with what those at the target did in its step."""
        if self._several is None or result.draft_s == 0.0:
            return seconds
        each_s = result.drafters_s or (result.draft_s,)
        if len(each_s) != len(self._at_target):  # it came from elsewhere, and is no more than a measurement
            return seconds
        of_target = {
            place: its_s for place, its_s in zip(self._at_target, each_s, strict=True) if its_s > 0.0
        }
        for place, its_s in of_target.items():
            self._note_seconds(place, its_s)
        return {**seconds, **of_target}

    def of_target(self, live: LiveRequest, answer: WorkResult, drafter: int | None) -> Proposal:
        """Return what the target has drafted itself, as a proposal; `drafter` as in `count`."""
        place = self._at_target[0] if drafter is None else drafter
        return Proposal(
            request_id=live.request_id,
            committed_len=live.committed_len,
            prefix_hash=live.prefix_hash,
            token_ids=answer.drafted,
            parents=answer.drafted_parents,
            method=self._methods[place],
        )

    def count(self, live: LiveRequest, drafter: int | None, num_drafted: int, num_accepted: int) -> None:
        """Count a verified proposal of one of several drafters, for it alone; None: there is but one."""
        if drafter is None or drafter >= len(self._counts):
            return
        counts = self._counts[drafter]
        counts.count(num_drafted, num_accepted)
        if drafter not in live.drafted_by:
            live.drafted_by.add(drafter)
            counts.num_requests += 1

    def _is_asked_for(self, live: LiveRequest) -> bool:
        return self._looks_first or not self.is_at_target(live)

    def _kept_up(self, lives: Iterable[LiveRequest]) -> Set[RequestId]:
        """Return those that who drafts elsewhere is to be told of, though nothing is drafted for them."""
        untold = {live.request_id: live.num_untold for live in lives if self._keeps_up[live.drafter]}
        if max(untold.values(), default=0) < _KEPT_UP_TOKENS:
            return frozenset()
        return {request_id for request_id, number in untold.items() if number >= _KEPT_UP_TOGETHER}

    def _num_behind(self, live: LiveRequest, budget: int) -> int:
        reader = self._readers[live.drafter]
        return 0 if reader is None or budget == 0 else max(0, reader.num_unread(live) - 1 - budget)

    def _note_seconds(self, place: int, seconds: float) -> None:
        if place < len(self._counts):
            self._counts[place].draft_s += seconds

    def _drop(self, reason: DropReason, count: int) -> None:
        self._metrics.proposals_dropped[reason] += count
