"""What alerts compare, recorded once: dividing counters of many series anew for each alert would cost
more."""

from __future__ import annotations

from deploy.monitoring.measures import (
    accepted_share,
    draft_utilization,
    failed_share,
    target_utilization,
    tokens_per_proposal,
)
from deploy.monitoring.objectives import Objectives
from deploy.monitoring.promql import Scope
from deploy.monitoring.rule import Recording

FAILED = {window: f"job:drafthouse_http_failed:ratio_rate{window}" for window in ("5m", "30m", "1h", "6h")}
"""By window."""
FIRST_TOKEN_IN_TIME = "job:drafthouse_first_token_in_time:ratio_rate5m"
NEXT_TOKENS_IN_TIME = "job:drafthouse_next_tokens_in_time:ratio_rate5m"
ACCEPTANCE = "job:drafthouse_draft_token_acceptance:ratio_rate30m"
_5M, _30M = (Scope(window=window, tells_models=True) for window in ("5m", "30m"))


def recordings(objectives: Objectives) -> tuple[Recording, ...]:
    """Return what is recorded."""
    return (
        *(
            Recording(name=name, expression=failed_share(Scope(window=window)))
            for window, name in FAILED.items()
        ),
        Recording(
            name=FIRST_TOKEN_IN_TIME,
            expression=_5M.share_within("time_to_first_token_seconds", objectives.first_token_bound),
        ),
        Recording(
            name=NEXT_TOKENS_IN_TIME,
            expression=_5M.share_within("inter_token_latency_seconds", objectives.next_tokens_bound),
        ),
        Recording(name=ACCEPTANCE, expression=accepted_share(_30M)),
        Recording(
            name="job:drafthouse_tokens_per_proposal:ratio_rate5m",
            expression=tokens_per_proposal(_5M),
        ),
        Recording(
            name="job:drafthouse_drafting_hidden:ratio_rate5m",
            expression=_5M.ratio("drafting_hidden_time_seconds", "drafting_time_seconds"),
        ),
        Recording(name="job:drafthouse_target_utilization:ratio_rate5m", expression=target_utilization(_5M)),
        Recording(name="job:drafthouse_draft_utilization:ratio_rate5m", expression=draft_utilization(_5M)),
        Recording(name="job:drafthouse_generation_tokens:rate5m", expression=_5M.rate("generation_tokens")),
    )
