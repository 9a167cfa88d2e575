"""The alerts. Every one has a section of its name in docs/operations/alerts.md."""

from __future__ import annotations

from deploy.monitoring.measures import num_failed, turned_away_share
from deploy.monitoring.objectives import Objectives
from deploy.monitoring.promql import Scope
from deploy.monitoring.recordings import ACCEPTANCE, FAILED, FIRST_TOKEN_IN_TIME, NEXT_TOKENS_IN_TIME
from deploy.monitoring.rule import Alert, Severity

_5M, _10M, _15M, _30M, _6H = (
    Scope(window=window, tells_models=True) for window in ("5m", "10m", "15m", "30m", "6h")
)
_OF_TARGET, _OF_DRAFT = 'part="target"', 'part="draft"'
_COMPILE_FAILED, _COMPILE_PENDING = 'compile="failed"', 'compile="pending"'
_NO_ROOM, _LATE = 'reason=~"place|memory"', 'reason="late"'
_WITH_DRAFTS = 'k!="0"'

_FEW_FAILURES = 2.5
"""In the long window: three are more. An increase is that of the samples, stretched to the whole window."""
_NEARLY_ALL = 0.9
"""A share of requests that is a disaster whatever was promised."""
_WERE_THERE = _6H.lowest("http_requests_in_progress")
"""Jobs, of the last hours."""
_AT_REST = (
    # Where there may be none, requests wait for the first to load its model, which takes minutes.
    f"({_5M.gauge('scales_to_zero', where=_OF_TARGET)} > 0 unless "
    f"{_10M.lowest('num_requests_without_group')} > 0)"
)
"""There need not be a target group: nobody asks for one, or not for long."""
_FORTNIGHT_S = 14 * 24 * 3600
"""Who renews certificates by themselves does it a month before they end."""


def _burns(
    name: str, windows: tuple[str, str], num_budgets: float, severity: Severity, objectives: Objectives
) -> Alert:
    """Return the alert that errors use up the budget too fast, in a short window and in a long one.

    14.4 budgets for an hour are 2 % of what 30 days may have, 6 for six hours 5 %: Google's SRE workbook,
    chapter 5.
    """
    short, long = windows
    # Where there are few requests, one that fails is a share of them that looks like a disaster.
    not_one_alone = f"{num_failed(Scope(window=long))} > {_FEW_FAILURES}"
    allowed = num_budgets * (1 - objectives.share_answered)
    often = f"{num_budgets:g} times as often as the objective of {objectives.share_answered:.6g} allows"
    if allowed > _NEARLY_ALL:  # so many times as many as may fail would be more than there are
        allowed, often = _NEARLY_ALL, f"{_NEARLY_ALL:.0%} of them or more"
    share = f"{allowed:.6g}"
    return Alert(
        name=f"DrafthouseErrorBudgetBurns{name}",
        expression=f"{FAILED[short]} > {share} and {FAILED[long]} > {share} and {not_one_alone}",
        lasting="2m",
        severity=severity,
        summary="{{ $labels.job }}: {{ $value | humanizePercentage }} of requests fail",
        description="Requests for text to {{ $labels.job }} fail, with status 500 or more or in the middle "
        f"of a stream, {often}, for {short} and for {long}. Those that ran out of a time which their client "
        "has set, less than the server's own, do not count.",
    )


def _without_drafts(scope: Scope, reason: str) -> str:
    """Return the share, of the requests that rounds were to have drafts for, that went without for a reason.

    `reason`: label matchers.
    """
    went_without = scope.rate("fallback_requests_by_reason", where=reason)
    return f"{went_without} / {scope.rate('speculation_request_rounds', where=_WITH_DRAFTS)}"


def availability_alerts(objectives: Objectives) -> tuple[Alert, ...]:
    """Return the alerts about requests that fail, or will on a day that is known."""
    return (
        Alert(
            name="DrafthouseMetricsAbsent",
            # Of several jobs one may be gone: nothing else fires for it, since all else compares what is
            # there. After six hours it counts as taken away on purpose.
            expression=f"({_WERE_THERE} unless {_5M.gauge('http_requests_in_progress')}) or "
            f"absent({_WERE_THERE})",
            lasting="5m",
            severity="critical",
            summary="No metrics of Drafthouse{{ with $labels.job }} ({{ . }}){{ end }}",
            description="Prometheus has had no metrics of any ingress"
            "{{ with $labels.job }} of {{ . }}{{ end }} for five minutes. Either nothing is served, or "
            "Prometheus looks in the wrong place.",
        ),
        Alert(
            name="DrafthouseNoTargetGroup",
            expression=f"{_5M.gauge('coordinators_with_target')} < 1 unless {_AT_REST}",
            lasting="1m",
            severity="critical",
            summary="{{ $labels.job }} has no target group",
            description="The ingress of {{ $labels.job }} reaches no coordinator that has a target. Where it "
            "reaches none, every request is answered with 503; where all that it reaches have lost their "
            "target and load another, requests and streams wait for that.",
        ),
        _burns("Fast", ("5m", "1h"), 14.4, "critical", objectives),
        _burns("Slowly", ("30m", "6h"), 6.0, "warning", objectives),
        Alert(
            name="DrafthouseHeadAway",
            expression=f"{_5M.gauge('directory_silent_seconds')} > 30",
            lasting="2m",
            severity="critical",
            summary="Ray's head node does not answer {{ $labels.job }}",
            description="The directory of {{ $labels.job }}, on Ray's head node, has not answered for "
            "{{ $value | humanizeDuration }}. Requests are served; nothing that dies is replaced. "
            "Without a head that comes back the other nodes end, too.",
        ),
        Alert(
            name="DrafthouseIngressesDie",
            # Between 2 and 3, as _FEW_FAILURES.
            expression=f"{_30M.increase('ingress_losses')} > 2.5",
            lasting="0m",
            severity="critical",
            summary="{{ $labels.job }} keeps losing ingresses",
            description="{{ $labels.job }} has lost {{ $value | humanize }} ingresses in half an hour. What "
            "they were answering broke off; streams can be gone on with (Last-Event-ID), nothing else. No "
            "error budget has that in it: who would have counted it was gone.",
        ),
        Alert(
            name="DrafthouseStreamsLost",
            expression=f"{_10M.increase('lost_streams')} > 0",
            lasting="0m",
            severity="critical",
            summary="{{ $labels.job }} has lost streams",
            description="Requests of {{ $labels.job }} ended in an error, because no target group was there "
            "for longer than cluster.failover_timeout_s.",
        ),
        Alert(
            name="DrafthouseTurnsAway",
            expression=f"{turned_away_share(_5M)} > 0.05",
            lasting="5m",
            severity="warning",
            summary="{{ $labels.job }} turns {{ $value | humanizePercentage }} of requests away",
            description="The queue of {{ $labels.job }} is full, or too long for the time that clients give, "
            "and they get 429, or such an event where their stream had begun. Add target groups, or accept "
            "less. Requests of API keys at a limit of their own do not count.",
        ),
        Alert(
            name="DrafthouseOutOfTime",
            expression=f"{_10M.rate('request_timeouts')} / {_10M.rate('request_success')} > 0.01",
            lasting="10m",
            severity="warning",
            summary="{{ $labels.job }} ends requests because their time is up",
            description="For each request of {{ $labels.job }} that ends, {{ $value | humanize }} end for "
            "want of time (timeout_s, X-Request-Timeout, http.request_timeout_s).",
        ),
        Alert(
            name="DrafthouseCertificateExpires",
            expression=f"{_5M.least('tls_certificate_expiry_timestamp_seconds')} - time() < {_FORTNIGHT_S}",
            lasting="1h",
            severity="warning",
            summary="{{ $labels.job }}: the TLS certificate ends in {{ $value | humanizeDuration }}",
            description="Clients of {{ $labels.job }} are shown a TLS certificate that ends in {{ $value | "
            "humanizeDuration }}. After that they fail, all of them. It has not been renewed, or what was "
            "renewed has not come to the server.",
        ),
    )


def latency_alerts(objectives: Objectives) -> tuple[Alert, ...]:
    """Return the alerts about requests that take long."""
    return (
        Alert(
            name="DrafthouseFirstTokenLate",
            expression=f"{FIRST_TOKEN_IN_TIME} < {objectives.share_in_time:g}",
            lasting="10m",
            severity="warning",
            summary="{{ $labels.job }}: first tokens come late",
            description="Of the first tokens of {{ $labels.job }} only {{ $value | humanizePercentage }} "
            f"came within {objectives.first_token_s:g} s.",
        ),
        Alert(
            name="DrafthouseTokensSlow",
            expression=f"{NEXT_TOKENS_IN_TIME} < {objectives.share_in_time:g}",
            lasting="10m",
            severity="warning",
            summary="{{ $labels.job }}: tokens come slowly",
            description="Of the deliveries of {{ $labels.job }} only {{ $value | humanizePercentage }} "
            f"followed within {objectives.next_tokens_s:g} s of the one before.",
        ),
        Alert(
            name="DrafthouseQueueLong",
            expression=f"{_5M.gauge('num_requests_waiting')} > {_5M.gauge('num_requests_running')}",
            lasting="10m",
            severity="warning",
            summary="{{ $labels.job }} has {{ $value }} requests waiting",
            description="For ten minutes more requests have been waiting at {{ $labels.job }} than running.",
        ),
        Alert(
            name="DrafthouseWorksTwice",
            expression=f"{_10M.ratio('num_recomputed_tokens', 'generation_tokens')} > 0.2",
            lasting="10m",
            severity="warning",
            summary="{{ $labels.job }} is short of KV memory",
            description="{{ $labels.job }} throws requests out of its KV cache and computes {{ $value | "
            "humanize }} tokens again for each one that it generates.",
        ),
    )


def speculation_alerts() -> tuple[Alert, ...]:
    """Return the alerts about drafting."""
    return (
        Alert(
            name="DrafthouseDraftPoolEmpty",
            expression=f"{_5M.gauge('draft_workers')} < 1 unless "
            f"{_5M.gauge('scales_to_zero', where=_OF_DRAFT)} > 0",
            lasting="5m",
            severity="warning",
            summary="{{ $labels.job }} has no draft worker",
            description="The draft pool of {{ $labels.job }} is empty. Answers are the same and come slower.",
        ),
        Alert(
            name="DrafthouseDraftsLate",
            # A worker that was late is not waited for until it is heard again, and rests the longer the
            # oftener it is late: the slower it is, the fewer deadlines it misses. Then requests go without.
            expression=f"{_10M.ratio('draft_deadline_misses', 'rounds')} > 0.05 or "
            f"{_without_drafts(_10M, _LATE)} > 0.05",
            lasting="10m",
            severity="warning",
            summary="{{ $labels.job }}: draft workers answer too late",
            description="In {{ $value | humanizePercentage }} of the rounds of {{ $labels.job }}, or for so "
            "many of the requests that rounds are to have drafts for, a draft worker was too late.",
        ),
        Alert(
            name="DrafthouseDraftPoolFull",
            # Memory may be short while places are free.
            expression=f"{_without_drafts(_15M, _NO_ROOM)} > 0.05",
            lasting="15m",
            severity="info",
            summary="{{ $labels.job }}: the draft pool is full",
            description="Draft workers of {{ $labels.job }} have no place, or no memory, for {{ $value | "
            "humanizePercentage }} of the requests that rounds are to have drafts for. These go on without.",
        ),
        Alert(
            name="DrafthouseDraftPoolNotWorth",
            # What it is worth is the last that was found: at rest it stays what it was.
            expression=f"{_5M.gauge('speculation_pool_worth')} <= 1 and {_5M.gauge('draft_workers')} > 0 and "
            f"{_30M.rate('rounds')} > 0",
            lasting="1h",
            severity="info",
            summary="{{ $labels.job }}: draft workers are not worth their devices",
            description="For an hour speculation has not made {{ $labels.job }} faster than plain decoding "
            "({{ $value | humanize }} times).",
        ),
        Alert(
            name="DrafthouseAcceptanceFell",
            expression=f"{ACCEPTANCE} < 0.7 * avg_over_time({ACCEPTANCE}[1d])",
            lasting="30m",
            severity="warning",
            summary="{{ $labels.job }}: fewer drafts are accepted than yesterday",
            description="{{ $value | humanizePercentage }} of draft tokens of {{ $labels.job }} are "
            "accepted, less than 0.7 of the last day's mean.",
        ),
        Alert(
            name="DrafthouseInvalidDrafts",
            expression=f"{_10M.increase('invalid_drafts_dropped')} > 0",
            lasting="0m",
            severity="warning",
            summary="{{ $labels.job }} gets drafts that make no sense",
            description="Draft workers of {{ $labels.job }} answer what nobody asked, or with nonsense. It "
            "is dropped; the text is right.",
        ),
        Alert(
            name="DrafthouseGrammarsNotKnown",
            expression=f"{_15M.increase('draft_grammar_failures')} > 0",
            lasting="0m",
            severity="info",
            summary="{{ $labels.job }}: draft models cannot follow grammars",
            description="Draft models of {{ $labels.job }} could not compile grammars that the target "
            "could. Their drafts are accepted less; the text is right.",
        ),
        Alert(
            name="DrafthouseLossyTokens",
            expression=f"{_10M.increase('spec_decode_num_lossy_tokens')} > 0",
            lasting="0m",
            severity="warning",
            summary="{{ $labels.job }} commits tokens by a lossy rule",
            description="Text of {{ $labels.job }} is not exactly the target's: a lossy verification rule "
            "is allowed.",
        ),
    )


def worker_alerts() -> tuple[Alert, ...]:
    """Return the alerts about processes that die, are missing, or do not become ready."""
    return (
        Alert(
            name="DrafthouseTargetGroupsMissing",
            expression=f"{_5M.gauge('target_groups_wanted')} - {_5M.gauge('coordinators_with_target')} > 0",
            lasting="15m",
            severity="warning",
            summary="{{ $labels.job }} has fewer target groups than it should: {{ $value }} are missing",
            description="For fifteen minutes {{ $value }} target groups of {{ $labels.job }}, configured or "
            "asked for by autoscaling, have not been there. Ray finds no place for them, or they die.",
        ),
        Alert(
            name="DrafthouseDraftWorkersMissing",
            expression=f"{_5M.gauge('draft_workers_wanted')} - {_5M.gauge('draft_workers')} > 0",
            lasting="15m",
            severity="warning",
            summary="{{ $labels.job }} has fewer draft workers than it should: {{ $value }} are missing",
            description="For fifteen minutes {{ $value }} draft workers of {{ $labels.job }}, configured or "
            "asked for by autoscaling, have not been there or not answered. Text is the same and comes "
            "slower.",
        ),
        Alert(
            name="DrafthouseTargetsDie",
            # Between 2 and 3, as _FEW_FAILURES.
            expression=f"{_30M.increase('target_losses')} > 2.5",
            lasting="0m",
            severity="warning",
            summary="{{ $labels.job }} keeps losing target workers",
            description="{{ $labels.job }} has lost {{ $value | humanize }} target workers in half an hour. "
            "Streams go on, but pause.",
        ),
        Alert(
            name="DrafthouseFailovers",
            expression=f"{_15M.increase('failovers')} > 0",
            lasting="0m",
            severity="warning",
            summary="Streams of {{ $labels.job }} went on at another target group",
            description="A coordinator of {{ $labels.job }} has gone. Its {{ $value | humanize }} streams "
            "go on at another one, after a pause.",
        ),
        Alert(
            name="DrafthouseCompileFailed",
            expression=f"{_5M.gauge('num_workers', where=_COMPILE_FAILED)} > 0",
            lasting="5m",
            severity="warning",
            summary="{{ $labels.job }}: workers run without compiled forward",
            description="{{ $value }} workers of {{ $labels.job }} could not compile their forward, and run "
            "eagerly: slower.",
        ),
        Alert(
            name="DrafthouseCompilePending",
            expression=f"{_5M.gauge('num_workers', where=_COMPILE_PENDING)} > 0",
            lasting="30m",
            severity="info",
            summary="{{ $labels.job }}: workers have not finished compiling",
            description="{{ $value }} workers of {{ $labels.job }} have had something left to compile for "
            "half an hour.",
        ),
        Alert(
            name="DrafthouseMessagesDropped",
            expression=f"{_10M.rate('channel_messages_dropped')} > 0.1",
            lasting="10m",
            severity="warning",
            summary="{{ $labels.job }} drops messages between ingresses and coordinators",
            description="{{ $value | humanize }} messages per second between ingresses and coordinators of "
            "{{ $labels.job }}, or among its ingresses, are dropped. Streams repair themselves, and pause "
            "for it.",
        ),
    )
