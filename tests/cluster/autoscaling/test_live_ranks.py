"""Scaling of target groups of several ranks, on a local Ray cluster: a group is all of them or none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from cluster.autoscaling.config import TargetScalingConfig
from cluster.config import BundleConfig, ClusterConfig, TargetGroupsConfig
from specdec.engine.config import EngineConfig
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.live_workers import workers
from tests.cluster.running_service import Streams, metric, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]

NUM_RANKS = 2
LONG_S = 600.0


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig) -> ClusterConfig:
    scaling = TargetScalingConfig(
        min_groups=1, max_groups=2, up_after_s=1.0, down_after_s=2.0, cooldown_s=1.0
    )
    # Two groups of two ranks fit the two CPUs, and no draft worker is needed beside them.
    bundle = BundleConfig(num_cpus=0.4)
    return cluster_config.model_copy(
        update={
            "namespace": "drafthouse-scaling-ranks",
            "target_groups": TargetGroupsConfig(bundle=bundle, autoscaling=scaling),
            "drain_timeout_s": 20.0,
        }
    )


@pytest.fixture(scope="module")
def deployed(ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig) -> Iterator[None]:
    target = engine_config.target.model_copy(update={"tensor_parallel_size": NUM_RANKS})
    lookup = SpeculativeConfig(method="ngram", num_speculative_tokens=3, controller="fixed")
    with deployed_on_ray(
        engine_config.model_copy(update={"target": target, "speculative_config": lookup}), config
    ):
        yield


def whole_groups() -> list[int]:
    """Return how many bundles each placement group has that Ray has reserved, all of it or nothing."""
    import ray

    return [
        len(group["bundles"])
        for group in ray.util.placement_group_table().values()
        if group["state"] == "CREATED" and len(group["bundles"]) >= NUM_RANKS
    ]


def test_groups_come_and_go_with_all_their_ranks(deployed: None, config: ClusterConfig, alone: Plain) -> None:
    async def scenario(service: object) -> None:
        def ranks() -> tuple[int, int]:
            return len(workers(config, "target")), len(workers(config, "rank-target"))

        async def come_to(number: int) -> None:
            """Wait until so many groups serve, and all processes of the others have ended."""
            await metric(service, "target_groups_wanted", lambda value: value == number, within_s=LONG_S)
            await metric(service, "coordinators", lambda value: value == number, within_s=LONG_S)
            until_s = time.monotonic() + LONG_S
            while (found := ranks()) != (number, number * (NUM_RANKS - 1)) or len(whole_groups()) != number:
                assert time.monotonic() < until_s, f"{found} ranks in {whole_groups()}"
                await asyncio.sleep(0.2)

        async def keep_asking(number: int, is_over: asyncio.Event) -> None:
            wanted = requests(1, max_tokens=100, name=f"load-{number}")
            expected = alone(wanted)
            while not is_over.is_set():
                streams = Streams(service, wanted)
                await asyncio.wait_for(asyncio.gather(*streams.tasks), LONG_S)
                assert streams.tokens == expected
                assert {last.finish_reason for last in streams.last.values()} == {"length"}

        await come_to(1)
        for round_of_load in range(2):  # what has gone once leaves room for the next one
            is_over = asyncio.Event()
            load = [
                asyncio.create_task(keep_asking(100 * round_of_load + index, is_over)) for index in range(20)
            ]
            await come_to(2)
            is_over.set()
            await asyncio.gather(*load)  # every stream was right, whichever group it was on
            # A little is left to do, which goes on while one group drains and ends.
            is_over = asyncio.Event()
            few = asyncio.create_task(keep_asking(1000 + round_of_load, is_over))
            await come_to(1)
            is_over.set()
            await few
        wanted = requests(5, max_tokens=60, name="after")
        streams = Streams(service, wanted)
        await asyncio.wait_for(asyncio.gather(*streams.tasks), LONG_S)
        assert streams.tokens == alone(wanted)

    with_service(config, scenario, num_drafters=0)
