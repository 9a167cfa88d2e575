"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from specdec.core.errors import InputError

LogprobsMode = Literal["raw", "processed"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_CHOICES = 128
_SEED_LIMIT = 1 << 64


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling and stopping parameters of one request; validated on construction by `checked()`.

    The transforms apply in this order, in fp32: temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    """0 means greedy (ties go to the lowest token id)."""
    top_k: int | None = None
    """Keep the k most likely tokens (ties at the cut are kept); None keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose mass reaches top_p (ties at the cut are kept);
    1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least min_p times the largest probability; 0 keeps all."""
    seed: int | None = None
    """64-bit seed of the request's noise; None lets the door mint one."""
    n: int = 1
    """Number of choices; choice i draws its noise from hash(seed, i)."""
    max_tokens: int | None = None
    """Most tokens to generate; None means up to the context limit."""
    min_tokens: int = 0
    """EOS and stop conditions are not looked at before this many generated tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the text is cut before the first one found."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text, beside EOS."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of most likely tokens to report per position beside the chosen one; None reports nothing."""
    logprobs_mode: LogprobsMode = "raw"
    """raw: log-softmax of the unmodified logits; processed: after the sampling transforms."""

    @property
    def is_greedy(self) -> bool:
        """Whether the token function is a plain argmax."""
        return self.temperature == 0.0

    def checked(self) -> SamplingParams:
        """Return self after checking every field.

        Raises:
            InputError: naming the first field that is out of range and what would be right.
        """
        right = "0 (greedy) or between 0.0001 and 10000"
        _require_number("temperature", self.temperature, 0.0, 1e4, right)
        if 0.0 < self.temperature < 1e-4:
            raise InputError(f"temperature must be {right}, got {self.temperature}", param="temperature")
        _require_number("top_p", self.top_p, 0.0, 1.0, "in (0, 1]")
        if self.top_p == 0.0:
            raise InputError("top_p must be in (0, 1], got 0", param="top_p")
        _require_number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        if self.top_k is not None:
            _require_int("top_k", self.top_k, 1, None)
        if self.seed is not None:
            _require_int("seed", self.seed, -(_SEED_LIMIT >> 1), _SEED_LIMIT - 1)
        _require_int("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 1, None)
        _require_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.logprobs_mode not in get_args(LogprobsMode):
            modes = " or ".join(get_args(LogprobsMode))
            raise InputError(
                f"logprobs_mode must be {modes}, got {self.logprobs_mode!r}", param="logprobs_mode"
            )
        self._check_stopping()
        return self

    def _check_stopping(self) -> None:
        for param in ("include_stop_str_in_output", "ignore_eos"):
            if not isinstance(getattr(self, param), bool):
                raise InputError(f"{param} must be true or false, got {getattr(self, param)!r}", param=param)
        _require_several("stop", self.stop, str, "strings")
        _require_several("stop_token_ids", self.stop_token_ids, int, "token ids")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InputError(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop"
            )
        if any(not text for text in self.stop):
            raise InputError("stop strings must not be empty", param="stop")
        for token_id in self.stop_token_ids:
            _require_int("stop_token_ids", token_id, 0, None)


def _require_number(param: str, value: float, low: float, high: float, right: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{param} must be a number {right}, got {value!r}", param=param)
    if not math.isfinite(value) or not low <= value <= high:
        raise InputError(f"{param} must be {right}, got {value}", param=param)


def _require_several(param: str, values: object, kind: type, what: str) -> None:
    # A lone string is iterable too: its characters would each become a stop string.
    if not isinstance(values, tuple | list) or not all(isinstance(value, kind) for value in values):
        raise InputError(f"{param} must be a sequence of {what}, got {values!r}", param=param)


def _require_int(param: str, value: int, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{param} must be an integer, got {value!r}", param=param)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InputError(f"{param} must be {bounds}, got {value}", param=param)
