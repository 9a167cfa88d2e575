"""The end of a process whose start has no end.

Ray Serve checks replicas that have started; for one that hangs before that it waits without end. When its
process ends, Serve starts another one. So a process sees to that itself: a thread waits beside the start, and
ends the process when it outlasts its limit. Where no thread runs any more (SIGSTOP, a machine that is frozen)
that does not help.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar, cast

START_MARGIN_S = 300.0
"""What a start takes at most beside loading a model: measuring costs, joining the cluster."""
_STDERR = 2
logger = logging.getLogger(__name__)
Constructor = TypeVar("Constructor", bound=Callable[..., None])


class StartLimit:
    """Ends this process, unless what is done within it ends in time.

    with StartLimit("coordinator", limit_s=2100.0):
        ...
    """

    def __init__(self, what: str, limit_s: float) -> None:
        """`what` starts, for the log."""
        self._what = what
        self._limit_s = limit_s
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        """Begin to wait."""
        threading.Thread(target=self._watch, name="start-limit", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait no longer: it has started, or failed."""
        self._is_over.set()

    def _watch(self) -> None:
        if self._is_over.wait(self._limit_s):
            return
        logger.error(
            "the %s has not started within %g s: this process ends, so that another one is started. Where "
            "its threads are:",
            self._what,
            self._limit_s,
        )
        try:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            faulthandler.dump_traceback(_STDERR)
            logging.shutdown()
        finally:
            os._exit(1)  # whether or not there is room for what is said


def ends_unless_started(what: str, limit_of: Callable[..., float]) -> Callable[[Constructor], Constructor]:
    """Decorate a constructor: the process ends when that takes longer than `limit_of`, of its arguments."""

    def decorate(constructor: Constructor) -> Constructor:
        @functools.wraps(constructor)
        def limited(self: object, *arguments: Any, **options: Any) -> None:
            with StartLimit(what, limit_of(*arguments, **options)):
                constructor(self, *arguments, **options)

        return cast("Constructor", limited)

    return decorate
