"""A benchmark that keeps to some of the machine's cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.cores import part_with_a_core

_CODE = """
import os, threading
from benchmarks.cores import keep_to_cores
told, ended = threading.Event(), threading.Event()
before = threading.Thread(target=ended.wait)
before.start()
cores = keep_to_cores(1)
after = threading.Thread(target=lambda: print(os.sched_getaffinity(0) == set(cores)))
after.start()
after.join()
print(os.sched_getaffinity(before.native_id) == os.sched_getaffinity(0) == set(cores))
ended.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core anyway")
def test_threads_of_before_and_after_keep_to_them_too() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


@pytest.mark.parametrize(
    ("cores", "sender", "server"), [({0, 1, 2, 5}, [5], [0, 1, 2]), ({3, 4}, [3, 4], [3, 4]), ({0}, [0], [0])]
)
def test_who_sends_a_load_has_a_core_of_its_own_where_there_are_three(
    monkeypatch: pytest.MonkeyPatch, cores: set[int], sender: list[int], server: list[int]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    assert part_with_a_core() == (sender, server)
