"""From engine outputs to response bodies: whole ones, and the chunks of streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from deploy.openai.bodies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatFinishReason,
    ChatResponse,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    Delta,
    FunctionCall,
    PromptLogprobs,
    PromptTokensDetails,
    ResponseMetrics,
    SpeculativeDecodingMetrics,
    StopReason,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from deploy.openai.logprobs import (
    TextCursor,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
)
from deploy.openai.protocol import ChatBody
from deploy.openai.requests import PreparedRequest
from deploy.openai.tokenization import DoorTokenizer
from deploy.openai.tools import CallReader, read_reply
from specdec.core.outputs import FinishReason, RequestOutput, SpeculationStats, TokenLogprobs
from specdec.engine.best_of import best_choices

RunningUsage = Usage | UnsetType | None
"""What a chunk with choices says of the usage: so far, nothing, or null where it comes at the end."""


@dataclass(slots=True)
class ChoiceResult:
    """What one choice has come to so far."""

    text_parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: StopReason = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_cached_tokens: int = 0

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.text_parts)

    def count(self, output: RequestOutput) -> None:
        """Take over the counters of an output, not its tokens (a stream has sent those on)."""
        self.num_tokens = max(self.num_tokens, output.num_generated_tokens)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            if output.stats is not None:
                self.speculation = output.stats.speculation
                self.num_cached_tokens = output.stats.num_cached_prompt_tokens

    def add(self, output: RequestOutput) -> None:
        """Take over everything."""
        self.count(output)
        self.text_parts.append(output.text)
        self.token_ids.extend(output.token_ids)
        self.logprobs.extend(output.logprobs or ())
        self.prompt_logprobs += output.prompt_logprobs or ()


def usage_of(prepared: PreparedRequest, results: Sequence[ChoiceResult]) -> Usage:
    """Return the token counts of a request.

    A prompt counts once, however many choices it has; what was cached of it is what its first choice found.
    """
    num_prompt, num_generated = prepared.num_prompt_tokens, sum(result.num_tokens for result in results)
    num_cached = sum(result.num_cached_tokens for result in results[:: prepared.body.num_streams])
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
    )


def metrics_of(results: Iterable[ChoiceResult]) -> ResponseMetrics:
    """Return what speculation did, choices one after the other."""
    total = SpeculationStats()
    for result in results:
        stats = result.speculation
        total.num_drafts += stats.num_drafts
        total.num_draft_tokens += stats.num_draft_tokens
        total.num_accepted_tokens += stats.num_accepted_tokens
        total.num_lossy_tokens += stats.num_lossy_tokens
        total.per_step_accepted.extend(stats.per_step_accepted)
        total.per_step_drafted.extend(stats.per_step_drafted)
    histogram = [0] * (max(total.per_step_drafted, default=-1) + 1)
    for num_accepted in total.per_step_accepted:
        histogram[num_accepted] += 1
    return ResponseMetrics(
        speculative_decoding=SpeculativeDecodingMetrics(
            mean_acceptance_length=total.mean_acceptance_length,
            draft_acceptance_rate=total.acceptance_rate,
            acceptance_histogram=histogram,
            num_spec_steps=total.num_drafts,
            num_accepted_draft_tokens=total.num_accepted_tokens,
            num_draft_tokens=total.num_draft_tokens,
            num_lossy_tokens=total.num_lossy_tokens,
            per_step_accepted=total.per_step_accepted,
            per_step_drafted=total.per_step_drafted,
        )
    )


def complete_body(prepared: PreparedRequest, results: list[ChoiceResult], tokenizer: DoorTokenizer) -> bytes:
    """Return the JSON body of a response that is not streamed."""
    usage = usage_of(prepared, results)
    metrics = metrics_of(results) if prepared.body.return_metrics else UNSET
    if isinstance(prepared.body, ChatBody):
        response: ChatResponse | CompletionResponse = ChatResponse(
            id=prepared.response_id,
            created=prepared.created_s,
            model=prepared.model,
            system_fingerprint=prepared.system_fingerprint,
            lossy=prepared.lossy,
            choices=[
                _chat_choice(prepared, index, result, tokenizer) for index, result in enumerate(results)
            ],
            usage=usage,
            metrics=metrics,
            prompt_logprobs=_prompt_logprobs(prepared, results[0].prompt_logprobs, tokenizer),
        )
    else:
        response = CompletionResponse(
            id=prepared.response_id,
            created=prepared.created_s,
            model=prepared.model,
            system_fingerprint=prepared.system_fingerprint,
            lossy=prepared.lossy,
            choices=[
                _completion_choice(prepared, index, stream, results, tokenizer)
                for index, stream in enumerate(_chosen(prepared, results))
            ],
            usage=usage,
            metrics=metrics,
        )
    return msgspec.json.encode(response)


def _chosen(prepared: PreparedRequest, results: list[ChoiceResult]) -> Iterator[int]:
    """Return which streams are the choices: all, or the best ones of each prompt."""
    num_streams = prepared.body.num_streams
    for first in range(0, len(results), num_streams):
        logprobs = [result.logprobs for result in results[first : first + num_streams]]
        yield from (first + number for number in best_choices(logprobs, prepared.body.n))


def _completion_choice(
    prepared: PreparedRequest,
    index: int,
    stream: int,
    results: Sequence[ChoiceResult],
    tokenizer: DoorTokenizer,
) -> CompletionChoice:
    wants_ids = prepared.body.return_token_ids
    result = results[stream]
    # Those of a prompt are with its first choice (see `requests`).
    prompt = results[stream - stream % prepared.body.num_streams].prompt_logprobs
    logprobs = None
    if prepared.body.num_logprobs is not None:
        cursor = TextCursor(tokenizer, offset=len(prepared.prompt_text(stream)))
        logprobs = _text_logprobs(prepared, stream, prompt, result.logprobs, tokenizer, cursor)
    return CompletionChoice(
        index=index,
        text=prepared.prompt_text(stream) + result.text,
        logprobs=logprobs,
        finish_reason=result.finish_reason,
        stop_reason=result.stop_reason,
        token_ids=tuple(result.token_ids) if wants_ids else UNSET,
        prompt_token_ids=prepared.requests[stream].prompt_token_ids if wants_ids else UNSET,
        prompt_logprobs=_prompt_logprobs(prepared, prompt, tokenizer),
    )


def _text_logprobs(
    prepared: PreparedRequest,
    stream: int,
    prompt: Sequence[TokenLogprobs],
    generated: Sequence[TokenLogprobs],
    tokenizer: DoorTokenizer,
    cursor: TextCursor,
) -> CompletionLogprobs:
    """Return what the beginning of a text is made of, the prompt included where it is echoed.

    `cursor` stands at the first generated token.
    """
    num_top = prepared.body.num_logprobs or 0
    shaped = completion_logprobs(generated, tokenizer, cursor)
    if not prepared.prompt_texts:
        return shaped
    token_ids = prepared.requests[stream].prompt_token_ids
    return joined(
        echoed_logprobs(token_ids, prompt, tokenizer, prepared.prompt_text(stream), num_top), shaped
    )


def _prompt_logprobs(
    prepared: PreparedRequest, positions: Sequence[TokenLogprobs], tokenizer: DoorTokenizer
) -> PromptLogprobs | UnsetType:
    num_top = prepared.body.prompt_logprobs
    return UNSET if num_top is None else prompt_logprobs(positions, tokenizer, num_top)


def _chat_choice(
    prepared: PreparedRequest, index: int, result: ChoiceResult, tokenizer: DoorTokenizer
) -> ChatChoice:
    wants_ids = prepared.body.return_token_ids
    message, has_calls = _message(prepared, result)
    return ChatChoice(
        index=index,
        message=message,
        logprobs=chat_logprobs(result.logprobs, tokenizer)
        if prepared.body.num_logprobs is not None
        else None,
        finish_reason=_finish_reason(result.finish_reason, has_calls),
        stop_reason=result.stop_reason,
        token_ids=tuple(result.token_ids) if wants_ids else UNSET,
        prompt_token_ids=prepared.requests[index].prompt_token_ids if wants_ids else UNSET,
    )


def _message(prepared: PreparedRequest, result: ChoiceResult) -> tuple[AssistantMessage, bool]:
    """Return the reply, and whether there are calls in it."""
    if not (isinstance(prepared.body, ChatBody) and prepared.body.reads_calls):
        return AssistantMessage(content=result.text), False
    content, calls = read_reply(
        result.text,
        names=prepared.body.callable_names,
        is_complete=result.finish_reason == "stop",
        is_parallel=prepared.body.parallel_tool_calls,
    )
    if not calls:
        return AssistantMessage(content=content), False
    made = [
        ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
        for call in calls
    ]
    return AssistantMessage(content=content or None, tool_calls=made), True


def _finish_reason(reason: FinishReason | None, has_calls: bool) -> ChatFinishReason | None:
    return "tool_calls" if has_calls and reason == "stop" else reason


class CompletionChunks:
    """Chunks of a streamed completion."""

    def __init__(self, prepared: PreparedRequest, tokenizer: DoorTokenizer) -> None:
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._wants_ids = prepared.body.return_token_ids
        self._cursors = [
            TextCursor(tokenizer, offset=len(prepared.prompt_text(index)))
            for index in range(len(prepared.requests))
        ]
        self._unechoed = set(range(len(prepared.requests))) if prepared.prompt_texts else set()

    def opening(self, index: int, usage: RunningUsage) -> bytes | None:
        """A completion's stream opens with its first text."""
        return None

    def skip(
        self, index: int, token_ids: Sequence[int], text: str, finish_reason: FinishReason | None
    ) -> None:
        """Go on as if these tokens had been delivered by `pieces`."""
        has_logprobs = self._prepared.body.num_logprobs is not None
        if not (text or self._wants_ids or has_logprobs):
            return  # there was nothing to see yet: the prompt is still to be echoed
        self._unechoed.discard(index)
        if has_logprobs:
            for token_id in token_ids:
                self._cursors[index].advance(token_id)

    def pieces(self, index: int, output: RequestOutput, usage: RunningUsage) -> list[bytes]:
        """Return the chunks that deliver one output: one, or none when there is nothing to see yet."""
        if not (
            output.text or output.finish_reason or output.logprobs or (self._wants_ids and output.token_ids)
        ):
            return []
        is_echo = index in self._unechoed
        self._unechoed.discard(index)
        logprobs = None
        if is_echo and self._prepared.body.num_logprobs is not None:
            logprobs = _text_logprobs(
                self._prepared,
                index,
                output.prompt_logprobs or (),
                output.logprobs or (),
                self._tokenizer,
                self._cursors[index],
            )
        elif output.logprobs:
            logprobs = completion_logprobs(output.logprobs, self._tokenizer, self._cursors[index])
        choice = CompletionChoice(
            index=index,
            text=(self._prepared.prompt_text(index) if is_echo else "") + output.text,
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._wants_ids else UNSET,
        )
        return [self._encode([choice], usage)]

    def closing(self, usage: Usage | UnsetType, metrics: ResponseMetrics | UnsetType) -> bytes:
        """Return the last chunk, which has no choices."""
        return self._encode([], usage, metrics)

    def _encode(
        self,
        choices: list[CompletionChoice],
        usage: RunningUsage,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> bytes:
        return msgspec.json.encode(
            CompletionResponse(
                id=self._prepared.response_id,
                created=self._prepared.created_s,
                model=self._prepared.model,
                system_fingerprint=self._prepared.system_fingerprint,
                lossy=self._prepared.lossy,
                choices=choices,
                usage=usage,
                metrics=metrics,
            )
        )


class ChatChunks:
    """Chunks of a streamed chat completion: the role first, then content, then the finish reason."""

    def __init__(self, prepared: PreparedRequest, tokenizer: DoorTokenizer) -> None:
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._wants_ids = prepared.body.return_token_ids
        body = prepared.body
        self._readers = (
            [
                CallReader(names=body.callable_names, is_parallel=body.parallel_tool_calls)
                for _ in prepared.requests
            ]
            if isinstance(body, ChatBody) and body.reads_calls
            else None
        )

    def opening(self, index: int, usage: RunningUsage) -> bytes | None:
        """Return the chunk that says who speaks."""
        choice = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        return self._encode([choice], usage)

    def skip(
        self, index: int, token_ids: Sequence[int], text: str, finish_reason: FinishReason | None
    ) -> None:
        """Go on as if these tokens, which have come to this text, had been delivered by `pieces`.

        A finish reason says that nothing but the chunk which tells it is missing.
        """
        if self._readers is not None:
            self._readers[index].feed(text)
            if finish_reason is not None:
                self._readers[index].end(is_complete=finish_reason == "stop")

    def pieces(self, index: int, output: RequestOutput, usage: RunningUsage) -> list[bytes]:
        """Return the chunks that deliver one output: content, finish, both or neither."""
        chunks = []
        delta, has_calls = self._delta(index, output)
        if delta is not None or output.logprobs or (self._wants_ids and output.token_ids):
            chunks.append(
                ChatChunkChoice(
                    index=index,
                    delta=delta or Delta(content=""),
                    logprobs=chat_logprobs(output.logprobs, self._tokenizer) if output.logprobs else None,
                    token_ids=output.token_ids if self._wants_ids else UNSET,
                )
            )
        if output.finish_reason is not None:
            chunks.append(
                ChatChunkChoice(
                    index=index,
                    delta=Delta(),
                    finish_reason=_finish_reason(output.finish_reason, has_calls),
                    stop_reason=output.stop_reason,
                )
            )
        return [self._encode([chunk], usage) for chunk in chunks]

    def _delta(self, index: int, output: RequestOutput) -> tuple[Delta | None, bool]:
        """Return what an output adds to the message, if anything, and whether it has calls by now."""
        if self._readers is None:
            return (Delta(content=output.text) if output.text else None), False
        reader = self._readers[index]
        first = reader.num_calls
        content, calls = reader.feed(output.text)
        if output.finish_reason is not None:
            held_back, last_calls = reader.end(is_complete=output.finish_reason == "stop")
            content, calls = content + held_back, calls + last_calls
        made = [
            ToolCallDelta(
                index=first + number,
                id=call.id,
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for number, call in enumerate(calls)
        ]
        delta = Delta(content=content or UNSET, tool_calls=made or UNSET) if content or made else None
        return delta, reader.num_calls > 0

    def closing(self, usage: Usage | UnsetType, metrics: ResponseMetrics | UnsetType) -> bytes:
        """Return the last chunk, which has no choices."""
        return self._encode([], usage, metrics)

    def _encode(
        self,
        choices: list[ChatChunkChoice],
        usage: RunningUsage,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> bytes:
        return msgspec.json.encode(
            ChatChunk(
                id=self._prepared.response_id,
                created=self._prepared.created_s,
                model=self._prepared.model,
                system_fingerprint=self._prepared.system_fingerprint,
                lossy=self._prepared.lossy,
                choices=choices,
                usage=usage,
                metrics=metrics,
            )
        )
