"""A process without memory is ended by the kernel, whether it wants more or not."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.starving import can_starve, starve

_IN_CIRCLES = """
import time
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.skipif(not can_starve(), reason="control groups (version 1) cannot be made here")
def test_a_process_that_needs_no_more_memory_is_ended_too() -> None:
    with subprocess.Popen([sys.executable, "-c", _IN_CIRCLES], stdout=subprocess.PIPE) as victim:
        try:
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"ready\n"
            starve(psutil.Process(victim.pid))
            assert victim.wait(10.0) == -signal.SIGKILL
        finally:
            victim.kill()
