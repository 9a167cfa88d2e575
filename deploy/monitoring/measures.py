"""What dashboards and rules both work out of several series."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deploy.monitoring.promql import Scope, share
from deploy.openai.metrics import GENERATING_ROUTES

_GENERATING = f'route=~"{"|".join(GENERATING_ROUTES)}"'
"""Requests that clients are promised something about. /health says 503 whenever nobody is ready, as often as
a balancer asks, and scrapes are answered in the worst outage: they make a share of failures too large or too
small."""


def failed_share(scope: Scope) -> str:
    """Return the share of requests for text that failed for a reason of ours, with a status or in the middle
    of a stream; 0 when there were some and none failed.

    That the time was up is a reason of ours, unless the client gave less than the server does.
    """
    return share(_failed(scope.rate), scope.rate("http_requests", where=_GENERATING))


def turned_away_share(scope: Scope) -> str:
    """Return the share of requests for text that are turned away, of those that API keys let in."""
    return share(num_turned_away(scope), _let_in(scope, _GENERATING))


def num_turned_away(scope: Scope) -> str:
    """Return how many requests for text are turned away per second, with status 429 or by the event of a
    stream that a comment had begun, but for those whose API key is at a limit: these all get the status."""
    answers = _let_in(scope, f'{_GENERATING},status="429"')
    none = f"0 * {scope.rate('http_requests', where=_GENERATING)}"
    return f"({answers} + ({scope.rate('streams_turned_away')} or {none}))"


def num_at_limit(scope: Scope) -> str:
    """Return how many requests for text are answered with 429 per second because their API key is at a
    limit; nothing where there are no keys with limits."""
    return scope.rate("api_key_refusals")


def _let_in(scope: Scope, where: str) -> str:
    answers = scope.rate("http_requests", where=where)
    return _less(answers, f"({num_at_limit(scope)} or 0 * {answers})")


def num_failed(scope: Scope) -> str:
    """Return how many requests for text failed so."""
    return _failed(scope.increase)


def _failed(grown: Callable[..., str]) -> str:
    none = f"0 * {grown('http_requests', where=_GENERATING)}"
    answers = grown("http_requests", where=f'{_GENERATING},status=~"5.."')
    of_clients = grown("http_client_timeouts", where='status="504"')
    failed = _less(f"({answers} or {none})", f"({of_clients} or {none})")
    return f"({failed} + ({grown('streams_failed')} or {none}))"


def _less(whole: str, part: str) -> str:
    # Each of the two is stretched to the window by itself.
    return f"clamp_min({whole} - {part}, 0)"


def accepted_share(scope: Scope, of: str = "spec_decode_num", *, by: Sequence[str] = ()) -> str:
    """Return the share of draft tokens that were accepted.

    Args:
        scope: where and when.
        of: how the names of the counters begin; those by one label end with it.
        by: labels that are kept.
    """
    return scope.ratio(*(_counter(of, what, by) for what in ("accepted_tokens", "draft_tokens")), by=by)


def tokens_per_proposal(scope: Scope, of: str = "spec_decode_num", *, by: Sequence[str] = ()) -> str:
    """Return how many tokens one step of the target brings: 1 + those accepted of a proposal."""
    ratio = scope.ratio(*(_counter(of, what, by) for what in ("accepted_tokens", "drafts")), by=by)
    return f"1 + {ratio}"


def target_utilization(scope: Scope) -> str:
    """Return the share of time in which a target computes, mean over the target groups."""
    working = f"({scope.rate('target_forward_time_seconds')} + {scope.rate('target_sample_time_seconds')})"
    return share(working, scope.gauge("coordinators"))


def draft_utilization(scope: Scope) -> str:
    """Return the share of time in which a draft worker drafts, mean over the draft workers."""
    return share(scope.rate("draft_compute_seconds"), scope.gauge("draft_workers"))


def _counter(of: str, what: str, by: Sequence[str]) -> str:
    return "_".join((of, what, *(("by", *by) if of == "spec_decode_num" and by else ())))
