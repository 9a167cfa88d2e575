"""The text of one stream and the conditions that end it, token by token."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.core.outputs import FinishReason
from specdec.core.request import Request
from specdec.engine.detokenize import Detokenizer, StopMatch, StopScanner
from specdec.engine.tokenizer import TokenDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """What every stream of one engine keeps to."""

    max_sequence_len: int
    """Longest sequence, prompt and output together, in tokens."""
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Why a stream ended."""

    reason: FinishReason
    stop_reason: str | int | None = None
    error: str | None = None
    error_code: str | None = None
    retry_after_s: float | None = None


class TextStream:
    """Turns generated tokens into text until one of them ends the stream.

    Conditions are looked at in this order: EOS and stop tokens, stop strings, max_tokens and the context
    limit; all but the last not before min_tokens.
    """

    __slots__ = ("_detokenizer", "_params", "_scanner", "_stop_ids", "finish", "max_generated")

    def __init__(self, request: Request, tokenizer: TokenDecoder, limits: StreamLimits) -> None:
        params = request.params
        self._params = params
        self._stop_ids = frozenset(
            (*(() if params.ignore_eos else limits.eos_token_ids), *params.stop_token_ids)
        )
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids)
        self._scanner = (
            StopScanner(params.stop, include_stop=params.include_stop_str_in_output) if params.stop else None
        )
        room = limits.max_sequence_len - len(request.prompt_token_ids)
        self.max_generated = room if params.max_tokens is None else min(room, params.max_tokens)
        """Generated tokens after which the stream ends by length."""
        self.finish: Finish | None = None
        """Set by the token that ends the stream."""

    def read(self, token_id: int, num_generated: int) -> str:
        """Return the text that a token releases; it is generated token number `num_generated`, from 1."""
        assert self.finish is None, "the stream has ended"
        looks = num_generated >= self._params.min_tokens
        if looks and token_id in self._stop_ids:
            return self._read_stop_token(token_id)
        is_last = num_generated >= self.max_generated
        text = self._detokenizer.feed(token_id)
        if is_last:
            text += self._detokenizer.flush()  # whole characters may wait behind a part of one
        if self._scanner is not None:
            scanned = self._scanner.feed(text, look=looks)
            if isinstance(scanned, StopMatch):
                self.finish = Finish(reason="stop", stop_reason=scanned.stop)
                return scanned.text
            text = scanned
        if is_last:
            self.finish = Finish(reason="length")
            text += self.drain()
        return text

    def drain(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        return self._drain_after("")

    def _read_stop_token(self, token_id: int) -> str:
        """End the stream; the token itself shows in the text only where that was asked for."""
        is_asked_for = token_id in self._params.stop_token_ids
        self.finish = Finish(reason="stop", stop_reason=token_id if is_asked_for else None)
        shown = self._params.include_stop_str_in_output
        return self._drain_after(self._detokenizer.feed(token_id) if shown else "")

    def _drain_after(self, text: str) -> str:
        text += self._detokenizer.flush()
        if self._scanner is None:
            return text
        released = self._scanner.feed(text, look=False)
        assert isinstance(released, str), "nothing is found by a scanner that does not look"
        return released + self._scanner.flush()
