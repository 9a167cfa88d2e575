"""Several draft workers as actors, killed at random while requests are served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence

import pytest

from cluster.config import (
    BundleConfig,
    ClusterConfig,
    DraftPoolConfig,
    MembershipConfig,
    TargetGroupsConfig,
)
from specdec.core.request import Request
from specdec.engine.config import EngineConfig
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.engine.engine import Engine
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.conftest import deployed_on_ray
from tests.cluster.live_workers import workers
from tests.cluster.running_service import Streams, metric, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

APP = "drafthouse-pool"
ACCEPTED = "spec_decode_num_accepted_tokens"
DRAFTERS = 'num_workers{part="draft",compile="off"}'


@pytest.fixture(scope="module")
def config(
    ray_cluster: None, engine_config: EngineConfig, cluster_config: ClusterConfig
) -> Iterator[ClusterConfig]:
    half = BundleConfig(num_cpus=0.5)
    chosen = cluster_config.model_copy(
        update={
            "namespace": APP,
            # Loading models takes all there is of a small machine, time and again here.
            "membership": MembershipConfig(lease_s=20.0, renew_s=0.25),
            "target_groups": TargetGroupsConfig(bundle=half),
            "draft_pool": DraftPoolConfig(
                num_workers=2, bundle=half, shares=DraftShareConfig(max_sequences=5)
            ),
        }
    )
    with deployed_on_ray(engine_config, chosen):
        yield chosen


def tokens_of(engine: Engine, wanted: Sequence[Request]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    for request in wanted:
        engine.add_request(request)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
    return tokens


async def num_accepted(service: object, name: str) -> float:
    """How many draft tokens of a batch of requests stood."""
    before = await metric(service, ACCEPTED, lambda value: True)
    streams = Streams(service, requests(8, max_tokens=180, name=name))
    await streams.finish()
    await asyncio.sleep(1.0)
    return await metric(service, ACCEPTED, lambda value: True) - before


def test_draft_workers_are_killed_at_random(config: ClusterConfig, engine_config: EngineConfig) -> None:
    import ray

    rng = random.Random(0)
    wanted = [one for batch in range(6) for one in requests(8, max_tokens=90, name=f"kills{batch}")]
    plain = engine_config.model_copy(update={"speculative_config": SpeculativeConfig(method="none")})

    async def scenario(service: object) -> None:
        at_first = await num_accepted(service, "before")
        assert at_first > 100
        streams = Streams(service, wanted)
        num_killed = 0
        while not all(task.done() for task in streams.tasks):
            if alive := workers(config, "draft"):
                ray.kill(rng.choice(alive), no_restart=True)
                num_killed += 1
            await asyncio.sleep(rng.uniform(0.5, 2.0))
        await streams.finish()
        assert num_killed >= 2
        assert await metric(service, "fallback_requests", lambda value: value > 0)
        await metric(service, DRAFTERS, lambda value: value == 2, within_s=180)
        with Engine(plain) as engine:
            assert streams.tokens == tokens_of(engine, wanted)
        for attempt in range(10):
            # The first rounds find out whom to wait for again.
            if await num_accepted(service, f"after{attempt}") > 0.8 * at_first:
                return
        raise AssertionError("drafting does not recover")

    with_service(config, scenario, num_drafters=2)
