"""Rules that look at probabilities, with drafter and target in actors of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.config import ClusterConfig
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.conftest import deployed_on_ray
from tests.cluster.live_workers import worker
from tests.cluster.running_service import Streams, metric, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

APP = "drafthouse-rules"


@pytest.fixture(scope="module", params=["block", pytest.param("typical", marks=pytest.mark.full)])
def rule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig, rule: str) -> ClusterConfig:
    return cluster_config.model_copy(update={"namespace": f"{APP}-{rule}"})


@pytest.fixture(scope="module")
def deployed(
    ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig, rule: str
) -> Iterator[None]:
    keys = {"rejection_sample_method": rule, "allow_lossy": rule == "typical"}
    speculative = engine_config.speculative_config.model_copy(update=keys)
    judged = engine_config.model_copy(update={"speculative_config": speculative})
    with deployed_on_ray(judged, config):
        yield


def test_drafts_and_their_probabilities_arrive(
    deployed: None, engine_config: EngineConfig, config: ClusterConfig, rule: str
) -> None:
    """Also when the target's worker dies amid the streams: what is delivered stands."""
    import ray

    wanted = requests(6, max_tokens=80, name=rule)
    plain = engine_config.model_copy(update={"speculative_config": SpeculativeConfig(method="none")})

    async def scenario(service: object) -> None:
        assert service.description().rule == rule  # type: ignore[attr-defined]
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        ray.kill(worker(config, "target"), no_restart=True)
        await streams.finish()
        with Engine(plain) as engine:
            for request in wanted:
                tokens = streams.tokens[request.request_id]
                assert len(tokens) == 80
                if request.params.is_greedy:
                    (alone,) = engine.generate([request.prompt_token_ids], request.params)
                    assert tokens == list(alone.token_ids)
        assert await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 100)
        values = await service.metrics()  # type: ignore[attr-defined]
        assert not values.get('spec_decode_num_proposals_dropped{reason="unverifiable"}')
        lossy = [
            output.stats.speculation.num_lossy_tokens
            for request in wanted
            if (output := streams.last[request.request_id]).stats is not None and not request.params.is_greedy
        ]
        assert len(lossy) == 3
        assert all((num > 0) == (rule == "typical") for num in lossy)
        await metric(service, "spec_decode_num_lossy_tokens", lambda value: value >= sum(lossy))

    with_service(config, scenario)
