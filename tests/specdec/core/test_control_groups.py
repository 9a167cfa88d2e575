"""How many CPUs a container lets its processes have: read from made-up system files."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.core.control_groups import usable_cpus


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


POD = {"proc/self/cgroup": "0::/pod/container"}
OLD = {"proc/self/cgroup": "4:cpu,cpuacct:/pod/container\n3:memory:/other"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        (POD, 64),
        (POD | {"sys/fs/cgroup/pod/container/cpu.max": "800000 100000"}, 8),
        (POD | {"sys/fs/cgroup/pod/container/cpu.max": "max 100000"}, 64),
        (POD | {"sys/fs/cgroup/pod/container/cpu.max": "250000 100000"}, 2),
        (POD | {"sys/fs/cgroup/pod/container/cpu.max": "50000 100000"}, 1),
        (POD | {"sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        (
            POD
            | {
                "sys/fs/cgroup/pod/container/cpu.max": "max 100000",
                "sys/fs/cgroup/pod/cpu.max": "300000 50000",
            },
            6,
        ),
        (
            OLD
            | {
                "sys/fs/cgroup/cpu/pod/container/cpu.cfs_quota_us": "700000",
                "sys/fs/cgroup/cpu/pod/container/cpu.cfs_period_us": "100000",
            },
            7,
        ),
        (
            OLD
            | {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            64,
        ),
        (POD | {"sys/fs/cgroup/pod/container/cpu.max": "rubbish"}, 64),
        (POD | {"sys/fs/cgroup/pod/container/cpu.max": "9900000 100000"}, 64),
    ],
)
def test_as_many_as_the_tightest_quota_allows(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(64)))
    assert usable_cpus(write(tmp_path, files)) == expected
