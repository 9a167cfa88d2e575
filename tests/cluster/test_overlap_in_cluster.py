"""Overlapped rounds with draft and target workers as actors: the same tokens, whatever dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.config import ClusterConfig
from specdec.engine.config import EngineConfig
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.live_workers import worker
from tests.cluster.running_service import Streams, metric, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

APP = "drafthouse-overlap"


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig) -> ClusterConfig:
    return cluster_config.model_copy(update={"namespace": APP})


@pytest.fixture(
    scope="module",
    params=[
        ("draft_ahead", "ngram"),
        pytest.param(("draft_ahead", "none"), marks=pytest.mark.full),
        pytest.param(("ping_pong", "none"), marks=pytest.mark.full),
    ],
    ids="-".join,
)
def mode(
    request: pytest.FixtureRequest, ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig
) -> Iterator[str]:
    """How rounds overlap, and what stands in for missing drafts."""
    overlap, fallback = request.param
    keys = {"overlap": overlap, "fallback": fallback}
    speculative = engine_config.speculative_config.model_copy(update=keys)
    chosen = engine_config.model_copy(update={"speculative_config": speculative})
    with deployed_on_ray(chosen, config):
        yield "-".join(request.param)


@pytest.mark.parametrize("victim", ["draft", pytest.param("target", marks=pytest.mark.full)])
def test_tokens_are_those_without_speculation(
    mode: str, victim: str, config: ClusterConfig, alone: Plain
) -> None:
    import ray

    wanted = requests(6, max_tokens=80, name=f"{mode}-{victim}")

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        ray.kill(worker(config, victim), no_restart=True)
        await streams.finish()
        assert streams.tokens == alone(wanted)
        assert await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 0)
        if mode.startswith("draft_ahead"):
            assert await metric(service, "speculation_cache_hits", lambda value: value > 0)
        if mode.endswith("ngram"):
            stood_in = 'spec_decode_num_accepted_tokens_by_method{method="ngram"}'
            assert await metric(service, stood_in, lambda value: value > 0)

    with_service(config, scenario)
