"""What clients may send: OpenAI's completions and chat completions, plus the fields that vLLM's users know.

Three kinds of fields that we do not act on are told apart:
- harmless ones (`user`, `store`, `service_tier`, ...) are accepted and ignored;
- ones that would change the output and are not built (`suffix`, `use_beam_search`, ...) are accepted only at
  their neutral value and otherwise refused by name;
- everything else is unknown, and refused with the nearest known name.

A field that is `null` has its default.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from deploy.openai.body_part import BodyPart
from deploy.openai.errors import shown
from deploy.openai.fields import (
    BadWords,
    KvBudgetAmount,
    LogitBias,
    Metadata,
    Prompt,
    Strings,
    TokenIds,
    TopK,
)
from deploy.openai.grammars import GrammarFields
from deploy.openai.tools import (
    MAX_TOOLS,
    AllowedChoice,
    EarlierCall,
    NamedChoice,
    Tool,
    ToolChoice,
    answer_or_calls,
    forced_calls,
)
from specdec.core.errors import InputError
from specdec.core.sampling_params import MAX_LOGPROBS, Grammar, LogprobsMode
from specdec.scheduling.admission import MAX_PRIORITY

NOT_SUPPORTED_YET: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "reasoning_effort": ("none",),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Known fields that would change the output, with the values that would not."""

HARMLESS = frozenset(
    {
        "guided_decoding_backend",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Known fields that cannot change the output: accounting and hints."""
_LONGEST_LIKENESS = 64
"""Characters: a longer name is like none, and comparing one as long as a body would take seconds."""


class StreamOptions(BodyPart):
    """How a stream is to be delivered."""

    include_usage: bool = False
    """End the stream with a chunk that has no choices and the usage of the whole request."""
    continuous_usage_stats: bool = False
    """Put the usage so far into every chunk that has choices."""
    event_ids: bool = True
    """Give every event an id, behind which the stream can be resumed. Some clients take lines other than
    `data:` for JSON: they need false, which leaves comments (`http.stream_keep_alive_s`) out, too."""
    include_obfuscation: bool = False
    """Accepted and ignored: nothing is padded."""


class SpeculationOptions(BodyPart):
    """Per-request override of how much is drafted, and from how much of the text. At least one of them.

    It changes the speed; under sample_and_match never the output, under another lossless rule never its
    distribution.
    """

    num_speculative_tokens: int | None = Field(default=None, ge=0, le=64)
    """Most draft tokens per round; 0 switches speculation off. What is more than the server's own
    `num_speculative_tokens` (of the drafter, where there are several) is cut to that; somebody's
    `slo.itl_ms` may leave less. Left out, the server decides."""
    kv_budget: KvBudgetAmount | None = None
    """How much of the text drafts attend to, where the server has a selection policy
    (`speculative_config.kv.policy`): an integer is tokens; 0.05 or "5%" a share of the length, at least the
    server's `kv.floor`. Left out, the server decides."""

    drafter: str | None = Field(default=None, min_length=1, max_length=32)
    """Who drafts, by its name in `speculative_config.drafters`, where the server has several. Left out, the
    server decides."""

    @model_validator(mode="after")
    def _check_any(self) -> Self:
        if self.num_speculative_tokens is None and self.kv_budget is None and self.drafter is None:
            raise ValueError("give num_speculative_tokens, kv_budget, drafter, or more than one of them")
        return self


class LatencyTargets(BodyPart):
    """How soon a client wants its tokens. What was taken in is served, be it late."""

    ttft_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Milliseconds to the first token: its prompt is read before others get draft tokens. With
    `scheduler.refuse_late` (the default) a request that is not expected to have it in time is refused."""
    itl_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Milliseconds between two events of the stream: with `speculative_config.controller: goodput` (the
    default) rounds are not made longer than that by drafting, as far as their time is foreseen, unless rounds
    without drafts already are. With `fixed` it changes nothing."""


class GenerationBody(GrammarFields):
    """Fields that completions and chat completions share."""

    model: str | None = None
    """Name of the served model; may be left out."""
    max_tokens: int | None = Field(default=None, ge=0)
    """Most tokens to generate; 0 only where something of the prompt is asked for."""
    min_tokens: int = Field(default=0, ge=0)
    """EOS and stop tokens are not among the first so many tokens; stop strings are not looked for before."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches top_p."""
    top_k: TopK = None
    """Keep the k most likely tokens; 0, -1 or null keep all."""
    min_p: float = 0.0
    """Keep tokens with at least min_p times the largest probability."""
    repetition_penalty: float = 1.0
    """Above 1: tokens of prompt and output become less likely to come again."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time that it is in the output."""
    logit_bias: LogitBias = ()
    """Token ids (as strings) and what to add to their logits, -100 to 100."""
    bad_words: BadWords = ()
    """Texts, or sequences of token ids, that the output must not contain."""
    allowed_token_ids: TokenIds | None = None
    """Only these tokens may be chosen."""
    seed: int | None = None
    """64-bit seed: the same request with the same seed gives the same tokens."""
    n: int = 1
    """Number of choices per prompt."""
    stop: Strings = ()
    """A string or strings that end the text; the text is cut before the first one found."""
    stop_token_ids: TokenIds = ()
    """Token ids that end the text, beside EOS."""
    include_stop_str_in_output: bool = False
    """Leave the stop string in the text."""
    ignore_eos: bool = False
    """Go on after EOS."""
    logprobs_mode: LogprobsMode = "raw"
    """raw: of the unmodified distribution; processed: of what was sampled from."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Report log-probabilities of the prompt's tokens, and of so many most likely ones at each position."""
    stream: bool = False
    """Deliver tokens as server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    speculation: SpeculationOptions | None = None
    """Override of how much is drafted for this request."""
    return_metrics: bool = False
    """Add `metrics.speculative_decoding` to the response (the last chunk of a stream)."""
    return_token_ids: bool = False
    """Add `token_ids` to every choice, and `prompt_token_ids` to complete responses."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    """Only requests of one salt find each other's prompts in the prefix cache."""
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Smaller is served first, and may take the place of larger ones that run. An API key may set a limit."""
    timeout_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Longest time (seconds) for the whole request, queueing included; then it ends with 504. With
    `scheduler.refuse_late` (the default) a request that cannot be complete by then gets 429 at once."""
    slo: LatencyTargets | None = None
    """How soon tokens are wanted."""
    metadata: Metadata = Field(default_factory=dict)
    """`class` says what kind of request it is, when the server's configuration lists it
    (`http.request_classes`): how far drafts are accepted is learnt per class."""

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, data: Any) -> Any:
        """Drop harmless fields; refuse what is not supported, or not known, by name."""
        if not isinstance(data, dict):
            raise InputError("the body must be a JSON object", param=None)
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in NOT_SUPPORTED_YET:
                if value is not None and value not in NOT_SUPPORTED_YET[name]:
                    raise InputError(f"{name} is not supported yet", param=name)
            elif name not in HARMLESS:
                raise InputError(_unknown_field(name, cls), param=name)
        return kept

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options is only allowed with stream: true", param="stream_options")
        return self

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise InputError("prompt_logprobs is not available with stream: true", param="prompt_logprobs")
        if self.max_tokens == 0 and self.num_prompt_logprobs is None:
            raise InputError(
                "max_tokens must be at least 1, or 0 with echo or prompt_logprobs", param="max_tokens"
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per position; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to find per position of the prompt; None: nothing."""
        return self.prompt_logprobs

    @property
    def num_streams(self) -> int:
        """Choices to generate per prompt."""
        return self.n

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def wants_event_ids(self) -> bool:
        """Whether it is a stream that its client may resume."""
        return self.stream and (self.stream_options is None or self.stream_options.event_ids)


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    prompt: Prompt
    """Text, or token ids, or a list of either."""
    max_tokens: int = Field(default=16, ge=0)
    """Most tokens to generate per choice; 0 only with `echo` or `prompt_logprobs`."""
    best_of: int | None = None
    """Generate so many choices per prompt and return the `n` best: those with the highest mean
    log-probability per token."""
    echo: bool = False
    """Put the prompt in front of every text, with its log-probabilities where `logprobs` asks for them."""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Report log-probabilities: of the chosen token and of so many most likely ones."""
    add_special_tokens: bool = True
    """Whether the tokenizer may add its own tokens (BOS) to text prompts."""

    @model_validator(mode="before")
    @classmethod
    def _take_empty_prompt(cls, data: Any) -> Any:
        """`null` is the prompt of no text: what the tokenizer puts in front of any."""
        is_null = isinstance(data, dict) and "prompt" in data and data["prompt"] is None
        return {**data, "prompt": ""} if is_null else data

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise InputError(f"best_of must be at least n, {self.n}, got {self.best_of}", param="best_of")
        if self.num_streams > self.n and self.stream:
            raise InputError("best_of above n is not available with stream: true", param="best_of")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per position; None: no log-probabilities at all."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to find per position of the prompt; None: nothing."""
        echoed = self.logprobs if self.echo else None
        if echoed is None and self.prompt_logprobs is None:
            return 0 if self.echo and self.max_tokens == 0 else None
        return max(echoed or 0, self.prompt_logprobs or 0)

    @property
    def num_streams(self) -> int:
        """Choices to generate per prompt."""
        return self.n if self.best_of is None else self.best_of


class TextPart(BodyPart):
    """One part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str

    # Every prompt is looked for in the prefix cache.
    ignored = frozenset({"cache_control", "prompt_cache_breakpoint"})


class RefusalPart(BodyPart):
    """One part of what the assistant has said: text as well."""

    type: Literal["refusal"]
    refusal: str

    ignored = frozenset({"cache_control"})

    @property
    def text(self) -> str:
        """What was said."""
        return self.refusal


def _content_kind(value: object) -> str:
    """Decide by its type which of two shapes a content is meant to have, so that one complaint comes out."""
    return "<parts>" if isinstance(value, list) else "<text>"


def _part_kind(value: object) -> str:
    """As `_content_kind`: what is no refusal is meant to be text."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<refusal>" if kind == "refusal" else "<text>"


EMPTY_REPLY_FIELDS = frozenset({"annotations", "audio", "function_call"})
_MESSAGE_TYPES = ("text", "message")
"""What some clients write into every message (lm-evaluation-harness: text): no other kinds are known."""
_REFUSAL = "refusal"
_REASONING = "reasoning"
ADDED_TO_REPLIES = frozenset({"id", "parsed", "provider_specific_fields", _REASONING, "thinking_blocks"})
"""What clients' libraries and gateways have made of a reply: nothing new."""


_Text = Annotated[str, Tag("<text>")]
_Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(_part_kind)
]
_Parts = Annotated[list[_Part], Field(fail_fast=True), Tag("<parts>")]


class ChatMessage(BodyPart):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` is treated as `system`; `tool` gives the result of a call."""
    content: Annotated[_Text | _Parts, Discriminator(_content_kind)]
    """The text, or parts whose texts are joined by newlines. Only a message with calls or with a refusal
    may do without."""
    refusal: str | None = None
    """What the assistant has said in place of an answer, or behind it: text like its content."""
    name: str | None = None
    """Passed to the chat template, which may ignore it."""
    tool_calls: list[EarlierCall] = Field(default_factory=list, fail_fast=True)
    """Calls that the assistant made."""
    tool_call_id: str | None = None
    """The call whose result this is."""
    reasoning_content: str | None = None
    """What the assistant thought before it answered (or `reasoning`). Passed to the chat template, which may
    ignore it."""

    ignored = frozenset({"cache_control"})

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_reply_fields(cls, data: Any) -> Any:
        """Clients echo an assistant message back with all the empty fields that a response has, and more."""
        if not isinstance(data, dict):
            return data
        dropped = set(EMPTY_REPLY_FIELDS)
        if data.get("type") in _MESSAGE_TYPES:
            dropped.add("type")
        for name in EMPTY_REPLY_FIELDS:
            if data.get(name) not in (None, []):
                raise ValueError(f"{name} is not supported yet")
        if data.get(_REFUSAL) in ("", []):
            dropped.add(_REFUSAL)
        is_reply = data.get("role") == "assistant"
        if is_reply:
            dropped |= ADDED_TO_REPLIES
        kept = {name: value for name, value in data.items() if name not in dropped}
        if is_reply and isinstance(data.get(_REASONING), str) and kept.get("reasoning_content") is None:
            kept["reasoning_content"] = data[_REASONING]
        if (kept.get("tool_calls") or kept.get(_REFUSAL)) and kept.get("content") is None:
            kept["content"] = ""
        return kept

    @model_validator(mode="after")
    def _check_roles(self) -> Self:
        if self.role == "assistant":
            return self
        if self.tool_calls:
            raise ValueError("tool_calls are for messages of the assistant")
        has_refused_part = not isinstance(self.content, str) and any(
            isinstance(part, RefusalPart) for part in self.content
        )
        if self.refusal is not None or has_refused_part:
            raise ValueError("refusals are for messages of the assistant")
        if self.reasoning_content is not None:
            raise ValueError("reasoning_content is for messages of the assistant")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates expect it."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.name:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    @property
    def text(self) -> str:
        """The content and the refusal as one string."""
        content = self.content
        texts = [content] if isinstance(content, str) else [part.text for part in content]
        if self.refusal is not None:
            texts = [*filter(None, texts), self.refusal]
        return "\n".join(texts)


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    """The conversation so far."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Most tokens to generate per choice; without it, up to the context limit."""
    logprobs: bool = False
    """Report the log-probability of each chosen token."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    """Report also so many most likely tokens per position; needs `logprobs: true`."""
    add_generation_prompt: bool = True
    """Whether the chat template opens the assistant's turn."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the model's chat template, such as `{"enable_thinking": false}`."""
    tools: list[Tool] = Field(default_factory=list, max_length=MAX_TOOLS)
    """Functions that the model may call."""
    tool_choice: ToolChoice = "auto"
    """none: no calls; auto: as the model likes; required: calls and nothing else; or the function to call, or
    those of `tools` that may be called."""
    parallel_tool_calls: bool = True
    """Whether a reply may hold several calls; if not, others than its first are dropped."""

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs needs logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise InputError(
                "max_tokens and max_completion_tokens disagree; give max_completion_tokens only",
                param="max_completion_tokens",
            )
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise InputError("tools names a function twice", param="tools")
        if isinstance(self.tool_choice, str) and not self.is_call_forced:
            return self
        if not self.tools:
            raise InputError("tool_choice needs tools", param="tool_choice")
        unknown = next((name for name in self._chosen_names if name not in names), None)
        if unknown is not None:
            raise InputError(f"tool_choice: {shown(unknown)} is not one of tools", param="tool_choice")
        # A response_format is for text, and there is none where calls are forced.
        if self.is_call_forced and super().grammar is not None and not self.has_response_format:
            raise InputError(
                "a tool_choice that forces a call cannot be combined with another grammar",
                param="tool_choice",
            )
        return self

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """What the chat template is told of the tools; None: nothing."""
        if not self.reads_calls:
            return None
        return [tool.model_dump(exclude_none=True) for tool in self._allowed_tools]

    @property
    def reads_calls(self) -> bool:
        """Whether calls are looked for in what the model writes."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def callable_names(self) -> frozenset[str]:
        """The functions that calls in a reply may name; what names another one is text."""
        return frozenset(tool.function.name for tool in self._allowed_tools)

    @property
    def is_call_forced(self) -> bool:
        """Whether the reply has to be calls and nothing else."""
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice not in ("none", "auto")

    @property
    def called_name(self) -> str | None:
        """The function that has to be called; None: whichever."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None

    @property
    def _allowed_tools(self) -> list[Tool]:
        if not isinstance(self.tool_choice, AllowedChoice):
            return self.tools
        names = self._chosen_names
        return [tool for tool in self.tools if tool.function.name in names]

    @property
    def _chosen_names(self) -> list[str]:
        """The functions that `tool_choice` names; none where it is a word."""
        if isinstance(self.tool_choice, NamedChoice):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedChoice):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return []

    @property
    def grammar(self) -> Grammar | None:
        """What the output must look like; None: anything."""
        tools, is_parallel = self._allowed_tools, self.parallel_tool_calls
        if self.is_call_forced:
            return forced_calls(tools, name=self.called_name, is_parallel=is_parallel)
        grammar = super().grammar
        if grammar is None or not self.reads_calls or not self.has_response_format:
            return grammar
        return answer_or_calls(grammar, tools, is_parallel=is_parallel)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per position; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


def _unknown_field(name: str, model: type[BaseModel]) -> str:
    known = [*model.model_fields, *NOT_SUPPORTED_YET, *HARMLESS]
    near = [] if len(name) > _LONGEST_LIKENESS else difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"unknown field {shown(name)}" + (f"; did you mean {near[0]!r}?" if near else "")
