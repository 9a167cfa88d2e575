"""What rounds were and brought, counted for the metrics.

No round waits for counting: what there is to count is kept as it is, and counted when there is time, which is
while the target is at work on the next round, where it is elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.request import Request
from specdec.engine.metrics.draft_counts import DraftKind
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.tree.topology import tree


class FinishedRound(NamedTuple):
    """One round, as far as it is counted. Times are seconds, or seconds of the engine's clock."""

    mode: OverlapMode
    num_requests: int
    num_rows: int
    """Of the target's forward."""
    num_places: int
    """Requests that it had room for."""
    num_committed: int
    asked_s: float
    """When drafts were asked for."""
    drafted_s: float
    """When they were there."""
    drafting_s: float
    """T_draft, as whoever drafted measures it."""
    waited_s: float
    """For drafts, be it in the target's step."""
    budgets: Mapping[RequestId, int]
    """How many draft tokens requests were to have; who is not there was to have none."""
    num_decoding: int
    """Requests that were to get tokens."""
    submitted_s: float
    verify_s: float
    forward_s: float
    """As the target measures it, as the next."""
    sample_s: float


class _VerifiedDraft(NamedTuple):
    """A proposal that something has become of."""

    request: Request
    num_generated: int
    """Tokens before it."""
    proposal: Proposal
    num_accepted: int


class RoundCounts:
    """Counts rounds, and the proposals in them, in the engine's metrics."""

    def __init__(self, metrics: EngineMetrics) -> None:
        """Count in `metrics`."""
        self._metrics = metrics
        self._drafts: list[_VerifiedDraft] = []
        self._rounds: list[FinishedRound] = []
        self._target_done_s = 0.0
        """About when the target had done the last round that was counted."""

    def note_draft(self, request: Request, num_generated: int, proposal: Proposal, num_accepted: int) -> None:
        """Keep what became of a proposal behind so many generated tokens."""
        self._drafts.append(_VerifiedDraft(request, num_generated, proposal, num_accepted))

    def note_round(self, finished: FinishedRound) -> None:
        """Keep what a round was."""
        self._rounds.append(finished)

    def count(self) -> None:
        """Count what has been kept."""
        for draft in self._drafts:
            self._count_draft(*draft)
        self._drafts.clear()
        for finished in self._rounds:
            self._count_round(finished)
        self._rounds.clear()

    def _count_draft(
        self, request: Request, num_generated: int, proposal: Proposal, num_accepted: int
    ) -> None:
        metrics, num_drafted, parents = self._metrics, proposal.num_tokens, proposal.parents
        metrics.count_draft(num_drafted, num_accepted, None if parents is None else tree(parents).max_depth)
        metrics.by_kind.count(DraftKind.of(request, num_generated), num_drafted, num_accepted)
        if proposal.method != metrics.method:
            metrics.count_other_method(proposal.method, num_drafted, num_accepted)

    def _count_round(self, its: FinishedRound) -> None:
        metrics = self._metrics
        metrics.num_rounds += 1
        metrics.num_verified_requests += its.num_requests
        metrics.num_verified_rows += its.num_rows
        metrics.num_places += its.num_places
        metrics.generation_tokens += its.num_committed
        metrics.rounds_by_mode[its.mode] += 1
        metrics.draft_s += its.waited_s
        metrics.verify_s += its.verify_s
        metrics.verify_latencies.add(its.verify_s)
        drafted_for = [k for k in its.budgets.values() if k > 0]
        metrics.count_choices(drafted_for, its.num_decoding - len(drafted_for))
        if drafted_for:
            metrics.draft_latencies.add(its.waited_s)
            drafting_s = its.drafting_s if metrics.drafts_elsewhere else its.waited_s
            if drafting_s > 0.0 or not metrics.drafts_elsewhere:
                metrics.drafting_latencies.add(drafting_s)
        metrics.target_forward_s += its.forward_s
        metrics.target_sample_s += its.sample_s
        self._count_overlap(its)

    def _count_overlap(self, its: FinishedRound) -> None:
        """Count how much of the drafting for a round went on while the target had something to verify."""
        exposed_s = its.drafted_s - max(its.asked_s, min(self._target_done_s, its.drafted_s))
        self._metrics.drafting_s += its.drafting_s
        self._metrics.hidden_drafting_s += max(0.0, its.drafting_s - exposed_s)
        target_s = its.forward_s + its.sample_s or its.verify_s
        self._target_done_s = max(self._target_done_s, its.submitted_s) + target_s
