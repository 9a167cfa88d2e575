"""Files of folders that users name."""

from __future__ import annotations

from pathlib import Path


def is_hidden(file: Path, folder: Path) -> bool:
    """Whether a file of a folder, or a folder on the way to it, is hidden, as all in `.git` is."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)
