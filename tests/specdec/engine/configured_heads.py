"""Drafters from hidden states by configuration: beside the target, in draft workers, over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specdec.core.errors import ConfigError
from specdec.engine.config import EngineConfig
from specdec.engine.ranks.follower import follow
from specdec.model.parallel.group import RankGroup
from specdec.scheduling.config import SchedulerConfig
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.fitted_drafters import FittedDrafters
from tests.specdec.engine.ranked_engines import leading_engine
from tests.specdec.engine.sampling_kinds import GREEDY
from tests.specdec.engine.tiny_models import PROMPTS


def config_of(bench: Bench, folder: Path | None, method: str = "medusa", **more: Any) -> EngineConfig:
    target = {"model": str(bench.models.load("llama").path), "dtype": "float32", **more.pop("target", {})}
    cache = more.pop("cache", {"block_size": 4, "num_blocks": 60})
    speculative = {
        "method": method,
        **({} if folder is None else {"model": str(folder)}),
        "num_speculative_tokens": 5,
        "controller": "fixed",
        **more,
    }
    return EngineConfig.model_validate(
        {
            "target": {"compile": {"mode": "off"}, **target},
            "speculative_config": speculative,
            "cache": cache,
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 24},
        }
    )


def serve(group: RankGroup, config: EngineConfig) -> Any:
    """Rank 0: streams and accepted tokens; the others follow."""
    if group.rank > 0:
        follow("target", config, group)
        return None
    with leading_engine(group, config) as engine:
        results = [one.token_ids for one in engine.generate(PROMPTS, GREEDY)]
        return results, engine.metrics().num_accepted_tokens


def refusal(group: RankGroup, config: EngineConfig) -> Any:
    """What this rank raises."""
    try:
        leading_engine(group, config) if group.rank == 0 else follow("target", config, group)
    except ConfigError as error:
        return str(error)


def remote_config(bench: Bench, drafters: FittedDrafters, method: str, **more: Any) -> EngineConfig:
    config = config_of(bench, drafters.folder_of(method), method, heads_at="draft_pool", **more)
    # The longest prompt in one step, so that whoever drafts reads it in one.
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    return config.model_copy(update={"scheduler": scheduler})
