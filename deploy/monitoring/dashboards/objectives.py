"""What was promised to clients, and whether it is kept."""

from __future__ import annotations

from deploy.monitoring.objectives import DEFAULT_OBJECTIVES, boundaries_s
from deploy.monitoring.panels import SHOWN, Dashboard, Limits, ListVariable, Panel, Row, line
from deploy.monitoring.recordings import failed_share

_KEPT = Limits(poor=0.99, bad=0.95)
_QUANTILES = ((0.5, "median"), (0.9, "p90"), (0.95, "p95"), (0.99, "p99"))
_SHARES = Row(
    title="Kept",
    panels=(
        Panel(
            title="Answered",
            description="Share of HTTP requests that did not fail for a reason of ours (status below 500).",
            unit="percentunit",
            kind="number",
            limits=Limits(poor=0.9999, bad=0.999),
            queries=(line(f"1 - {failed_share(SHOWN)}", "{{job}}"),),
        ),
        Panel(
            title="First token within $ttft s",
            description="Share of choices whose first token came in time. Choose the bound above.",
            unit="percentunit",
            kind="number",
            limits=_KEPT,
            queries=(line(SHOWN.share_within("time_to_first_token_seconds", "$ttft"), "{{job}}"),),
        ),
        Panel(
            title="Next tokens within $itl s",
            description="Share of deliveries that followed the one before in time. Choose the bound above.",
            unit="percentunit",
            kind="number",
            limits=_KEPT,
            queries=(line(SHOWN.share_within("inter_token_latency_seconds", "$itl"), "{{job}}"),),
        ),
        Panel(
            title="Failed requests",
            description="Share of HTTP requests answered with a status of 500 or more.",
            unit="percentunit",
            queries=(line(failed_share(SHOWN), "{{job}}"),),
        ),
        Panel(
            title="Turned away and out of time",
            description="Requests refused because the queue was full (429), and ended because their time "
            "was up. Both mean more load than there is room for.",
            unit="reqps",
            queries=(
                line(SHOWN.rate("http_requests", where='status="429"'), "turned away"),
                line(SHOWN.rate("request_timeouts"), "out of time"),
            ),
        ),
        Panel(
            title="In time, over time",
            description="The shares above as lines.",
            unit="percentunit",
            queries=(
                line(SHOWN.share_within("time_to_first_token_seconds", "$ttft"), "first token"),
                line(SHOWN.share_within("inter_token_latency_seconds", "$itl"), "next tokens"),
            ),
        ),
    ),
)
_LATENCIES = Row(
    title="Latencies",
    panels=tuple(
        Panel(
            title=title,
            description=description,
            unit="s",
            width=12,
            queries=tuple(line(SHOWN.quantile(quantile, name), legend) for quantile, legend in _QUANTILES),
        )
        for title, description, name in (
            (
                "Time to the first token",
                "From the request's arrival to its first token: the queue and reading the prompt.",
                "time_to_first_token_seconds",
            ),
            (
                "Time between deliveries",
                "Between two deliveries of one stream; several tokens come at once.",
                "inter_token_latency_seconds",
            ),
            (
                "Time per token",
                "Mean over one finished choice, first token left out: how fast a reader sees text grow.",
                "request_time_per_output_token_seconds",
            ),
            (
                "Whole request",
                "From arrival to end, whatever its length.",
                "e2e_request_latency_seconds",
            ),
        )
    ),
)

OBJECTIVES = Dashboard(
    uid="drafthouse-slo",
    title="Drafthouse / SLOs",
    description="What was promised to clients, and whether it is kept. The alerts have bounds of their own: "
    "`drafthouse rules write --help`.",
    rows=(_SHARES, _LATENCIES),
    variables=(
        ListVariable(
            name="ttft",
            label="First token within (s)",
            values=boundaries_s("time_to_first_token_seconds"),
            default=DEFAULT_OBJECTIVES.first_token_bound,
        ),
        ListVariable(
            name="itl",
            label="Next tokens within (s)",
            values=boundaries_s("inter_token_latency_seconds"),
            default=DEFAULT_OBJECTIVES.next_tokens_bound,
        ),
    ),
)
