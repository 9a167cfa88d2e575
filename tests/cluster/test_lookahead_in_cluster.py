"""Lookahead decoding with the window in the coordinator and its rows in the target's worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.config import ClusterConfig
from specdec.engine.config import EngineConfig
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.test_running_cluster import Streams, metric, requests, with_service, worker

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
    import ray

    wanted = requests(6, max_tokens=80, name="lookahead")
    expected = alone(wanted)

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        ray.kill(worker(config, "target"), no_restart=True)
        await streams.finish()
        for request in wanted:
            assert streams.tokens[request.request_id] == expected[request.request_id]
        await metric(service, "spec_decode_num_rows_beside", lambda value: value > 100)
        await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 0)
        values = await service.metrics()  # type: ignore[attr-defined]
        assert not values.get('spec_decode_num_proposals_dropped{reason="malformed"}')

    with_service(config, scenario, num_drafters=0)
