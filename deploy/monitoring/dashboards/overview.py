"""Is it up, is it fast, is it full: the page to open first."""

from __future__ import annotations

from deploy.monitoring.panels import SHOWN, Dashboard, Limits, Panel, Row, line

_NOW = Row(
    title="Now",
    panels=(
        Panel(
            title="Target groups",
            description="Copies of the model that can be reached. 0: nobody is answered; see "
            "DrafthouseNoTargetGroup.",
            unit="short",
            kind="number",
            width=4,
            limits=Limits(poor=1, bad=0.5),
            queries=(line(SHOWN.gauge("coordinators"), "{{job}}"),),
        ),
        Panel(
            title="Draft workers",
            description="Draft workers that rounds wait for. With 0 the text stays the same and comes "
            "slower.",
            unit="short",
            kind="number",
            width=4,
            queries=(line(SHOWN.gauge("draft_workers"), "{{job}}"),),
        ),
        Panel(
            title="Tokens per second",
            description="Tokens generated, all requests together.",
            unit="tokens/s",
            kind="number",
            width=4,
            queries=(line(SHOWN.rate("generation_tokens"), "{{job}}"),),
        ),
        Panel(
            title="Tokens per proposal",
            description="1 + accepted draft tokens per proposal: how many tokens one step of the target "
            "brings. 1 means that drafting is for nothing.",
            unit="short",
            kind="number",
            width=4,
            limits=Limits(poor=1.5, bad=1.1),
            queries=(
                line(
                    f"1 + {SHOWN.ratio('spec_decode_num_accepted_tokens', 'spec_decode_num_drafts')}",
                    "{{job}}",
                ),
            ),
        ),
        Panel(
            title="Memory in use",
            description="Share of the target's KV blocks that requests hold. Near 1 new requests wait and "
            "running ones are thrown out and computed again.",
            unit="percentunit",
            kind="number",
            width=4,
            limits=Limits(poor=0.85, bad=0.95),
            queries=(line(SHOWN.gauge("kv_cache_usage_perc"), "{{job}}"),),
        ),
        Panel(
            title="Requests waiting",
            description="Requests that have been taken in and not begun. Fine for seconds; if it stays, add "
            "target groups.",
            unit="short",
            kind="number",
            width=4,
            limits=Limits(poor=10, bad=100),
            queries=(line(SHOWN.gauge("num_requests_waiting"), "{{job}}"),),
        ),
    ),
)
_REQUESTS = Row(
    title="Requests",
    panels=(
        Panel(
            title="Answers by status",
            description="HTTP answers per second. 429: the queue is full. 503: nobody is ready. 504: out of "
            "time. 499: the client left.",
            unit="reqps",
            queries=(line(SHOWN.rate("http_requests", by=("status",)), "{{status}}"),),
        ),
        Panel(
            title="Requests in the engine",
            description="Running: taking part in rounds. Waiting: in the queue. Open: HTTP requests being "
            "answered.",
            unit="short",
            queries=(
                line(SHOWN.gauge("num_requests_running"), "running"),
                line(SHOWN.gauge("num_requests_waiting"), "waiting"),
                line(SHOWN.gauge("http_requests_in_progress"), "open"),
            ),
        ),
        Panel(
            title="How requests ended",
            description="stop: the model was done; length: its limit; abort: the client left; error: it "
            "failed. Choices whose client left before the end, or did not read, are counted by the door; "
            "refused are those for whom the queue was full, or too long, or who had to leave it.",
            unit="reqps",
            queries=(
                line(SHOWN.rate("request_success", by=("finished_reason",)), "{{finished_reason}}"),
                line(SHOWN.rate("http_aborted_choices"), "client left"),
                line(SHOWN.rate("http_slow_readers"), "client did not read"),
                line(SHOWN.rate("request_timeouts"), "out of time"),
                line(SHOWN.rate("requests_refused", by=("reason",)), "refused: {{reason}}"),
            ),
        ),
    ),
)
_SPEED = Row(
    title="Speed, as clients see it",
    panels=(
        Panel(
            title="Time to the first token",
            description="From the request's arrival to its first token: the queue and reading the prompt. "
            "Beside it, what one would wait in the queue that came now.",
            unit="s",
            queries=(
                *(
                    line(SHOWN.quantile(quantile, "time_to_first_token_seconds"), name)
                    for quantile, name in ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))
                ),
                line(SHOWN.gauge("queue_wait_seconds"), "queue, now"),
            ),
        ),
        Panel(
            title="Time between deliveries",
            description="Between two deliveries of one stream. Speculation delivers several tokens at once, "
            "so this is longer than the time per token.",
            unit="s",
            queries=tuple(
                line(SHOWN.quantile(quantile, "inter_token_latency_seconds"), name)
                for quantile, name in ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))
            ),
        ),
        Panel(
            title="Whole request",
            description="From arrival to end. Long answers take long: compare with the same hour of another "
            "day.",
            unit="s",
            queries=tuple(
                line(SHOWN.quantile(quantile, "e2e_request_latency_seconds"), name)
                for quantile, name in ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))
            ),
        ),
        Panel(
            title="Tokens read and written",
            description="Prompt tokens of requests that were taken in, and tokens generated.",
            unit="tokens/s",
            width=12,
            queries=(
                line(SHOWN.rate("prompt_tokens"), "prompt"),
                line(SHOWN.rate("generation_tokens"), "generated"),
            ),
        ),
        Panel(
            title="What fails inside",
            description="Failures that clients do not see, because requests go on elsewhere; lost streams "
            "are those that did not. Anything that does not go back to 0 wants a look at the log.",
            unit="ops",
            width=12,
            queries=(
                line(SHOWN.rate("target_losses"), "target workers lost"),
                line(SHOWN.rate("replays"), "requests replayed"),
                line(SHOWN.rate("failovers"), "failovers"),
                line(SHOWN.rate("lost_streams"), "streams lost"),
            ),
        ),
    ),
)

OVERVIEW = Dashboard(
    uid="drafthouse-overview",
    title="Drafthouse / Overview",
    description="Is it up, is it fast, is it full. Speculation, pools, objectives and long contexts have "
    "pages of their own.",
    rows=(_NOW, _REQUESTS, _SPEED),
)
