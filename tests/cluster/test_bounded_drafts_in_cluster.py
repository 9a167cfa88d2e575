"""A draft worker whose model has few positions and little memory: long texts, long answers, a death."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from cluster.config import ClusterConfig
from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.live_workers import kill
from tests.cluster.running_service import Streams, metric, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

APP = "drafthouse-bounded"
POSITIONS = 48


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig) -> ClusterConfig:
    return cluster_config.model_copy(update={"namespace": APP})


@pytest.fixture(scope="module")
def deployed(ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig) -> Iterator[None]:
    speculative = SpeculativeConfig.model_validate(
        {
            **engine_config.speculative_config.model_dump(),
            "max_model_len": POSITIONS,
            "cache": {"num_blocks": 60, "block_size": 4},
            "kv": {"policy": "streaming", "budget": 16},
        }
    )
    bounded = engine_config.model_copy(update={"speculative_config": speculative})
    with deployed_on_ray(bounded, config):
        yield


def requests(name: str) -> list[Request]:
    generator = random.Random(name)
    return [
        Request(
            request_id=RequestId(f"{name}-{index}"),
            prompt_token_ids=tuple(generator.choices(range(2, 100), k=length)),
            params=SamplingParams(temperature=float(index % 2), max_tokens=50, ignore_eos=True),
            seed=1000 + index,
        )
        for index, length in enumerate((150, 3, 200, 40))
    ]


@pytest.mark.parametrize("dies", [False, True])
def test_tokens_are_those_of_the_target_alone(
    deployed: None, config: ClusterConfig, alone: Plain, dies: bool
) -> None:
    wanted = requests(f"dies-{dies}")

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        if dies:
            await streams.all_have_begun()
            kill(config, "draft")
        await streams.finish()
        assert streams.tokens == alone(wanted)
        if not dies:
            assert await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 10)
            assert await metric(service, "draft_windows_reread", lambda value: value > 2)
            assert await metric(service, "draft_sequences_too_long", lambda value: value == 0) == 0

    with_service(config, scenario)
