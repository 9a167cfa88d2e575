"""What was refused a moment ago: whoever asks for as much is refused without asking again.

When several times as much is asked as can be served, most of a door's work, and of whoever it asks, would be
for those who are refused: their text is tokenized and sent on, to learn what the one before was told. That
work is taken from those who are served where they share cores. So whoever refuses says for how long that
holds (`CapacityError.holds_s`), a small part of the wait, and the door remembers it for that time.

Nothing else of a request is looked at then: one that is wrong is told so when it comes again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from deploy.openai.metrics import DoorMetrics
from specdec.core.errors import UNDECODABLE, CapacityError, LateError

_CHAT = "/chat/completions"
_DEFAULT_TOKENS = 16
"""Of completions, as OpenAI has it; a chat's answer may be as long as it likes."""
_MOST_KEPT = 16
_MOST_HELD_S = 0.1
"""Nobody is refused for what is older, whatever was said of it."""
_FRESH, _LONGEST_S = 0.1, 5.0
"""Of the time that a request had, of which so many seconds count at most: after that its refusal says nothing
of others, for it was refused for what it had left."""
_LEAST_TEXT = 0.8
"""A prompt of so much of another's length asks for as much: most of the time it waits."""


class _Slo(msgspec.Struct):
    ttft_ms: float | None = None


class _Body(msgspec.Struct):
    """The fields that a demand goes by, of either route."""

    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    model: str | None = None
    priority: int | None = None
    slo: _Slo | None = None
    timeout_s: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None


_BODIES = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request asks for, as far as it decides whether that can be given."""

    model: str | None
    owner: str | None
    """Digest of what its client has sent as its API key: keys take turns."""
    priority: int
    ttft_ms: float
    limits_s: tuple[float, ...]
    """Of the body, and of the header."""
    num_tokens: float
    """At most, to be generated."""
    ignores_eos: bool
    """Whether it takes that many: others mostly end sooner."""
    num_choices: int
    num_bytes: int
    """Of what is to be read."""

    def is_as_much_as(self, other: Demand) -> bool:
        """Whether who cannot give `other` cannot give this, either."""
        return (
            (self.model, self.owner) == (other.model, other.owner)
            and self.priority >= other.priority  # larger is later
            and self.ttft_ms <= other.ttft_ms
            and min(self.limits_s, default=math.inf) <= min(other.limits_s, default=math.inf)
            and self.num_tokens >= other.num_tokens
            and self.ignores_eos >= other.ignores_eos
            and self.num_choices >= other.num_choices
            and self.num_bytes >= _LEAST_TEXT * other.num_bytes
        )


def demand_of(path: str, data: bytes, authorization: str | None, timeout: str | None) -> Demand | None:
    """Return what a request asks for, by its body and its headers `Authorization` and `X-Request-Timeout`.

    None: that cannot be told from them.
    """
    try:
        body = _BODIES.decode(data)
        limits_s = [body.timeout_s, None if timeout is None else float(timeout)]
    except (*UNDECODABLE, ValueError):
        return None
    ttft_ms = None if body.slo is None else body.slo.ttft_ms
    num_tokens: float = math.inf if path.endswith(_CHAT) else _DEFAULT_TOKENS
    for limit in (body.max_tokens, body.max_completion_tokens):
        num_tokens = num_tokens if limit is None else limit
    return Demand(
        model=body.model,
        owner=None if authorization is None else _digest(authorization),
        priority=body.priority or 0,
        ttft_ms=math.inf if ttft_ms is None else ttft_ms,
        limits_s=tuple(limit_s for limit_s in limits_s if limit_s is not None),
        num_tokens=num_tokens,
        ignores_eos=bool(body.ignore_eos),
        num_choices=max(body.n or 1, body.best_of or 1),
        num_bytes=sum(memoryview(text).nbytes for text in (body.prompt, body.messages, body.tools)),
    )


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _Known:
    demand: Demand
    kind: type[CapacityError]
    message: str
    retry_after_s: float
    until_s: float

    def refusal(self) -> CapacityError:
        """Return it anew: one that was raised holds on to the request that it was raised for."""
        message = f"a request that asked for no more than this one was just refused: {self.message}"
        return self.kind(message, retry_after_s=self.retry_after_s)


class KnownRefusals:
    """Those of one door. Times are those of `now_s`, a monotonic clock.

    One thread notes them, any may check: what is known is replaced as a whole.
    """

    def __init__(self, metrics: DoorMetrics, now_s: Callable[[], float]) -> None:
        self.metrics = metrics
        self._now_s = now_s
        self._known: tuple[_Known, ...] = ()

    def note(
        self, demand: Demand | None, refusal: CapacityError, *, num_choices: int = 1, age_s: float = 0.0
    ) -> None:
        """Remember a refusal for as long as it holds.

        Args:
            demand: what was refused; None: nobody knows.
            refusal: why.
            num_choices: of all its prompts, of which any may have been the one too many.
            age_s: for how long it has been here.
        """
        if demand is None or not refusal.holds_s > 0.0:
            return
        had_s = min(*demand.limits_s, demand.ttft_ms / 1e3, _LONGEST_S)
        if age_s > _FRESH * had_s:
            return
        now_s = self._now_s()
        new = _Known(
            replace(demand, num_choices=num_choices),
            type(refusal),
            str(refusal),
            refusal.retry_after_s,
            now_s + min(refusal.holds_s, _MOST_HELD_S),
        )
        self._known = (*(one for one in self._known if now_s < one.until_s), new)[-_MOST_KEPT:]

    def has_any(self) -> bool:
        """Whether there is a refusal that holds."""
        return any(self._now_s() < one.until_s for one in self._known)

    def check(self, demand: Demand | None) -> None:
        """Check that nobody is known to have been refused who did not ask for more.

        Raises:
            CapacityError: as that was.
        """
        if demand is None or not self._known:
            return
        now_s = self._now_s()
        for known in self._known:
            if now_s < known.until_s and demand.is_as_much_as(known.demand):
                reason = "late" if issubclass(known.kind, LateError) else "full"
                self.metrics.refused_at_door.labels(reason).inc()
                raise known.refusal()
