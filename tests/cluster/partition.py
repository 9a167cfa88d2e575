"""Ray nodes with addresses of their own: links are cut, power is lost; run by `test_partition.py`.

ip netns exec NAME-1 python tests/cluster/partition.py NAME TEMP TARGET_FOLDER DRAFT_FOLDER SCENARIO...

NAME is a `Network` of four hosts: head and door, two with a target group each, one with the draft worker.
Streams run all the time; every one must be, token by token, what the target alone generates.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import psutil

from benchmarks.network import Network
from cluster.config import (
    BundleConfig,
    ClusterConfig,
    DraftPoolConfig,
    HealthCheckConfig,
    MembershipConfig,
    TargetGroupsConfig,
)
from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.scheduling.config import SchedulerConfig
from specdec.transport.config import ChannelConfig
from tests.cluster.running_service import metric, requests, with_service

HEAD, FIRST, SECOND, DRAFTER = 1, 2, 3, 4
NUM_HOSTS = 4
TARGET_SLOT, DRAFT_SLOT = {"target_slot": 1.0}, {"draft_slot": 1.0}
LEASE_S = 3.0
CUT_S = 6.0
"""Longer than a lease, and not long enough for Ray to give a node up."""
LIMIT_S = 240.0
NUM_CLIENTS = 4
MAX_CUTS = 4
ACCEPTED = "spec_decode_num_accepted_tokens"
CLUSTER = ClusterConfig(
    namespace="drafthouse-partition",
    target_groups=TargetGroupsConfig(
        num_groups=2, bundle=BundleConfig(num_cpus=0, resources=TARGET_SLOT), step_timeout_s=20.0
    ),
    draft_pool=DraftPoolConfig(bundle=BundleConfig(num_cpus=0, resources=DRAFT_SLOT)),
    channels=ChannelConfig(bind="auto"),
    membership=MembershipConfig(lease_s=LEASE_S, renew_s=0.25),
    health_checks=HealthCheckConfig(period_s=1.0, timeout_s=5.0),
    drain_timeout_s=2.0,
)
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
"""Of Ray's nodes: about ten seconds."""


def engine_config(target: str, draft: str) -> EngineConfig:
    eager = CompileConfig(mode="off")
    return EngineConfig(
        target=ModelConfig(model=target, num_threads=1, compile=eager),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=draft,
            num_threads=1,
            compile=eager,
            num_speculative_tokens=3,
            controller="fixed",
        ),
        cache=CacheConfig(num_blocks=512, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )


def tokens_alone(engine: EngineConfig, wanted: list[Request]) -> list[list[int]]:
    plain = engine.model_copy(update={"speculative_config": SpeculativeConfig(method="none")})
    tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    with Engine(plain) as alone:
        for request in wanted:
            alone.add_request(request)
        while alone.has_work:
            for output in alone.step():
                tokens[output.request_id].extend(output.token_ids)
    return list(tokens.values())


class Load:
    """Clients that read streams all the time, and check every token of them."""

    def __init__(self, service: object, wanted: list[Request], expected: list[list[int]]) -> None:
        self._service = service
        self._wanted = wanted
        self._expected = expected
        self._numbers: Iterator[int] = itertools.count()
        self._is_over = False
        self.num_complete = 0
        self.longest_pause_s = 0.0
        """Since somebody last set it to zero."""
        self._tasks = [asyncio.create_task(self._client()) for _ in range(NUM_CLIENTS)]

    async def _client(self) -> None:
        while not self._is_over:
            number = next(self._numbers)
            which = number % len(self._wanted)
            request = msgspec.structs.replace(self._wanted[which], request_id=RequestId(f"load-{number}"))
            tokens: list[int] = []
            reason, heard_s = None, time.monotonic()
            async for output in self._service.generate(request):  # type: ignore[attr-defined]
                assert output.first_index == len(tokens), "a gap, or something twice"
                assert reason is None, "something after the end"
                tokens.extend(output.token_ids)
                reason = output.finish_reason
                self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - heard_s)
                heard_s = time.monotonic()
            assert (reason, tokens) == ("length", self._expected[which])
            self.num_complete += 1

    def check(self) -> None:
        """Raise what has gone wrong so far."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def more(self, number: int) -> None:
        """Wait until so many more streams are complete, those that run now included."""
        wanted, until_s = self.num_complete + number, time.monotonic() + LIMIT_S
        while self.num_complete < wanted:
            self.check()
            assert time.monotonic() < until_s, "streams stand still"
            await asyncio.sleep(0.02)

    async def end(self) -> None:
        self._is_over = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), LIMIT_S)


class World:
    """What scenarios act on."""

    def __init__(self, network: Network, service: object, load: Load) -> None:
        self.network = network
        self.service = service
        self.load = load

    async def value(self, name: str) -> float:
        return await metric(self.service, name, lambda value: True, within_s=LIMIT_S)

    async def grows(self, name: str) -> float:
        """Wait until a counter has grown; return after how many seconds."""
        began_s, before = time.monotonic(), await self.value(name)
        await metric(self.service, name, lambda value: value > before, within_s=LIMIT_S)
        return time.monotonic() - began_s

    async def groups_serving(self, number: int) -> float:
        """Wait until so many target groups serve and can be reached; return after how many seconds."""
        began_s = time.monotonic()
        await metric(self.service, "coordinators", lambda value: value == number, within_s=LIMIT_S)
        while True:
            status = await self.service.status()  # type: ignore[attr-defined]
            if sum(group.is_serving for group in status.target_groups) == number:
                return time.monotonic() - began_s
            assert time.monotonic() - began_s < LIMIT_S, status
            await asyncio.sleep(0.1)


async def drafts_are_cut_off(world: World) -> str:
    """Everybody sees everybody, but the target groups do not see the draft worker, nor it them."""
    await world.grows(ACCEPTED)
    for host in (FIRST, SECOND):
        world.network.part(host, DRAFTER)
    await asyncio.sleep(CUT_S / 2)
    accepted, world.load.longest_pause_s = await world.value(ACCEPTED), 0.0
    await asyncio.sleep(CUT_S / 2)
    await world.load.more(NUM_CLIENTS)
    assert await world.value(ACCEPTED) == accepted, "the link was not cut"
    pause_s = world.load.longest_pause_s
    for host in (FIRST, SECOND):
        world.network.reunite(host, DRAFTER)
    back_s = await world.grows(ACCEPTED)
    assert await alive_nodes() == NUM_HOSTS
    return f"longest pause without drafts {pause_s:.2f} s, drafts again after {back_s:.1f} s"


async def a_target_node_is_cut_off(world: World) -> str:
    """Its streams go on at the other group; what it has left is not heard any more when it is back."""
    for _ in range(MAX_CUTS):
        failovers = await world.value("failovers")
        told = await cut_off_once(world)
        if await world.value("failovers") > failovers:
            return told
    raise AssertionError(f"no stream was there, {MAX_CUTS} times")


async def cut_off_once(world: World) -> str:
    """Cut the first target's node off for a while. Chance may have it that no stream is there just then."""
    await world.groups_serving(2)
    world.load.longest_pause_s = 0.0
    world.network.isolate(FIRST)
    cut_s = time.monotonic()
    noticed_s = await world.groups_serving(1)
    await world.load.more(2 * NUM_CLIENTS)
    await asyncio.sleep(max(0.0, cut_s + CUT_S - time.monotonic()))
    pause_s = world.load.longest_pause_s
    world.network.join(FIRST)
    back_s = await world.groups_serving(2)
    await world.load.more(2 * NUM_CLIENTS)
    assert await alive_nodes() == NUM_HOSTS
    return (
        f"noticed after {noticed_s:.1f} s, longest pause {pause_s:.1f} s, there again after {back_s:.1f} s, "
        f"{await world.value('stale_frames_dropped'):.0f} stale frames dropped"
    )


async def the_draft_node_is_given_up(world: World) -> str:
    """Ray takes it for dead; when it hears of that its processes end, and a new node takes its place."""
    await world.grows(ACCEPTED)
    world.network.isolate(DRAFTER)
    cut_s = time.monotonic()
    while await alive_nodes() == NUM_HOSTS:
        world.load.check()
        assert time.monotonic() < cut_s + LIMIT_S
        await asyncio.sleep(0.2)
    given_up_s = time.monotonic() - cut_s
    await world.load.more(NUM_CLIENTS)
    world.network.join(DRAFTER)
    joined_s = time.monotonic()
    while has_draft_worker(world.network):
        world.load.check()
        assert time.monotonic() < joined_s + LIMIT_S, "a zombie goes on drafting"
        await asyncio.sleep(0.2)
    ended_s = time.monotonic() - joined_s
    world.network.kill(DRAFTER)
    began_s = time.monotonic()
    await asyncio.to_thread(start_node, world.network, DRAFTER, DRAFT_SLOT)
    await metric(world.service, "draft_workers", lambda value: value == 1, within_s=LIMIT_S)
    await world.grows(ACCEPTED)
    back_s = time.monotonic() - began_s
    return (
        f"given up by Ray after {given_up_s:.1f} s, its worker ended {ended_s:.1f} s after the link was "
        f"there again, drafts again {back_s:.1f} s after a new node was ordered"
    )


async def a_target_node_loses_power(world: World) -> str:
    """kill -9 of raylet, agents and workers, without a word to anybody."""
    await world.groups_serving(2)
    world.load.longest_pause_s = 0.0
    world.network.isolate(SECOND)
    began_s = time.monotonic()
    world.network.kill(SECOND)
    noticed_s = await world.groups_serving(1)
    await world.load.more(2 * NUM_CLIENTS)
    pause_s = world.load.longest_pause_s
    world.network.join(SECOND)
    await asyncio.to_thread(start_node, world.network, SECOND, TARGET_SLOT)
    await world.groups_serving(2)
    back_s = time.monotonic() - began_s
    await world.load.more(2 * NUM_CLIENTS)
    return (
        f"noticed after {noticed_s:.1f} s, longest pause {pause_s:.1f} s, a group on the new node after "
        f"{back_s:.1f} s"
    )


SCENARIOS: dict[str, Callable[[World], Awaitable[str]]] = {
    scenario.__name__: scenario
    for scenario in (
        drafts_are_cut_off,
        a_target_node_is_cut_off,
        the_draft_node_is_given_up,
        a_target_node_loses_power,
    )
}


async def alive_nodes() -> int:
    import ray

    nodes = await asyncio.to_thread(ray.nodes)
    return sum(node["Alive"] for node in nodes)


def node_of_directory() -> str:
    """Say where the directory is: on a node that groups do not see, it would take them for lost."""
    import ray

    from cluster.directory_actor import DIRECTORY_NAME

    directory = ray.get_actor(DIRECTORY_NAME, namespace=CLUSTER.namespace)
    where = directory.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
    return str(ray.get(where, timeout=LIMIT_S))


def has_draft_worker(network: Network) -> bool:
    def title(process: int) -> str:
        try:
            return " ".join(psutil.Process(process).cmdline())
        except psutil.Error:
            return ""

    return any("ray::DraftWorker" in title(process) for process in network.processes(DRAFTER))


def start_node(network: Network, host: int, resources: dict[str, float], temp: Path | None = None) -> None:
    """Run `ray start` on a host; the one that is given a folder becomes the head."""
    where = [f"--address={network.address(HEAD)}:6379"]
    if temp is not None:
        where = [
            "--head",
            "--port=6379",
            "--include-dashboard=false",
            f"--temp-dir={temp / 'ray'}",
            f"--system-config={json.dumps(HEALTH_CHECKS)}",
        ]
    command = network.command(
        host,
        str(Path(sys.executable).with_name("ray")),
        "start",
        *where,
        f"--node-ip-address={network.address(host)}",
        "--num-cpus=0",
        f"--resources={json.dumps(resources)}",
        f"--object-store-memory={80 << 20}",
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def main() -> None:
    name, temp, target, draft, *scenarios = sys.argv[1:]
    network, folder = Network(name, NUM_HOSTS), Path(temp)
    (folder / "ray").mkdir()
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_TMPDIR": str(folder),
    }
    began_s = time.monotonic()
    start_node(network, HEAD, {}, folder)
    for host, slot in ((FIRST, TARGET_SLOT), (SECOND, TARGET_SLOT), (DRAFTER, DRAFT_SLOT)):
        start_node(network, host, slot)
    import ray
    from ray import serve

    from cluster.application import build_application, resolve

    engine = engine_config(target, draft)
    wanted = requests(8, max_tokens=150, name="load")
    expected = tokens_alone(engine, wanted)
    ray.init(address=f"{network.address(HEAD)}:6379", log_to_driver=False)
    serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    cluster = resolve(CLUSTER)
    assert cluster.channels.bind == "node"
    serve.run(build_application(engine, cluster), name="partition", route_prefix=None)
    print(f"started in {time.monotonic() - began_s:.0f} s", flush=True)

    async def all_of_them(service: object) -> None:
        assert await asyncio.to_thread(node_of_directory) == ray.get_runtime_context().get_node_id()
        load = Load(service, wanted, expected)
        world = World(network, service, load)
        await load.more(NUM_CLIENTS)
        for scenario in scenarios:
            print(f"{scenario}: {await SCENARIOS[scenario](world)}", flush=True)
        await load.end()
        print(f"{load.num_complete} streams, every one right", flush=True)

    with_service(cluster, all_of_them)


if __name__ == "__main__":
    main()
