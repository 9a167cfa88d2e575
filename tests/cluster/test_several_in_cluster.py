"""Drafters in the coordinator, in the target's worker and in the draft pool, each of other requests."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from cluster.config import ClusterConfig
from cluster.pool_drafter import drafter_of_pool
from specdec.core.errors import ConfigError
from specdec.engine.config import EngineConfig
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.running_service import outlive_the_target, requests

NAMES = ("lookup", "window", "small")


def several(draft: str | None, **more: object) -> SpeculativeConfig:
    small = {"method": "draft_model", "model": draft, "num_threads": 1, "compile": {"mode": "off"}}
    return SpeculativeConfig.model_validate(
        {
            "method": "several",
            "num_speculative_tokens": 3,
            "controller": "fixed",
            "drafters": [
                {"name": "lookup", "method": "ngram", "prompt_lookup_min": 1},
                {"name": "window", "method": "self", "kv": {"policy": "streaming", "budget": 24}},
                {"name": "small", **small},
                {"name": "next", "method": "suffix", "shadow": 1.0},
                *([{"name": "other", **small}] if more else []),
            ],
        }
    )


def test_draft_workers_hold_one_draft_model() -> None:
    target = {"model": "/models/target"}
    engine = EngineConfig.model_validate({"target": target, "speculative_config": several("/models/draft")})
    of_pool = drafter_of_pool(engine)
    assert of_pool is not None
    assert (of_pool.speculative_config.method, of_pool.speculative_config.model) == (
        "draft_model",
        "/models/draft",
    )
    assert of_pool.target == engine.target
    alone = EngineConfig.model_validate({"target": target, "speculative_config": {"method": "suffix"}})
    assert drafter_of_pool(alone) is None
    two = engine.model_copy(update={"speculative_config": several("/models/draft", two=True)})
    with pytest.raises(ConfigError, match="2 of them are draft models, and draft workers hold one"):
        drafter_of_pool(two)


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig) -> ClusterConfig:
    return cluster_config.model_copy(update={"namespace": "drafthouse-several"})


@pytest.fixture(scope="module")
def deployed(ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig) -> Iterator[None]:
    speculative = several(engine_config.speculative_config.model)
    with deployed_on_ray(engine_config.model_copy(update={"speculative_config": speculative}), config):
        yield


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.full
def test_tokens_are_those_of_the_target_alone(deployed: None, config: ClusterConfig, alone: Plain) -> None:
    """Also when the target's worker dies amid the streams."""
    plain = requests(6, max_tokens=80, name="several")
    wanted = [msgspec.structs.replace(one, drafter=NAMES[index % 3]) for index, one in enumerate(plain)]
    least = {f'drafter_num_draft_tokens{{drafter="{name}"}}': 3 for name in NAMES}
    least['drafter_num_accepted_tokens{drafter="small"}'] = 10
    least['shadow_num_drafts{drafter="next"}'] = 3
    outlive_the_target(config, wanted, alone(plain), least)
