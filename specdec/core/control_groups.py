"""The control groups around this process (Linux), and how many CPUs they let it have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def folders_of(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the folders of a controller's groups, from this process's own outward: of version 2, or of 1.

    Those of version 1 end in `sys/fs/cgroup/CONTROLLER/...`. Inside a container its own group may be mounted
    as the root: folders that do not exist say nothing.
    """
    for line in lines_of(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = PurePosixPath(path)
        for ancestor in (group, *group.parents):
            yield base / str(ancestor).lstrip("/")


def lines_of(file: Path) -> list[str]:
    """Return the lines of a system file; none where it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def number_of(file: Path) -> int | None:
    """Return the number that a system file holds; None where it holds none ("max": no limit)."""
    text = "".join(lines_of(file)).strip()
    return int(text) if text.isdigit() else None


def usable_cpus(root: Path = ROOT) -> int:
    """Return how many threads of this process can compute at the same time: one at least.

    Containers are limited by a quota of time (`limits.cpu`, `docker run --cpus`) and see all cores of their
    node: with a thread for each, a team would use up its quota within a fraction of each period, and then
    stand still until the next one.
    """
    quotas = [quota for folder in folders_of("cpu", root) if (quota := _quota_of(folder)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, quotas)]))


def _quota_of(folder: Path) -> float | None:
    """Return the CPUs that a group may use; None: as many as there are."""
    words = " ".join(lines_of(folder / "cpu.max")).split()
    if len(words) == 2 and all(word.isdigit() for word in words):
        quota, period = map(int, words)
    else:
        quota = number_of(folder / "cpu.cfs_quota_us") or 0  # -1: none
        period = number_of(folder / "cpu.cfs_period_us") or 0
    return quota / period if quota > 0 and period > 0 else None
