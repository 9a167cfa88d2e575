"""API keys as the door knows them: digests with names and limits, and what each key is using.

Limits are of a key, whichever door its requests come by. A door does not know what a key is using elsewhere,
so each of several grants an equal part: one at least.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from deploy.openai.errors import ApiError
from deploy.openai.metrics import DoorMetrics
from specdec.core.clock import Clock, MonotonicClock
from specdec.core.decaying import moved
from specdec.core.errors import CapacityError, InputError, NotReadyError

_SECONDS_OF_RATE = 60.0
_FIRST_GUESS_S = 1.0
"""How long a choice takes, before one has ended."""
_WEIGHT_OF_NEW = 0.2
_MAX_RETRY_AFTER_S = 60.0
_KEPT_S = 3600.0
"""So long is known what a key has used that is not in the file any more."""
_ROUNDING = 1e-6
"""Tokens."""
_REFUSALS = (CapacityError, NotReadyError, InputError)
"""What a request fails with that is not begun."""


def digest_api_key(key: str) -> bytes:
    """Return what is kept of an API key."""
    return hashlib.sha256(key.encode()).digest()


def bearer_of(authorization: str | None) -> str:
    """Return the key of an Authorization header; empty where there is none in it."""
    scheme, _, text = (authorization or "").partition(" ")
    return text.strip() if scheme.lower() == "bearer" else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One accepted key. The key itself is known to its owner alone."""

    name: str
    """For people: in metrics and logs."""
    digest: bytes = field(repr=False)
    """SHA-256 of the key."""
    max_concurrency: int | None = None
    """Choices (prompts times `n`) that are generated at once; None: no limit."""
    tokens_per_minute: int | None = None
    """Tokens of prompts and of what is generated, per minute; None: no limit."""
    min_priority: int = 0
    """The most urgent priority (the smallest number) that its requests may have. Keys take turns within a
    priority, so that one which is free to choose would come before all others."""


class Usage(AbstractContextManager["Usage"], Protocol):
    """What one request takes of its key's limits, from entering to leaving."""

    def charge(self, num_tokens: int) -> None:
        """Count generated tokens."""
        ...


class UnlimitedUsage(Usage):
    """Of a request without a key."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Leave nothing behind."""

    def charge(self, num_tokens: int) -> None:
        """Count nothing."""


class _Meter:
    """What one key has running, and how many tokens of its rate are used up.

    A leaky bucket: used tokens drain at the rate of the limit, and a request is let in while a token of
    a minute's worth is left. What it will generate is not known then, so it may overdraw, and those after it
    wait until that has drained: over any length of time the rate holds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_used = 0.0
        self._since_s = clock.now_s()
        self._mean_choice_s = _FIRST_GUESS_S
        self.num_running = 0
        self.num_prepared = 0
        """Requests that are being read."""

    @property
    def is_in_use(self) -> bool:
        """Whether requests of the key run, or have lately used tokens that may not have drained yet."""
        is_recent = self._num_used > 0.0 and self._clock.now_s() - self._since_s < _KEPT_S
        return is_recent or self.num_running > 0 or self.num_prepared > 0

    def seconds_until_free(self) -> float:
        """Return when, roughly, one of the running choices ends: as they have done so far."""
        return min(self._mean_choice_s / max(1, self.num_running), _MAX_RETRY_AFTER_S)

    def seconds_until_below(self, tokens_per_minute: int) -> float:
        """Return when the next request is let in; 0: now."""
        self._drain(tokens_per_minute)
        excess = self._num_used + 1.0 - tokens_per_minute
        # Less than that is rounding: who has waited as long as told is let in.
        return 0.0 if excess < _ROUNDING else excess * _SECONDS_OF_RATE / tokens_per_minute

    def use(self, num_tokens: int, tokens_per_minute: int) -> None:
        """Count tokens."""
        self._drain(tokens_per_minute)
        self._num_used += num_tokens

    def give_back(self, num_tokens: int, tokens_per_minute: int) -> None:
        """Count tokens no more that were not used after all."""
        self._drain(tokens_per_minute)
        self._num_used = max(0.0, self._num_used - num_tokens)

    def ended(self, num_choices: int, seconds: float | None) -> None:
        """Count the end of a request; None: it was refused, which says nothing of how long one takes."""
        self.num_running -= num_choices
        if seconds is not None:
            self._mean_choice_s = moved(self._mean_choice_s, seconds, _WEIGHT_OF_NEW)

    def _drain(self, tokens_per_minute: int) -> None:
        now_s = self._clock.now_s()
        drained = (now_s - self._since_s) * tokens_per_minute / _SECONDS_OF_RATE
        self._num_used = max(0.0, self._num_used - drained)
        self._since_s = now_s


def _alone() -> int:
    return 1


class KeyRing:
    """The keys that are accepted now. They may be replaced at any time; requests that run go on."""

    def __init__(
        self,
        keys: Iterable[ApiKey] | None,
        clock: Clock | None = None,
        *,
        num_doors: Callable[[], int] = _alone,
    ) -> None:
        """`keys` None: there are some, and nobody has read them yet; until `replace` none is accepted.

        `num_doors`: how many doors share the limits at present, this one included.
        """
        self._clock = clock or MonotonicClock()
        self._num_doors = num_doors
        self._keys = () if keys is None else tuple(keys)
        self._why_unread = "nobody has tried yet" if keys is None else None
        self._meters: dict[bytes, _Meter] = {}

    @property
    def is_asked_for(self) -> bool:
        """Whether a request needs a key at all."""
        return bool(self._keys) or self._why_unread is not None

    @property
    def why_unread(self) -> str | None:
        """Why nobody knows yet which keys are accepted; None: these are known."""
        return self._why_unread

    def note_unread(self, why: str) -> None:
        """Say why the keys could not be read. Those that are known stay so."""
        if self._why_unread is not None:
            self._why_unread = why

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Accept these from now on, and no others. What a key has used so far stays counted."""
        self._keys, self._why_unread = tuple(keys), None
        known = {key.digest for key in self._keys}
        self._meters = {
            digest: meter
            for digest, meter in self._meters.items()
            if digest in known or meter.is_in_use  # the key may come back
        }

    def find(self, text: str) -> ApiKey | None:
        """Return the key that a client has sent, or None."""
        # Headers are read as Latin-1, whatever a client has written its key in: by its bytes they are UTF-8.
        sent = (digest_api_key(text), hashlib.sha256(text.encode("latin-1", "replace")).digest())
        # All of them, whether or not one has matched: the time taken says nothing about the keys.
        matches = [key for key in self._keys if sum([hmac.compare_digest(one, key.digest) for one in sent])]
        return matches[0] if matches else None

    def lets_in(self, authorization: str | None) -> bool:
        """Whether a request with this Authorization header is one of ours; without keys everybody's is."""
        return not self.is_asked_for or self.find(bearer_of(authorization)) is not None

    @contextmanager
    def preparing(self, key: ApiKey | None, metrics: DoorMetrics) -> Iterator[None]:
        """Read a request within this: what would be refused is not read first, which costs the most.

        Whoever has sent more than the key allows at once has that refused here, however much it is.
        `usage` is entered afterwards, when it is known what is asked for, and counts that.

        Raises:
            CapacityError: the key is at one of its limits.
        """
        if key is None:
            yield
            return
        limits = self._limits_of(key, metrics)
        meter = limits.meter
        limits.check_concurrency(1 + meter.num_prepared)
        limits.check_rate()
        meter.num_prepared += 1
        try:
            yield
        finally:
            meter.num_prepared -= 1

    def usage(
        self,
        key: ApiKey | None,
        *,
        num_choices: int,
        param: str,
        num_prompt_tokens: int,
        metrics: DoorMetrics,
    ) -> Usage:
        """Return what a request has to enter before it is generated; `param` says how many choices it has.

        Entering raises CapacityError where the key is at one of its limits, and ApiError where the request is
        larger than its limit, so that waiting would not help.
        """
        if key is None:
            return UnlimitedUsage()
        return _KeyUsage(self._limits_of(key, metrics), num_choices, param, num_prompt_tokens, self._clock)

    def _limits_of(self, key: ApiKey, metrics: DoorMetrics) -> _Limits:
        meter = self._meters.setdefault(key.digest, _Meter(self._clock))
        return _Limits(key, meter, metrics, self._num_doors)


class _Limits:
    """This door's part of those of a key, against what the key is using here."""

    def __init__(
        self, key: ApiKey, meter: _Meter, metrics: DoorMetrics, num_doors: Callable[[], int]
    ) -> None:
        self.key = key
        self.meter = meter
        self.metrics = metrics
        self._num_doors = num_doors

    @property
    def tokens_per_minute(self) -> int | None:
        """Tokens of a minute through this door; None: no limit."""
        return self._part_of(self.key.tokens_per_minute)

    def check_concurrency(self, num_more: int, *, largest: int = 1) -> None:
        """Raise CapacityError where so many choices are too many now.

        A request of `largest` choices may be larger than this door's part: it is let in when nothing runs.
        """
        part = self._part_of(self.key.max_concurrency)
        if part is not None and self.meter.num_running + num_more > max(part, largest):
            self._refuse(
                "concurrency",
                f"This API key may have {self.key.max_concurrency} choices generated at once"
                f"{self._named(part)}, and has {self.meter.num_running + self.meter.num_prepared}.",
                self.meter.seconds_until_free(),
            )

    def check_rate(self) -> None:
        """Raise CapacityError where the tokens of a minute are used up."""
        part = self.tokens_per_minute
        wait_s = 0.0 if part is None else self.meter.seconds_until_below(part)
        if part is not None and wait_s > 0:
            self._refuse(
                "tokens",
                f"This API key may use {self.key.tokens_per_minute} tokens per minute{self._named(part)} "
                "(prompts and what is generated), and has used them.",
                wait_s,
            )

    def _part_of(self, limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // self._num_doors())

    def _named(self, part: int) -> str:
        num_doors = self._num_doors()
        return "" if num_doors == 1 else f", {part} by this one of {num_doors} doors"

    def _refuse(self, limit: str, message: str, retry_after_s: float) -> None:
        self.metrics.api_key_refusals.labels(self.key.name, limit).inc()
        raise CapacityError(message, retry_after_s=retry_after_s)


class _KeyUsage(Usage):
    def __init__(
        self, limits: _Limits, num_choices: int, param: str, num_prompt_tokens: int, clock: Clock
    ) -> None:
        self._limits = limits
        self._meter = limits.meter
        self._num_choices = num_choices
        self._param = param
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = limits.metrics.api_key_tokens.labels(limits.key.name)
        self._clock = clock
        self._start_s = 0.0
        self._is_prompt_counted = False
        """In the metric, which cannot give it back: once it is clear that the request is not refused."""

    def __enter__(self) -> Self:
        """Take a place."""
        self._check_size()
        self._limits.check_concurrency(self._num_choices, largest=self._num_choices)
        self._limits.check_rate()
        self._start_s = self._clock.now_s()
        self._meter.num_running += self._num_choices
        self._use(self._num_prompt_tokens)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the place back; of a request that was refused, the tokens of its prompt, too."""
        if isinstance(error, _REFUSALS) and not self._is_prompt_counted:
            self._meter.ended(self._num_choices, None)
            tokens_per_minute = self._limits.tokens_per_minute
            if tokens_per_minute is not None:
                self._meter.give_back(self._num_prompt_tokens, tokens_per_minute)
            return
        self._meter.ended(self._num_choices, self._clock.now_s() - self._start_s)
        self._count_prompt()

    def charge(self, num_tokens: int) -> None:
        """Count generated tokens."""
        if num_tokens:
            self._count_prompt()
            self._num_tokens.inc(num_tokens)
            self._use(num_tokens)

    def _use(self, num_tokens: int) -> None:
        tokens_per_minute = self._limits.tokens_per_minute
        if tokens_per_minute is not None:
            self._meter.use(num_tokens, tokens_per_minute)

    def _count_prompt(self) -> None:
        if not self._is_prompt_counted:
            self._is_prompt_counted = True
            self._num_tokens.inc(self._num_prompt_tokens)

    def _check_size(self) -> None:
        limit = self._limits.key.max_concurrency
        if limit is not None and self._num_choices > limit:
            raise ApiError(
                400,
                f"The request has {self._num_choices} choices (prompts times n, or times best_of); this API "
                f"key may have {limit} at once.",
                param=self._param,
                code="too_many_choices",
            )
