"""The guard of a local cluster, over processes that are called like Ray's."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from deploy.ray_guard import RayGuard


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    sleep = shutil.which("sleep")
    assert sleep is not None
    program = tmp_path / "raylet"
    shutil.copy(sleep, program)
    with subprocess.Popen([program, "60"]) as process:
        while psutil.Process(process.pid).name() != "raylet":  # between fork and exec
            pass
        yield process
        process.kill()


def test_a_dead_raylet_is_reported_once_with_what_ran(raylet: subprocess.Popen[bytes]) -> None:
    reports: list[tuple[str, list[int]]] = []
    is_lost = threading.Event()

    def note(died: str, family: Sequence[psutil.Process]) -> None:
        reports.append((died, [process.pid for process in family]))
        is_lost.set()

    guard = RayGuard(note, look_s=0.02)
    guard.start()
    assert not is_lost.wait(0.2)
    raylet.kill()  # and nobody reaps it
    assert is_lost.wait(10)
    guard.stop()
    ((died, family),) = reports
    assert died == f"raylet (process {raylet.pid})"
    assert raylet.pid in family


def test_what_dies_after_the_guard_was_stopped_is_no_loss(raylet: subprocess.Popen[bytes]) -> None:
    losses: list[str] = []
    guard = RayGuard(lambda died, _: losses.append(died), look_s=0.01)
    guard.start()
    guard.stop()
    raylet.kill()
    raylet.wait()
    assert losses == []


def test_a_guard_that_never_started_can_be_stopped() -> None:
    RayGuard(lambda *_: None).stop()
