"""EAGLE-3 in the draft pool of a cluster on Ray: hidden states travel, same tokens, whoever dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, TargetGroupsConfig
from specdec.engine.config import EngineConfig
from specdec.proposers.config import SpeculativeConfig
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.live_workers import worker
from tests.cluster.running_service import Streams, metric, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]

APP = "drafthouse-remote-heads"


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
def heads(engine_config: EngineConfig, alone: Plain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fitted to what the target says."""
    import torch
    from transformers import AutoModelForCausalLM

    from specdec.drafters.base import TargetParts
    from specdec.drafters.checkpoints.eagle3 import save_eagle3
    from specdec.drafters.eagle3 import Eagle3, Eagle3Settings
    from tests.specdec.engine.fitted_drafters import fit

    reference = AutoModelForCausalLM.from_pretrained(engine_config.target.model)
    wanted = requests(5, max_tokens=100, name="heads")
    streams = alone(wanted)
    target = TargetParts.of(reference)
    torch.manual_seed(0)
    settings = Eagle3Settings(config=target.config, fused_layers=(0, 1), has_embeddings=True)
    drafter = Eagle3(target, settings)
    fit(drafter, reference, [[*one.prompt_token_ids, *streams[one.request_id]] for one in wanted])
    folder = tmp_path_factory.mktemp("heads")
    save_eagle3(drafter, folder)
    return folder


@pytest.fixture(scope="module")
def deployed(
    ray_cluster: None, engine_config: EngineConfig, config: ClusterConfig, heads: Path
) -> Iterator[None]:
    speculative = SpeculativeConfig(
        method="eagle3",
        model=str(heads),
        heads_at="draft_pool",
        num_speculative_tokens=3,
        controller="fixed",
        num_threads=1,
    )
    with deployed_on_ray(engine_config.model_copy(update={"speculative_config": speculative}), config):
        yield


def test_states_travel_and_streams_outlive_draft_worker_and_target(
    deployed: None, config: ClusterConfig, alone: Plain
) -> None:
    """Each worker that takes over gets, or sends, the states of whole prefixes: drafts are accepted again."""
    import ray

    async def accepted(service: object, more_than: float) -> float:
        return await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > more_than)

    async def scenario(service: object) -> None:
        wanted = requests(5, max_tokens=100, name="heads")
        streams = Streams(service, wanted)
        await streams.finish()
        assert streams.tokens == alone(wanted)
        before = await accepted(service, 50)
        for part in ("draft", "target"):
            again = requests(5, max_tokens=150, name=f"without-{part}")
            streams = Streams(service, again)
            await streams.all_have_begun()
            ray.kill(worker(config, part), no_restart=True)
            await streams.finish()
            assert streams.tokens == alone(again)
            await metric(service, "draft_workers", lambda value: value >= 1)
            last = requests(5, max_tokens=100, name=f"after-{part}")
            streams = Streams(service, last)
            await streams.finish()
            assert streams.tokens == alone(last)
            # Another engine, after the target's loss, counts anew.
            before = await accepted(service, before + 50 if part == "draft" else 50)

    with_service(config, scenario)
