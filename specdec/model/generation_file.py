"""generation_config.json of a checkpoint: what ends a text, and how requests are sampled that do not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.core.errors import CheckpointError

GENERATION_FILE = "generation_config.json"


def read_generation_file(folder: Path) -> dict[str, Any]:
    """Return the content of the file; nothing where a folder has none.

    Raises:
        CheckpointError: it cannot be read, or holds no JSON object.
    """
    file = folder / GENERATION_FILE
    if not file.is_file():
        return {}
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content
