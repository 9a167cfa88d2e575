"""Lookahead decoding with the window in the coordinator and its rows in the target's worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.config import ClusterConfig
from specdec.engine.config import EngineConfig
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.running_service import outlive_the_target, requests

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

SPECULATIVE = SpeculativeConfig.model_validate(
    {"method": "lookahead", "num_speculative_tokens": 12, "controller": "fixed"}
)


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig) -> ClusterConfig:
    return cluster_config.model_copy(update={"namespace": "drafthouse-lookahead"})


@pytest.fixture(scope="module")
def deployed(ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig) -> Iterator[None]:
    with deployed_on_ray(engine_config.model_copy(update={"speculative_config": SPECULATIVE}), config):
        yield


def test_tokens_are_those_of_the_target_alone(deployed: None, config: ClusterConfig, alone: Plain) -> None:
    """Also when the target's worker dies amid the streams."""
    wanted = requests(6, max_tokens=80, name="lookahead")
    least = {"spec_decode_num_rows_beside": 100, "spec_decode_num_accepted_tokens": 0}
    outlive_the_target(config, wanted, alone(wanted), least, num_drafters=0)
