"""Long texts: memory, reading prompts, and drafting with a part of the K/V."""

from __future__ import annotations

from deploy.monitoring.measures import accepted_share
from deploy.monitoring.panels import SHOWN, Dashboard, Row, line, panel

_MEMORY = Row(
    title="Memory",
    panels=(
        panel(
            "KV blocks in use",
            "Share of the target's KV blocks that requests hold, mean over target groups.",
            "percentunit",
            line(SHOWN.gauge("kv_cache_usage_perc"), "{{job}}"),
        ),
        panel(
            "Thrown out and computed again",
            "Requests per second that gave their blocks to others, when memory was short.",
            "ops",
            line(SHOWN.rate("num_preemptions"), "preemptions"),
        ),
        panel(
            "Work done twice",
            "Tokens computed again after a preemption, for each token generated. Above 0.1: "
            "give `cache.memory_bytes` more, or run fewer requests at once (`scheduler.max_num_seqs`).",
            "percentunit",
            line(SHOWN.ratio("num_recomputed_tokens", "generation_tokens"), "{{job}}"),
        ),
    ),
)
_PROMPTS = Row(
    title="Reading prompts",
    panels=(
        panel(
            "Prompt tokens",
            "Of requests that were taken in, and those of them found in the prefix cache.",
            "tokens/s",
            line(SHOWN.rate("prompt_tokens"), "all"),
            line(SHOWN.rate("prefix_cache_hits"), "in the prefix cache"),
        ),
        panel(
            "Prefix cache",
            "Share of looked-up tokens that were found. Low with shared prompts: memory too "
            "small, or requests that could share go to different target groups.",
            "percentunit",
            line(SHOWN.ratio("prefix_cache_hits", "prefix_cache_queries"), "target"),
            line(SHOWN.ratio("draft_prefix_cache_hits", "draft_prefix_cache_queries"), "draft models"),
        ),
        panel(
            "Time to the first token",
            "Long prompts take long to read; p95 is theirs.",
            "s",
            line(SHOWN.quantile(0.5, "time_to_first_token_seconds"), "median"),
            line(SHOWN.quantile(0.95, "time_to_first_token_seconds"), "p95"),
        ),
    ),
)
_DRAFTING = Row(
    title="Drafting behind long texts",
    panels=(
        panel(
            "Tokens that drafts attend to",
            "Mean KV budget of running requests (speculative_config.kv.budget), where there is one.",
            "short",
            line(SHOWN.gauge("speculation_mean_kv_budget"), "{{job}}"),
        ),
        panel(
            "Seconds per round: drafts and target",
            "Waiting for drafts and for the target, mean per round. With long texts the "
            "target's share grows with every token in the batch; drafts with a KV budget do not.",
            "s",
            line(SHOWN.ratio("draft_time_seconds", "rounds"), "drafts"),
            line(SHOWN.ratio("verify_time_seconds", "rounds"), "target"),
        ),
        panel(
            "Accepted draft tokens",
            "Share. Falls when the KV budget leaves out what matters: try a larger one, or another policy.",
            "percentunit",
            line(accepted_share(SHOWN), "{{job}}"),
        ),
        panel(
            "Too long for the draft model",
            "Requests that went on without its drafts, because their text is longer than it can "
            "read, or than its memory has room for; and texts that it had to read again at new positions "
            "(kv.positions: in_cache).",
            "ops",
            line(SHOWN.rate("draft_sequences_too_long"), "too long"),
            line(SHOWN.rate("draft_sequences_outgrown"), "no memory"),
            line(SHOWN.rate("draft_windows_reread"), "read again"),
            width=12,
        ),
        panel(
            "Looking ahead",
            "Continuations drafted for verdicts not known yet; those that there was no memory "
            "for; those that came true.",
            "ops",
            line(SHOWN.rate("draft_ahead_branches"), "drafted"),
            line(SHOWN.rate("draft_ahead_branches_left_out"), "left out"),
            line(SHOWN.rate("draft_ahead_branches_true"), "came true"),
            width=12,
        ),
    ),
)

LONG_CONTEXT = Dashboard(
    uid="drafthouse-long-context",
    title="Drafthouse / Long context",
    description="Long texts: memory, reading prompts, and drafting with a part of the K/V.",
    rows=(_MEMORY, _PROMPTS, _DRAFTING),
)
