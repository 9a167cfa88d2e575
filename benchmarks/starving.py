"""Takes a process's memory away, so that the kernel ends it for that.

Needs root, and control groups of version 1.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

_CONTROLLER = Path("/sys/fs/cgroup/memory")
_LEFT_BYTES = 64 << 10
_NUM_PAGES = 64
"""More than may be left in a control group of that size."""
_LIMIT_S = 60.0
_POLL_S = 0.01
_PAGE_MAP_BYTES = 8
_IS_THERE = 3 << 62
"""Bits of an entry of /proc/PID/pagemap: in memory, or swapped out."""


def can_starve() -> bool:
    """Whether this machine lets us."""
    return os.access(_CONTROLLER / "memory.limit_in_bytes", os.W_OK)


def starve(process: psutil.Process) -> None:
    """Put a process into a control group without memory; return when the kernel has ended it.

    What it has already stays its own, and one that goes round in circles needs no more: it is made to.

    Raises:
        TimeoutError: it does without.
    """
    group = _CONTROLLER / f"drafthouse-{os.getpid()}-{process.pid}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(_LEFT_BYTES))
        (group / "cgroup.procs").write_text(str(process.pid))
        with contextlib.suppress(OSError):  # it ends meanwhile
            _grow(process.pid)
        until_s = time.monotonic() + _LIMIT_S
        while not _has_ended(process):
            if time.monotonic() > until_s:
                process.kill()
                raise TimeoutError(f"process {process.pid} does without memory")
            time.sleep(_POLL_S)
        counts = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
        assert int(counts["oom_kill"]) >= 1, "something else has ended it"
    finally:
        while (group / "cgroup.procs").read_text():
            time.sleep(_POLL_S)
        group.rmdir()


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _grow(pid: int) -> None:
    """Have a process own pages that it has reserved and never touched, by writing the zeros that are there.

    The kernel counts them as its own: it does not matter who touches them.
    """
    size = resource.getpagesize()
    num_left = _NUM_PAGES
    folder = Path("/proc") / str(pid)
    with (
        (folder / "mem").open("r+b", buffering=0) as memory,
        (folder / "pagemap").open("rb", buffering=0) as page_map,
    ):
        for address in _anonymous_pages((folder / "maps").read_text(), size):
            page_map.seek(address // size * _PAGE_MAP_BYTES)
            if int.from_bytes(page_map.read(_PAGE_MAP_BYTES), sys.byteorder) & _IS_THERE:
                continue
            memory.seek(address)
            memory.write(b"\0")
            num_left -= 1
            if not num_left:
                return


def _anonymous_pages(maps: str, size: int) -> Iterator[int]:
    """Yield addresses of a process's own pages that may be written to and belong to no file."""
    for line in maps.splitlines():
        bounds, permissions, *others = line.split()
        if permissions != "rw-p" or len(others) > 3:  # behind offset, device and inode: a name
            continue
        first, end = (int(bound, 16) for bound in bounds.split("-"))
        yield from range(first, end, size)
