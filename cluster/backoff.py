"""When something that keeps failing is tried again."""

from __future__ import annotations

import math


class Backoff:
    """Waits longer after each failure. Times are seconds of whatever clock the caller uses.

    Who has been well for long enough, if anybody says how long that is, is forgiven what was before: its next
    failure is a first one.
    """

    def __init__(self, *, first_s: float, longest_s: float, forgiven_after_s: float = math.inf) -> None:
        """Wait `first_s`, then twice that, and so on up to `longest_s`.

        `forgiven_after_s`: how long an attempt has to go well, counted from its beginning.
        """
        self._first_s = first_s
        self._longest_s = longest_s
        self._forgiven_after_s = forgiven_after_s
        self._wait_s = 0.0
        self._due_s = -math.inf

    def is_due(self, now_s: float) -> bool:
        """Whether it may be tried (again)."""
        return now_s >= self._due_s

    def failed(self, now_s: float) -> float:
        """Note a failure; return after how many seconds to try again."""
        is_first = not self._wait_s or now_s >= self._due_s + self._forgiven_after_s
        self._wait_s = self._first_s if is_first else min(2.0 * self._wait_s, self._longest_s)
        self._due_s = now_s + self._wait_s
        return self._wait_s
