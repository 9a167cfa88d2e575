"""A start that has no end."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workers.start_limit import StartLimit, ends_unless_started

HANGS = (
    "import logging, time\n"
    "from workers.start_limit import ends_unless_started\n"
    "logging.basicConfig()\n"
    "def hang_for_ever(): time.sleep(100)\n"
    "class Replica:\n"
    "    @ends_unless_started('replica', lambda limit_s: limit_s)\n"
    "    def __init__(self, limit_s): hang_for_ever()\n"
    "Replica(0.2)\n"
)


def test_a_process_whose_start_hangs_ends_though_the_disk_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", HANGS], stderr=full, check=False, timeout=60)
    assert done.returncode == 1


def test_a_process_whose_start_hangs_ends_and_says_where_it_was() -> None:
    started_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, check=False)
    assert time.monotonic() - started_s < 60
    assert done.returncode == 1
    assert "the replica has not started within 0.2 s" in done.stderr
    assert "hang_for_ever" in done.stderr


class _Started:
    @ends_unless_started("replica", lambda limit_s, *, error=None: limit_s)
    def __init__(self, limit_s: float, *, error: Exception | None = None) -> None:
        if error is not None:
            raise error
        self.limit_s = limit_s


def test_one_that_has_started_or_failed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    assert _Started(0.05).limit_s == 0.05
    with pytest.raises(RuntimeError, match="no memory"):
        _Started(0.05, error=RuntimeError("no memory"))
    with StartLimit("replica", 0.05):
        pass
    time.sleep(0.2)
    assert not ended


def test_the_constructor_looks_as_it_did() -> None:
    assert list(inspect.signature(_Started).parameters) == ["limit_s", "error"]
