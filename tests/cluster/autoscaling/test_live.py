"""Scaling on a local Ray cluster: groups come with load, go without it, and nobody's stream suffers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from cluster.autoscaling.config import DraftScalingConfig, TargetScalingConfig
from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, TargetGroupsConfig
from specdec.engine.config import EngineConfig
from tests.cluster.conftest import Plain
from tests.cluster.test_running_cluster import Streams, metric, requests

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

APP = "drafthouse-scaling"
PACE = {"up_after_s": 1.0, "down_after_s": 2.0, "cooldown_s": 1.0, "scale_to_zero_after_s": 30.0}
SMALL = BundleConfig(num_cpus=0.5)
LONG_S = 600.0


@pytest.fixture(scope="module")
def scaling_config(cluster_config: ClusterConfig) -> ClusterConfig:
    targets = TargetScalingConfig(min_groups=0, max_groups=2, **PACE)
    drafts = DraftScalingConfig(min_workers=0, max_workers=1, **PACE)
    return cluster_config.model_copy(
        update={
            "namespace": "drafthouse-scaling",
            "target_groups": TargetGroupsConfig(bundle=SMALL, autoscaling=targets),
            "draft_pool": DraftPoolConfig(bundle=SMALL, autoscaling=drafts),
            "drain_timeout_s": 20.0,
        }
    )


@pytest.fixture(scope="module")
def deployed(ray_cluster: None, engine_config: EngineConfig, scaling_config: ClusterConfig) -> Iterator[None]:
    from ray import serve

    from cluster.application import build_application

    serve.run(build_application(engine_config, scaling_config), name=APP, route_prefix=None)
    yield
    serve.delete(APP)


def test_replicas_follow_the_load_to_zero_and_back(
    deployed: None, scaling_config: ClusterConfig, alone: Plain
) -> None:
    from ray import serve

    from cluster.application import COORDINATOR
    from cluster.autoscaling.waking import waker_of
    from cluster.client import ClusterService

    async def scenario() -> None:
        wake = waker_of(serve.get_deployment_handle(COORDINATOR, APP))
        service = ClusterService(scaling_config, wake=wake)
        await service.start()
        try:
            await service.wait_ready(LONG_S)
            # Load: two batches' worth, all the time.
            is_over = asyncio.Event()
            load = [asyncio.create_task(keep_asking(service, index, is_over)) for index in range(20)]
            await metric(service, "coordinators", lambda value: value == 2, within_s=LONG_S)
            is_over.set()
            await asyncio.gather(*load)  # every stream was right, whichever group it was on
            # A little is left to do: one group does it, and what runs on the one that leaves goes on.
            is_over.clear()
            few = asyncio.create_task(keep_asking(service, 100, is_over))
            await metric(service, "coordinators", lambda value: value == 1, within_s=LONG_S)
            is_over.set()
            await few
            # Nothing: nobody is there.
            await metric(service, "coordinators", lambda value: value == 0, within_s=LONG_S)
            assert service.description() is not None
            # Somebody asks: a group and a draft worker are started for it.
            wanted = requests(1, max_tokens=20, name="cold")
            streams = Streams(service, wanted)
            await asyncio.wait_for(asyncio.gather(*streams.tasks), LONG_S)
            assert streams.tokens == alone(wanted)
        finally:
            await service.close()

    async def keep_asking(service: object, number: int, is_over: asyncio.Event) -> None:
        wanted = requests(1, max_tokens=100, name=f"load-{number}")
        expected = alone(wanted)
        while not is_over.is_set():
            streams = Streams(service, wanted)
            await asyncio.wait_for(asyncio.gather(*streams.tasks), LONG_S)
            assert streams.tokens == expected
            assert {last.finish_reason for last in streams.last.values()} == {"length"}

    asyncio.run(scenario())
