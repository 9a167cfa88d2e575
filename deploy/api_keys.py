"""API keys: read from a file where the server is started; only digests leave this module."""

from __future__ import annotations

from pathlib import Path

from deploy.openai.middleware import digest_api_key
from specdec.core.errors import ConfigError


def read_api_keys(file: str | Path) -> frozenset[bytes]:
    """Return the SHA-256 digests of the keys in a file, one per line; empty lines and # lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"http.api_keys_file: {file} cannot be read: {reason}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"http.api_keys_file: {file} holds no key")
    return frozenset(map(digest_api_key, keys))
