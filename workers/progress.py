"""How far a worker is with its start, as a few log lines and for whoever waits for it."""

from __future__ import annotations

import logging
from typing import Protocol

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.idle_work import WorkProgress

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 2.0
_TELL_INTERVAL_S = 0.5


class StartListener(Protocol):
    """Is told, from time to time, what a starting worker does. It crosses process borders."""

    def __call__(self, text: str) -> None:
        """`text`, for people, such as "compiling target 37 %"; empty once the worker is ready."""
        ...


class StartProgress:
    """A `LoadProgress`, and what goes with it for compiling. Quick starts are not mentioned in the log."""

    def __init__(
        self, part: str, listener: StartListener | None = None, *, clock: Clock | None = None
    ) -> None:
        """`part` is "target" or "draft"."""
        self._part = part
        self._listener = listener
        self._clock = clock or MonotonicClock()
        self._logged_s = self._clock.now_s()
        self._told_s: float | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of `stage` of loading are finished."""
        self._say(f"loading {self._part} {_percent(done, total)} ({stage})")

    def compiling(self, progress: WorkProgress) -> None:
        """Compiling is so far."""
        self._say(f"compiling {self._part} {_percent(progress.done, progress.total)} ({progress.stage})")

    def ready(self) -> None:
        """Nothing more will be said."""
        if self._listener is not None:
            self._listener("")

    def _say(self, text: str) -> None:
        now_s = self._clock.now_s()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            logger.info("%s", text)
        if self._listener is not None and (self._told_s is None or now_s - self._told_s >= _TELL_INTERVAL_S):
            self._told_s = now_s
            self._listener(text)


def _percent(done: int, total: int) -> str:
    return f"{100 * done // max(1, total)} %"
