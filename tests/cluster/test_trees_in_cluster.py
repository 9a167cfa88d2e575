"""Trees of a draft worker in an actor of its own, verified by a target in another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.config import ClusterConfig
from specdec.engine.config import EngineConfig
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.running_service import outlive_the_target, requests

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

TREES = {
    "static": {"shape": "static", "widths": [3, 2]},
    "dynamic": {"shape": "dynamic", "top_k": 3, "depth": 4},
}


@pytest.fixture(scope="module", params=TREES)
def shape(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig, shape: str) -> ClusterConfig:
    return cluster_config.model_copy(update={"namespace": f"drafthouse-trees-{shape}"})


@pytest.fixture(scope="module")
def deployed(
    ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig, shape: str
) -> Iterator[None]:
    keys = {
        **engine_config.speculative_config.model_dump(),
        "num_speculative_tokens": 9,
        "tree": TREES[shape],
    }
    speculative = SpeculativeConfig.model_validate(keys)
    with deployed_on_ray(engine_config.model_copy(update={"speculative_config": speculative}), config):
        yield


def test_tokens_are_those_of_the_target_alone(deployed: None, config: ClusterConfig, alone: Plain) -> None:
    """Also when the target's worker dies amid the streams."""
    wanted = requests(6, max_tokens=80, name="trees")
    least = {"spec_decode_num_accepted_tokens": 100, "spec_decode_num_moved_kv": 0}
    outlive_the_target(config, wanted, alone(wanted), least)
