"""The shapes of responses, as OpenAI's clients expect them. `UNSET` fields are absent."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from specdec.core.outputs import FinishReason

StopReason = str | int | None
Lossy = Literal[True] | UnsetType
"""True where the verification rule may have changed the distribution of what was generated."""


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the usage."""

    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a whole request; each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculativeDecodingMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What speculation did for this request, all choices together (vLLM's names)."""

    mean_acceptance_length: float
    """Tokens per verified proposal: 1 + accepted / proposals."""
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    """Entry i: proposals of which exactly i tokens were accepted."""
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_lossy_tokens: int
    """Tokens from verification by a lossy rule."""
    per_step_accepted: list[int]
    per_step_drafted: list[int]


class ResponseMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one request, only when it asked for them."""

    speculative_decoding: SpeculativeDecodingMetrics


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry per token; the first token of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token at a position of the prompt."""

    logprob: float
    rank: int | None
    """1 for the most likely token; None for the prompt's own token where it is not among those listed."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]
"""By position of the prompt, by token id; None for the first (vLLM's shape)."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One text, or a piece of one in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or a chunk of one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    lossy: Lossy = UNSET
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token that might have been chosen."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One generated token."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a message's content."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The reply."""

    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One reply."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    lossy: Lossy = UNSET
    choices: list[ChatChoice]
    usage: Usage
    metrics: ResponseMetrics | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What a chat chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one reply."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a chat completion."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    lossy: Lossy = UNSET
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: ResponseMetrics | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "drafthouse"
    max_model_len: int
    revision: str


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All served models."""

    object: str = "list"
    data: list[ModelCard]
