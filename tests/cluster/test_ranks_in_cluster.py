"""Targets and drafts over several ranks as Ray actors: same tokens, and a group lives and dies together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, TargetGroupsConfig
from specdec.core.errors import CheckpointError
from specdec.engine.config import EngineConfig
from specdec.transport.base import PeerId
from specdec.transport.config import ChannelConfig
from specdec.transport.zmq import ZmqChannel
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.live_workers import worker
from tests.cluster.running_service import Streams, metric, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow]

APP = "drafthouse-ranks"


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig) -> ClusterConfig:
    half = BundleConfig(num_cpus=0.5)
    return cluster_config.model_copy(
        update={
            "namespace": APP,
            "target_groups": TargetGroupsConfig(bundle=half),
            "draft_pool": DraftPoolConfig(bundle=half),
        }
    )


@pytest.fixture(scope="module")
def deployed(ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig) -> Iterator[None]:
    speculative = engine_config.speculative_config.model_copy(update={"draft_tensor_parallel_size": 2})
    target = engine_config.target.model_copy(update={"tensor_parallel_size": 2})
    parallel = engine_config.model_copy(update={"target": target, "speculative_config": speculative})
    with deployed_on_ray(parallel, config):
        yield


def test_tokens_are_those_of_one_process(deployed: None, config: ClusterConfig, alone: Plain) -> None:
    wanted = requests(5, max_tokens=40, name="ranks")

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.finish()
        assert streams.tokens == alone(wanted)
        assert await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 10)

    with_service(config, scenario)


@pytest.mark.parametrize("victim", ["rank-target", pytest.param("target", marks=pytest.mark.full)])
def test_streams_outlive_a_lost_rank(
    deployed: None, config: ClusterConfig, alone: Plain, victim: str
) -> None:
    import ray

    wanted = requests(5, max_tokens=150, name=victim)

    async def scenario(service: object) -> None:
        losses = await metric(service, "target_losses", lambda value: True)
        former = {role: worker(config, role) for role in ("target", "rank-target")}
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        ray.kill(former[victim], no_restart=True)
        await streams.finish()
        assert streams.tokens == alone(wanted)
        assert await metric(service, "target_losses", lambda value: value == losses + 1)
        for role, actor in former.items():
            assert worker(config, role) != actor, "both ranks are new"

    with_service(config, scenario)


@pytest.mark.full
def test_an_idle_group_notices_a_lost_rank(deployed: None, config: ClusterConfig, alone: Plain) -> None:
    import ray

    wanted = requests(2, max_tokens=20, name="idle")

    async def scenario(service: object) -> None:
        losses = await metric(service, "target_losses", lambda value: True)
        ray.kill(worker(config, "rank-target"), no_restart=True)
        await metric(service, "target_losses", lambda value: value == losses + 1)
        streams = Streams(service, wanted)
        await streams.finish()
        assert streams.tokens == alone(wanted)

    with_service(config, scenario)


@pytest.mark.full
def test_a_draft_worker_is_replaced_with_all_its_ranks(
    deployed: None, config: ClusterConfig, alone: Plain
) -> None:
    import ray

    wanted = requests(4, max_tokens=60, name="draft")

    async def scenario(service: object) -> None:
        ray.kill(worker(config, "rank-draft"), no_restart=True)
        await metric(service, "draft_workers", lambda value: value == 0)
        await metric(service, "draft_workers", lambda value: value == 1)
        before = await metric(service, "spec_decode_num_accepted_tokens", lambda value: True)
        streams = Streams(service, wanted)
        await streams.finish()
        assert streams.tokens == alone(wanted)
        await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > before)

    with_service(config, scenario)


@pytest.mark.full
def test_a_model_that_cannot_be_cut_is_refused_in_the_users_words(
    ray_cluster: None, engine_config: EngineConfig
) -> None:
    from cluster.runtime import channel_options, worker_options
    from cluster.worker_handle import WorkerHandle
    from workers.target_worker import TargetWorker

    free = BundleConfig.model_construct(num_cpus=0.0, num_gpus=0.0, resources={}, labels={})
    names = [PeerId(f"uncut-{rank}") for rank in range(3)]
    first, *others = [worker_options(free, name, "drafthouse-uncut") for name in names]
    target = engine_config.target.model_copy(update={"tensor_parallel_size": 3})
    config = engine_config.model_copy(update={"target": target})
    owner = ZmqChannel(PeerId("owner"))
    actor = TargetWorker.options(**first).remote(  # type: ignore[attr-defined]
        config, names[0], "127.0.0.1", owner.address, channel_options(ChannelConfig()), None, others
    )
    with pytest.raises(CheckpointError, match="4 attention heads cannot be divided over 3 ranks"):
        WorkerHandle(actor, "target worker").await_address(100)
    owner.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("width", "stages", "fate", "auth"),
    [
        pytest.param(2, 1, "kill", "token", id="tp2-with-tokens"),
        pytest.param(1, 2, "stop", "disabled", id="pp2-stopped"),
        pytest.param(2, 2, "kill", "disabled", id="tp2-pp2"),
    ],
)
def test_ranks_on_two_nodes(
    model_folders: tuple[Path, Path], width: int, stages: int, fate: str, auth: str
) -> None:
    said = run_script("two_nodes.py", str(model_folders[0]), str(width), str(stages), fate, auth)
    assert "two nodes, same tokens" in said


@pytest.mark.full
@pytest.mark.timeout(900)
def test_each_part_is_on_nodes_of_its_own(model_folders: tuple[Path, Path]) -> None:
    said = run_script("own_nodes.py", *map(str, model_folders))
    assert "each on nodes of its own, before and after" in said


def run_script(name: str, *arguments: str) -> str:
    """In a process of its own: a Ray cluster of several nodes beside the one of this session."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(name)), *arguments],
        env={**environment, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
