"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
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
from specdec.core.outputs import RequestOutput, TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""
INLINE_LOGPROBS = 1024
"""More of them are shaped off the event loop (1,000 take about 4 ms)."""


def num_logprobs_of(output: RequestOutput, *, are_told: bool = True) -> int:
    """Return how many log-probabilities there are in an output, those of alternatives counted.

    Those of its tokens count only if they `are_told`: the best of several choices is found by them, too.
    """
    of_tokens = (output.logprobs or ()) if are_told else ()
    positions = (*of_tokens, *(output.prompt_logprobs or ()))
    return sum(1 + len(position.top) for position in positions)


class TextCursor:
    """Says where tokens begin in a text, one behind the other; what does not show there takes no room."""

    def __init__(self, tokenizer: DoorTokenizer, text: str = "", offset: int = 0) -> None:
        """Begin at an offset. Special tokens show where `text` has their names (a prompt that names them)."""
        self._tokenizer = tokenizer
        self._text = text
        self._offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def advance(self, token_id: int) -> int:
        """Return the offset of the next token, and go on behind the characters that it completes."""
        offset, token = self._offset, self._tokenizer.token_text(token_id)
        if token_id not in self._tokenizer.special_ids:
            shown = self._decoder.decode(bytes(token.data))
            # SentencePiece puts a space before a prompt, which its text lacks.
            is_put_before = offset == 0 and shown.startswith(" ") and self._text[:1] not in ("", " ")
            self._offset += len(shown) - is_put_before
        elif self._text.startswith(token.text, offset):
            self._offset += len(token.text)
        return offset


def completion_logprobs(
    positions: Sequence[TokenLogprobs],
    tokenizer: DoorTokenizer,
    cursor: TextCursor,
    num_top: int | None = None,
) -> CompletionLogprobs:
    """Return the parallel lists of /v1/completions.

    Args:
        positions: one per token.
        tokenizer: says what tokens look like.
        cursor: stands at the first token; it is moved behind the last one.
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
        shaped.text_offset.append(cursor.advance(position.token_id))
    return shaped


def echoed_logprobs(
    prompt_token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs],
    tokenizer: DoorTokenizer,
    text: str,
    num_top: int,
) -> CompletionLogprobs:
    """Return the lists for a prompt that is echoed as `text`.

    `positions` are those of its second token and all behind it.
    """
    cursor = TextCursor(tokenizer, text)
    first = CompletionLogprobs(
        tokens=[tokenizer.token_text(prompt_token_ids[0]).text],
        token_logprobs=[None],
        top_logprobs=[None],
        text_offset=[cursor.advance(prompt_token_ids[0])],
    )
    return joined(first, completion_logprobs(positions, tokenizer, cursor, num_top))


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
