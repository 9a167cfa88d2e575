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


class Attempts:
    """To have something that should stay: how many came to nothing, and how long to wait before the next.

    What is lost soon after it began has come to nothing as well: it would be started without end otherwise,
    at full speed. What has served for some time has not, and what has served for long makes up for all that
    was before. Times are seconds of the caller's clock.
    """

    def __init__(
        self, *, most: int, first_s: float, longest_s: float, soon_s: float, forgiven_after_s: float
    ) -> None:
        """Wait as `Backoff` does. Nothing counts as begun yet.

        Args:
            most: after so many in vain, more are of no use.
            first_s: wait after the first one in vain.
            longest_s: longest wait.
            soon_s: what is lost earlier after its beginning has come to nothing.
            forgiven_after_s: what is lost so late after its beginning is the first to be lost.
        """
        self._most = most
        self._first_s = first_s
        self._longest_s = longest_s
        self._soon_s = soon_s
        self._forgiven_after_s = forgiven_after_s
        self._began_s = -math.inf
        self._forget()

    @property
    def are_in_vain(self) -> bool:
        """Whether to give up."""
        return self.num_failed >= self._most

    def began(self, now_s: float) -> None:
        """Note that it is there."""
        self._began_s = now_s

    def lost(self, now_s: float) -> float:
        """Note that it is there no more; return after how many seconds to try again."""
        served_s = now_s - self._began_s
        if served_s >= self._forgiven_after_s:
            self._forget()
        return self.failed(now_s) if served_s < self._soon_s else 0.0

    def failed(self, now_s: float) -> float:
        """Note that an attempt came to nothing; return after how many seconds to try again."""
        self.num_failed += 1
        return self._backoff.failed(now_s)

    def _forget(self) -> None:
        self.num_failed = 0
        """In vain, since it last served for long."""
        self._backoff = Backoff(first_s=self._first_s, longest_s=self._longest_s)
