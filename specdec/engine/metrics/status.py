"""From an engine's counters to what people want to know of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from specdec.core.clock import Clock
from specdec.engine.metrics.draft_counts import MethodCounts
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.engine.metrics.recent_share import RECENT_S
from specdec.scheduling.speculation.explanation import IN_WORDS, ControllerState
from specdec.transport.status import (
    ChoiceStatus,
    DrafterStatus,
    DraftLinkStatus,
    RecentStatus,
    TargetGroupStatus,
)


class _Totals(NamedTuple):
    """Counters since an engine started."""

    num_rounds: float
    num_tokens: float
    num_drafts: float
    num_drafted: float
    num_accepted: float
    round_s: float
    draft_wait_s: float
    verify_s: float
    coordinator_s: float
    drafting_s: float
    hidden_s: float
    num_hits: float
    num_misses: float
    num_late: float

    @staticmethod
    def of(metrics: EngineMetrics, counters: Mapping[str, float]) -> _Totals:
        return _Totals(
            num_rounds=metrics.num_rounds,
            num_tokens=metrics.generation_tokens,
            num_drafts=metrics.num_drafts,
            num_drafted=metrics.num_draft_tokens,
            num_accepted=metrics.num_accepted_tokens,
            round_s=metrics.round_s,
            draft_wait_s=metrics.draft_s,
            verify_s=metrics.verify_s,
            coordinator_s=metrics.coordinator_s,
            drafting_s=metrics.drafting_s,
            hidden_s=metrics.hidden_drafting_s,
            num_hits=counters.get("speculation_cache_hits", 0.0),
            num_misses=counters.get("speculation_cache_misses", 0.0),
            num_late=counters.get("speculation_cache_late", 0.0),
        )


class _Sample(NamedTuple):
    """Counters at one moment."""

    at_s: float
    totals: _Totals
    by_method: Mapping[str, MethodCounts]


class StatusKeeper:
    """Remembers the counters of the last seconds of one engine. Belongs to one thread."""

    def __init__(self, clock: Clock, *, max_num_running: int, incarnation: int = 1) -> None:
        """Begin with an engine that is ready now, the `incarnation`-th of its coordinator."""
        self._clock = clock
        self._since = time.time()
        self._max_num_running = max_num_running
        self._incarnation = incarnation
        self._seen = deque([_Sample(clock.now_s(), _Totals(*[0] * len(_Totals._fields)), {})])

    def take(
        self,
        metrics: EngineMetrics,
        counters: Mapping[str, float],
        draft_workers: tuple[DraftLinkStatus, ...] = (),
    ) -> TargetGroupStatus:
        """Return how things are now.

        Args:
            metrics: of the engine.
            counters: of its proposer.
            draft_workers: as the engine sees them.
        """
        now = _Sample(self._clock.now_s(), _Totals.of(metrics, counters), _copied(metrics))
        before = self._remember(now)
        return TargetGroupStatus(
            since=self._since,
            incarnation=self._incarnation,
            num_running=metrics.num_running,
            num_waiting=metrics.num_waiting,
            max_num_running=self._max_num_running,
            kv_cache_usage=metrics.kv_cache_usage,
            utilization=metrics.target_utilization,
            choice=_choice(metrics.speculation, metrics.mean_kv_budget),
            recent=_since(before, now),
            draft_workers=draft_workers,
            drafters=_drafters(metrics),
        )

    def _remember(self, now: _Sample) -> _Sample:
        """Return what "recent" counts from."""
        seen = self._seen
        while len(seen) > 1 and seen[1].at_s <= now.at_s - RECENT_S:
            seen.popleft()
        seen.append(now)
        return seen[0]


def _drafters(metrics: EngineMetrics) -> tuple[DrafterStatus, ...]:
    heard = [(name, counts, False) for name, counts in metrics.by_drafter.items()]
    shadows = [(name, counts, True) for name, counts in metrics.by_shadow.items()]
    return tuple(
        DrafterStatus(
            name=name,
            is_shadow=is_shadow,
            num_running=metrics.num_running_by_drafter.get(name, 0),
            num_requests=counts.num_requests,
            num_drafted=counts.num_draft_tokens,
            acceptance=_ratio(counts.num_accepted_tokens, counts.num_draft_tokens),
            tokens_per_pass=counts.tokens_per_pass,
        )
        for name, counts, is_shadow in (*heard, *shadows)
    )


def _copied(metrics: EngineMetrics) -> Mapping[str, MethodCounts]:
    return {method: replace(counts) for method, counts in metrics.by_method().items()}


def _since(before: _Sample, after: _Sample) -> RecentStatus | None:
    pairs = zip(before.totals, after.totals, strict=True)
    new = _Totals(*(later - earlier for earlier, later in pairs))
    if new.num_rounds <= 0 or new.round_s <= 0.0:
        return None
    num_verdicts = new.num_hits + new.num_misses
    return RecentStatus(
        num_rounds=int(new.num_rounds),
        tokens_per_s=new.num_tokens / new.round_s,
        acceptance=_ratio(new.num_accepted, new.num_drafted),
        acceptance_by_method=_acceptance_by_method(before.by_method, after.by_method),
        mean_acceptance_length=1.0 + new.num_accepted / new.num_drafts if new.num_drafts else None,
        round_s=new.round_s / new.num_rounds,
        draft_wait_s=new.draft_wait_s / new.num_rounds,
        draft_s=new.drafting_s / new.num_rounds or None,
        verify_s=new.verify_s / new.num_rounds,
        coordinator_s=new.coordinator_s / new.num_rounds,
        hidden_share=_ratio(new.hidden_s, new.drafting_s),
        hit_rate=_ratio(new.num_hits, num_verdicts),
        late_rate=_ratio(new.num_late, num_verdicts),
    )


def _acceptance_by_method(
    before: Mapping[str, MethodCounts], after: Mapping[str, MethodCounts]
) -> dict[str, float]:
    nothing, shares = MethodCounts(), {}
    for method, now in after.items():
        then = before.get(method, nothing)
        num_drafted = now.num_draft_tokens - then.num_draft_tokens
        if num_drafted > 0:
            shares[method] = (now.num_accepted_tokens - then.num_accepted_tokens) / num_drafted
    return shares


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None


def _choice(state: ControllerState, mean_kv_budget: float | None) -> ChoiceStatus:
    expected = dict[str, float](state.goodput_by_mode)
    if state.goodput_off > 0.0:
        expected["plain"] = state.goodput_off
    return ChoiceStatus(
        mode=state.mode,
        is_speculating=state.is_speculating,
        reason=state.reason,
        explanation=IN_WORDS[state.reason],
        mean_num_draft_tokens=state.mean_num_draft_tokens,
        num_requests_by_k={k: count for k, count in enumerate(state.num_requests_by_k) if count},
        expected_tokens_per_s=expected.get(state.mode if state.is_speculating else "plain"),
        expected_tokens_per_s_by_mode=expected,
        expected_draft_s=state.draft_s or None,
        expected_verify_s=state.verify_s or None,
        expected_round_s=state.round_s or None,
        expected_acceptance=state.acceptance,
        pool_worth=state.pool_worth,
        mean_kv_budget=mean_kv_budget,
        bounded_by=state.bounded_by,
    )
