"""What dashboards and rules both work out of several series."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deploy.monitoring.promql import Scope


def failed_share(scope: Scope) -> str:
    """Return the share of HTTP requests that failed for a reason of ours, with a status or in the middle of a
    stream; 0 when there were some and none failed."""
    return f"{_failed(scope.rate)} / {scope.rate('http_requests')}"


def num_failed(scope: Scope) -> str:
    """Return how many HTTP requests failed so."""
    return _failed(scope.increase)


def _failed(grown: Callable[..., str]) -> str:
    none = f"0 * {grown('http_requests')}"
    answers = grown("http_requests", where='status=~"5.."')
    return f"(({answers} or {none}) + ({grown('streams_failed')} or {none}))"


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


def _counter(of: str, what: str, by: Sequence[str]) -> str:
    return "_".join((of, what, *(("by", *by) if of == "spec_decode_num" and by else ())))
