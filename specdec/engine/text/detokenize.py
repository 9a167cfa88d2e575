"""From tokens to text as they come: whole characters only, and nothing that may belong to a stop string.

What has been released after n tokens depends on those n tokens alone, not on how they were grouped into
rounds. So a stream that is replayed elsewhere from its delivered tokens goes on at the right character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.engine.text.tokenizer import TokenDecoder

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_NUM_PROMPT_TOKENS = 4
"""Prompt tokens before the text: some tokenizers drop the space of a text's first word."""
_MAX_PENDING = 16
"""Tokens that wait for the rest of a character, before some of them are taken to be no character."""
_MAX_CHARACTER_TOKENS = 4
"""UTF-8 characters have at most four bytes, so at most as many tokens."""


class Detokenizer:
    """The text of one stream.

    A step decodes the tokens since the last character border together with those before that border,
    because some tokenizers choose spaces by the token before; so its cost does not grow with the text.
    """

    __slots__ = ("_context", "_context_text", "_pending", "_tokenizer")

    def __init__(self, tokenizer: TokenDecoder, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        special_ids = tokenizer.special_ids
        tail = [token for token in prompt_token_ids[-2 * _NUM_PROMPT_TOKENS :] if token not in special_ids]
        self._set_context(self._whole_characters(tail))
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        if token_id in self._tokenizer.special_ids:
            return ""
        self._pending.append(token_id)
        text = self._decode(self._pending)
        if not text.endswith(_REPLACEMENT):
            self._set_context(self._pending)
            self._pending = []
            return text
        if len(self._pending) > _MAX_PENDING:
            return self._split_pending(text)
        return ""

    def flush(self) -> str:
        """Return the text of the tokens that wait for the rest of a character."""
        text = self._decode(self._pending)
        self._pending = []
        return text

    def _whole_characters(self, tail: list[int]) -> list[int]:
        """Return tokens at the end of a prompt that are whole characters; none, where there are no such.

        Some tokenizers decode a run of bytes as a whole: beside a part of a character none of them is one. So
        fewer tokens may do where more do not. Of a prompt that ends inside a character, or in U+FFFD itself,
        it is tokens before that, which it does not change.
        """
        decode = self._tokenizer.decode
        for end in range(len(tail), 0, -1):
            for start in range(max(0, end - _NUM_PROMPT_TOKENS), end):
                text = decode(tail[start:end])
                if not text.endswith(_REPLACEMENT) and decode(tail[start : end + 1]).startswith(text):
                    return tail[start:end]
        return []

    def _split_pending(self, text: str) -> str:
        """Give up on the oldest pending tokens, at a border that no later token can move."""
        for border in range(len(self._pending) - _MAX_CHARACTER_TOKENS, 0, -1):
            first = self._decode(self._pending[:border])
            rest = self._tokenizer.decode(self._pending[border:])
            if first + rest == text:
                self._set_context([])
                self._pending = self._pending[border:]
                return first
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode([*self._context, *token_ids])[len(self._context_text) :]

    def _set_context(self, token_ids: list[int]) -> None:
        self._context = token_ids
        self._context_text = self._tokenizer.decode(token_ids) if token_ids else ""


class StopMatch(NamedTuple):
    """A stop string that was found."""

    stop: str
    text: str
    """Released text up to the end of the stream: before the stop string, or with it if that was asked."""


class StopScanner:
    """Looks for stop strings in a growing text and holds back what may become one."""

    __slots__ = ("_held", "_include_stop", "_num_ordinary", "_stops")

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self._num_ordinary = 0
        """Characters at the beginning of `_held` in which a complete stop string is ordinary text."""

    def feed(self, text: str, *, look: bool) -> str | StopMatch:
        """Return the text that may be released, or the first stop string in it.

        With `look` false (before min_tokens) a complete stop string is ordinary text; one that begins there
        and is completed with `look` true counts.
        """
        text = self._held + text
        if not look:
            self._num_ordinary = len(text)
        match = self._find(text) if look else None
        if match is not None:
            self._held = ""
            return match
        num_released = len(text) - self._num_held(text)
        self._held = text[num_released:]
        self._num_ordinary = max(0, self._num_ordinary - num_released)
        return text[:num_released]

    def flush(self) -> str:
        """Return what was held back."""
        text, self._held = self._held, ""
        self._num_ordinary = 0
        return text

    def _find(self, text: str) -> StopMatch | None:
        first_end = self._num_ordinary + 1
        found = [
            (position, stop)
            for stop in self._stops
            if (position := text.find(stop, max(0, first_end - len(stop)))) >= 0
        ]
        if not found:
            return None
        position, stop = min(found, key=lambda item: item[0])
        return StopMatch(stop, text[: position + len(stop)] if self._include_stop else text[:position])

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of the text that some stop string begins with."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
