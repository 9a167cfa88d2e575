"""Every number that an engine and its drafters export, by name without prefix.

`docs/operations/watching.md` explains them to operators; a test compares this list with what is exported.
"""

from __future__ import annotations

from collections.abc import Mapping

from specdec.core.series import Series

_OF_ROUNDS: Mapping[str, Series] = {
    "rounds": Series("counter", "Rounds: propose, verify, commit."),
    "overlap_rounds": Series(
        "counter", "Rounds by how drafting and verification followed each other.", labels=("mode",)
    ),
    "round_time_seconds": Series("counter", "Time of all rounds, each from the end of the one before."),
    "draft_time_seconds": Series("counter", "Time in which rounds waited for proposals."),
    "verify_time_seconds": Series("counter", "From the submission of the target's steps to their answers."),
    **{
        f"{name}_{part}": Series("histogram", text, labels=("le",) if part == "bucket" else ())
        for name, text in (
            ("round_draft_seconds", "Waiting for drafts, of each round that they were asked for in."),
            ("round_verify_seconds", "From the submission of each round to the target's answer."),
            (
                "round_drafting_seconds",
                "T_draft of each round that drafts were asked for in, where it is known: as draft workers "
                "measure it, of several the longest, or what drafting takes here, or in the target's step.",
            ),
        )
        for part in ("bucket", "sum", "count")
    },
    "target_forward_time_seconds": Series("counter", "The target's forwards, as it measures them."),
    "target_sample_time_seconds": Series("counter", "The target's choice of tokens, as it measures it."),
    "target_utilization": Series(
        "gauge",
        "Share of the last ten seconds in which a target computed, as it measures it, 0 to 1.",
        "mean",
    ),
    "coordinator_time_seconds": Series(
        "counter",
        "Time of rounds that is neither waiting for drafts nor for the target: planning, asking for drafts, "
        "committing, and what goes on between two rounds.",
    ),
    "drafting_time_seconds": Series(
        "counter", "T_draft of all rounds: as draft workers measure it, of several the longest."
    ),
    "drafting_hidden_time_seconds": Series(
        "counter", "The part of drafting_time_seconds in which the target had something to verify."
    ),
    "verify_batch_requests": Series("counter", "Requests in the target's batches, added up over rounds."),
    "verify_batch_rows": Series("counter", "Tokens in the target's batches, added up over rounds."),
    "verify_batch_places": Series(
        "counter", "Requests that the target's batches had room for, added up over rounds."
    ),
    "num_preemptions": Series("counter", "Requests that gave their KV blocks to others."),
    "num_recomputed_tokens": Series("counter", "Tokens computed once more after a preemption."),
    "prefix_cache_queries": Series("counter", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": Series("counter", "Prompt tokens found in the prefix cache."),
    "prompt_tokens": Series("counter", "Prompt tokens of requests that were taken in."),
    "generation_tokens": Series("counter", "Tokens generated."),
    "request_timeouts": Series("counter", "Requests that ended because their time was up."),
    "requests_refused": Series(
        "counter",
        "Requests that were not served: the queue was full (no_target: while a target was loaded anew, "
        "held_up: while a suspect ran alone or lost ones were replayed), they "
        "would have been late, or they had to leave a full queue for others.",
        labels=("reason",),
    ),
    "request_success": Series(
        "counter", "Requests that ended, by finish reason.", labels=("finished_reason",)
    ),
    "num_requests_running": Series("gauge", "Requests that take part in rounds."),
    "num_requests_waiting": Series("gauge", "Requests that wait for their turn."),
    "queue_wait_seconds": Series(
        "gauge",
        "How long one would wait that came now and were served last, by the measured drain rate.",
        "mean",
    ),
    "kv_cache_usage_perc": Series("gauge", "Share of the target's KV blocks that are held, 0 to 1.", "mean"),
}

_OF_DRAFTS: Mapping[str, Series] = {
    "spec_decode_num_drafts": Series("counter", "Proposals verified."),
    "spec_decode_num_draft_tokens": Series("counter", "Draft tokens verified."),
    "spec_decode_num_accepted_tokens": Series("counter", "Draft tokens accepted."),
    "spec_decode_num_accepted_tokens_per_pos": Series(
        "counter", "Draft tokens accepted, by position in their proposal.", labels=("position",)
    ),
    "spec_decode_num_drafts_by_method": Series(
        "counter",
        "Proposals verified, by who made them: the drafter, its fallback, a grammar that forces tokens.",
        labels=("method",),
    ),
    "spec_decode_num_draft_tokens_by_method": Series(
        "counter", "Draft tokens verified, by who made them.", labels=("method",)
    ),
    "spec_decode_num_accepted_tokens_by_method": Series(
        "counter", "Draft tokens accepted, by who made them.", labels=("method",)
    ),
    **{
        f"spec_decode_{name}_by_{label}": Series("counter", f"{text}, by {of_what}.", labels=(label,))
        for label, of_what in (
            ("request_class", "the class of their request (metadata.class)"),
            ("temperature", "the temperature of their request, in bands"),
            ("top_p", "the top_p of their request, in bands"),
            ("phase", "how many tokens had been generated, in bands"),
        )
        for name, text in (
            ("num_drafts", "Proposals verified"),
            ("num_draft_tokens", "Draft tokens verified"),
            ("num_accepted_tokens", "Draft tokens accepted"),
        )
    },
    "spec_decode_wasted_draft_tokens": Series("counter", "Draft tokens verified and not accepted."),
    "spec_decode_num_missing_proposals": Series("counter", "Requests drafted for that no proposal came for."),
    "spec_decode_num_proposals_dropped": Series(
        "counter", "Proposals that were not used, by reason.", labels=("reason",)
    ),
    "spec_decode_num_lossy_tokens": Series("counter", "Tokens committed by a rule that is not lossless."),
    "spec_decode_num_moved_kv": Series(
        "counter", "Accepted tokens of trees whose K/V had to be moved behind the committed ones."
    ),
    "spec_decode_num_rows_beside": Series(
        "counter", "Rows that the target computed beside those of drafts, for method lookahead."
    ),
    "draft_prefix_cache_queries": Series("counter", "Tokens looked up in draft models' prefix caches."),
    "draft_prefix_cache_hits": Series("counter", "Tokens found in draft models' prefix caches."),
    "local_draft_utilization": Series(
        "gauge",
        "Share of the last ten seconds in which drafts were made by the engine's process, or its target, "
        "where there is no draft pool.",
        "mean",
    ),
    "draft_ahead_branches": Series("counter", "Continuations drafted for verdicts that were not known yet."),
    "draft_ahead_branches_left_out": Series("counter", "Continuations that draft models had no memory for."),
    "draft_ahead_branches_true": Series("counter", "Continuations whose verdict came true."),
    "draft_windows_reread": Series(
        "counter", "Requests that a draft model of few positions gave new ones (kv.positions: in_cache)."
    ),
    "draft_sequences_too_long": Series("counter", "Requests too long for the draft model to draft behind."),
    "draft_grammar_failures": Series("counter", "Grammars that draft models could not follow."),
}

_OF_ONLINE_LEARNING: Mapping[str, Series] = {
    "online_texts_heard": Series("counter", "Texts that ended and may be learnt from, at draft workers."),
    "online_texts_dropped": Series(
        "counter", "Of these, those that no trainer fetched in time, or that one was sent when it was lost."
    ),
    "online_tokens_buffered": Series("counter", "Tokens of texts that trainers of draft models kept."),
    "online_tokens_dropped": Series("counter", "Of these, those that have given way since."),
    "online_training_steps": Series("counter", "Steps of the optimizers of draft models."),
    "online_versions_tried": Series("counter", "Versions of draft models that were trained."),
    "online_versions_served": Series(
        "counter", "Of these, those that beat the version before on what was held back."
    ),
    "online_versions_refused": Series("counter", "Of these, those that did not, and were dropped."),
    "online_versions_taken": Series("counter", "Times that a draft worker took other weights."),
    "online_trial_tokens": Series("counter", "Held-back tokens that versions were judged by."),
    "online_trial_matches_before": Series(
        "counter", "Of these, those that the version served would have drafted."
    ),
    "online_trial_matches_after": Series(
        "counter", "Of these, those that the version tried would have drafted."
    ),
    "online_trainers_lost": Series(
        "counter", "Trainers of draft models that died or hung, with the texts they kept."
    ),
    "online_errors": Series(
        "counter", "Other errors between draft workers and trainers; learning pauses after each."
    ),
}

_OF_DRAFT_POOL: Mapping[str, Series] = {
    "draft_workers": Series("gauge", "Draft workers that are waited for.", "max"),
    "draft_pool_usage_perc": Series(
        "gauge", "Requests in the draft pool over those that it takes, 0 to 1.", "mean"
    ),
    "draft_utilization": Series(
        "gauge",
        "Share of the last ten seconds in which draft workers drafted, mean over those that are waited for; "
        "a batch for several target groups counts for each.",
    ),
    "draft_wait_seconds": Series("counter", "Time in which draft workers were waited for."),
    "draft_compute_seconds": Series("counter", "Drafting, as each draft worker measures it."),
    "worker_messages_dropped": Series(
        "counter",
        "Messages of workers dropped, by channel (draft, target: between coordinators and these workers; "
        "hidden: between target and draft workers), by who dropped them, and by reason.",
        labels=("channel", "dropped_by", "reason"),
    ),
    "draft_deadline_misses": Series("counter", "Draft workers that did not answer in time."),
    "stale_drafts_dropped": Series("counter", "Drafts that came for another prefix, or too late."),
    "invalid_drafts_dropped": Series(
        "counter",
        "Drafts with tokens that nobody asked for, and replies of draft workers that make no sense.",
    ),
    "fallback_requests": Series(
        "counter", "Requests that a round went on without the draft pool's drafts for."
    ),
    "fallback_requests_by_reason": Series(
        "counter",
        "The same, by reason: there is no worker (none), none has a place or memory for it, it is too_long "
        "for all of them, it has too much to catch up on (behind), its worker was late, nothing was drafted "
        "for what came true (miss), its worker has to begin anew (forgotten), answered with no token "
        "(nothing) or nonsense (invalid), several workers have died of it (deadly).",
        labels=("reason",),
    ),
    "speculation_cache_hits": Series("counter", "Verdicts that a continuation had been drafted for."),
    "speculation_cache_misses": Series("counter", "Verdicts that no continuation was there for."),
    "speculation_cache_late": Series(
        "counter", "Of the misses, those whose continuations had not come in time."
    ),
    "draft_sequences_refused": Series("counter", "Requests that a draft worker had no place for."),
    "draft_sequences_outgrown": Series(
        "counter", "Requests given up, or refused, by a draft worker whose memory they were too long for."
    ),
    "draft_sequences_moved": Series("counter", "Requests moved to a draft worker that is less busy."),
}

_OF_CONTROLLER: Mapping[str, Series] = {
    "speculation_on": Series("gauge", "Share of the target groups that speculate.", "mean"),
    "speculation_state": Series(
        "gauge", "Target groups by mode, and by why it is the mode.", labels=("mode", "reason")
    ),
    "speculation_mean_kv_budget": Series(
        "gauge", "Mean of the tokens that drafts of running requests may attend to (kv.budget).", "mean"
    ),
    "speculation_mean_num_draft_tokens": Series(
        "gauge", "Mean k over the requests of the last decision.", "mean"
    ),
    "speculation_chosen_num_draft_tokens": Series(
        "gauge", "Requests by k, of the last decision.", labels=("k",)
    ),
    "speculation_request_rounds": Series(
        "counter",
        "Requests in rounds that were to give them tokens, by k: how many draft tokens each was to have.",
        labels=("k",),
    ),
    "speculation_goodput_on": Series(
        "gauge", "Expected tokens per second with speculation, in its best mode."
    ),
    "speculation_goodput_off": Series("gauge", "Expected tokens per second without speculation."),
    "speculation_expected_draft_seconds": Series("gauge", "Expected T_draft of the choice.", "mean"),
    "speculation_expected_verify_seconds": Series("gauge", "Expected T_verify of the choice.", "mean"),
    "speculation_expected_round_seconds": Series("gauge", "Expected time of a round.", "mean"),
    "speculation_expected_acceptance": Series(
        "gauge", "Mean expected acceptance, by position.", "mean", labels=("position",)
    ),
    "speculation_pool_worth": Series(
        "gauge",
        "Tokens per second with speculation over those without, the mean of the last two minutes; of several "
        "target groups, that which has most of it: at 1 or below drafters are not worth their devices.",
        "max",
    ),
    "speculation_switches": Series("counter", "Changes of mode, and of whether to speculate."),
    "speculation_probe_rounds": Series(
        "counter", "Rounds with drafts to see whether being without is right."
    ),
    "speculation_audit_rounds": Series("counter", "Rounds without drafts to see whether drafting is right."),
    "speculation_stretch_rounds": Series("counter", "Rounds with longer drafts to see what those are worth."),
    "speculation_comparison_rounds": Series("counter", "Rounds in another mode to see how fast that is."),
}

_OF_SEVERAL: Mapping[str, Series] = {
    "drafter_num_requests_running": Series(
        "gauge", "Requests that take part in rounds, by the drafter that they have.", labels=("drafter",)
    ),
    **{
        f"{prefix}_{name}": Series("counter", text, labels=("drafter",))
        for prefix, texts in (
            (
                "drafter",
                {
                    "num_requests": "Requests that each of several drafters has drafted for.",
                    "num_drafts": "Proposals of each that were verified.",
                    "num_draft_tokens": "Draft tokens of each that were verified.",
                    "num_accepted_tokens": "Draft tokens of each that were accepted.",
                    "time_seconds": "Time in which rounds waited for each.",
                },
            ),
            (
                "shadow",
                {
                    "num_requests": "Requests that a drafter which is not heard looks at.",
                    "num_drafts": "Its proposals that were compared with what was generated.",
                    "num_draft_tokens": "Draft tokens of these.",
                    "num_accepted_tokens": "Draft tokens that would have been accepted.",
                    "time_seconds": "Time that it took.",
                },
            ),
        )
        for name, text in texts.items()
    },
}

ENGINE_SERIES: Mapping[str, Series] = {
    **_OF_ROUNDS,
    **_OF_DRAFTS,
    **_OF_DRAFT_POOL,
    **_OF_ONLINE_LEARNING,
    **_OF_CONTROLLER,
    **_OF_SEVERAL,
}
"""By name."""
