"""The goodput controller with drafter and target in actors of their own: costs are measured over channels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cluster.config import ClusterConfig
from specdec.engine.config import EngineConfig
from specdec.scheduling.speculation.cost_profile import CostProfile
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.live_workers import worker
from tests.cluster.running_service import Streams, metric, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

APP = "drafthouse-controller"


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig) -> ClusterConfig:
    return cluster_config.model_copy(update={"namespace": APP})


@pytest.fixture(scope="module")
def deployed(
    ray_cluster: None,
    engine_config: EngineConfig,
    config: ClusterConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("profiles")
    keys = {"controller": "goodput", "profile_dir": str(folder), "profile_seconds": 1.0}
    speculative = engine_config.speculative_config.model_copy(update=keys)
    chosen = engine_config.model_copy(update={"speculative_config": speculative})
    with deployed_on_ray(chosen, config):
        yield folder


def test_what_drafts_cost_was_measured_at_the_start(deployed: Path) -> None:
    """Draft workers let nobody in who is not in the directory: not even who has yet to be ready."""
    (kept,) = deployed.glob("*.json")
    profile = msgspec.json.decode(kept.read_bytes(), type=CostProfile)
    assert profile.draft
    assert all(point.wire_s > 0.0 for point in profile.draft), "they were drafted in another process"


def test_tokens_are_those_without_speculation(deployed: Path, config: ClusterConfig, alone: Plain) -> None:
    """Also when the target's worker dies amid the streams; the next one is not measured again."""
    import ray
    from ray import serve

    from cluster.application import COORDINATOR

    wanted = requests(6, max_tokens=80, name="chosen")

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        ray.kill(worker(config, "target"), no_restart=True)
        await streams.finish()
        assert streams.tokens == alone(wanted)
        assert await metric(service, "speculation_goodput_off", lambda value: value > 0.0)
        values = await service.metrics()  # type: ignore[attr-defined]
        assert any(name.startswith("speculation_state{") for name in values)
        assert not values.get('spec_decode_num_proposals_dropped{reason="malformed"}')
        for number in range(60):  # a few seconds of rounds say what the pool is worth
            more = Streams(service, requests(6, max_tokens=80, name=f"more-{number}"))
            await more.finish()
            if (await service.metrics()).get("speculation_pool_worth"):  # type: ignore[attr-defined]
                break

    with_service(config, scenario)
    coordinators = serve.get_deployment_handle(COORDINATOR, APP)
    stats = coordinators.record_autoscaling_stats.remote().result(timeout_s=30)
    assert stats["speculation_pool_worth"] > 0.0, "an autoscaling policy cannot see what the pool is worth"
