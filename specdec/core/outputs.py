"""What an engine says about a request, step by step."""

from __future__ import annotations

from typing import Literal

import msgspec

from specdec.core.ids import Epoch, RequestId

_NUM_FIRST_ROUNDS = 16
"""Rounds of a trace that are told one by one."""
FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: EOS, a stop token or a stop string; length: max_tokens or the context limit."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one generated position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, most likely first."""


class SpeculationStats(msgspec.Struct, kw_only=True):
    """Per-request speculation counters (vLLM's meaning: a draft is one proposal verified)."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_lossy_tokens: int = 0
    """Tokens from verification by a rule that does not keep the target's distribution."""
    per_step_drafted: list[int] = msgspec.field(default_factory=list)
    per_step_accepted: list[int] = msgspec.field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        """Committed tokens per verified proposal: 1 + accepted / drafts (1.0 when nothing was drafted)."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def acceptance_rate(self) -> float:
        """Share of drafted tokens that were accepted (0.0 when nothing was drafted)."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


class TracedRound(msgspec.Struct, frozen=True, array_like=True):
    """What one round was for one request; seconds on the engine's clock."""

    index: int
    """0 for the request's first round in which tokens were committed."""
    propose_s: float
    """When drafts were asked for."""
    proposed_s: float
    verify_s: float
    """When the target was."""
    verified_s: float
    committed_s: float
    num_drafted: int
    num_committed: int


class RoundTrace(msgspec.Struct, kw_only=True):
    """Rounds in which a request got tokens: sums over all, and some of them one by one."""

    num_rounds: int = 0
    propose_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    rounds: list[TracedRound] = msgspec.field(default_factory=list)
    """The first ones, then those whose index is a power of two."""

    def note(self, one: TracedRound) -> None:
        """Count a round; its index is `num_rounds`."""
        self.num_rounds += 1
        self.propose_s += one.proposed_s - one.propose_s
        self.verify_s += one.verified_s - one.verify_s
        self.commit_s += one.committed_s - one.verified_s
        if one.index < _NUM_FIRST_ROUNDS or one.index & (one.index - 1) == 0:
            self.rounds.append(one)


class RequestStats(msgspec.Struct, kw_only=True):
    """Times (seconds, on the engine's clock) and counters of one finished request."""

    arrival_s: float
    expected_first_token_s: float | None = None
    """Seconds from its arrival, as foreseen when it was taken in. None: it had not to wait."""
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached_prompt_tokens: int = 0
    num_delivered_tokens: int = 0
    """Of its generated tokens, those of earlier epochs, which it has read and not generated."""
    speculation: SpeculationStats = msgspec.field(default_factory=SpeculationStats)
    trace: RoundTrace | None = None
    """Where the request asks for it (`Request.is_traced`)."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one request since its last output. The last one carries a finish reason.

    Every accepted request ends in exactly one output whose `finish_reason` is not None.
    """

    request_id: RequestId
    epoch: Epoch
    first_index: int
    """Index of the first token below among the generated tokens (0-based)."""
    token_ids: tuple[int, ...]
    text: str
    """New text; characters are never split, text that may belong to a stop string is held back."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt's second token and all behind it, when the request asked for them: once, with the first
    output."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the text, if one did."""
    error: str | None = None
    error_code: str | None = None
    retry_after_s: float | None = None
    """With an error that passes: when to try again."""
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    """Including delivered tokens of earlier epochs and those in this output."""
    stats: RequestStats | None = None
    """Only with the last output."""
