"""Medusa heads in target workers that are Ray actors over two ranks: same tokens, also after one is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import BundleConfig, ClusterConfig, TargetGroupsConfig
from specdec.engine.config import EngineConfig
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.live_workers import worker
from tests.cluster.running_service import Streams, metric, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

APP = "drafthouse-heads"


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig) -> ClusterConfig:
    half = TargetGroupsConfig(bundle=BundleConfig(num_cpus=0.5))
    return cluster_config.model_copy(update={"namespace": APP, "target_groups": half})


@pytest.fixture(scope="module")
def heads(engine_config: EngineConfig, alone: Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fitted to what the target says."""
    import torch
    from transformers import AutoModelForCausalLM

    from specdec.drafters.base import TargetParts
    from specdec.drafters.checkpoints.medusa import save_medusa
    from specdec.drafters.medusa import Medusa
    from tests.specdec.engine.linear_heads import fit_heads

    target = AutoModelForCausalLM.from_pretrained(engine_config.target.model)
    wanted = requests(5, max_tokens=100, name="heads")
    streams = alone(wanted)
    texts = [[*one.prompt_token_ids, *streams[one.request_id]] for one in wanted]
    weights = fit_heads(target, texts, num_heads=3, layers=(-1,))
    medusa = Medusa(TargetParts.of(target), num_heads=3)
    with torch.no_grad():
        for head, weight in zip(medusa.heads, weights, strict=True):
            head[-1].weight.copy_(weight.T)  # type: ignore[index]
    folder = tmp_path_factory.mktemp("heads")
    save_medusa(medusa, folder, base_model="tiny")
    return folder


@pytest.fixture(scope="module")
def deployed(
    ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig, heads: Path
) -> Iterator[None]:
    speculative = SpeculativeConfig(
        method="medusa", model=str(heads), num_speculative_tokens=3, controller="fixed"
    )
    target = engine_config.target.model_copy(update={"tensor_parallel_size": 2})
    drafting = engine_config.model_copy(update={"target": target, "speculative_config": speculative})
    with deployed_on_ray(drafting, config):
        yield


def test_streams_are_the_targets_and_outlive_a_lost_worker(
    deployed: None, config: ClusterConfig, alone: Plain
) -> None:
    """A worker that takes over is told the tokens again, and computes the hidden states anew."""
    import ray

    wanted = requests(5, max_tokens=100, name="heads")

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.finish()
        assert streams.tokens == alone(requests(5, max_tokens=100, name="heads"))
        assert await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 50)
        again = requests(5, max_tokens=150, name="again")
        streams = Streams(service, again)
        await streams.all_have_begun()
        ray.kill(worker(config, "target"), no_restart=True)
        await streams.finish()
        assert streams.tokens == alone(requests(5, max_tokens=150, name="again"))
        await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 0)

    with_service(config, scenario, num_drafters=0)
