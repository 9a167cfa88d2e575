"""Drafters that draft without being heard: what they would have brought is known once the text goes on.

For a share of the requests they propose while the target verifies, one proposal at a time for each request;
it is compared with the tokens that come, whoever drafted those. What they bring cannot depend on whether
they are heard, because the tokens do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.clock import Clock
from specdec.core.errors import TransportError
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.engine.metrics.draft_counts import DrafterCounts
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.engine.requests.live_request import LiveRequest
from specdec.proposers.several.proposer import ShadowDrafter
from specdec.scheduling.speculation.drafter_shares import place_of
from specdec.scheduling.speculation.shadow_scores import would_stand


class Shadows:
    """Asks drafters that are not heard, and keeps their proposals until it is known what they are worth."""

    def __init__(self, shadows: Sequence[ShadowDrafter], metrics: EngineMetrics, clock: Clock) -> None:
        """Count what `shadows` do in `metrics`."""
        self._shadows = [
            _Shadow(one, metrics.by_shadow.setdefault(one.name, DrafterCounts())) for one in shadows
        ]
        self._clock = clock

    def draft(self, lives: Sequence[LiveRequest]) -> float:
        """Have them draft behind what is committed of some requests; return the seconds that it took."""
        if not self._shadows:
            return 0.0
        started_s = self._clock.now_s()
        for shadow in self._shadows:
            before_s = self._clock.now_s()
            shadow.draft(lives)
            shadow.counts.draft_s += self._clock.now_s() - before_s
        return self._clock.now_s() - started_s

    def learn(self, live: LiveRequest) -> None:
        """Compare what they have drafted with what has come of a request."""
        for shadow in self._shadows:
            shadow.learn(live)

    def release(self, request_id: RequestId) -> None:
        """Forget a request."""
        for shadow in self._shadows:
            shadow.open.pop(request_id, None)
            shadow.sampled.pop(request_id, None)


class _Shadow:
    """One drafter that is not heard."""

    def __init__(self, drafter: ShadowDrafter, counts: DrafterCounts) -> None:
        self.drafter = drafter
        self.counts = counts
        self.open: dict[RequestId, Proposal] = {}
        """Proposals of which it is not known what they are worth."""
        self.sampled: dict[RequestId, bool] = {}

    def draft(self, lives: Sequence[LiveRequest]) -> None:
        most = self.drafter.num_draft_tokens
        its = [live for live in lives if live.request_id not in self.open and self._looks_at(live)]
        budgets = {live.request_id: min(most, live.max_draft_tokens) for live in its if live.is_decoding}
        if not its:
            return
        try:
            proposals = self.drafter.proposer.propose(its, budgets)
        except TransportError:
            return  # it is not heard either way
        for live in its:
            proposal = proposals.get(live.request_id)
            is_new = proposal is not None and proposal.prefix_hash == live.prefix_hash
            if proposal is not None and is_new and proposal.token_ids:
                self.open[live.request_id] = proposal

    def learn(self, live: LiveRequest) -> None:
        proposal = self.open.get(live.request_id)
        if proposal is None:
            return
        came = live.token_ids[proposal.committed_len :]
        num_standing = would_stand(proposal.token_ids, proposal.parents, came)
        if num_standing is not None:
            del self.open[live.request_id]
            self.counts.count(proposal.num_tokens, num_standing)

    def _looks_at(self, live: LiveRequest) -> bool:
        sampled = self.sampled.get(live.request_id)
        if sampled is None:
            place = place_of(live.request_id, f"shadow {self.drafter.name}")
            sampled = self.sampled[live.request_id] = place < self.drafter.share
            self.counts.num_requests += sampled
        return sampled
