"""Long texts: memory, reading prompts, and drafting with a part of the K/V."""

from __future__ import annotations

from deploy.monitoring.panels import SHOWN, Dashboard, Panel, Row, line

_MEMORY = Row(
    title="Memory",
    panels=(
        Panel(
            title="KV blocks in use",
            description="Share of the target's KV blocks that requests hold, mean over target groups.",
            unit="percentunit",
            queries=(line(SHOWN.gauge("kv_cache_usage_perc"), "{{job}}"),),
        ),
        Panel(
            title="Thrown out and computed again",
            description="Requests per second that gave their blocks to others, when memory was short.",
            unit="ops",
            queries=(line(SHOWN.rate("num_preemptions"), "preemptions"),),
        ),
        Panel(
            title="Work done twice",
            description="Tokens computed again after a preemption, for each token generated. Above 0.1: "
            "give `cache.memory_bytes` more, or run fewer requests at once (`scheduler.max_num_seqs`).",
            unit="percentunit",
            queries=(line(SHOWN.ratio("num_recomputed_tokens", "generation_tokens"), "{{job}}"),),
        ),
    ),
)
_PROMPTS = Row(
    title="Reading prompts",
    panels=(
        Panel(
            title="Prompt tokens",
            description="Of requests that were taken in, and those of them found in the prefix cache.",
            unit="tokens/s",
            queries=(
                line(SHOWN.rate("prompt_tokens"), "all"),
                line(SHOWN.rate("prefix_cache_hits"), "in the prefix cache"),
            ),
        ),
        Panel(
            title="Prefix cache",
            description="Share of looked-up tokens that were found. Low with shared prompts: memory too "
            "small, or requests that could share go to different target groups.",
            unit="percentunit",
            queries=(
                line(SHOWN.ratio("prefix_cache_hits", "prefix_cache_queries"), "target"),
                line(SHOWN.ratio("draft_prefix_cache_hits", "draft_prefix_cache_queries"), "draft models"),
            ),
        ),
        Panel(
            title="Time to the first token",
            description="Long prompts take long to read; p95 is theirs.",
            unit="s",
            queries=(
                line(SHOWN.quantile(0.5, "time_to_first_token_seconds"), "median"),
                line(SHOWN.quantile(0.95, "time_to_first_token_seconds"), "p95"),
            ),
        ),
    ),
)
_DRAFTING = Row(
    title="Drafting behind long texts",
    panels=(
        Panel(
            title="Tokens that drafts attend to",
            description="Mean KV budget of running requests (speculative_config.kv.budget), where there is "
            "one.",
            unit="short",
            queries=(line(SHOWN.gauge("speculation_mean_kv_budget"), "{{job}}"),),
        ),
        Panel(
            title="Seconds per round: drafts and target",
            description="Waiting for drafts and for the target, mean per round. With long texts the "
            "target's share grows with every token in the batch; drafts with a KV budget do not.",
            unit="s",
            queries=(
                line(SHOWN.ratio("draft_time_seconds", "rounds"), "drafts"),
                line(SHOWN.ratio("verify_time_seconds", "rounds"), "target"),
            ),
        ),
        Panel(
            title="Accepted draft tokens",
            description="Share. Falls when the KV budget leaves out what matters: try a larger one, or "
            "another policy.",
            unit="percentunit",
            queries=(
                line(
                    SHOWN.ratio("spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens"), "{{job}}"
                ),
            ),
        ),
        Panel(
            title="Too long for the draft model",
            description="Requests that went on without its drafts, because their text is longer than it can "
            "read, or than its memory has room for; and texts that it had to read again at new positions "
            "(kv.positions: in_cache).",
            unit="ops",
            width=12,
            queries=(
                line(SHOWN.rate("draft_sequences_too_long"), "too long"),
                line(SHOWN.rate("draft_sequences_outgrown"), "no memory"),
                line(SHOWN.rate("draft_windows_reread"), "read again"),
            ),
        ),
        Panel(
            title="Looking ahead",
            description="Continuations drafted for verdicts not known yet; those that there was no memory "
            "for; those that came true.",
            unit="ops",
            width=12,
            queries=(
                line(SHOWN.rate("draft_ahead_branches"), "drafted"),
                line(SHOWN.rate("draft_ahead_branches_left_out"), "left out"),
                line(SHOWN.rate("draft_ahead_branches_true"), "came true"),
            ),
        ),
    ),
)

LONG_CONTEXT = Dashboard(
    uid="drafthouse-long-context",
    title="Drafthouse / Long context",
    description="Long texts: memory, reading prompts, and drafting with a part of the K/V.",
    rows=(_MEMORY, _PROMPTS, _DRAFTING),
)
