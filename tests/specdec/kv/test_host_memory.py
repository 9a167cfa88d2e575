"""What a machine, or the control group around this process, has left: read from made-up system files."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from specdec.kv.host_memory import PeakMemory, available_bytes

MIB = 1 << 20
MACHINE = "MemTotal: 8388608 kB\nMemFree: 1024 kB\nMemAvailable: 4194304 kB\n"  # 4096 MiB
UNLIMITED = str((1 << 63) - 4096)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, *, limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    """A control group, version 2."""
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {inactive}\n",
    }


def old_group(folder: str, *, limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    """A control group, version 1."""
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }


CASES: dict[str, tuple[dict[str, str], int | None]] = {
    "a machine alone": ({"proc/meminfo": MACHINE}, 4096 * MIB),
    "a group without limit": (
        {
            "proc/meminfo": MACHINE,
            "proc/self/cgroup": "0::/a\n",
            **group("sys/fs/cgroup/a", limit="max", used=1),
        },
        4096 * MIB,
    ),
    "cached files count as free": (
        {
            "proc/meminfo": MACHINE,
            "proc/self/cgroup": "0::/a\n",
            **group("sys/fs/cgroup/a", limit=str(1000 * MIB), used=700 * MIB, inactive=50 * MIB),
        },
        350 * MIB,
    ),
    "a group further out is tighter": (
        {
            "proc/meminfo": MACHINE,
            "proc/self/cgroup": "0::/a/b\n",
            **group("sys/fs/cgroup/a/b", limit=str(1000 * MIB), used=0),
            **group("sys/fs/cgroup/a", limit=str(800 * MIB), used=100 * MIB),
        },
        700 * MIB,
    ),
    "inside a container its group is the root": (
        {
            "proc/meminfo": MACHINE,
            "proc/self/cgroup": "0::/docker/xyz\n",
            **group("sys/fs/cgroup", limit=str(600 * MIB), used=100 * MIB),
        },
        500 * MIB,
    ),
    "version 1": (
        {
            "proc/meminfo": MACHINE,
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/a\n0::/\n",
            **old_group("sys/fs/cgroup/memory/a", limit=str(300 * MIB), used=100 * MIB, inactive=20 * MIB),
            **old_group("sys/fs/cgroup/memory", limit=UNLIMITED, used=MIB),
        },
        220 * MIB,
    ),
    "a group that has used more than its limit": (
        {
            "proc/meminfo": MACHINE,
            "proc/self/cgroup": "0::/a\n",
            **group("sys/fs/cgroup/a", limit=str(MIB), used=2 * MIB),
        },
        0,
    ),
    "nothing is known": ({}, None),
    "no machine, but a group": (
        {"proc/self/cgroup": "0::/a\n", **group("sys/fs/cgroup/a", limit=str(9 * MIB), used=0)},
        9 * MIB,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_available(tmp_path: Path, name: str) -> None:
    files, expected = CASES[name]
    assert available_bytes(write(tmp_path, files)) == expected


def test_this_machine_has_something_left() -> None:
    available = available_bytes()
    assert available is None or 0 < available < 1 << 50


def test_peak_is_found_though_it_is_gone_afterwards() -> None:
    # Not from the heap: what an earlier test has given back there would not be new.
    with PeakMemory() as peak, mmap.mmap(-1, 64 * MIB) as memory:
        for page in range(0, 64 * MIB, mmap.PAGESIZE):
            memory[page] = 1
    if not (Path("/proc/self/status")).exists():
        pytest.skip("the system does not say")
    assert peak.grown_bytes > 60 * MIB


def test_an_unknown_peak_is_none(tmp_path: Path) -> None:
    with PeakMemory(tmp_path) as peak:
        pass
    assert peak.grown_bytes == 0
