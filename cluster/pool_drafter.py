"""What drafts in draft workers, of what an engine is configured to have."""

from __future__ import annotations

from specdec.core.errors import ConfigError
from specdec.engine.config import EngineConfig


def drafter_of_pool(engine: EngineConfig) -> EngineConfig | None:
    """Return what draft workers have to do with: an engine with their drafter alone; None: there are none.

    Raises:
        ConfigError: several drafters would have to draft there.
    """
    speculative = engine.speculative_config
    remote = [one for one in speculative.every_drafter if one.drafts_in_pool]
    if len(remote) > 1:
        raise ConfigError(
            f"speculative_config.drafters: {len(remote)} of them are draft models, and draft workers hold "
            "one: leave the others out"
        )
    return engine.model_copy(update={"speculative_config": remote[0]}) if remote else None
