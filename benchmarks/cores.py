"""The cores that a whole benchmark runs on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_THREADS = Path("/proc/self/task")


def keep_to_cores(number: int) -> list[int]:
    """Keep this process, and those that it starts, to the first so many cores that it may use; return them.

    A machine that has more would else give what is not pinned a core of its own: results would be those of
    another number of devices than the ones compared.
    """
    cores = sorted(os.sched_getaffinity(0))[:number]
    keep_to(cores)
    return cores


def part_with_a_core() -> tuple[list[int], list[int]]:
    """Return the cores of who sends a load, and of who serves it: one for the former where there are three.

    On two cores they share both.
    """
    cores = sorted(os.sched_getaffinity(0))
    return (cores[-1:], cores[:-1]) if len(cores) > 2 else (cores, cores)


def keep_to(cores: Sequence[int]) -> None:
    """Keep this process, and those that it starts from now on, to some cores."""
    threads = [int(path.name) for path in _THREADS.iterdir()] if _THREADS.exists() else [0]
    for thread in threads:  # a call for the process would reach the calling thread alone
        try:
            os.sched_setaffinity(thread, cores)
        except ProcessLookupError:
            continue  # it has ended meanwhile
