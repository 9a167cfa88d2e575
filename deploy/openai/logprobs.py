"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.openai.bodies import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from deploy.openai.tokenization import DoorTokenizer
from specdec.core.outputs import TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def completion_logprobs(
    positions: Sequence[TokenLogprobs], tokenizer: DoorTokenizer, text_offset: int
) -> CompletionLogprobs:
    """Return the parallel lists of /v1/completions; `text_offset` is that of the first token."""
    shaped = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for position in positions:
        token = tokenizer.token_text(position.token_id).text
        shaped.tokens.append(token)
        shaped.token_logprobs.append(_finite(position.logprob))
        # The chosen token is always there, as in OpenAI's answers; it wins over another of the same text.
        top = {tokenizer.token_text(token_id).text: _finite(logprob) for token_id, logprob in position.top}
        shaped.top_logprobs.append(top | {token: _finite(position.logprob)})
        shaped.text_offset.append(text_offset)
        text_offset += len(token)
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
