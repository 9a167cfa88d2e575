"""`benchmarks.full_disk` for tests: skipped where nothing can be mounted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.full_disk import CannotMount, can_mount
from benchmarks.full_disk import small_disk as mounted

needs_mounts = pytest.mark.skipif(not can_mount(), reason="mounts a file system, which needs root")


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount an empty one at a folder, which is made; unmount it however the test ends."""
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(mounted(folder, size))
        except CannotMount as error:
            pytest.skip(f"no file system can be mounted here: {error}")
        yield disk
