"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.openai.bodies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    PromptTokenLogprob,
    TopLogprob,
)
from deploy.openai.tokenization import DoorTokenizer
from specdec.core.outputs import TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def completion_logprobs(
    positions: Sequence[TokenLogprobs], tokenizer: DoorTokenizer, text_offset: int, num_top: int | None = None
) -> CompletionLogprobs:
    """Return the parallel lists of /v1/completions.

    Args:
        positions: one per token.
        tokenizer: says what tokens look like.
        text_offset: that of the first token.
        num_top: most alternatives to show; None: all there are.
    """
    shaped = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for position in positions:
        token = tokenizer.token_text(position.token_id).text
        shaped.tokens.append(token)
        shaped.token_logprobs.append(_finite(position.logprob))
        # The chosen token is always there, as in OpenAI's answers; it wins over another of the same text.
        listed = position.top[:num_top]
        top = {tokenizer.token_text(token_id).text: _finite(logprob) for token_id, logprob in listed}
        shaped.top_logprobs.append(top | {token: _finite(position.logprob)})
        shaped.text_offset.append(text_offset)
        text_offset += len(token)
    return shaped


def echoed_logprobs(
    prompt_token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs],
    tokenizer: DoorTokenizer,
    num_top: int,
) -> CompletionLogprobs:
    """Return the lists for an echoed prompt; `positions` are those of its second token and all behind it."""
    first = tokenizer.token_text(prompt_token_ids[0]).text
    shaped = completion_logprobs(positions, tokenizer, len(first), num_top)
    shaped.tokens.insert(0, first)
    shaped.token_logprobs.insert(0, None)
    shaped.top_logprobs.insert(0, None)
    shaped.text_offset.insert(0, 0)
    return shaped


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Return two pieces of the same text as one."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def prompt_logprobs(
    positions: Sequence[TokenLogprobs], tokenizer: DoorTokenizer, num_top: int
) -> PromptLogprobs:
    """Return vLLM's `prompt_logprobs`; `positions` are those of the second token and all behind it."""
    shaped: PromptLogprobs = [None]
    for position in positions:
        ranks = {token_id: index + 1 for index, (token_id, _) in enumerate(position.top[:num_top])}
        logprobs = dict(position.top[:num_top]) | {position.token_id: position.logprob}
        shaped.append(
            {
                str(token_id): PromptTokenLogprob(
                    logprob=_finite(logprob),
                    rank=ranks.get(token_id),
                    decoded_token=tokenizer.token_text(token_id).text,
                )
                for token_id, logprob in logprobs.items()
            }
        )
    return shaped


def chat_logprobs(positions: Sequence[TokenLogprobs], tokenizer: DoorTokenizer) -> ChatLogprobs:
    """Return the nested form of /v1/chat/completions."""
    content = []
    for position in positions:
        chosen = tokenizer.token_text(position.token_id)
        content.append(
            ChatTokenLogprob(
                token=chosen.text,
                logprob=_finite(position.logprob),
                bytes=chosen.data,
                top_logprobs=[_top(token_id, logprob, tokenizer) for token_id, logprob in position.top],
            )
        )
    return ChatLogprobs(content=content)


def _top(token_id: int, logprob: float, tokenizer: DoorTokenizer) -> TopLogprob:
    token = tokenizer.token_text(token_id)
    return TopLogprob(token=token.text, logprob=_finite(logprob), bytes=token.data)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
