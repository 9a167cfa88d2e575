"""Which parts of a deployment belong together while a rolling update replaces one version by another.

A door tokenizes for one target, and a coordinator expects drafts of one kind. While old and new replicas run
side by side, each door speaks only to coordinators of its own target, and each coordinator only to draft
workers of its own drafter. A part's generation is a digest of what it depends on, so that what an update
leaves as it was is shared by old and new.
"""

from __future__ import annotations

import hashlib
from typing import NewType

from specdec.engine.config import EngineConfig

Generation = NewType("Generation", str)


def target_generation(engine: EngineConfig) -> Generation:
    """Return that of doors and coordinators: the target, and the rule by which its tokens are chosen."""
    return _digest(engine.target.model_dump_json(), engine.speculative_config.rejection_sample_method)


def draft_generation(engine: EngineConfig) -> Generation:
    """Return that of draft workers: the drafter, and whose tokens it drafts."""
    return _digest(engine.target.model_dump_json(), engine.speculative_config.model_dump_json())


def _digest(*texts: str) -> Generation:
    return Generation(hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16])
