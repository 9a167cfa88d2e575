"""When a worker does work that waits until nobody waits: compiling forwards for shapes foreseen."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.idle_work import IdleWork

_POLL_S = 0.25


class IdleRunner:
    """Does pieces of idle work once no message has come for `quiet_s`. A piece cannot be interrupted."""

    def __init__(self, works: Sequence[IdleWork], *, quiet_s: float, clock: Clock | None = None) -> None:
        self._works = works
        self._quiet_s = quiet_s
        self._clock = clock or MonotonicClock()
        self._served_s = self._clock.now_s()

    @property
    def patience_s(self) -> float | None:
        """How long to wait for a message before calling `after`; None (for ever) when nothing is pending.

        Once it is quiet, pieces follow each other with just a look for messages in between: packing the
        weights of a deep model is hundreds of pieces of a millisecond.
        """
        if self._pending() is None:
            return None
        return 0.0 if self._is_quiet(self._clock.now_s()) else _POLL_S

    def after(self, was_served: bool, is_needed: bool) -> None:
        """Call after every wait for a message.

        Args:
            was_served: whether a message came.
            is_needed: whether somebody will ask again soon, so that this is no time for long work.
        """
        now_s = self._clock.now_s()
        if was_served or is_needed:
            self._served_s = now_s
        elif self._is_quiet(now_s):
            work = self._pending()
            if work is not None:
                work.run_next()

    def _is_quiet(self, now_s: float) -> bool:
        return now_s - self._served_s >= self._quiet_s

    def _pending(self) -> IdleWork | None:
        return next((work for work in self._works if work.pending()), None)
