"""Targets that draft for themselves with a part of their K/V, as Ray actors over two ranks: same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pytest

from cluster.config import BundleConfig, ClusterConfig, TargetGroupsConfig
from specdec.core.errors import InputError
from specdec.core.request import Request
from specdec.engine.config import EngineConfig
from specdec.kv.selection import BudgetAmount, KvSelectionConfig
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.live_workers import worker
from tests.cluster.running_service import Streams, metric, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

APP = "drafthouse-self"
BUDGETS: Sequence[BudgetAmount | None] = (None, 8, 40, 0.5, 4096)
"""The configured one is 16; texts come to be more than 100 tokens long."""


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig) -> ClusterConfig:
    half = TargetGroupsConfig(bundle=BundleConfig(num_cpus=0.5))
    return cluster_config.model_copy(update={"namespace": APP, "target_groups": half})


@pytest.fixture(scope="module")
def deployed(ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig) -> Iterator[None]:
    speculative = SpeculativeConfig(
        method="self",
        num_speculative_tokens=3,
        controller="fixed",
        kv=KvSelectionConfig(policy="streaming", budget=16, sink_tokens=4, floor=16),
    )
    target = engine_config.target.model_copy(update={"tensor_parallel_size": 2})
    drafting = engine_config.model_copy(update={"target": target, "speculative_config": speculative})
    with deployed_on_ray(drafting, config):
        yield


def with_budgets(wanted: Sequence[Request]) -> list[Request]:
    return [
        msgspec.structs.replace(one, kv_budget=BUDGETS[index % len(BUDGETS)])
        for index, one in enumerate(wanted)
    ]


def test_tokens_are_those_of_the_target_alone(deployed: None, config: ClusterConfig, alone: Plain) -> None:
    wanted = with_budgets(requests(5, max_tokens=100, name="self"))

    async def scenario(service: object) -> None:
        assert service.description().drafts_itself  # type: ignore[attr-defined]
        streams = Streams(service, wanted)
        await streams.finish()
        assert streams.tokens == alone(requests(5, max_tokens=100, name="self"))
        assert await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 50)

    with_service(config, scenario, num_drafters=0)


def test_a_budget_that_cannot_be_is_refused_at_the_door(deployed: None, config: ClusterConfig) -> None:
    (one,) = requests(1, max_tokens=10, name="small")

    async def scenario(service: object) -> None:
        small = msgspec.structs.replace(one, kv_budget=6)
        with pytest.raises(InputError, match=r"6 tokens do not hold .*: give at least 7") as caught:
            async for _ in service.generate(small):  # type: ignore[attr-defined]
                pass
        assert caught.value.param == "speculation.kv_budget"

    with_service(config, scenario, num_drafters=0)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["target", "rank-target"])
def test_streams_outlive_a_lost_worker(
    deployed: None, config: ClusterConfig, alone: Plain, victim: str
) -> None:
    """What it had drafted is lost with it; what is replayed goes on with the same budgets."""
    import ray

    wanted = with_budgets(requests(5, max_tokens=150, name=f"self-{victim}"))

    async def scenario(service: object) -> None:
        losses = await metric(service, "target_losses", lambda value: True)
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        ray.kill(worker(config, victim), no_restart=True)
        await streams.finish()
        assert streams.tokens == alone(requests(5, max_tokens=150, name=f"self-{victim}"))
        assert await metric(service, "target_losses", lambda value: value == losses + 1)
        # Of the new engine alone: what the lost one had counted is gone with it.
        await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 0)

    with_service(config, scenario, num_drafters=0)
