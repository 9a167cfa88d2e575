"""The real thing on a local Ray cluster: same tokens as in process, whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest

from cluster.config import BundleConfig, ClusterConfig, TargetGroupsConfig
from specdec.core.errors import ChannelTimeout, CheckpointError, InputError, ResourceError
from specdec.core.ids import RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.messages import DoorReport, Hello
from specdec.transport.status import ServiceStatus
from specdec.transport.zmq import ZmqChannel
from tests.cluster.conftest import Plain, deployed_on_ray
from tests.cluster.live_workers import kill, worker
from tests.cluster.running_service import Streams, metric, metrics_now, requests, with_service

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def deployed(ray_cluster: None, engine_config: EngineConfig, cluster_config: ClusterConfig) -> Iterator[None]:
    with deployed_on_ray(engine_config, cluster_config):
        yield


def test_tokens_are_those_of_the_target_alone(
    deployed: None, cluster_config: ClusterConfig, alone: Plain
) -> None:
    wanted = requests(6, max_tokens=60, name="same")

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.finish()
        assert streams.tokens == alone(wanted)
        for request in wanted:
            last = streams.last[request.request_id]
            assert (last.finish_reason, last.num_generated_tokens) == ("length", 60)
        accepted = await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 0)
        assert accepted > 10, "the drafter hardly helped: this proves little"
        for part in ("target", "draft"):
            await metric(service, f'num_workers{{part="{part}",compile="off"}}', lambda value: value == 1)

    with_service(cluster_config, scenario)


def test_a_trace_goes_through_the_coordinator_to_the_rounds(
    deployed: None, cluster_config: ClusterConfig
) -> None:
    from deploy.openai.tracing import TRACE_ID_HEADER
    from tests.deploy.openai.kept_spans import PARENT, Traced, attributes

    body = {"prompt": [5, 6, 7, 8], "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    async def scenario(service: object) -> None:
        traced = Traced(service)
        transport = httpx.ASGITransport(traced.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://door", timeout=60) as client:
            response = await client.post("/v1/completions", json=body, headers={"traceparent": PARENT})
        assert response.status_code == 200, response.text
        assert response.headers[TRACE_ID_HEADER] == PARENT.split("-")[1]
        spans = traced.spans()
        assert {format(span.context.trace_id, "032x") for span in spans} == {PARENT.split("-")[1]}
        names = {span.context.span_id: span.name for span in spans}
        parents = {span.name: names.get(span.parent.span_id) for span in spans if span.parent is not None}
        assert parents == {
            "POST /v1/completions": None,  # the client's
            "generate": "POST /v1/completions",
            "queue": "generate",
            "prefill": "generate",
            "decode": "generate",
        }
        one = {span.name: span for span in spans}
        root, choice = one["POST /v1/completions"], one["generate"]
        assert root.start_time <= choice.start_time < choice.end_time <= root.end_time
        events = [*one["prefill"].events, *one["decode"].events]
        rounds = [event.attributes["round"] for event in events if event.name == "verify"]
        assert rounds[:4] == [0, 1, 2, 3]
        assert [event.name for event in events] == ["propose", "verify", "commit"] * len(rounds)
        told = attributes(choice)
        assert told["gen_ai.usage.output_tokens"] == 60
        assert 0 < told["drafthouse.num_accepted_draft_tokens"] <= told["drafthouse.num_draft_tokens"]
        seconds = [told[f"drafthouse.{part}_seconds"] for part in ("propose", "verify", "commit")]
        assert min(seconds) > 0
        assert sum(seconds) <= (choice.end_time - choice.start_time) / 1e9

    with_service(cluster_config, scenario)


def test_a_killed_draft_worker_changes_nothing_but_speed(
    deployed: None, cluster_config: ClusterConfig, alone: Plain
) -> None:
    wanted = requests(6, max_tokens=180, name="nodraft")

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        (lost,) = (await status_when(service, lambda status: len(status.draft_workers) == 1)).draft_workers
        kill(cluster_config, "draft")
        await streams.finish()
        assert streams.tokens == alone(wanted)
        assert await metric(service, "fallback_requests", lambda value: value > 0)
        # The pool replaces it by another one, at the same place, and drafting goes on.
        status = await status_when(
            service,
            lambda status: [one.incarnation for one in status.draft_workers] == [lost.incarnation + 1],
        )
        (new,) = status.draft_workers
        assert new.id != lost.id
        assert new.since > lost.since
        await metric(service, "draft_workers", lambda value: value == 1)
        before = await metric(service, "spec_decode_num_accepted_tokens", lambda value: True)
        await Streams(service, requests(1, max_tokens=60, name="again")).finish()
        await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > before)

    with_service(cluster_config, scenario)


def test_the_status_says_who_is_there_and_what_is_done(deployed: None, cluster_config: ClusterConfig) -> None:
    wanted = requests(4, max_tokens=180, name="status")

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.all_have_begun()

        def all_draft(status: ServiceStatus) -> bool:
            (group,) = status.target_groups
            return (
                group.num_running == 4 and group.choice is not None and bool(group.choice.num_requests_by_k)
            )

        status = await status_when(service, all_draft)
        (group,), (drafter,) = status.target_groups, status.draft_workers
        assert group.is_answering
        assert group.is_serving
        assert group.choice is not None
        assert (group.choice.mode, group.choice.reason) == ("lockstep", "configured")
        assert group.choice.num_requests_by_k.keys() == {3}
        assert (drafter.num_requests, drafter.max_requests) == (4, 8)
        assert 0 < group.since <= time.time()
        await streams.finish()
        status = await status_when(service, lambda status: status.target_groups[0].num_running == 0)
        recent = status.target_groups[0].recent
        assert recent is not None
        assert recent.tokens_per_s > 0
        assert recent.acceptance is not None
        assert recent.draft_s is not None

    with_service(cluster_config, scenario)


async def status_when(service: object, holds: Callable[[ServiceStatus], bool]) -> ServiceStatus:
    """Wait until the status is as it should be; return it."""
    until = time.monotonic() + 60
    while True:
        status: ServiceStatus = await service.status()  # type: ignore[attr-defined]
        if holds(status):
            return status
        assert time.monotonic() < until, status
        await asyncio.sleep(0.02)


def test_streams_outlive_the_target_worker(
    deployed: None, cluster_config: ClusterConfig, alone: Plain
) -> None:
    wanted = requests(6, max_tokens=180, name="notarget")

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        kill(cluster_config, "target")
        await streams.finish()
        assert streams.tokens == alone(wanted)
        assert {last.finish_reason for last in streams.last.values()} == {"length"}
        assert await metric(service, "target_losses", lambda value: value >= 1)

    with_service(cluster_config, scenario)


@pytest.mark.full
def test_an_idle_coordinator_replaces_its_target_worker_too(
    deployed: None, cluster_config: ClusterConfig, alone: Plain
) -> None:
    wanted = requests(2, max_tokens=20, name="idle")

    async def scenario(service: object) -> None:
        before = await metric(service, "target_losses", lambda value: True)
        kill(cluster_config, "target")
        await metric(service, "target_losses", lambda value: value == before + 1)
        streams = Streams(service, wanted)
        await streams.finish()
        assert streams.tokens == alone(wanted)

    with_service(cluster_config, scenario)


def test_a_client_that_leaves_frees_its_blocks(deployed: None, cluster_config: ClusterConfig) -> None:
    (request,) = requests(1, max_tokens=200, name="leaves")
    (other,) = requests(1, max_tokens=200, name="aborted")

    async def scenario(service: object) -> None:
        outputs: AsyncIterator[RequestOutput] = service.generate(request)  # type: ignore[attr-defined]
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]
        streams = Streams(service, [other])
        await streams.all_have_begun()
        await service.abort(other.request_id)  # type: ignore[attr-defined]
        await streams.finish()
        assert streams.last[other.request_id].finish_reason == "abort"
        await metric(service, "num_requests_running", lambda value: value == 0)
        await metric(service, "kv_cache_usage_perc", lambda value: value == 0)
        assert await metric(service, 'request_success{finished_reason="abort"}', lambda value: value >= 2)

    with_service(cluster_config, scenario)


def test_a_door_that_vanishes_frees_its_blocks(deployed: None, cluster_config: ClusterConfig) -> None:
    from cluster.client import ClusterService

    wanted = requests(3, max_tokens=200, name="vanishes")
    aborted = 'request_success{finished_reason="abort"}'

    async def vanish() -> float:
        service = ClusterService(cluster_config)
        await service.start()
        await service.wait_ready(60)
        await metric(service, "num_requests_running", lambda value: value == 0)
        ended = (await metrics_now(service)).get(aborted, 0.0)
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        await service.close()  # without a word about its streams
        for task in streams.tasks:
            task.cancel()
        return ended

    ended = asyncio.run(vanish())

    async def scenario(service: object) -> None:
        await metric(service, aborted, lambda value: value >= ended + len(wanted))
        await metric(service, "num_requests_running", lambda value: value == 0)
        await metric(service, "kv_cache_usage_perc", lambda value: value == 0)

    with_service(cluster_config, scenario)


def test_whichever_of_several_doors_is_asked_the_numbers_are_those_of_all(
    deployed: None, cluster_config: ClusterConfig
) -> None:
    from cluster.client import ClusterService

    answered = "http_requests_total"

    def counted(number: float) -> DoorReport:
        return DoorReport({answered: number}, {"http_requests_in_progress": 1.0})

    async def main() -> None:
        async with contextlib.AsyncExitStack() as doors:
            first, second = ClusterService(cluster_config), ClusterService(cluster_config)
            first.share(lambda: counted(3.0))
            doors.push_async_callback(first.close)
            await first.start()
            await first.wait_ready(60)
            await metric(first, "num_requests_running", lambda value: value == 0)
            before = await metric(first, "generation_tokens", lambda value: value >= 0)
            (one,) = requests(1, max_tokens=8, name="doors")
            await Streams(first, [one]).finish()
            alone = await metric(first, "generation_tokens", lambda value: value >= before + 8)
            second.share(lambda: counted(5.0))
            doors.push_async_callback(second.close)
            await second.start()
            await second.wait_ready(60)
            for service in (first, second):
                await metric(service, answered, lambda value: value == 8)
                await metric(service, "http_requests_in_progress", lambda value: value == 2)
                await metric(service, "generation_tokens", lambda value: value == alone)
            await first.close()
            # The one that kept the account is gone; what it had counted is not.
            await metric(second, "http_requests_in_progress", lambda value: value == 1)
            assert (await second.metrics())[answered] == 8

    asyncio.run(main())


def test_bad_input_is_refused_by_name_and_harms_nobody(
    deployed: None, cluster_config: ClusterConfig, alone: Plain
) -> None:
    (good,) = requests(1, max_tokens=30, name="good")
    too_long = Request(
        request_id=RequestId("too-long"), prompt_token_ids=(5,) * 300, params=SamplingParams(), seed=1
    )

    async def scenario(service: object) -> None:
        streams = Streams(service, [good])
        with pytest.raises(InputError, match="256"):
            await Streams(service, [too_long]).finish()
        await streams.finish()
        assert streams.tokens == alone([good])

    with_service(cluster_config, scenario)


def test_a_peer_without_a_members_key_is_not_heard(deployed: None, cluster_config: ClusterConfig) -> None:
    import ray

    from cluster.directory_actor import open_directory

    directory = open_directory(cluster_config.namespace, cluster_config.membership.lease_s)
    snapshot = ray.get(directory.exchange.remote(None, None))
    addresses: list[PeerAddress] = [member.address for member in snapshot.members]
    addresses.append(ray.get(worker(cluster_config, "target").address.remote()))  # type: ignore[attr-defined]
    roles = {address.peer_id.split("-")[0] for address in addresses}
    assert roles >= {"coordinator", "draft", "target"}
    stranger = ZmqChannel(PeerId("coordinator-stranger"))
    for address in addresses:
        stranger.connect(address)
        stranger.send(address.peer_id, Hello(1 << 62))
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        with pytest.raises(ChannelTimeout):
            stranger.receive(0.2)
    stranger.close()


def test_the_directory_may_be_lost(deployed: None, cluster_config: ClusterConfig, alone: Plain) -> None:
    import ray

    from cluster.directory_actor import DIRECTORY_NAME

    before, after = requests(2, max_tokens=60, name="before"), requests(2, max_tokens=60, name="after")

    async def scenario(service: object) -> None:
        directory = ray.get_actor(DIRECTORY_NAME, namespace=cluster_config.namespace)
        ray.kill(directory, no_restart=False)
        streams = Streams(service, before)
        await streams.finish()
        assert streams.tokens == alone(before)

    with_service(cluster_config, scenario)

    async def newcomer(service: object) -> None:
        streams = Streams(service, after)
        await streams.finish()
        assert streams.tokens == alone(after)
        assert await metric(service, "draft_workers", lambda value: value == 1)

    with_service(cluster_config, newcomer)


def test_the_directory_outlives_the_placement_group_of_its_maker(ray_cluster: None) -> None:
    """Serve's replicas capture the actors they make into their own placement group."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from cluster.directory_actor import close_directory, open_directory

    namespace = "directory-placement"

    @ray.remote(num_cpus=0)
    class Replica:
        def exchange(self) -> None:
            ray.get(open_directory(namespace, 5.0).exchange.remote(None, None))

        def wait_for_the_end(self) -> None:
            threading.Event().wait()

    group = placement_group([{"memory": 1 << 20}])  # the CPUs are taken
    ray.get(group.ready())
    capturing = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    replica = Replica.options(scheduling_strategy=capturing).remote()  # type: ignore[attr-defined]
    ray.get(replica.exchange.remote())
    end = replica.wait_for_the_end.remote()
    remove_placement_group(group)
    try:
        with pytest.raises((ray.exceptions.RayActorError, ray.exceptions.ActorPlacementGroupRemoved)):
            ray.get(end, timeout=60)
        assert ray.get(open_directory(namespace, 5.0).exchange.remote(None, None), timeout=60) is not None
    finally:
        close_directory(namespace)


def test_what_does_not_fit_the_cluster_is_refused_at_once(
    ray_cluster: None, engine_config: EngineConfig, cluster_config: ClusterConfig
) -> None:
    from cluster.application import build_application

    bundle = BundleConfig(num_gpus=64)
    wanting = cluster_config.model_copy(update={"target_groups": TargetGroupsConfig(bundle=bundle)})
    with pytest.raises(ResourceError, match=r"target group 1 of 1 needs 1 CPU \+ 64 GPU on one node"):
        build_application(engine_config, wanting)


def test_streams_outlive_the_coordinator(deployed: None, cluster_config: ClusterConfig, alone: Plain) -> None:
    import ray

    wanted = requests(4, max_tokens=200, name="nocoordinator")

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        replicas = [
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if "#Coordinator#" in entry["name"]
        ]
        assert len(replicas) == 1
        ray.kill(ray.get_actor(replicas[0], namespace="serve"), no_restart=True)
        await streams.finish()
        assert streams.tokens == alone(wanted)
        assert {last.finish_reason for last in streams.last.values()} == {"length"}
        assert {last.epoch for last in streams.last.values()} == {1}

    with_service(cluster_config, scenario)


def test_a_worker_that_cannot_load_says_so_in_the_user_s_words(
    ray_cluster: None, engine_config: EngineConfig, cluster_config: ClusterConfig
) -> None:
    from cluster.runtime import channel_options, new_peer_id
    from cluster.worker_handle import WorkerHandle
    from workers.target_worker import TargetWorker

    broken = engine_config.model_copy(
        update={"target": engine_config.target.model_copy(update={"model": "/nowhere/at/all"})}
    )
    owner = PeerAddress(peer_id=PeerId("nobody"), endpoint="tcp://127.0.0.1:1", public_key="x" * 40)
    actor = TargetWorker.options(num_cpus=0).remote(  # type: ignore[attr-defined]
        broken, new_peer_id("target"), "127.0.0.1", owner, channel_options(cluster_config.channels)
    )
    with pytest.raises(CheckpointError, match="model folder /nowhere/at/all does not exist"):
        WorkerHandle(actor, "target worker").await_address(60)


@pytest.mark.full
def test_a_worker_compiles_before_it_is_ready_and_what_is_left_while_idle(
    ray_cluster: None, engine_config: EngineConfig, cluster_config: ClusterConfig
) -> None:
    from cluster.directory_actor import close_directory, open_directory
    from cluster.runtime import channel_options, new_peer_id
    from cluster.start_reports import StartReporter, read_start_reports
    from cluster.worker_handle import WorkerHandle
    from specdec.attention.cpu import CpuPagedAttention
    from specdec.attention.native import NativeUnavailable
    from specdec.model.config import CompileConfig
    from workers.target_worker import TargetWorker

    try:
        CpuPagedAttention()
    except NativeUnavailable as error:
        pytest.skip(f"no compiled forward here: {error}")
    owner = PeerAddress(peer_id=PeerId("nobody"), endpoint="tcp://127.0.0.1:1", public_key="x" * 40)
    namespace = "start-reports"
    open_directory(namespace, 5.0)

    def start(startup_seconds: float) -> WorkerHandle:
        compiling = CompileConfig(startup_seconds=startup_seconds)
        target = engine_config.target.model_copy(update={"compile": compiling})
        worker_id = new_peer_id("target")
        actor = TargetWorker.options(num_cpus=0).remote(  # type: ignore[attr-defined]
            engine_config.model_copy(update={"target": target}),
            worker_id,
            "127.0.0.1",
            owner,
            channel_options(cluster_config.channels),
            StartReporter(namespace, worker_id),
        )
        return WorkerHandle(actor, "target worker")

    patient, hasty = start(60.0), start(0.0)
    try:
        reports: set[str] = set()
        while patient.poll_compile_state() is None:  # it answers once it is ready
            reports.update(read_start_reports(namespace))
            time.sleep(0.01)
        assert any(text.startswith("loading target ") for text in reports), reports
        assert patient.compile_state() == "ready"
        hasty.await_address(60)  # by now it may have found time to compile: so small is the model
        until = time.monotonic() + 60
        while hasty.poll_compile_state() != "ready":
            assert time.monotonic() < until
            time.sleep(0.05)
        assert read_start_reports(namespace) == ()
    finally:
        patient.stop()
        hasty.stop()
        close_directory(namespace)
