"""When a worker does work that need not be done before it can serve: compiling forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.idle_work import IdleWork, WorkProgress

_POLL_S = 0.25


def run_at_start(
    works: Sequence[IdleWork],
    *,
    budget_s: float,
    report: Callable[[WorkProgress], None],
    clock: Clock | None = None,
) -> None:
    """Do pieces, before anybody can ask for anything, until all is done or the time is over.

    A restarted worker does the same: what was built before its end is found again in a second or less, an
    eager forward would be several times slower for those who wait, and in bf16 replayed streams go on
    bit for bit only on the forward that they were begun on.

    Args:
        works: done in this order.
        budget_s: no piece begins later than this.
        report: called before every piece.
        clock: of the budget.
    """
    clock = clock or MonotonicClock()
    give_up_s = clock.now_s() + budget_s
    for work in works:
        while work.pending() and clock.now_s() < give_up_s:
            report(work.progress())
            work.run_next()


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
