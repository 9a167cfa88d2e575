"""What was promised to clients, and whether it is kept."""

from __future__ import annotations

from deploy.monitoring.measures import failed_share, num_at_limit, num_turned_away
from deploy.monitoring.objectives import DEFAULT_OBJECTIVES, boundaries_s
from deploy.monitoring.panels import SHOWN, SHOWN_AS_ONE, Dashboard, Limits, ListVariable, Row, line, panel

_KEPT = Limits(poor=0.99, bad=0.95)
_QUANTILES = ((0.5, "median"), (0.9, "p90"), (0.95, "p95"), (0.99, "p99"))
_SHARES = Row(
    title="Kept",
    panels=(
        panel(
            "Answered",
            "Share of requests for text that did not fail for a reason of ours: status below 500, and no "
            "error in the stream, or out of a time that their client has set. Over all of the time that is "
            "shown.",
            "percentunit",
            line(f"1 - {failed_share(SHOWN_AS_ONE)}", "{{job}}"),
            kind="number",
            limits=Limits(poor=0.9999, bad=0.999),
        ),
        panel(
            "First token within $ttft s",
            "Share of choices whose first token came in time, over all of the time that is shown. Choose the "
            "bound above.",
            "percentunit",
            line(SHOWN_AS_ONE.share_within("time_to_first_token_seconds", "$ttft"), "{{job}}"),
            kind="number",
            limits=_KEPT,
        ),
        panel(
            "Next tokens within $itl s",
            "Share of deliveries that followed the one before in time, over all of the time that is shown. "
            "Choose the bound above.",
            "percentunit",
            line(SHOWN_AS_ONE.share_within("inter_token_latency_seconds", "$itl"), "{{job}}"),
            kind="number",
            limits=_KEPT,
        ),
        panel(
            "Failed requests",
            "Share of requests for text answered with a status of 500 or more, or with a stream that ended "
            "in an error; but for those whose client gave them less time than the server does.",
            "percentunit",
            line(failed_share(SHOWN), "{{job}}"),
        ),
        panel(
            "Turned away and out of time",
            "Turned away: refused because the queue was full, or too long for the time that they gave, with "
            "status 429, or by an event of their stream where a comment had begun it with 200. "
            "Out of time: ended because their time was up; those whose client gave them less than the server "
            "does are shown by status, too. Both mean more load than there is room for, or limits that are "
            "too tight. API key at a limit: refused (429) whatever room there is.",
            "reqps",
            line(num_turned_away(SHOWN), "turned away"),
            line(SHOWN.rate("request_timeouts"), "out of time"),
            line(SHOWN.rate("http_client_timeouts", by=("status",)), "the client's own time: {{status}}"),
            line(num_at_limit(SHOWN), "API key at a limit"),
        ),
        panel(
            "In time, over time",
            "The shares above as lines.",
            "percentunit",
            line(SHOWN.share_within("time_to_first_token_seconds", "$ttft"), "first token"),
            line(SHOWN.share_within("inter_token_latency_seconds", "$itl"), "next tokens"),
        ),
    ),
)
_LATENCIES = Row(
    title="Latencies",
    panels=tuple(
        panel(
            title,
            description,
            "s",
            *(line(SHOWN.quantile(quantile, name), legend) for quantile, legend in _QUANTILES),
            width=12,
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
_PARTS = Row(
    title="Where the time of a request goes",
    panels=tuple(
        panel(
            title,
            description,
            "s",
            *(line(SHOWN.quantile(quantile, name), legend) for quantile, legend in _QUANTILES),
            width=6,
        )
        for title, description, name in (
            (
                "Queue",
                "From the arrival at a target group (after a failover, the last one) to its first round.",
                "request_queue_time_seconds",
            ),
            (
                "Reading the prompt",
                "From its first round to its first token.",
                "request_prefill_time_seconds",
            ),
            ("Generating", "From the first token to the end.", "request_decode_time_seconds"),
            ("All rounds", "From its first round to the end.", "request_inference_time_seconds"),
        )
    ),
)

OBJECTIVES = Dashboard(
    uid="drafthouse-slo",
    title="Drafthouse / SLOs",
    description="What was promised to clients, and whether it is kept. The alerts have bounds of their own: "
    "`drafthouse rules write --help`.",
    rows=(_SHARES, _LATENCIES, _PARTS),
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
