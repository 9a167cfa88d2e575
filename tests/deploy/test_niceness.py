"""A process that gives way does so with every thread of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

NICENESS_OF_ALL = """
import os, threading
from deploy import niceness

def report():
    print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

started, told = threading.Event(), threading.Event()

def wait_and_report():
    started.set()
    told.wait()
    report()

before = threading.Thread(target=wait_and_report)
before.start()
started.wait()
niceness.give_way({by})
told.set()
before.join()
report()
after = threading.Thread(target=report)
after.start()
after.join()
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="niceness of threads is Linux's")
def test_all_threads_give_way_those_that_come_later_too() -> None:
    (own,) = run("import os; print(os.getpriority(os.PRIO_PROCESS, 0))").stdout.split()
    assert run(NICENESS_OF_ALL.format(by=0)).stdout.split() == [own] * 3
    nicer = str(min(19, int(own) + 5))
    assert run(NICENESS_OF_ALL.format(by=5)).stdout.split() == [nicer] * 3
    assert run(NICENESS_OF_ALL.format(by=19)).stdout.split() == ["19"] * 3, "there is no more than that"


NOWHERE = """
from pathlib import Path
from deploy import niceness

niceness._THREADS = Path("/nowhere")
niceness.give_way(5)
"""


def test_a_system_that_does_not_list_threads_is_told_of() -> None:
    assert "http.niceness has no effect" in run(NOWHERE).stderr
