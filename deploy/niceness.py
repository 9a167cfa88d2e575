"""Processes that give way to others where they share cores."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_THREADS = Path("/proc/self/task")
_NICEST = 19


def give_way(by: int) -> None:
    """Make this process, with all threads that it has and will have, so much nicer than it is.

    The system knows niceness by thread. Where it does not list threads nothing is done, and a line in the log
    says so.

    Args:
        by: as `nice` counts it; 0: nothing is done.
    """
    if by == 0:
        return
    try:
        threads = [int(entry.name) for entry in _THREADS.iterdir()]
    except OSError as error:
        logger.warning("http.niceness has no effect on this system: %s", error)
        return
    for thread in threads:
        try:
            now = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, min(_NICEST, now + by))
        except ProcessLookupError:  # it has ended meanwhile
            continue
