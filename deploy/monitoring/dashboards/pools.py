"""Target groups and draft workers: who is there, how busy, what is dropped."""

from __future__ import annotations

from deploy.monitoring.measures import draft_utilization, target_utilization
from deploy.monitoring.panels import SHOWN, Dashboard, Panel, Query, Row, SeriesVariable, Unit, line, panel
from deploy.monitoring.promql import PREFIX

_CHOSEN = 'target_group=~"$target_group"'


def _of_groups(title: str, description: str, unit: Unit, expression: str) -> Panel:
    queries: tuple[Query, ...] = (line(expression, "{{target_group}}"),)
    return panel(
        title,
        description,
        unit,
        *queries,
    )


def _gauge(name: str) -> str:
    return SHOWN.gauge(f"target_group_{name}", by=("target_group",), where=_CHOSEN)


def _rate(name: str) -> str:
    return SHOWN.rate(f"target_group_{name}", by=("target_group",), where=_CHOSEN)


def _ratio(part: str, whole: str) -> str:
    names = (f"target_group_{name}" for name in (part, whole))
    return SHOWN.ratio(*names, by=("target_group",), where=_CHOSEN)


_GROUPS = Row(
    title="Target groups",
    panels=(
        _of_groups(
            "Requests running",
            "By target group. Very uneven for minutes: clients with one long shared prefix, or a group "
            "that is slow.",
            "short",
            _gauge("num_requests_running"),
        ),
        _of_groups(
            "Requests waiting",
            "By target group. One group's queue grows while others have none: that group is slow; look at "
            "its rounds.",
            "short",
            _gauge("num_requests_waiting"),
        ),
        _of_groups(
            "Memory in use",
            "Share of KV blocks held, by target group. Near 1 for minutes: requests are thrown out and "
            "computed again.",
            "percentunit",
            _gauge("kv_cache_usage_perc"),
        ),
        _of_groups(
            "Tokens per second", "Generated, by target group.", "tokens/s", _rate("generation_tokens")
        ),
        _of_groups(
            "Seconds per round",
            "Mean, by target group. Groups on equal machines should be alike.",
            "s",
            _ratio("round_time_seconds", "rounds"),
        ),
        _of_groups(
            "Accepted draft tokens",
            "Share, by target group.",
            "percentunit",
            _ratio("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"),
        ),
        panel(
            "Targets at work",
            "Share of time in which a target computes, mean over the target groups. Low beside "
            "requests that wait: rounds wait for drafts, or the coordinator is what is slow.",
            "percentunit",
            line(target_utilization(SHOWN), "{{job}}"),
            line(SHOWN.gauge("target_utilization"), "{{job}}, last ten seconds"),
            width=12,
        ),
        panel(
            "Groups that can be reached",
            "And how many there should be, as configured or as autoscaling has decided last; workers by what "
            "has become of compiling their forward. failed: they run eagerly, slower. May be none: 1 where "
            "there need be no such workers while nobody asks (min_groups or min_workers: 0).",
            "short",
            line(SHOWN.gauge("coordinators"), "target groups"),
            line(SHOWN.gauge("coordinators_with_target"), "target groups that have a target"),
            line(SHOWN.gauge("target_groups_wanted"), "target groups wanted"),
            line(SHOWN.gauge("num_workers", by=("part", "compile")), "{{part}} workers: {{compile}}"),
            line(SHOWN.gauge("scales_to_zero", by=("part",)), "{{part}} workers may be none"),
            width=12,
        ),
        panel(
            "Why a group was chosen",
            "Requests by reason. With texts that begin alike, few that follow their prefix mean "
            "that groups forget it (memory) or that the group which has it is too busy.",
            "ops",
            line(SHOWN.rate("routed_requests", by=("reason",)), "{{reason}}"),
        ),
        panel(
            "Prompt tokens routed to where they are cached",
            "Tokens per second that a chosen group is thought to have read already.",
            "tokens/s",
            line(SHOWN.rate("routed_prefix_tokens"), "tokens"),
        ),
        panel(
            "Losses",
            "Target workers lost, requests that went on with a new one, requests that went on "
            "at another group, and streams that ended because nobody was there.",
            "ops",
            line(SHOWN.rate("target_losses"), "target workers lost"),
            line(SHOWN.rate("replays"), "replays"),
            line(SHOWN.rate("failovers"), "failovers"),
            line(SHOWN.rate("lost_streams"), "lost streams"),
        ),
        panel(
            "The directory has not answered for",
            "It is on Ray's head node. While it is away nothing that dies is replaced, and nothing scales.",
            "s",
            line(SHOWN.gauge("directory_silent_seconds"), "{{job}}"),
        ),
        panel(
            "Requests submitted once more",
            "By epoch, the number of the attempt beyond the first: after the loss of their group, or where "
            "one had no room for them. Grows only while something is lost or full.",
            "ops",
            line(SHOWN.rate("request_epochs", by=("epoch",), where='epoch!="0"'), "epoch {{epoch}}"),
        ),
        panel(
            "Time without a target worker",
            "Share of time, added up over the target groups.",
            "percentunit",
            line(SHOWN.rate("target_recovery_seconds"), "{{job}}"),
        ),
    ),
)
_DRAFTERS = Row(
    title="Draft pool",
    panels=(
        panel(
            "Draft workers, and places in use",
            "Workers that rounds wait for, how many there should be, as configured or as autoscaling has "
            "decided last, and requests in the pool over those that it takes.",
            "short",
            line(SHOWN.gauge("draft_workers"), "workers"),
            line(SHOWN.gauge("draft_workers_wanted"), "workers wanted"),
            line(SHOWN.gauge("draft_pool_usage_perc"), "share of places in use"),
        ),
        panel(
            "Drafters at work",
            "Seconds of drafting per second, all draft workers together: at the number of "
            "workers they do nothing else. Beside it, the share of a worker's time that this is (a batch for "
            "several target groups counts for each), the share of its time in which an engine without a pool "
            "drafts, and seconds per second in which rounds waited for drafts.",
            "short",
            line(SHOWN.rate("draft_compute_seconds"), "drafting"),
            line(draft_utilization(SHOWN), "share of each worker's time"),
            line(SHOWN.mean_gauge("draft_utilization"), "the same, last ten seconds"),
            line(SHOWN.gauge("local_draft_utilization"), "without a pool: share of time, last ten seconds"),
            line(SHOWN.rate("draft_wait_seconds"), "waited for"),
        ),
        panel(
            "Requests without drafts",
            "Requests that a round went on without the pool's drafts for, and why. none: there is no worker; "
            "place, memory: no worker has any for it; too_long: for the draft model; behind: its worker has "
            "yet to read it; late: no answer in time; miss: nothing was drafted for what came true "
            "(draft_ahead); forgotten: its worker has to begin anew; invalid: nonsense. Then what is counted "
            "once a request, or worker, and not once a round.",
            "ops",
            line(SHOWN.rate("fallback_requests"), "without drafts"),
            line(SHOWN.rate("fallback_requests_by_reason", by=("reason",)), "{{reason}}"),
            line(SHOWN.rate("spec_decode_num_missing_proposals"), "no proposal came"),
            line(SHOWN.rate("draft_sequences_refused"), "no place"),
            line(SHOWN.rate("draft_sequences_outgrown"), "no memory"),
            line(SHOWN.rate("draft_sequences_too_long"), "too long"),
            line(SHOWN.rate("draft_deadline_misses"), "worker too late"),
        ),
        panel(
            "Drafts dropped",
            "Stale: for a prefix that is over. Invalid: nonsense, which should be 0. Others by reason.",
            "ops",
            line(SHOWN.rate("stale_drafts_dropped"), "stale"),
            line(SHOWN.rate("invalid_drafts_dropped"), "invalid"),
            line(SHOWN.rate("spec_decode_num_proposals_dropped", by=("reason",)), "{{reason}}"),
            line(SHOWN.rate("draft_grammar_failures"), "grammar not known"),
        ),
        panel(
            "Requests moved",
            "To a draft worker that is less busy. Grows when a worker joins or leaves, and rests otherwise.",
            "ops",
            line(SHOWN.rate("draft_sequences_moved"), "{{job}}"),
        ),
        panel(
            "Messages dropped",
            "Between ingresses and coordinators, and among ingresses: by who dropped them, and by reason; of "
            "epochs that are over (normal after a failover); of unknown kinds (versions that do not fit).",
            "ops",
            line(
                SHOWN.rate("channel_messages_dropped", by=("dropped_by", "reason")),
                "{{dropped_by}}: {{reason}}",
            ),
            line(SHOWN.rate("stale_frames_dropped"), "of former epochs"),
            line(SHOWN.rate("unexpected_messages_dropped"), "of unknown kinds"),
        ),
        panel(
            "Messages to and from workers dropped",
            "By channel, by who dropped them, and by reason. Hidden: hidden states, from target to draft "
            "workers. Refused links are normal while workers join. Full: somebody sends more than is read.",
            "ops",
            line(
                SHOWN.rate("worker_messages_dropped", by=("channel", "dropped_by", "reason")),
                "{{channel}}, {{dropped_by}}: {{reason}}",
            ),
        ),
    ),
)

POOLS = Dashboard(
    uid="drafthouse-pools",
    title="Drafthouse / Pools",
    description="Target groups and draft workers: who is there, how busy they are, and what is dropped.",
    rows=(_GROUPS, _DRAFTERS),
    variables=(
        SeriesVariable(
            name="target_group",
            label="Target group",
            query=f'label_values({PREFIX}target_group_num_requests_running{{job=~"$job"}}, target_group)',
        ),
    ),
)
