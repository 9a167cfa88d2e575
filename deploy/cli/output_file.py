"""Files that a command is to write at its end."""

from __future__ import annotations

import os
from pathlib import Path

from specdec.core.errors import ConfigError


def check_output(option: str, file: Path) -> None:
    """Refuse before measuring, not after, what cannot be written.

    Raises:
        ConfigError: naming option and file.
    """
    if file.is_dir():
        raise ConfigError(f"{option}: {file} is a folder; give a file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option}: {file} cannot be written")
