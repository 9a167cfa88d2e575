"""Is it up, is it fast, is it full: the page to open first."""

from __future__ import annotations

from deploy.monitoring.measures import tokens_per_proposal
from deploy.monitoring.panels import SHOWN, Dashboard, Limits, Row, line, panel

_NOW = Row(
    title="Now",
    panels=(
        panel(
            "Target groups",
            "Copies of the model that can be reached and have a target. 0: nobody is answered (see "
            "DrafthouseNoTargetGroup), or, with min_groups: 0, nobody asks.",
            "short",
            line(SHOWN.gauge("coordinators_with_target"), "{{job}}"),
            kind="number",
            width=4,
            limits=Limits(poor=1, bad=0.5),
        ),
        panel(
            "Draft workers",
            "Draft workers that rounds wait for. With 0 the text stays the same and comes slower.",
            "short",
            line(SHOWN.gauge("draft_workers"), "{{job}}"),
            kind="number",
            width=4,
        ),
        panel(
            "Tokens per second",
            "Tokens generated, all requests together.",
            "tokens/s",
            line(SHOWN.rate("generation_tokens"), "{{job}}"),
            kind="number",
            width=4,
        ),
        panel(
            "Tokens per proposal",
            "1 + accepted draft tokens per proposal: how many tokens one step of the target "
            "brings. 1 means that drafting is for nothing.",
            "short",
            line(
                tokens_per_proposal(SHOWN),
                "{{job}}",
            ),
            kind="number",
            width=4,
            limits=Limits(poor=1.5, bad=1.1),
        ),
        panel(
            "Memory in use",
            "Share of the target's KV blocks that requests hold. Near 1 new requests wait and "
            "running ones are thrown out and computed again.",
            "percentunit",
            line(SHOWN.gauge("kv_cache_usage_perc"), "{{job}}"),
            kind="number",
            width=4,
            limits=Limits(poor=0.85, bad=0.95),
        ),
        panel(
            "Requests waiting",
            "Requests that have been taken in and not begun. Fine for seconds; if it stays, add "
            "target groups.",
            "short",
            line(SHOWN.gauge("num_requests_waiting"), "{{job}}"),
            kind="number",
            width=4,
            limits=Limits(poor=10, bad=100),
        ),
    ),
)
_REQUESTS = Row(
    title="Requests",
    panels=(
        panel(
            "Answers by status",
            "HTTP answers per second. 429: the queue is full or too long, or an API key is at its limit. "
            "503: nobody is ready. 504: out of time. 499: the client left. Of all routes: /health says 503, "
            "too. Streams that fail on the way have had status 200, and are shown by their error's code; so "
            "have those that are turned away after a comment.",
            "reqps",
            line(SHOWN.rate("http_requests", by=("status",)), "{{status}}"),
            line(SHOWN.rate("streams_failed", by=("code",)), "stream: {{code}}"),
            line(SHOWN.rate("streams_turned_away"), "stream: turned away"),
        ),
        panel(
            "Requests in the engine",
            "Running: taking part in rounds. Waiting: in the queue. Without a group: waiting for a target "
            "group to be there at all. Open: HTTP requests being answered.",
            "short",
            line(SHOWN.gauge("num_requests_running"), "running"),
            line(SHOWN.gauge("num_requests_waiting"), "waiting"),
            line(SHOWN.gauge("num_requests_without_group"), "without a group"),
            line(SHOWN.gauge("http_requests_in_progress"), "open"),
        ),
        panel(
            "How requests ended",
            "stop: the model was done; length: its limit; abort: the client left; error: it "
            "failed. Choices whose client left before the end, or did not read, are counted by the door; "
            "refused are those for whom the queue was full, or too long, or who had to leave it.",
            "reqps",
            line(SHOWN.rate("request_success", by=("finished_reason",)), "{{finished_reason}}"),
            line(SHOWN.rate("http_aborted_choices"), "client left"),
            line(SHOWN.rate("http_slow_readers"), "client did not read"),
            line(SHOWN.rate("request_timeouts"), "out of time"),
            line(SHOWN.rate("requests_refused", by=("reason",)), "refused: {{reason}}"),
            line(SHOWN.rate("requests_refused_at_door", by=("reason",)), "refused at the door: {{reason}}"),
        ),
    ),
)
_SPEED = Row(
    title="Speed, as clients see it",
    panels=(
        panel(
            "Time to the first token",
            "From the request's arrival to its first token: the queue and reading the prompt. "
            "Beside it, what one would wait in the queue that came now.",
            "s",
            *(
                line(SHOWN.quantile(quantile, "time_to_first_token_seconds"), name)
                for quantile, name in ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))
            ),
            line(SHOWN.gauge("queue_wait_seconds"), "queue, now"),
        ),
        panel(
            "Time between deliveries",
            "Between two deliveries of one stream. Speculation delivers several tokens at once, "
            "so this is longer than the time per token.",
            "s",
            *(
                line(SHOWN.quantile(quantile, "inter_token_latency_seconds"), name)
                for quantile, name in ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))
            ),
        ),
        panel(
            "Whole request",
            "From arrival to end. Long answers take long: compare with the same hour of another day.",
            "s",
            *(
                line(SHOWN.quantile(quantile, "e2e_request_latency_seconds"), name)
                for quantile, name in ((0.5, "median"), (0.95, "p95"), (0.99, "p99"))
            ),
        ),
        panel(
            "Tokens read and written",
            "Prompt tokens of requests that were taken in, and tokens generated.",
            "tokens/s",
            line(SHOWN.rate("prompt_tokens"), "prompt"),
            line(SHOWN.rate("generation_tokens"), "generated"),
            width=12,
        ),
        panel(
            "What fails inside",
            "Failures that clients do not see, because requests go on elsewhere; lost streams "
            "are those that did not, and what a lost ingress was answering broke off. "
            "Anything that does not go back to 0 wants a look at the log.",
            "ops",
            line(SHOWN.rate("target_losses"), "target workers lost"),
            line(SHOWN.rate("replays"), "requests replayed"),
            line(SHOWN.rate("failovers"), "failovers"),
            line(SHOWN.rate("lost_streams"), "streams lost"),
            line(SHOWN.rate("ingress_losses"), "ingresses lost"),
            width=12,
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
