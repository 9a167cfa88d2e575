"""Does drafting pay, and if not, why."""

from __future__ import annotations

from deploy.monitoring.panels import SHOWN, Dashboard, Panel, Row, line

_ACCEPTANCE = Row(
    title="Are drafts right?",
    panels=(
        Panel(
            title="Accepted draft tokens",
            description="Share of verified draft tokens that were the target's own. A fall without a change "
            "of traffic: is the right draft model loaded?",
            unit="percentunit",
            queries=(
                line(
                    SHOWN.ratio("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"),
                    "{{job}}",
                ),
            ),
        ),
        Panel(
            title="Accepted, by who drafted",
            description="The draft model, its fallback (n-grams), or a grammar that leaves one choice.",
            unit="percentunit",
            queries=(
                line(
                    SHOWN.ratio(
                        "spec_decode_num_accepted_tokens_by_method",
                        "spec_decode_num_draft_tokens_by_method",
                        by=("method",),
                    ),
                    "{{method}}",
                ),
            ),
        ),
        Panel(
            title="Accepted per second, by position",
            description="Position 0 is the first draft token. When late positions bring next to nothing, a "
            "smaller k would do.",
            unit="tokens/s",
            queries=(
                line(SHOWN.rate("spec_decode_num_accepted_tokens_per_pos", by=("position",)), "{{position}}"),
            ),
        ),
        Panel(
            title="Expected acceptance, by position",
            description="What the controller reckons with when it chooses k.",
            unit="percentunit",
            queries=(line(SHOWN.gauge("speculation_expected_acceptance", by=("position",)), "{{position}}"),),
        ),
        Panel(
            title="Tokens per proposal",
            description="1 + accepted tokens per proposal: tokens that one step of the target brings.",
            unit="short",
            queries=(
                line(
                    f"1 + {SHOWN.ratio('spec_decode_num_accepted_tokens', 'spec_decode_num_drafts')}",
                    "all",
                ),
                line(
                    "1 + "
                    + SHOWN.ratio(
                        "spec_decode_num_accepted_tokens_by_method",
                        "spec_decode_num_drafts_by_method",
                        by=("method",),
                    ),
                    "{{method}}",
                ),
            ),
        ),
        Panel(
            title="Draft tokens: useful and not",
            description="Verified and accepted; verified and not (wasted); committed by a lossy rule, which "
            "is 0 unless the lossy rule was allowed. Moved: accepted from trees, whose K/V lay elsewhere. "
            "Beside: rows of the target for method lookahead.",
            unit="tokens/s",
            queries=(
                line(SHOWN.rate("spec_decode_num_accepted_tokens"), "accepted"),
                line(SHOWN.rate("spec_decode_wasted_draft_tokens"), "wasted"),
                line(SHOWN.rate("spec_decode_num_lossy_tokens"), "lossy"),
                line(SHOWN.rate("spec_decode_num_moved_kv"), "moved"),
                line(SHOWN.rate("spec_decode_num_rows_beside"), "beside"),
            ),
        ),
    ),
)
_CHOICE = Row(
    title="What the controller has chosen",
    panels=(
        Panel(
            title="Mode and reason",
            description="Target groups by mode (lockstep, ping_pong, draft_ahead) and by why it is the "
            "mode. The reasons are explained in docs/scheduling.md.",
            unit="short",
            queries=(line(SHOWN.gauge("speculation_state", by=("mode", "reason")), "{{mode}}: {{reason}}"),),
        ),
        Panel(
            title="Requests by k",
            description="How many draft tokens the running requests ask for. k = 0: not drafted for.",
            unit="short",
            is_stacked=True,
            queries=(line(SHOWN.gauge("speculation_chosen_num_draft_tokens", by=("k",)), "k = {{k}}"),),
        ),
        Panel(
            title="Speculating, and mean k",
            description="Share of the target groups that speculate, and mean k of the last decision.",
            unit="short",
            queries=(
                line(SHOWN.gauge("speculation_on"), "share of groups"),
                line(SHOWN.gauge("speculation_mean_num_draft_tokens"), "mean k"),
            ),
        ),
        Panel(
            title="Expected tokens per second",
            description="With speculation in its best mode, and without. The controller takes the larger "
            "one.",
            unit="tokens/s",
            queries=(
                line(SHOWN.gauge("speculation_goodput_on"), "with"),
                line(SHOWN.gauge("speculation_goodput_off"), "without"),
            ),
        ),
        Panel(
            title="Worth of the draft pool",
            description="Tokens per second with speculation over those without, mean of two minutes. 1 or "
            "less for long: draft workers are not worth their devices with this traffic.",
            unit="short",
            queries=(line(SHOWN.gauge("speculation_pool_worth"), "{{job}}"),),
        ),
        Panel(
            title="Changes of mind",
            description="Switches of mode; rounds spent on seeing whether the choice is still right. Many "
            "switches per minute: traffic is at the border where drafting just pays.",
            unit="ops",
            queries=(
                line(SHOWN.rate("speculation_switches"), "switches"),
                line(SHOWN.rate("speculation_probe_rounds"), "probe rounds"),
                line(SHOWN.rate("speculation_audit_rounds"), "audit rounds"),
                line(SHOWN.rate("speculation_stretch_rounds"), "stretch rounds"),
            ),
        ),
    ),
)
_SEVERAL = Row(
    title="Several drafters",
    panels=(
        Panel(
            title="Requests by drafter",
            description="Running requests by the drafter that they have: their own choice, a share of an "
            "A/B test, or what the controller finds best. Empty unless there are several.",
            unit="short",
            is_stacked=True,
            queries=(line(SHOWN.gauge("drafter_num_requests_running", by=("drafter",)), "{{drafter}}"),),
        ),
        Panel(
            title="Tokens per proposal, by drafter",
            description="1 + accepted tokens per proposal. Shadows: what proposals that nobody verified "
            "would have brought.",
            unit="short",
            queries=(
                line(
                    "1 + "
                    + SHOWN.ratio("drafter_num_accepted_tokens", "drafter_num_drafts", by=("drafter",)),
                    "{{drafter}}",
                ),
                line(
                    "1 + " + SHOWN.ratio("shadow_num_accepted_tokens", "shadow_num_drafts", by=("drafter",)),
                    "{{drafter}} (shadow)",
                ),
            ),
        ),
        Panel(
            title="Accepted draft tokens, by drafter",
            description="Share of its draft tokens that were the target's own; of a shadow's, that would "
            "have been accepted.",
            unit="percentunit",
            queries=(
                line(
                    SHOWN.ratio("drafter_num_accepted_tokens", "drafter_num_draft_tokens", by=("drafter",)),
                    "{{drafter}}",
                ),
                line(
                    SHOWN.ratio("shadow_num_accepted_tokens", "shadow_num_draft_tokens", by=("drafter",)),
                    "{{drafter}} (shadow)",
                ),
            ),
        ),
        Panel(
            title="Requests drafted for, by drafter",
            description="Requests per second that each begins to draft for; one that changes its drafter "
            "counts for both.",
            unit="reqps",
            queries=(
                line(SHOWN.rate("drafter_num_requests", by=("drafter",)), "{{drafter}}"),
                line(SHOWN.rate("shadow_num_requests", by=("drafter",)), "{{drafter}} (shadow)"),
            ),
        ),
        Panel(
            title="Time of each drafter",
            description="Seconds per second in which rounds waited for it. A shadow's: in which it drafted, "
            "beside the target or before it.",
            unit="percentunit",
            queries=(
                line(SHOWN.rate("drafter_time_seconds", by=("drafter",)), "{{drafter}}"),
                line(SHOWN.rate("shadow_time_seconds", by=("drafter",)), "{{drafter}} (shadow)"),
            ),
        ),
    ),
)
_ROUNDS = Row(
    title="Where the time of a round goes",
    panels=(
        Panel(
            title="Parts of a round",
            description="Mean seconds per round: waiting for drafts, waiting for the target, everything "
            "else.",
            unit="s",
            is_stacked=True,
            queries=(
                line(SHOWN.ratio("draft_time_seconds", "rounds"), "waiting for drafts"),
                line(SHOWN.ratio("verify_time_seconds", "rounds"), "verification"),
                line(SHOWN.ratio("coordinator_time_seconds", "rounds"), "coordinator"),
            ),
        ),
        Panel(
            title="Round: measured and expected",
            description="Mean seconds per round, beside what the controller expects of the choice. Apart "
            "for long: its costs are out of date.",
            unit="s",
            queries=(
                line(SHOWN.ratio("round_time_seconds", "rounds"), "measured"),
                line(SHOWN.gauge("speculation_expected_round_seconds"), "expected"),
                line(SHOWN.gauge("speculation_expected_draft_seconds"), "expected drafting"),
                line(SHOWN.gauge("speculation_expected_verify_seconds"), "expected verification"),
            ),
        ),
        Panel(
            title="Drafting hidden behind verification",
            description="Share of drafting time in which the target had something to verify. 0 in lockstep, "
            "near 1 where drafts cost no time.",
            unit="percentunit",
            queries=(line(SHOWN.ratio("drafting_hidden_time_seconds", "drafting_time_seconds"), "{{job}}"),),
        ),
        Panel(
            title="Rounds by mode",
            description="Rounds per second, by how drafting and verification followed each other.",
            unit="ops",
            is_stacked=True,
            queries=(line(SHOWN.rate("overlap_rounds", by=("mode",)), "{{mode}}"),),
        ),
        Panel(
            title="Continuations that came true",
            description="With draft_ahead: of verdicts, those that a continuation had been drafted for, and "
            "those whose continuation came too late.",
            unit="ops",
            queries=(
                line(SHOWN.rate("speculation_cache_hits"), "hits"),
                line(SHOWN.rate("speculation_cache_misses"), "misses"),
                line(SHOWN.rate("speculation_cache_late"), "of these, late"),
            ),
        ),
        Panel(
            title="Target: forward and sampling",
            description="Mean seconds per round in the target's forward, and in its choice of tokens.",
            unit="s",
            queries=(
                line(SHOWN.ratio("target_forward_time_seconds", "rounds"), "forward"),
                line(SHOWN.ratio("target_sample_time_seconds", "rounds"), "sampling"),
            ),
        ),
    ),
)

_LEARNING = Row(
    title="Draft models that learn (speculative_config.online)",
    panels=(
        Panel(
            title="Acceptance on what was held back",
            description="At trials: of the version that was served, and of the one that was tried. Tokens of "
            "texts that neither was trained on.",
            unit="percentunit",
            queries=(
                line(SHOWN.ratio("online_trial_matches_before", "online_trial_tokens"), "served"),
                line(SHOWN.ratio("online_trial_matches_after", "online_trial_tokens"), "tried"),
            ),
        ),
        Panel(
            title="Versions",
            description="Tried; of these, better than the version before, or dropped. Taken: by draft "
            "workers. All refused for long: there is nothing more to learn, or the learning rate is wrong.",
            unit="short",
            queries=(
                line(SHOWN.increase("online_versions_tried"), "tried"),
                line(SHOWN.increase("online_versions_served"), "better"),
                line(SHOWN.increase("online_versions_refused"), "dropped"),
                line(SHOWN.increase("online_versions_taken"), "taken"),
                line(SHOWN.increase("online_trainers_lost"), "trainers lost"),
            ),
        ),
        Panel(
            title="Texts, and steps of training",
            description="Texts that ended and may be learnt from, and those that no trainer fetched; steps "
            "of the optimizers.",
            unit="ops",
            queries=(
                line(SHOWN.rate("online_texts_heard"), "heard"),
                line(SHOWN.rate("online_texts_dropped"), "dropped"),
                line(SHOWN.rate("online_training_steps"), "steps"),
            ),
        ),
        Panel(
            title="Buffers of trainers",
            description="Tokens that come in, and that give way.",
            unit="tokens/s",
            queries=(
                line(SHOWN.rate("online_tokens_buffered"), "in"),
                line(SHOWN.rate("online_tokens_dropped"), "out"),
            ),
        ),
    ),
)

SPECULATION = Dashboard(
    uid="drafthouse-speculation",
    title="Drafthouse / Speculation",
    description="Does drafting pay, and if not, why. Whatever it shows, the text is the target's.",
    rows=(_ACCEPTANCE, _CHOICE, _SEVERAL, _ROUNDS, _LEARNING),
)
