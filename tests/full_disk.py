"""A file system of a few blocks, for tests of what happens when a disk is full. Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_mounts = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, which needs root")


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount an empty one at a folder, which is made; unmount it however the test ends."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily: processes that a failed test left behind may have files open there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def filled_up(disk: Path) -> Iterator[None]:
    """Take all that is free of it, up to the last byte."""
    ballast = disk / "ballast"
    block = bytes(1 << 16)
    with ballast.open("wb", buffering=0) as file:
        while block:
            try:
                file.write(block)
            except OSError:
                block = block[: len(block) // 2]
    try:
        yield
    finally:
        ballast.unlink()
