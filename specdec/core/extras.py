"""How the extras of this distribution are installed: one text for all errors that ask for one."""

from __future__ import annotations


def how_to_install(extra: str) -> str:
    """Return the command that brings an extra of `pyproject.toml`, and where it is given."""
    return f"pip install -e '.[{extra}]' in a checkout of Drafthouse"
