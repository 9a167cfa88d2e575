"""Retrieval from a corpus that is kept beside its files."""

from __future__ import annotations

from pathlib import Path

from specdec.proposers.lookup_config import RetrievalConfig


def config_for(path: Path, **keys: object) -> RetrievalConfig:
    cache = {"path": str(path), "cache_dir": str(path.parent / "kept")}
    return RetrievalConfig.model_validate({**cache, **keys})
