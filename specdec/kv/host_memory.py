"""How much memory a process of this machine may still take: Linux, with or without control groups."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from specdec.core.control_groups import ROOT, folders_of, lines_of, number_of

_KIB = 1024


def available_bytes(root: Path = ROOT) -> int | None:
    """Return what the machine has left, or the tightest control group around this process if that is less.

    Page cache that can be dropped counts as left. None where the system does not say (not Linux).
    """
    amounts = [amount for amount in (_of_machine(root), *_of_groups(root)) if amount is not None]
    return max(0, min(amounts)) if amounts else None


def give_back_freed() -> None:
    """Return to the system what the C library keeps of memory that has been freed (glibc; others: nothing).

    What threads have freed piece by piece stays with the process otherwise, hundreds of megabytes after a
    model was loaded.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class PeakMemory:
    """Measures by how much the process grows at most while something runs.

    with PeakMemory() as peak:
        run()
    peak.grown_bytes
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._process = root / "proc/self"
        self._before: int | None = None
        self.grown_bytes = 0
        """Largest growth; 0 where the system does not say."""

    def __enter__(self) -> PeakMemory:
        with suppress(OSError):  # where it cannot be reset, the mark is that of the whole life: still a bound
            (self._process / "clear_refs").write_text("5")
        self._before = self._status("VmRSS")
        return self

    def __exit__(self, *error: object) -> None:
        after = self._status("VmHWM")
        if self._before is not None and after is not None:
            self.grown_bytes = max(0, after - self._before)

    def _status(self, key: str) -> int | None:
        return _amount(self._process / "status", key)


def _of_machine(root: Path) -> int | None:
    return _amount(root / "proc/meminfo", "MemAvailable")


def _of_groups(root: Path) -> Iterator[int | None]:
    """Yield what is left of every control group's limit, from this process's own outward."""
    for folder in folders_of("memory", root):
        if (folder / "memory.max").exists():
            yield _left_of(folder, "memory.max", "memory.current", "inactive_file")
        else:
            yield _left_of(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _left_of(folder: Path, limit_name: str, usage_name: str, reclaimable_name: str) -> int | None:
    limit, usage = number_of(folder / limit_name), number_of(folder / usage_name)
    if limit is None or usage is None:
        return None
    return limit - usage + (_amount(folder / "memory.stat", reclaimable_name, unit_bytes=1) or 0)


def _amount(file: Path, key: str, *, unit_bytes: int = _KIB) -> int | None:
    for line in lines_of(file):
        words = line.split()
        if words and words[0].rstrip(":") == key:
            return int(words[1]) * unit_bytes
    return None
