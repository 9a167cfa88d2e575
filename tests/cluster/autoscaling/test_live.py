"""Scaling on a local Ray cluster: groups and draft workers come with load, go without it, and nobody's stream
suffers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial

import pytest

from cluster.autoscaling.config import DraftScalingConfig, TargetScalingConfig
from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, TargetGroupsConfig
from specdec.engine.config import EngineConfig
from tests.cluster.conftest import Plain
from tests.cluster.running_service import Streams, metric, requests

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

APP = "drafthouse-scaling"
PACE = {"up_after_s": 1.0, "down_after_s": 2.0, "cooldown_s": 1.0, "scale_to_zero_after_s": 30.0}
SMALL = BundleConfig(num_cpus=0.4)
LONG_S = 600.0


@pytest.fixture(scope="module")
def scaling_config(cluster_config: ClusterConfig) -> ClusterConfig:
    targets = TargetScalingConfig(min_groups=0, max_groups=2, **PACE)
    # Whatever is waited for here is worth a worker, once the first has something to do.
    drafts = DraftScalingConfig(min_workers=0, max_workers=2, target_utilization=0.1, min_gain=0.002, **PACE)
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
    from cluster.autoscaling.wanted import tell_woken
    from cluster.client import ClusterService

    async def scenario() -> None:
        tell = partial(tell_woken, scaling_config.namespace, "target")
        wake = waker_of(serve.get_deployment_handle(COORDINATOR, APP), tell)
        service = ClusterService(scaling_config, wake=wake)
        await service.start()
        try:
            await service.wait_ready(LONG_S)
            # Load: two batches' worth, all the time.
            is_over = asyncio.Event()
            load = [asyncio.create_task(keep_asking(service, index, is_over)) for index in range(20)]
            await metric(service, "coordinators", lambda value: value == 2, within_s=LONG_S)
            await drafters(service, 2)
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
            await drafters(service, 0)
            assert service.description() is not None
            accepted = (await service.metrics())["spec_decode_num_accepted_tokens"]
            # Somebody asks: a group is started for it, and a draft worker while it runs.
            wanted = requests(1, max_tokens=20, name="cold")
            streams = Streams(service, wanted)
            await asyncio.wait_for(asyncio.gather(*streams.tasks), LONG_S)
            assert streams.tokens == alone(wanted)
            is_over.clear()
            few = asyncio.create_task(keep_asking(service, 200, is_over))
            await drafters(service, 1)
            # It drafts what is right: what groups before had accepted stays in the sum.
            await metric(
                service, "spec_decode_num_accepted_tokens", lambda value: value > accepted, within_s=LONG_S
            )
            is_over.set()
            await few
        finally:
            await service.close()

    async def drafters(service: ClusterService, number: int) -> None:
        """Wait until there are so many draft workers."""
        until_s = time.monotonic() + LONG_S
        while (found := len((await service.status()).draft_workers)) != number:
            assert time.monotonic() < until_s, f"{found} draft workers"
            await asyncio.sleep(0.2)

    async def keep_asking(service: object, number: int, is_over: asyncio.Event) -> None:
        wanted = requests(1, max_tokens=100, name=f"load-{number}")
        expected = alone(wanted)
        while not is_over.is_set():
            streams = Streams(service, wanted)
            await asyncio.wait_for(asyncio.gather(*streams.tasks), LONG_S)
            assert streams.tokens == expected
            assert {last.finish_reason for last in streams.last.values()} == {"length"}

    asyncio.run(scenario())
