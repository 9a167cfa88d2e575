"""Does drafting pay, and if not, why."""

from __future__ import annotations

from collections.abc import Callable

from deploy.monitoring.measures import accepted_share, tokens_per_proposal
from deploy.monitoring.panels import SHOWN, Dashboard, Row, Unit, line, panel

_ACCEPTANCE = Row(
    title="Are drafts right?",
    panels=(
        panel(
            "Accepted draft tokens",
            "Share of verified draft tokens that were the target's own. A fall without a change "
            "of traffic: is the right draft model loaded?",
            "percentunit",
            line(
                accepted_share(SHOWN),
                "{{job}}",
            ),
        ),
        panel(
            "Accepted, by who drafted",
            "The draft model, its fallback (n-grams), or a grammar that leaves one choice.",
            "percentunit",
            line(
                accepted_share(SHOWN, by=("method",)),
                "{{method}}",
            ),
        ),
        panel(
            "Accepted per second, by position",
            "Position 0 is the first draft token. When late positions bring next to nothing, a "
            "smaller k would do.",
            "tokens/s",
            line(SHOWN.rate("spec_decode_num_accepted_tokens_per_pos", by=("position",)), "{{position}}"),
        ),
        panel(
            "Expected acceptance, by position",
            "What the controller reckons with when it chooses k.",
            "percentunit",
            line(SHOWN.gauge("speculation_expected_acceptance", by=("position",)), "{{position}}"),
        ),
        panel(
            "Tokens per proposal",
            "1 + accepted tokens per proposal: tokens that one step of the target brings.",
            "short",
            line(
                tokens_per_proposal(SHOWN),
                "all",
            ),
            line(
                tokens_per_proposal(SHOWN, by=("method",)),
                "{{method}}",
            ),
        ),
        panel(
            "Draft tokens: useful and not",
            "Verified and accepted; verified and not (wasted); committed by a lossy rule, which "
            "is 0 unless the lossy rule was allowed. Moved: accepted from trees, whose K/V lay elsewhere. "
            "Beside: rows of the target for method lookahead.",
            "tokens/s",
            line(SHOWN.rate("spec_decode_num_accepted_tokens"), "accepted"),
            line(SHOWN.rate("spec_decode_wasted_draft_tokens"), "wasted"),
            line(SHOWN.rate("spec_decode_num_lossy_tokens"), "lossy"),
            line(SHOWN.rate("spec_decode_num_moved_kv"), "moved"),
            line(SHOWN.rate("spec_decode_num_rows_beside"), "beside"),
        ),
    ),
)
_MEASURES: tuple[tuple[str, Unit, Callable[..., str]], ...] = (
    ("Accepted", "percentunit", accepted_share),
    ("Tokens per proposal", "short", tokens_per_proposal),
)
_KINDS = (
    (
        "class of request",
        "request_class",
        "`metadata.class` of bodies, where it is one of http.request_classes; all others are other. Much "
        "lower for one class: a drafter for its domain would pay (method several, online).",
    ),
    (
        "temperature",
        "temperature",
        "In bands. Falls with the temperature: p and q both widen, and agree less.",
    ),
    ("top_p", "top_p", "In bands. Narrower sampling is drafted for more easily."),
    (
        "phase",
        "phase",
        "By how many tokens had been generated. Lookups in the text find more the longer it is; draft models "
        "with a KV budget may find less.",
    ),
)
"""What drafts are told apart by: in words, label, what it says."""
_FOR = Row(
    title="What drafts are for",
    panels=tuple(
        panel(
            f"{title}, by {what}",
            description,
            unit,
            line(measure(SHOWN, by=(label,)), f"{{{{{label}}}}}"),
            width=6,
        )
        for title, unit, measure in _MEASURES
        for what, label, description in _KINDS
    ),
)
_CHOICE = Row(
    title="What the controller has chosen",
    panels=(
        panel(
            "Mode and reason",
            "Target groups by mode (lockstep, ping_pong, draft_ahead) and by why it is the "
            "mode. The reasons are explained in docs/scheduling.md.",
            "short",
            line(SHOWN.gauge("speculation_state", by=("mode", "reason")), "{{mode}}: {{reason}}"),
        ),
        panel(
            "Requests by k",
            "How many draft tokens requests were to have, each round in which they got tokens. k = 0: not "
            "drafted for.",
            "ops",
            line(SHOWN.rate("speculation_request_rounds", by=("k",)), "k = {{k}}"),
            is_stacked=True,
        ),
        panel(
            "Requests by k, last decision",
            "How many draft tokens the running requests were to have when this was scraped; what was decided "
            "between two scrapes is in the panel before.",
            "short",
            line(SHOWN.gauge("speculation_chosen_num_draft_tokens", by=("k",)), "k = {{k}}"),
            is_stacked=True,
        ),
        panel(
            "Speculating, and mean k",
            "Share of the target groups that speculate, and mean k of the last decision.",
            "short",
            line(SHOWN.gauge("speculation_on"), "share of groups"),
            line(SHOWN.gauge("speculation_mean_num_draft_tokens"), "mean k"),
        ),
        panel(
            "Expected tokens per second",
            "With speculation in its best mode, and without. The controller takes the larger one.",
            "tokens/s",
            line(SHOWN.gauge("speculation_goodput_on"), "with"),
            line(SHOWN.gauge("speculation_goodput_off"), "without"),
        ),
        panel(
            "Worth of the draft pool",
            "Tokens per second with speculation over those without, mean of two minutes. 1 or "
            "less for long: draft workers are not worth their devices with this traffic.",
            "short",
            line(SHOWN.mean_gauge("speculation_pool_worth"), "{{job}}"),
        ),
        panel(
            "Changes of mind",
            "Switches of mode; rounds spent on seeing whether the choice is still right. Many "
            "switches per minute: traffic is at the border where drafting just pays.",
            "ops",
            line(SHOWN.rate("speculation_switches"), "switches"),
            line(SHOWN.rate("speculation_probe_rounds"), "probe rounds"),
            line(SHOWN.rate("speculation_audit_rounds"), "audit rounds"),
            line(SHOWN.rate("speculation_stretch_rounds"), "stretch rounds"),
            line(SHOWN.rate("speculation_comparison_rounds"), "comparison rounds"),
            width=24,
        ),
    ),
)
_SEVERAL = Row(
    title="Several drafters",
    panels=(
        panel(
            "Requests by drafter",
            "Running requests by the drafter that they have: their own choice, a share of an "
            "A/B test, or what the controller finds best. Empty unless there are several.",
            "short",
            line(SHOWN.gauge("drafter_num_requests_running", by=("drafter",)), "{{drafter}}"),
            is_stacked=True,
        ),
        panel(
            "Tokens per proposal, by drafter",
            "1 + accepted tokens per proposal. Shadows: what proposals that nobody verified "
            "would have brought.",
            "short",
            line(
                tokens_per_proposal(SHOWN, "drafter_num", by=("drafter",)),
                "{{drafter}}",
            ),
            line(
                tokens_per_proposal(SHOWN, "shadow_num", by=("drafter",)),
                "{{drafter}} (shadow)",
            ),
        ),
        panel(
            "Accepted draft tokens, by drafter",
            "Share of its draft tokens that were the target's own; of a shadow's, that would "
            "have been accepted.",
            "percentunit",
            line(
                accepted_share(SHOWN, "drafter_num", by=("drafter",)),
                "{{drafter}}",
            ),
            line(
                accepted_share(SHOWN, "shadow_num", by=("drafter",)),
                "{{drafter}} (shadow)",
            ),
        ),
        panel(
            "Requests drafted for, by drafter",
            "Requests per second that each begins to draft for; one that changes its drafter "
            "counts for both.",
            "reqps",
            line(SHOWN.rate("drafter_num_requests", by=("drafter",)), "{{drafter}}"),
            line(SHOWN.rate("shadow_num_requests", by=("drafter",)), "{{drafter}} (shadow)"),
        ),
        panel(
            "Time of each drafter",
            "Seconds per second in which rounds waited for it. A shadow's: in which it drafted, "
            "beside the target or before it.",
            "percentunit",
            line(SHOWN.rate("drafter_time_seconds", by=("drafter",)), "{{drafter}}"),
            line(SHOWN.rate("shadow_time_seconds", by=("drafter",)), "{{drafter}} (shadow)"),
        ),
    ),
)
_ROUNDS = Row(
    title="Where the time of a round goes",
    panels=(
        panel(
            "Parts of a round",
            "Mean seconds per round: waiting for drafts, waiting for the target, everything else.",
            "s",
            line(SHOWN.ratio("draft_time_seconds", "rounds"), "waiting for drafts"),
            line(SHOWN.ratio("verify_time_seconds", "rounds"), "verification"),
            line(SHOWN.ratio("coordinator_time_seconds", "rounds"), "coordinator"),
            is_stacked=True,
        ),
        panel(
            "Round: measured and expected",
            "Mean seconds per round, beside what the controller expects of the choice. Apart "
            "for long: its costs are out of date.",
            "s",
            line(SHOWN.ratio("round_time_seconds", "rounds"), "measured"),
            line(SHOWN.gauge("speculation_expected_round_seconds"), "expected"),
            line(SHOWN.gauge("speculation_expected_draft_seconds"), "expected drafting"),
            line(SHOWN.gauge("speculation_expected_verify_seconds"), "expected verification"),
        ),
        panel(
            "Drafting hidden behind verification",
            "Share of drafting time in which the target had something to verify. 0 in lockstep, "
            "near 1 where drafts cost no time.",
            "percentunit",
            line(SHOWN.ratio("drafting_hidden_time_seconds", "drafting_time_seconds"), "{{job}}"),
        ),
        panel(
            "Rounds by mode",
            "Rounds per second, by how drafting and verification followed each other.",
            "ops",
            line(SHOWN.rate("overlap_rounds", by=("mode",)), "{{mode}}"),
            is_stacked=True,
        ),
        panel(
            "Continuations that came true",
            "With draft_ahead: of verdicts, those that a continuation had been drafted for, and "
            "those whose continuation came too late.",
            "ops",
            line(SHOWN.rate("speculation_cache_hits"), "hits"),
            line(SHOWN.rate("speculation_cache_misses"), "misses"),
            line(SHOWN.rate("speculation_cache_late"), "of these, late"),
        ),
        panel(
            "Target: forward and sampling",
            "Mean seconds per round in the target's forward, and in its choice of tokens.",
            "s",
            line(SHOWN.ratio("target_forward_time_seconds", "rounds"), "forward"),
            line(SHOWN.ratio("target_sample_time_seconds", "rounds"), "sampling"),
        ),
        panel(
            "Drafts and verification: p50, p95, p99",
            "Of single rounds: waiting for drafts, where there are any; what drafting itself took, where "
            "that is known; waiting for the target. A p99 far from the median is what streams stutter by.",
            "s",
            *(
                line(SHOWN.quantile(quantile, f"round_{part}_seconds"), f"{legend} {quantile:.0%}")
                for part, legend in (
                    ("draft", "drafts"),
                    ("drafting", "drafting"),
                    ("verify", "verification"),
                )
                for quantile in (0.5, 0.95, 0.99)
            ),
            width=8,
        ),
        panel(
            "Batches of the target",
            "Mean size: requests, and tokens (committed ones that are read, and drafts).",
            "short",
            line(SHOWN.ratio("verify_batch_requests", "rounds"), "requests"),
            line(SHOWN.ratio("verify_batch_rows", "rounds"), "tokens"),
            width=8,
        ),
        panel(
            "Places taken in batches",
            "Requests per batch over scheduler.max_num_seqs. In ping_pong a batch is one half "
            "of the requests. Near 1 with requests waiting: another target group, or more places.",
            "percentunit",
            line(SHOWN.ratio("verify_batch_requests", "verify_batch_places"), "{{job}}"),
            width=8,
        ),
    ),
)

_LEARNING = Row(
    title="Draft models that learn (speculative_config.online)",
    panels=(
        panel(
            "Acceptance on what was held back",
            "At trials: of the version that was served, and of the one that was tried. Tokens of "
            "texts that neither was trained on.",
            "percentunit",
            line(SHOWN.ratio("online_trial_matches_before", "online_trial_tokens"), "served"),
            line(SHOWN.ratio("online_trial_matches_after", "online_trial_tokens"), "tried"),
        ),
        panel(
            "Versions",
            "Tried; of these, better than the version before, or dropped. Taken: by draft "
            "workers. All refused for long: there is nothing more to learn, or the learning rate is wrong.",
            "short",
            line(SHOWN.increase("online_versions_tried"), "tried"),
            line(SHOWN.increase("online_versions_served"), "better"),
            line(SHOWN.increase("online_versions_refused"), "dropped"),
            line(SHOWN.increase("online_versions_taken"), "taken"),
            line(SHOWN.increase("online_trainers_lost"), "trainers lost"),
            line(SHOWN.increase("online_errors"), "other errors"),
        ),
        panel(
            "Texts, and steps of training",
            "Texts that ended and may be learnt from, and those that no trainer fetched; steps "
            "of the optimizers.",
            "ops",
            line(SHOWN.rate("online_texts_heard"), "heard"),
            line(SHOWN.rate("online_texts_dropped"), "dropped"),
            line(SHOWN.rate("online_training_steps"), "steps"),
        ),
        panel(
            "Buffers of trainers",
            "Tokens that come in, and that give way.",
            "tokens/s",
            line(SHOWN.rate("online_tokens_buffered"), "in"),
            line(SHOWN.rate("online_tokens_dropped"), "out"),
        ),
    ),
)

SPECULATION = Dashboard(
    uid="drafthouse-speculation",
    title="Drafthouse / Speculation",
    description="Does drafting pay, and if not, why. Whatever it shows, the text is the target's.",
    rows=(_ACCEPTANCE, _FOR, _CHOICE, _SEVERAL, _ROUNDS, _LEARNING),
)
