"""A request that kills the target's worker whenever it runs is ended; the others lose time, and nothing else.

What kills is code that the checkpoint brings (`trust_remote_code`): with the poison among its tokens the
model's forward ends the process, as a kernel with a bug would.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator

import pytest

from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, TargetGroupsConfig
from cluster.crash_policy import MAX_CRASHES
from specdec.core.error_codes import FAILED_REPEATEDLY
from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from tests.architectures import VOCAB_SIZE
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.running_service import Streams, metric, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

LIMIT_S = 300.0
POISON = VOCAB_SIZE - 1
PROMPT = (POISON,) * 16
"""Half of it in one step is deadly: so often nobody else has this token, nor is it cut into three."""
CODE = f"""\
import os
import signal

from transformers import LlamaConfig, LlamaForCausalLM


class PoisonedForCausalLM(LlamaForCausalLM):
    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.register_forward_pre_hook(die_of_poison, with_kwargs=True)


def die_of_poison(model, args, kwargs):
    token_ids = kwargs["input_ids"]
    if token_ids.device.type != "meta" and int((token_ids == {POISON}).sum()) >= {len(PROMPT) // 2}:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def config(cluster_config: ClusterConfig) -> ClusterConfig:
    half = BundleConfig(num_cpus=0.5)
    return cluster_config.model_copy(
        update={
            "namespace": "drafthouse-poison",
            "target_groups": TargetGroupsConfig(bundle=half),
            "draft_pool": DraftPoolConfig(bundle=half),
        }
    )


@pytest.fixture(scope="module")
def deployed(
    ray_cluster: None,
    engine_config: EngineConfig,
    config: ClusterConfig,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("poisoned") / "target"
    shutil.copytree(engine_config.target.model, folder)
    (folder / "modeling_poisoned.py").write_text(CODE)
    said = json.loads((folder / "config.json").read_text())
    said["auto_map"] = {"AutoModelForCausalLM": "modeling_poisoned.PoisonedForCausalLM"}
    (folder / "config.json").write_text(json.dumps(said))
    target = engine_config.target.model_copy(update={"model": str(folder), "trust_remote_code": True})
    with deployed_on_ray(engine_config.model_copy(update={"target": target}), config):
        yield


async def end_of(streams: Streams) -> None:
    await asyncio.wait_for(asyncio.gather(*streams.tasks), LIMIT_S)


def test_a_request_that_kills_its_worker_each_time_is_ended_and_the_others_live(
    deployed: None, config: ClusterConfig, alone: Plain
) -> None:
    beside, later = requests(4, max_tokens=180, name="beside"), requests(3, max_tokens=40, name="later")
    deadly = Request(
        request_id=RequestId("deadly"),
        prompt_token_ids=PROMPT,
        params=SamplingParams(max_tokens=40, ignore_eos=True),
        seed=1,
    )

    async def scenario(service: object) -> None:
        others = Streams(service, beside)
        await others.all_have_begun()
        poisoned = Streams(service, [deadly])
        await end_of(poisoned)
        last = poisoned.last[deadly.request_id]
        assert (last.finish_reason, last.error_code) == ("error", FAILED_REPEATEDLY), last
        assert poisoned.tokens == {deadly.request_id: []}
        await end_of(others)
        assert others.tokens == alone(beside)
        assert {one.finish_reason for one in others.last.values()} == {"length"}
        # Two beside others, one alone: nobody else is ever to blame.
        await metric(service, "target_losses", lambda value: value == MAX_CRASHES + 1)
        afterwards = Streams(service, later)
        await end_of(afterwards)
        assert afterwards.tokens == alone(later)
        await metric(service, "num_requests_running", lambda value: value == 0)
        await metric(service, "kv_cache_usage_perc", lambda value: value == 0)
        assert await metric(service, "target_losses", lambda value: True) == MAX_CRASHES + 1

    with_service(config, scenario)
