"""Two target groups, of which one loses a process: killed, or stopped, so that nothing of it closes.

Who is taken for dead, how soon, who is not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, HealthCheckConfig, TargetGroupsConfig
from specdec.engine.config import EngineConfig
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.live_workers import workers
from tests.cluster.running_service import Streams, metric, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

CHECKS = HealthCheckConfig(period_s=1.0, timeout_s=2.0)
LIMIT_S = 240.0


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig) -> ClusterConfig:
    half = BundleConfig(num_cpus=0.5)
    return cluster_config.model_copy(
        update={
            "namespace": "drafthouse-hung",
            "target_groups": TargetGroupsConfig(num_groups=2, bundle=half),
            "draft_pool": DraftPoolConfig(bundle=half),
            "health_checks": CHECKS,
        }
    )


@pytest.fixture(scope="module")
def deployed(ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig) -> Iterator[None]:
    with deployed_on_ray(engine_config, config):
        yield


def process_of(actor: Any) -> int:
    import ray

    return int(ray._private.state.actors(actor._actor_id.hex())["Pid"])


def test_a_directory_that_hangs_for_longer_than_leases_takes_nobody_away(
    deployed: None, config: ClusterConfig, alone: Plain
) -> None:
    import ray

    from cluster.directory_actor import DIRECTORY_NAME

    async def scenario(service: object) -> None:
        await metric(service, "coordinators", lambda value: value == 2, within_s=LIMIT_S)
        before = await service.status()  # type: ignore[attr-defined]
        process = process_of(ray.get_actor(DIRECTORY_NAME, namespace=config.namespace))
        os.kill(process, signal.SIGSTOP)
        try:
            hanging = asyncio.get_running_loop().time() + 3 * config.membership.lease_s
            number = 0
            while asyncio.get_running_loop().time() < hanging:
                await ask(service, alone, f"during-{number}")
                number += 1
        finally:
            os.kill(process, signal.SIGCONT)
        seen_until = asyncio.get_running_loop().time() + 2 * config.membership.lease_s
        while asyncio.get_running_loop().time() < seen_until:
            await ask(service, alone, f"after-{number}")
            number += 1
            assert await metric(service, "coordinators", lambda value: True) == 2
        after = await service.status()  # type: ignore[attr-defined]
        assert [group.id for group in after.target_groups] == [group.id for group in before.target_groups]
        assert [one.id for one in after.draft_workers] == [one.id for one in before.draft_workers]
        values = await service.metrics()  # type: ignore[attr-defined]
        assert values.get("failovers", 0) == 0

    with_service(config, scenario)


async def ask(service: object, alone: Plain, name: str) -> None:
    wanted = requests(2, max_tokens=40, name=name)
    streams = Streams(service, wanted)
    await streams.finish()
    assert streams.tokens == alone(wanted)


def test_streams_leave_a_group_whose_target_has_died(
    deployed: None, config: ClusterConfig, alone: Plain
) -> None:
    import ray

    wanted = requests(6, max_tokens=180, name="left")

    async def scenario(service: object) -> None:
        await metric(service, "coordinators", lambda value: value == 2, within_s=LIMIT_S)
        before = (await service.metrics()).get("failovers", 0)  # type: ignore[attr-defined]
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        ray.kill(workers(config, "target")[0], no_restart=True)
        killed_s = time.monotonic()
        await streams.finish()
        took_s = time.monotonic() - killed_s
        assert streams.tokens == alone(wanted)
        await metric(service, "failovers", lambda value: value > before)
        await metric(service, "target_recovery_seconds", lambda value: value > 0, within_s=LIMIT_S)
        sys.stdout.write(f"target killed: streams over after {took_s:.1f} s\n")

    with_service(config, scenario)


def test_a_coordinator_that_hangs_is_left_at_once_and_replaced(
    deployed: None, config: ClusterConfig, alone: Plain
) -> None:
    import ray

    wanted = requests(6, max_tokens=180, name="hung")

    async def scenario(service: object) -> None:
        await metric(service, "coordinators", lambda value: value == 2, within_s=LIMIT_S)
        replicas = sorted(
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if f"{config.namespace}#Coordinator#" in entry["name"]
        )
        assert len(replicas) == 2
        hung = process_of(ray.get_actor(replicas[0], namespace="serve"))
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        os.kill(hung, signal.SIGSTOP)
        stopped_s = time.monotonic()
        try:
            await streams.finish()
            took_s = time.monotonic() - stopped_s
            assert streams.tokens == alone(wanted)
            while _is_there(hung):
                assert time.monotonic() < stopped_s + LIMIT_S, "nobody found out"
                await asyncio.sleep(0.1)
            found_s = time.monotonic() - stopped_s
        finally:
            if _is_there(hung):
                os.kill(hung, signal.SIGKILL)
        await metric(service, "coordinators", lambda value: value == 2, within_s=LIMIT_S)
        replaced_s = time.monotonic() - stopped_s
        await ask(service, alone, "again")
        sys.stdout.write(
            f"hung coordinator: streams over after {took_s:.1f} s, ended after {found_s:.1f} s, "
            f"another there after {replaced_s:.1f} s\n"
        )
        assert found_s < 40, "three checks of two seconds"

    with_service(config, scenario)


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
