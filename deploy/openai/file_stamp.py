"""By what a file is told from the one that was there before: files are followed that others replace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class FileStamp(NamedTuple):
    """Changes when a file does, and when another takes its place, behind a link, too (as with Secrets)."""

    modified_ns: int
    changed_ns: int
    num_bytes: int
    inode: int


def stamp_of(file: str | Path) -> FileStamp | None:
    """Return a file's stamp; None: it is not there, or nobody may look."""
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return FileStamp(stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)
