"""Counters and gauges of one engine, under the names that dashboards know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from specdec.core.outputs import FinishReason
from specdec.engine.metrics.draft_counts import DrafterCounts, DraftsByKind, MethodCounts
from specdec.engine.metrics.latencies import Latencies
from specdec.scheduling.speculation.explanation import ControllerState
from specdec.scheduling.speculation.modes import OverlapMode

DropReason = Literal["stale", "malformed", "late", "unverifiable"]
"""Why a proposal was not used: for another prefix; no chain (or tree) of valid tokens; no answer at all; not
sampled as the verification rule needs it."""

RefusalReason = Literal["full", "late", "displaced"]
"""Why a request was not served: the queue was full; it would have been late; it had to leave a full queue."""


@dataclass(slots=True)
class EngineMetrics:
    """Counters since the engine started, and gauges of its last round. Times are seconds."""

    method: str = "none"
    """How the proposer drafts."""
    num_rounds: int = 0
    rounds_by_mode: Counter[OverlapMode] = field(default_factory=Counter)
    num_request_rounds_per_k: list[int] = field(default_factory=list)
    """[k]: how often a request was to be given k draft tokens in a round that gave it tokens."""
    num_drafts: int = 0
    """Proposals that were verified."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """[i]: how often draft token i of a proposal was accepted; of a tree, one at depth i."""
    other_methods: dict[str, MethodCounts] = field(default_factory=dict)
    """The part of all these that was not drafted by `method`: what stood in, and what grammars forced."""
    by_kind: DraftsByKind = field(default_factory=DraftsByKind)
    """All proposals that were verified, by what they were for."""
    by_drafter: dict[str, DrafterCounts] = field(default_factory=dict)
    """Of several drafters, by their names: all proposals that were verified."""
    by_shadow: dict[str, DrafterCounts] = field(default_factory=dict)
    """Of drafters that are not heard: proposals that were compared with what was generated."""
    num_running_by_drafter: Counter[str] = field(default_factory=Counter)
    """Requests that have each of several drafters."""
    num_verified_requests: int = 0
    """Requests in the batches that the target was given, added up over rounds."""
    num_verified_rows: int = 0
    """Tokens in these batches."""
    num_places: int = 0
    """Requests that these batches had room for."""
    num_moved_kv: int = 0
    """Accepted tokens of trees whose K/V had to be moved to their places."""
    num_rows_beside: int = 0
    """Rows that the target computed for the proposer beside those of drafts."""
    num_lossy_tokens: int = 0
    """Tokens committed by a verification rule that does not keep the target's distribution."""
    proposals_dropped: Counter[DropReason] = field(default_factory=Counter)
    num_missing_proposals: int = 0
    """Draft budgets that no proposal came for."""
    num_preemptions: int = 0
    num_timeouts: int = 0
    """Requests that ended because their time was up."""
    refusals: Counter[RefusalReason] = field(default_factory=Counter)
    prompt_tokens: int = 0
    """Prompt tokens of requests that were taken in."""
    generation_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Tokens whose K/V were given up by preemption and computed once more."""
    prefix_cache_queries: int = 0
    """Tokens of requests that began to run, looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Of these, tokens that were found: they were not computed."""
    round_s: float = 0.0
    """From the end of a round, or the beginning of work, to the end of the next round."""
    draft_s: float = 0.0
    """Waiting for proposals."""
    draft_latencies: Latencies = field(default_factory=Latencies)
    """The same of each round that drafts were asked for in."""
    drafting_s: float = 0.0
    """T_draft, where drafts come from elsewhere, as whoever drafted measures it."""
    hidden_drafting_s: float = 0.0
    """The part of it in which the target had something to verify."""
    drafts_elsewhere: bool = False
    """Whether drafts come from elsewhere: then waiting for them is not what they take."""
    drafting_latencies: Latencies = field(default_factory=Latencies)
    """T_draft of each round that drafts were asked for in, where it is known: as whoever drafted elsewhere
    measures it, and what waiting for them took where they are made here, or in the target's step."""
    verify_s: float = 0.0
    """From the submission of a step to its answer."""
    verify_latencies: Latencies = field(default_factory=Latencies)
    """The same of each round."""
    target_forward_s: float = 0.0
    target_sample_s: float = 0.0
    target_utilization: float = 0.0
    """Share of the last seconds in which the target computed, as it measures it."""
    local_draft_utilization: float | None = None
    """Share of the last seconds in which drafts were made, where they are not made elsewhere."""
    coordinator_s: float = 0.0
    """The rest of the rounds: planning, packing, committing, detokenizing, and what is done between them."""
    finished: Counter[FinishReason] = field(default_factory=Counter)
    speculation: ControllerState = field(default_factory=ControllerState)
    """What the speculation controller has decided last."""
    mean_kv_budget: float | None = None
    """Mean of the tokens that drafts of running requests may attend to; None: everything, or none runs."""
    num_running: int = 0
    num_waiting: int = 0
    queue_wait_s: float = 0.0
    """Seconds that a request would wait which came now and were served last."""
    kv_cache_usage: float = 0.0
    """Share of the KV blocks that are held, 0 to 1."""

    def count_draft(self, num_drafted: int, num_accepted: int, depth: int | None = None) -> None:
        """Count one verified proposal: a chain, or a tree whose longest path has `depth` tokens."""
        depth = num_drafted if depth is None else depth
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        per_position = self.num_accepted_tokens_per_pos
        if depth > len(per_position):
            per_position.extend([0] * (depth - len(per_position)))
        for position in range(num_accepted):
            per_position[position] += 1

    def count_choices(self, num_draft_tokens: Iterable[int], num_without: int) -> None:
        """Count how many draft tokens each request of a round was to be given; some were to have none."""
        per_k = self.num_request_rounds_per_k
        for k, count in ((0, num_without), *((k, 1) for k in num_draft_tokens)):
            if k >= len(per_k):
                per_k.extend([0] * (k + 1 - len(per_k)))
            per_k[k] += count

    def count_other_method(self, method: str, num_drafted: int, num_accepted: int) -> None:
        """Count that a proposal, counted already, was by another method than `method`."""
        self.other_methods.setdefault(method, MethodCounts()).count(num_drafted, num_accepted)

    def by_method(self) -> Mapping[str, MethodCounts]:
        """Return the counts of every method that has proposed something (any thread)."""
        others = dict(self.other_methods)
        own = MethodCounts(
            self.num_drafts - sum(one.num_drafts for one in others.values()),
            self.num_draft_tokens - sum(one.num_draft_tokens for one in others.values()),
            self.num_accepted_tokens - sum(one.num_accepted_tokens for one in others.values()),
        )
        return {self.method: own, **others} if own.num_drafts > 0 else others

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verified proposal: 1 + accepted / drafts (1.0 without drafts)."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    def snapshot(self) -> Mapping[str, float]:
        """Return all values by metric name, without prefix; labels as in the Prometheus text format.

        May be called while another thread counts.
        """
        values: dict[str, float] = {
            "rounds": self.num_rounds,
            "verify_batch_requests": self.num_verified_requests,
            "verify_batch_rows": self.num_verified_rows,
            "verify_batch_places": self.num_places,
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_num_draft_tokens": self.num_draft_tokens,
            "spec_decode_num_accepted_tokens": self.num_accepted_tokens,
            "spec_decode_wasted_draft_tokens": self.num_draft_tokens - self.num_accepted_tokens,
            "spec_decode_num_missing_proposals": self.num_missing_proposals,
            "spec_decode_num_lossy_tokens": self.num_lossy_tokens,
            "spec_decode_num_moved_kv": self.num_moved_kv,
            "spec_decode_num_rows_beside": self.num_rows_beside,
            "num_preemptions": self.num_preemptions,
            "request_timeouts": self.num_timeouts,
            "num_recomputed_tokens": self.num_recomputed_tokens,
            "prefix_cache_queries": self.prefix_cache_queries,
            "prefix_cache_hits": self.prefix_cache_hits,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "round_time_seconds": self.round_s,
            "draft_time_seconds": self.draft_s,
            "drafting_time_seconds": self.drafting_s,
            "drafting_hidden_time_seconds": self.hidden_drafting_s,
            "verify_time_seconds": self.verify_s,
            "target_forward_time_seconds": self.target_forward_s,
            "target_sample_time_seconds": self.target_sample_s,
            "target_utilization": self.target_utilization,
            "coordinator_time_seconds": self.coordinator_s,
            "num_requests_running": self.num_running,
            "num_requests_waiting": self.num_waiting,
            "queue_wait_seconds": self.queue_wait_s,
            "kv_cache_usage_perc": self.kv_cache_usage,
        }
        values.update(self.speculation.gauges())
        if self.mean_kv_budget is not None:
            values["speculation_mean_kv_budget"] = self.mean_kv_budget
        values.update(self._of_drafting())
        for mode, count in dict(self.rounds_by_mode).items():
            values[f'overlap_rounds{{mode="{mode}"}}'] = count
        for position, count in enumerate(list(self.num_accepted_tokens_per_pos)):
            values[f'spec_decode_num_accepted_tokens_per_pos{{position="{position}"}}'] = count
        for method, counts in self.by_method().items():
            values[f'spec_decode_num_drafts_by_method{{method="{method}"}}'] = counts.num_drafts
            values[f'spec_decode_num_draft_tokens_by_method{{method="{method}"}}'] = counts.num_draft_tokens
            values[f'spec_decode_num_accepted_tokens_by_method{{method="{method}"}}'] = (
                counts.num_accepted_tokens
            )
        values.update(self.by_kind.series())
        values.update(self.draft_latencies.series("round_draft_seconds"))
        values.update(self.verify_latencies.series("round_verify_seconds"))
        for prefix, counts_of in (("drafter", self.by_drafter), ("shadow", self.by_shadow)):
            for name, its in dict(counts_of).items():
                values.update(its.series(prefix, f'{{drafter="{name}"}}'))
        for name, count in dict(self.num_running_by_drafter).items():
            values[f'drafter_num_requests_running{{drafter="{name}"}}'] = count
        # All of them from the beginning: of a counter that appears with 1, Prometheus sees no increase.
        for drop in get_args(DropReason):
            values[f'spec_decode_num_proposals_dropped{{reason="{drop}"}}'] = self.proposals_dropped[drop]
        for refusal in get_args(RefusalReason):
            values[f'requests_refused{{reason="{refusal}"}}'] = self.refusals[refusal]
        for finish in get_args(FinishReason):
            values[f'request_success{{finished_reason="{finish}"}}'] = self.finished[finish]
        return values

    def _of_drafting(self) -> Mapping[str, float]:
        """How much is drafted, and how long that takes."""
        values: dict[str, float] = dict(self.drafting_latencies.series("round_drafting_seconds"))
        for k, count in enumerate(list(self.num_request_rounds_per_k)):
            values[f'speculation_request_rounds{{k="{k}"}}'] = count
        if self.local_draft_utilization is not None:
            values["local_draft_utilization"] = self.local_draft_utilization
        return values
