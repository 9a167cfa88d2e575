"""Time that a hypervisor takes: a virtual machine's cores that others run on meanwhile.

A block of half a second in which a neighbour had our cores says how busy the neighbour is. Such a block is
measured again; what decides is the kernel's count of stolen time, never the result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_STOLEN = 0.10
"""Share of our cores' time: with more, a block says little. A quiet machine with neighbours has 0.02-0.08."""
_MOST_TRIES = 6
"""Of a block: neighbours may stay for minutes."""
_STAT = Path("/proc/stat")
_STOLEN_FIELD = 8
"""Of a line `cpuN ...`, in ticks (proc_stat(5))."""


@dataclass(frozen=True, slots=True)
class Measured(Generic[T]):
    """A result, and how far others had the machine."""

    result: T
    stolen: float
    """Share of the time of the benchmark's cores."""


def least_stolen(run: Callable[[], T]) -> Measured[T]:
    """Run something until a run was undisturbed, a few times at most; return the least disturbed run."""
    least: Measured[T] | None = None
    for _ in range(_MOST_TRIES):
        one = _measure(run)
        if least is None or one.stolen < least.stolen:
            least = one
        if least.stolen <= MOST_STOLEN:
            break
    assert least is not None
    return least


def _measure(run: Callable[[], T]) -> Measured[T]:
    before_s, started_s = stolen_seconds(), time.perf_counter()
    result = run()
    cores_s = (time.perf_counter() - started_s) * len(_cores())
    return Measured(result, (stolen_seconds() - before_s) / cores_s)


def stolen_seconds(cores: Set[int] | None = None) -> float:
    """Return what was stolen since the machine started, of the benchmark's cores or others; 0 if untold."""
    if not _STAT.exists():
        return 0.0
    ours = {f"cpu{number}" for number in (_cores() if cores is None else cores)}
    lines = (line.split() for line in _STAT.read_text().splitlines())
    ticks = sum(int(line[_STOLEN_FIELD]) for line in lines if line[0] in ours and len(line) > _STOLEN_FIELD)
    return ticks / os.sysconf("SC_CLK_TCK")


def _cores() -> set[int]:
    """Return the cores of the benchmark, which its processes may have divided among them."""
    return os.sched_getaffinity(0)
