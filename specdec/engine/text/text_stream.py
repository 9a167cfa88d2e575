"""The text of one stream and the conditions that end it, token by token."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.core.outputs import FinishReason
from specdec.core.request import Request
from specdec.engine.text.detokenize import Detokenizer, StopMatch, StopScanner
from specdec.engine.text.tokenizer import TokenDecoder


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

    Where there are stop strings, text is read with its token. Otherwise tokens alone say where the stream
    ends, and their text is read when it is taken: that takes longer than all else that is done with a token.
    """

    __slots__ = (
        "_detokenizer",
        "_params",
        "_released",
        "_scanner",
        "_stop_ids",
        "_unread",
        "finish",
        "max_generated",
    )

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
        self._unread: list[int] = []
        """Tokens whose text is still to be read."""
        self._released = ""
        """Text that was read and not taken."""

    def advance(self, token_id: int, num_generated: int) -> None:
        """Go on by a token; it is generated token number `num_generated`, from 1."""
        assert self.finish is None, "the stream has ended"
        looks = num_generated >= self._params.min_tokens
        if looks and token_id in self._stop_ids:
            self._end_by_token(token_id)
            return
        self._unread.append(token_id)
        is_last = num_generated >= self.max_generated
        if self._scanner is not None:
            self._scan(self._scanner, looks=looks, is_last=is_last)
        if is_last and self.finish is None:
            self.finish = Finish(reason="length")
            if self._scanner is not None:
                self.drain()

    def take(self) -> str:
        """Return the text released since the last call; all that is left when the stream has ended."""
        if self._scanner is None:
            self._released += self._read()
            if self.finish is not None:
                self._released += self._detokenizer.flush()
        text, self._released = self._released, ""
        return text

    def drain(self) -> None:
        """Release the text that was held back, at the end of the stream."""
        text = self._read() + self._detokenizer.flush()
        if self._scanner is not None:
            scanned = self._scanner.feed(text, look=False)
            assert isinstance(scanned, str), "nothing is found by a scanner that does not look"
            text = scanned + self._scanner.flush()
        self._released += text

    def _end_by_token(self, token_id: int) -> None:
        """End the stream; the token itself shows in the text only where that was asked for."""
        is_asked_for = token_id in self._params.stop_token_ids
        self.finish = Finish(reason="stop", stop_reason=token_id if is_asked_for else None)
        if self._params.include_stop_str_in_output:
            self._unread.append(token_id)
        if self._scanner is not None:
            self.drain()

    def _scan(self, scanner: StopScanner, *, looks: bool, is_last: bool) -> None:
        """Read what is unread, and look whether a stop string in it ends the stream."""
        text = self._read()
        if is_last:
            text += self._detokenizer.flush()  # whole characters may wait behind a part of one
        scanned = scanner.feed(text, look=looks)
        if isinstance(scanned, StopMatch):
            self.finish = Finish(reason="stop", stop_reason=scanned.stop)
            scanned = scanned.text
        self._released += scanned

    def _read(self) -> str:
        """Return what the unread tokens release."""
        unread, self._unread = self._unread, []
        return "".join(map(self._detokenizer.feed, unread))
