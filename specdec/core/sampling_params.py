"""How one request wants its tokens chosen and when it wants to stop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import msgspec

from specdec.core.errors import InputError

LogprobsMode = Literal["raw", "processed"]

LEAST_TEMPERATURE = 1e-4
"""Beside 0: what is less is too small to divide by."""
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
"""Longest stop string."""
MAX_CHOICES = 128
MAX_LOGIT_BIAS = 1024
"""Token ids that one request may bias."""
MAX_BIAS = 100
MAX_BAD_WORDS = 1024
"""Token sequences that one request may forbid."""
MAX_BAD_WORD_TOKENS = 64
_SEED_LIMIT = 1 << 64


GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What the whole output must look like."""

    kind: GrammarKind
    text: str = ""
    """json_schema: the schema; regex: matches all of the output; choice: a JSON list of strings; grammar: in
    Lark's notation or GBNF."""
    param: str = "grammar"
    """Name of the field that the client gave it in."""

    def check_length(self, max_bytes: int) -> None:
        """Check that the text has `max_bytes` of UTF-8 at most.

        Raises:
            InputError: it is longer; names the field.
        """
        num_bytes = len(self.text.encode())
        if num_bytes > max_bytes:
            raise InputError(
                f"{self.param} has {num_bytes} bytes, at most {max_bytes} are allowed", param=self.param
            )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping parameters of one request; validated by `checked()`.

    Logits are changed in this order, in fp32: repetition_penalty, frequency_penalty, presence_penalty,
    logit_bias, and then what forbids tokens (bad_words, min_tokens, allowed_token_ids, grammar). The
    distribution is cut after that: temperature, top_k, top_p, min_p.
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
    repetition_penalty: float = 1.0
    """Logits of tokens that occur in the prompt or the output are divided by it where positive, multiplied
    where negative (Keskar et al., CTRL, 2019); 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for every time that it occurs in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, number added to its logit), each id once."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output must not contain: the last token of one is forbidden where the output
    ends in the others."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be chosen; None: all."""
    grammar: Grammar | None = None
    """What the output must look like; None: anything."""
    seed: int | None = None
    """64-bit seed of the request's noise; None lets the door mint one."""
    n: int = 1
    """Number of choices; choice i draws its noise from hash(seed, i)."""
    best_of: int | None = None
    """Generate so many choices and keep the `n` whose tokens have the highest mean log-probability (raw);
    None: `n`."""
    max_tokens: int | None = None
    """Most tokens to generate; None means up to the context limit."""
    min_tokens: int = 0
    """EOS and stop tokens are not among the first so many generated tokens, and stop strings are not looked
    for before them."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the text is cut before the first one found."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the text, beside EOS."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of most likely tokens to report per position beside the chosen one; None reports nothing."""
    logprobs_mode: LogprobsMode = "raw"
    """raw: log-softmax of the unmodified logits; processed: after the sampling transforms, and not together
    with `logprobs` and more than `n` choices to choose from (`best_of`)."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report per position of the prompt beside its own, always raw; None:
    nothing is reported. With it `max_tokens` may be 0, and nothing is generated."""

    @property
    def is_greedy(self) -> bool:
        """Whether the token function is a plain argmax."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens occurred before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def shapes_logits(self) -> bool:
        """Whether logits are changed before the token function sees them."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.bad_words
            or self.min_tokens
            or self.allowed_token_ids is not None
        )

    @property
    def num_streams(self) -> int:
        """Choices that are generated."""
        return self.n if self.best_of is None else self.best_of

    def stop_ids(self, eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Return the tokens that end the text, given the model's EOS tokens."""
        return frozenset((*(() if self.ignore_eos else eos_token_ids), *self.stop_token_ids))

    def checked(self) -> SamplingParams:
        """Return self after checking every field.

        Raises:
            InputError: naming the first field that is out of range and what would be right.
        """
        right = f"0 (greedy) or between {LEAST_TEMPERATURE:g} and 10000"
        _require_number("temperature", self.temperature, 0.0, 1e4, right)
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
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
            _require_int("max_tokens", self.max_tokens, 1 if self.prompt_logprobs is None else 0, None)
        _require_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.best_of is not None:
            _require_int("best_of", self.best_of, self.n, MAX_CHOICES)
        for param in ("logprobs", "prompt_logprobs"):
            if getattr(self, param) is not None:
                _require_int(param, getattr(self, param), 0, MAX_LOGPROBS)
        if self.logprobs_mode not in get_args(LogprobsMode):
            modes = " or ".join(get_args(LogprobsMode))
            raise InputError(
                f"logprobs_mode must be {modes}, got {self.logprobs_mode!r}", param="logprobs_mode"
            )
        if self.num_streams > self.n and self.logprobs is not None and self.logprobs_mode != "raw":
            raise InputError(
                "logprobs_mode must be raw where best_of is above n and log-probabilities are reported: "
                f"the best are chosen by raw ones, got {self.logprobs_mode!r}",
                param="logprobs_mode",
            )
        self._check_stopping()
        self._check_penalties()
        self._check_forbidden()
        return self

    def _check_penalties(self) -> None:
        _require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, "between 0.01 and 100")
        for param in ("presence_penalty", "frequency_penalty"):
            _require_number(param, getattr(self, param), -2.0, 2.0, "between -2 and 2")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InputError(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} tokens, got {len(self.logit_bias)}",
                param="logit_bias",
            )
        for token_id, bias in self.logit_bias:
            _require_int("logit_bias", token_id, 0, None)
            _require_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS, f"between -{MAX_BIAS} and {MAX_BIAS}")
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise InputError("logit_bias names a token id twice", param="logit_bias")

    def _check_forbidden(self) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InputError(
                f"bad_words takes at most {MAX_BAD_WORDS} sequences, got {len(self.bad_words)}",
                param="bad_words",
            )
        for word in self.bad_words:
            _require_several("bad_words", word, int, "token ids")
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InputError(
                    f"each of bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens, got {len(word)}",
                    param="bad_words",
                )
            for token_id in word:
                _require_int("bad_words", token_id, 0, None)
        if self.grammar is not None and self.ignore_eos:
            raise InputError(
                f"ignore_eos cannot be combined with {self.grammar.param}, which says where the text ends",
                param="ignore_eos",
            )
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InputError("allowed_token_ids must not be empty", param="allowed_token_ids")
            for token_id in self.allowed_token_ids:
                _require_int("allowed_token_ids", token_id, 0, None)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check that every token id named here is one of `vocab_size`.

        Raises:
            InputError: naming the field and the id.
        """
        named: Mapping[str, Iterable[int]] = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": (token_id for token_id, _ in self.logit_bias),
            "bad_words": (token_id for word in self.bad_words for token_id in word),
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for param, token_ids in named.items():
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise InputError(
                        f"{param}: token id {token_id} is not in this model's vocabulary, "
                        f"which ends at {vocab_size - 1}",
                        param=param,
                    )

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
        longest = max(map(len, self.stop), default=0)
        if longest > MAX_STOP_CHARACTERS:
            raise InputError(
                f"each of stop must have at most {MAX_STOP_CHARACTERS} characters, got {longest}",
                param="stop",
            )
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


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What requests of a model get that say nothing of it; None: what `SamplingParams` has."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def params(self, **said: Any) -> SamplingParams:
        """Return the parameters of a request that says this, and nothing of the rest."""
        return SamplingParams(**(self.given() | said))

    def given(self) -> dict[str, Any]:
        """Return those that are not None, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}


NO_SAMPLING_DEFAULTS = SamplingDefaults()
