"""Loading progress as a few log lines."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

_INTERVAL_S = 2.0


class LoggedProgress:
    """A `LoadProgress` that says something at most every two seconds, and nothing for quick loads."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last_s: float | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of `stage` are finished."""
        now_s = time.monotonic()
        if self._last_s is None:
            self._last_s = now_s
        if now_s - self._last_s >= _INTERVAL_S:
            self._last_s = now_s
            logger.info("%s: %s %d %%", self._what, stage, 100 * done // max(1, total))
