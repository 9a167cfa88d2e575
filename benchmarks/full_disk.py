"""A small file system that can be filled up, to see what happens when a disk is full. Needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


class CannotMount(Exception):
    """No file system can be mounted here."""


def can_mount() -> bool:
    """Whether this user may at all."""
    return os.geteuid() == 0


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount an empty one at a folder, which is made; unmount it in the end.

    Raises:
        CannotMount: the system does not let us.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotMount(done.stderr.strip())
    try:
        yield folder
    finally:
        # Lazily: processes that were left behind may have files open there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def filled_up(disk: Path) -> Iterator[None]:
    """Take all that is free of it, up to the last byte."""
    ballast = disk / "ballast"
    block = bytes(1 << 20)
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
