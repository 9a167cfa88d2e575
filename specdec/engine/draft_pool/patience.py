"""How long one remote drafter is waited for, and how often a silent one is tried again."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdec.core.config import StrictConfig
from specdec.core.decaying import moved

_SMOOTHING = 0.2
"""Weight of a new measurement."""
_TELLING_TOKENS = 64
"""What reading fewer takes is what a call takes, not what tokens do."""


class DraftDeadlineConfig(StrictConfig):
    """A drafter that answers later than these limits costs its requests the drafts of that round, no more."""

    min_deadline_s: float = Field(default=0.05, gt=0)
    """Shortest wait (seconds) before a round goes on without drafts."""
    max_deadline_s: float = Field(default=1.0, gt=0)
    """Longest wait (seconds), also while nothing has been measured yet."""
    deadline_multiple: float = Field(default=4.0, gt=1)
    """The wait is this many times the expected draft time."""
    first_retry_s: float = Field(default=0.1, gt=0)
    """A silent drafter is asked again after so many seconds, without being waited for; the interval
    doubles up to `max_retry_s`."""
    max_retry_s: float = Field(default=2.0, gt=0)
    """Longest interval (seconds) between such attempts."""
    reassign_after_s: float = Field(default=0.5, ge=0)
    """Requests of a drafter that has been silent for so many seconds move to another one, if there is one."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for least, most in (("min_deadline_s", "max_deadline_s"), ("first_retry_s", "max_retry_s")):
            least_s, most_s = getattr(self, least), getattr(self, most)
            if least_s > most_s:
                raise ValueError(f"{least}: {least_s:g} s must be at most {most} ({most_s:g} s)")
        return self

    def retry_interval_s(self, exponent: int) -> float:
        """Return how long the next attempt waits, behind as many in vain."""
        return min(self.max_retry_s, self.first_retry_s * 2.0 ** min(exponent, 30))


class DraftPatience:
    """The state of the relation with one drafter: either it is waited for, or it is late.

    A late drafter is not waited for until something is heard from it again; one that is late time after time
    rests longer each time, though it be heard. Draft time is modelled as a time per round plus a time per
    token that the drafter had not seen (prefill).
    """

    def __init__(self, config: DraftDeadlineConfig) -> None:
        self._config = config
        self._round_s: float | None = None
        self._token_s: float | None = None
        self._late_since_s: float | None = None
        self._heard_since = False
        self._num_misses = 0
        self._num_attempts = 0
        self._rest_until_s = 0.0
        self._retry_at_s = 0.0

    def is_waited_for(self, now_s: float) -> bool:
        """Whether a round sent now is worth its deadline."""
        return self._late_since_s is None or (self._heard_since and now_s >= self._rest_until_s)

    def late_for_s(self, now_s: float) -> float:
        """Seconds for which nothing has been heard although something was due; 0 when it is not late."""
        return 0.0 if self._late_since_s is None or self._heard_since else now_s - self._late_since_s

    def may_ask(self, now_s: float) -> bool:
        """Whether to send a round now: always, unless it is late and its next attempt is not due."""
        return self.is_waited_for(now_s) or now_s >= self._retry_at_s

    def deadline_s(self, num_entries: int, num_new_tokens: int) -> float:
        """Seconds to wait for a round with `num_new_tokens` unseen tokens for `num_entries` requests."""
        config = self._config
        prefill = _is_prefill(num_entries, num_new_tokens)
        if self._round_s is None or (prefill and self._token_s is None):
            return config.max_deadline_s
        expected_s = self._round_s + (num_new_tokens * (self._token_s or 0.0) if prefill else 0.0)
        return min(config.max_deadline_s, max(config.min_deadline_s, config.deadline_multiple * expected_s))

    def is_worth_waiting_for(self, num_new_tokens: int) -> bool:
        """Whether reading so many unseen tokens takes no longer than a usual round, as far as is known."""
        if self._round_s is None or self._token_s is None:
            return True
        return num_new_tokens * self._token_s <= self._round_s

    def asked(self, now_s: float) -> None:
        """A round was sent."""
        if not self.is_waited_for(now_s):
            self._num_attempts += 1
            self._retry_at_s = now_s + self._config.retry_interval_s(self._num_attempts)

    def missed(self, now_s: float) -> None:
        """The deadline passed, or the link broke."""
        self._num_misses += 1
        if self._late_since_s is None or self._heard_since:
            self._late_since_s = now_s
        self._heard_since = False
        self._num_attempts = 0
        self._retry_at_s = now_s + self._config.retry_interval_s(0)
        # Being late once is what prefill looks like; only repetition costs a rest.
        rest_s = self._config.retry_interval_s(self._num_misses - 2) if self._num_misses > 1 else 0.0
        self._rest_until_s = now_s + rest_s

    def heard(self) -> None:
        """Anything arrived from the drafter."""
        self._heard_since = True

    def answered_in_time(self) -> None:
        """All that a round asked for arrived before its deadline."""
        self._late_since_s = None
        self._num_misses = 0

    def has_read(self, spent_s: float, num_tokens: int) -> None:
        """It has read so many tokens in `spent_s`, and drafted nothing in it."""
        if num_tokens >= _TELLING_TOKENS and spent_s > 0.0:
            self._token_s = moved(self._token_s, spent_s / num_tokens, _SMOOTHING)

    def measured(self, elapsed_s: float, num_entries: int, num_new_tokens: int) -> None:
        """A round took `elapsed_s` from question to answer."""
        if not _is_prefill(num_entries, num_new_tokens):
            self._round_s = moved(self._round_s, elapsed_s, _SMOOTHING)
        else:
            beyond_s = max(0.0, elapsed_s - (self._round_s or 0.0))
            self._token_s = moved(self._token_s, beyond_s / num_new_tokens, _SMOOTHING)


def _is_prefill(num_entries: int, num_new_tokens: int) -> bool:
    """Whether most of the work is taking in tokens: a usual round brings a handful per request."""
    return num_new_tokens > 16 * num_entries
