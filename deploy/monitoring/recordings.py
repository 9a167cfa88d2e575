"""What alerts compare, recorded once: dividing counters of many series anew for each alert would cost "
"more."""

from __future__ import annotations

from deploy.monitoring.objectives import Objectives
from deploy.monitoring.promql import Scope
from deploy.monitoring.rule import Recording

FAILED = {window: f"job:drafthouse_http_failed:ratio_rate{window}" for window in ("5m", "30m", "1h", "6h")}
"""By window."""
FIRST_TOKEN_IN_TIME = "job:drafthouse_first_token_in_time:ratio_rate5m"
NEXT_TOKENS_IN_TIME = "job:drafthouse_next_tokens_in_time:ratio_rate5m"
ACCEPTANCE = "job:drafthouse_draft_token_acceptance:ratio_rate30m"
_5M, _30M = Scope(window="5m"), Scope(window="30m")


def failed_share(scope: Scope) -> str:
    """Return the share of HTTP requests that failed for a reason of ours; 0 when there were some and none "
    "failed."""
    requests = scope.rate("http_requests")
    failed = scope.rate("http_requests", where='status=~"5.."')
    return f"({failed} or 0 * {requests}) / {requests}"


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
        Recording(
            name=ACCEPTANCE,
            expression=_30M.ratio("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"),
        ),
        Recording(
            name="job:drafthouse_tokens_per_proposal:ratio_rate5m",
            expression=f"1 + {_5M.ratio('spec_decode_num_accepted_tokens', 'spec_decode_num_drafts')}",
        ),
        Recording(
            name="job:drafthouse_drafting_hidden:ratio_rate5m",
            expression=_5M.ratio("drafting_hidden_time_seconds", "drafting_time_seconds"),
        ),
        Recording(name="job:drafthouse_generation_tokens:rate5m", expression=_5M.rate("generation_tokens")),
    )
