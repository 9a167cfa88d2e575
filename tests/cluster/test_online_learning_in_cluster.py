"""A draft pool whose models learn from traffic, while draft workers and their trainers die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec
import pytest

from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, TargetGroupsConfig
from specdec.core.request import Request
from specdec.engine.config import EngineConfig
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.online_config import OnlineConfig
from specdec.scheduling.config import SchedulerConfig
from specdec.transport.status import OnlineStatus, ServiceStatus
from tests.cluster.conftest import deployed_on_ray
from tests.cluster.live_workers import kill, worker, workers
from tests.cluster.running_service import Streams, metric, with_service
from tests.training.online.domain_requests import plain_tokens, requests
from tests.training.online.domains import FORMER, LATTER, QUICK, model_of, save

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module")
def learning_config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A target that knows two domains, a draft model that knows the former and may learn."""
    folder = tmp_path_factory.mktemp("learning")
    target = save(model_of([FORMER, LATTER], num_layers=2, num_steps=100), folder / "target")
    draft = save(model_of([FORMER]), folder / "draft")
    eager = CompileConfig(mode="off")
    return EngineConfig(
        target=ModelConfig(model=str(target), dtype="float32", num_threads=1, compile=eager),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=str(draft),
            num_speculative_tokens=3,
            controller="fixed",
            num_threads=1,
            compile=eager,
            online=QUICK,
        ),
        cache=CacheConfig(num_blocks=256, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )


@contextmanager
def deployed(
    learning_config: EngineConfig, cluster_config: ClusterConfig, online: OnlineConfig
) -> Iterator[ClusterConfig]:
    half = BundleConfig(num_cpus=0.5)
    speculative = learning_config.speculative_config.model_copy(update={"online": online})
    chosen = cluster_config.model_copy(
        update={
            "namespace": "drafthouse-online",
            "membership": cluster_config.membership.model_copy(update={"lease_s": 20.0}),
            "target_groups": TargetGroupsConfig(bundle=half),
            "draft_pool": DraftPoolConfig(bundle=half),
        }
    )
    with deployed_on_ray(learning_config.model_copy(update={"speculative_config": speculative}), chosen):
        yield chosen


async def learnt(service: object, holds: Callable[[OnlineStatus], bool]) -> OnlineStatus:
    """Wait until the one draft worker has learnt as much."""
    seen: list[OnlineStatus | None] = []
    for _ in range(600):
        status: ServiceStatus = await service.status()  # type: ignore[attr-defined]
        seen = [one.online for one in status.draft_workers]
        for one in seen:
            if one is not None and holds(one):
                return one
        await asyncio.sleep(0.2)
    raise AssertionError(f"not learnt as much within two minutes: {seen}")


async def served(service: object, wanted: list[Request]) -> dict[str, list[int]]:
    streams = Streams(service, wanted)
    await streams.finish()
    return streams.tokens


async def taken(service: object) -> None:
    """Serve until a version has been taken: that is done, and told, with what there is to draft."""
    for number in range(60):
        await served(service, requests(LATTER, 2, f"more-{number}"))
        values = await service.metrics()  # type: ignore[attr-defined]
        if values["online_versions_taken"] >= 1:
            return
        await asyncio.sleep(0.5)
    raise AssertionError("no version of the weights was taken")


async def acceptance(service: object, wanted: list[Request]) -> float:
    """Of draft tokens of these requests."""

    async def counts() -> tuple[float, float]:
        await asyncio.sleep(1.0)
        values = await service.metrics()  # type: ignore[attr-defined]
        return (
            values["spec_decode_num_accepted_tokens"],
            values["spec_decode_num_draft_tokens"],
        )

    before = await counts()
    await served(service, wanted)
    after = await counts()
    return (after[0] - before[0]) / max(1.0, after[1] - before[1])


async def improved(service: object, least: float) -> None:
    """Serve until so much is accepted: how soon that is depends on how fast the trainer's machine is."""
    seen: list[float] = []
    for number in range(20):
        seen.append(await acceptance(service, requests(LATTER, 16, f"after-{number}")))
        if seen[-1] > least:
            return
    raise AssertionError(f"acceptance should have risen above {least:.2f}, it was {seen}")


def test_a_pool_learns_and_what_dies_takes_nothing_with_it(
    ray_cluster: None, cluster_config: ClusterConfig, learning_config: EngineConfig
) -> None:
    async def scenario(service: object) -> None:
        await served(service, requests(FORMER, 8, "warm"))
        before = await acceptance(service, requests(LATTER, 8, "before"))
        first = requests(LATTER, 64, "first")
        tokens = await served(service, first)
        version = (await learnt(service, lambda online: online.version >= 1)).version
        await taken(service)

        # The draft worker dies while there is more to learn; the next one has what was learnt.
        second = requests(LATTER, 48, "second")
        streams = Streams(service, second)
        await asyncio.sleep(0.3)
        kill(running, "draft")
        await streams.finish()
        tokens |= streams.tokens
        await metric(service, "draft_workers", lambda value: value == 1)
        after_loss = await learnt(service, lambda online: online.version >= version)
        assert after_loss.num_buffered_tokens > 0

        # So does its trainer; another one goes on from what is served.
        trainer = worker(running, "trainer")
        kill(running, "trainer")
        third = requests(LATTER, 64, "third")
        tokens |= await served(service, third)
        await metric(service, "online_trainers_lost", partial(at_least, 1))
        assert await next_trainer(running) != trainer
        assert (await learnt(service, lambda online: online.num_buffered_tokens > 0)).version >= version
        await improved(service, before + 0.2)
        assert tokens == plain_tokens(learning_config, [*first, *second, *third])

    with deployed(learning_config, cluster_config, QUICK) as running:
        with_service(running, scenario)


async def next_trainer(running: ClusterConfig) -> object:
    """Wait for the one that takes the place of another, after a pause."""
    for _ in range(300):
        if workers(running, "trainer"):
            return worker(running, "trainer")
        await asyncio.sleep(0.2)
    raise AssertionError("no trainer was started within a minute")


def of_owner(wanted: list[Request], owner: str | None) -> list[Request]:
    return [msgspec.structs.replace(request, owner=owner) for request in wanted]


def test_nothing_is_learnt_of_those_who_have_not_allowed_it(
    ray_cluster: None, cluster_config: ClusterConfig, learning_config: EngineConfig
) -> None:
    """As many texts of one who has are learnt from at once: the negative control."""
    alice, bob = "a" * 64, "b" * 64
    online = OnlineConfig.model_validate({**QUICK.model_dump(), "allow_shared": False, "tenants": [alice]})

    async def scenario(service: object) -> None:
        await served(service, of_owner(requests(FORMER, 4, "warm"), bob))
        strangers = of_owner(requests(LATTER, 48, "of-bob"), bob) + requests(LATTER, 48, "of-nobody")
        tokens = await served(service, strangers)
        await asyncio.sleep(3.0)  # a trainer fetches within a second, and a version takes it two
        values = await service.metrics()  # type: ignore[attr-defined]
        assert (values["online_texts_heard"], values["online_tokens_buffered"]) == (0, 0)
        status = await learnt(service, lambda online: True)
        assert (status.version, status.num_tried, status.num_buffered_tokens) == (0, 0, 0)

        mine = of_owner(requests(LATTER, 64, "of-alice"), alice)
        tokens |= await served(service, mine)
        await learnt(service, lambda online: online.version >= 1)
        assert await metric(service, "online_texts_heard", partial(at_least, 1)) <= len(mine)
        assert tokens == plain_tokens(learning_config, [*strangers, *mine])

    with deployed(learning_config, cluster_config, online) as running:
        with_service(running, scenario)


def at_least(least: float, value: float) -> bool:
    return value >= least
