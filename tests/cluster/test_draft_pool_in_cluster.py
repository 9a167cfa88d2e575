"""Several draft workers as actors, killed at random while requests are served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, TargetGroupsConfig
from specdec.engine.config import EngineConfig
from specdec.engine.draft_shares import DraftShareConfig
from specdec.engine.engine import Engine
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.test_running_cluster import Streams, metric, requests, with_service, workers

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

APP = "drafthouse-pool"


@pytest.fixture(scope="module")
def config(
    ray_cluster: None, engine_config: EngineConfig, cluster_config: ClusterConfig
) -> Iterator[ClusterConfig]:
    from ray import serve

    from cluster.application import build_application

    half = BundleConfig(num_cpus=0.5)
    chosen = cluster_config.model_copy(
        update={
            "namespace": APP,
            "target_groups": TargetGroupsConfig(bundle=half),
            "draft_pool": DraftPoolConfig(
                num_workers=2, bundle=half, shares=DraftShareConfig(max_sequences=5)
            ),
        }
    )
    serve.run(build_application(engine_config, chosen), name=APP, route_prefix=None)
    yield chosen
    serve.delete(APP)


def test_draft_workers_are_killed_at_random(config: ClusterConfig, engine_config: EngineConfig) -> None:
    import ray

    rng = random.Random(0)
    wanted = [one for batch in range(6) for one in requests(8, max_tokens=90, name=f"kills{batch}")]
    quiet = requests(8, max_tokens=180, name="after")
    plain = engine_config.model_copy(update={"speculative_config": SpeculativeConfig(method="none")})

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        num_killed = 0
        while not all(task.done() for task in streams.tasks):
            await asyncio.sleep(rng.uniform(0.1, 0.5))
            alive = workers(config, "draft")
            if alive:
                ray.kill(rng.choice(alive), no_restart=True)
                num_killed += 1
        await streams.finish()
        assert num_killed >= 2
        assert await metric(service, "fallback_requests", lambda value: value > 0)
        await metric(service, "draft_workers", lambda value: value == 2)
        before = await metric(service, "spec_decode_num_accepted_tokens", lambda value: True)
        late = Streams(service, quiet)
        await late.all_have_begun()
        assert await metric(service, "draft_pool_usage_perc", lambda value: value > 0)
        await late.finish()
        accepted = await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > before)
        assert accepted - before > 100, "drafting goes on as if nothing had been"
        with Engine(plain) as engine:
            for request in [*wanted, *quiet]:
                engine.add_request(request)
            alone: dict[str, list[int]] = {request.request_id: [] for request in [*wanted, *quiet]}
            while engine.has_work:
                for output in engine.step():
                    alone[output.request_id].extend(output.token_ids)
        assert {**streams.tokens, **late.tokens} == alone

    with_service(config, scenario, num_drafters=2)
