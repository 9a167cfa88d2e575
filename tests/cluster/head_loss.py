"""A head node that dies and comes back, with its state in Redis or without; run by `test_head_loss.py`.

ip netns exec NAME-1 python tests/cluster/head_loss.py NAME TEMP TARGET_FOLDER DRAFT_FOLDER with|without

NAME is a `Network` of three hosts: clients and Redis, the head, and a node with all of the application.
Clients read streams over HTTP all the time; every one must be, token by token, what the target alone
generates.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.network import Network
from deploy.application import APPLICATION
from deploy.config_file import parse_config
from tests.http_load import LIMIT_S, NUM_CLIENTS, Load, connected, wanted_of

OUTSIDE, HEAD, NODE = 1, 2, 3
NUM_HOSTS = 3
PORT, GCS_PORT, REDIS_PORT = 8000, 6379, 6380
PASSWORD = "of-this-test"
NODE_LABELS = {"pool": "models"}
SHORT_OUTAGE_S = 8.0
"""Longer than a lease: whoever depends on the head would have noticed."""


def configuration(target: str, draft: str) -> dict[str, Any]:
    eager = {"dtype": "float32", "device": "cpu", "num_threads": 1, "compile": {"mode": "off"}}
    bundle = {"num_cpus": 0.5, "labels": NODE_LABELS}
    return {
        "target": {"model": target, **eager},
        "speculative_config": {
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": 3,
            "controller": "fixed",
            "num_threads": 1,
            "compile": {"mode": "off"},
        },
        "cache": {"num_blocks": 256, "block_size": 8},
        "cluster": {
            "check_resources": False,
            "channels": {"bind": "node"},
            "membership": {"lease_s": 3, "renew_s": 0.5},
            "health_checks": {"period_s": 1, "timeout_s": 5},
            "drain_timeout_s": 2,
            "target_groups": {"bundle": bundle},
            "draft_pool": {"bundle": bundle},
        },
        "http": {"served_model_name": "m"},
    }


def serve_config(config: dict[str, Any]) -> dict[str, Any]:
    """What `serve deploy` is given; the door is on the node that stays."""
    door = {"name": "Ingress", "ray_actor_options": {"num_cpus": 0, "label_selector": NODE_LABELS}}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": PORT},
        "applications": [
            {
                "name": APPLICATION,
                "route_prefix": "/",
                "import_path": "deploy.serve_config:build",
                "args": {"config": config, "insecure": True},
                "deployments": [door],
            }
        ],
    }


def deploy(address: str, text: str) -> None:
    """Run on the node: hand the Serve config over and leave. `serve deploy` would need the dashboard."""
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    config = json.loads(text)
    ray.init(address=address, log_to_driver=False)
    serve.start(proxy_location=config["proxy_location"], http_options=config["http_options"])
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate(config))


@dataclass(frozen=True, slots=True)
class World:
    """The machines."""

    network: Network
    folder: Path
    redis: str | None
    """Address of the head's storage."""

    @property
    def head(self) -> str:
        return f"{self.network.address(HEAD)}:{GCS_PORT}"

    @property
    def url(self) -> str:
        """The door of the node that stays."""
        return f"http://{self.network.address(NODE)}:{PORT}"

    def start_head(self) -> None:
        # Here Ray sees the processes of all hosts, and would take the node's for a head that runs still.
        (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        where = [
            "--head",
            f"--port={GCS_PORT}",
            "--include-dashboard=false",
            f"--temp-dir={self.folder / 'ray'}",
            "--num-cpus=0",
        ]
        storage = {}
        if self.redis is not None:
            where.append(f"--redis-password={PASSWORD}")
            storage = {"RAY_REDIS_ADDRESS": self.redis, "RAY_external_storage_namespace": "drafthouse"}
        self._start(HEAD, where, storage)

    def start_node(self) -> None:
        where = [f"--address={self.head}", "--num-cpus=2", f"--labels={json.dumps(NODE_LABELS)}"]
        self._start(NODE, where, {})

    def _start(self, host: int, where: list[str], environment: dict[str, str]) -> None:
        ray = str(Path(sys.executable).with_name("ray"))
        address = [f"--node-ip-address={self.network.address(host)}", f"--object-store-memory={80 << 20}"]
        self.run(host, [ray, "start", *where, *address], environment)

    def run(self, host: int, command: list[str], environment: dict[str, str]) -> None:
        done = subprocess.run(
            self.network.command(host, *command),
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]

    def processes(self, host: int, title: str) -> list[psutil.Process]:
        """Those of a host whose title begins so."""
        found = []
        for number in self.network.processes(host):
            with contextlib.suppress(psutil.Error, IndexError):
                process = psutil.Process(number)
                if process.cmdline()[0].startswith(title):
                    found.append(process)
        return found


async def healthy(client: httpx.AsyncClient) -> None:
    """Wait until the application can be asked."""
    until_s = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if (await client.get("/health")).is_success:
                return
        assert time.monotonic() < until_s, "it does not serve"
        await asyncio.sleep(0.25)


async def the_head_is_away(world: World, load: Load) -> float:
    """kill -9 of GCS, raylet, Serve's controller and all else there; return when."""
    title = "ray::ServeController"
    assert len(world.processes(HEAD, title)) == 1
    await load.more(NUM_CLIENTS)
    while not all(reading.token_ids for reading in load.readings):
        await asyncio.sleep(0.001)
    world.network.kill(HEAD)
    lost_s, before = time.monotonic(), load.num_complete
    await load.more(2 * NUM_CLIENTS)
    await asyncio.sleep(max(0.0, lost_s + SHORT_OUTAGE_S - time.monotonic()))
    await load.more(NUM_CLIENTS)
    assert load.num_breaks == 0
    print(f"without a head: {load.num_complete - before} streams, longest pause {load.longest_pause_s:.2f} s")
    return lost_s


async def with_redis(world: World, load: Load) -> None:
    """All goes on; and what is lost after the new head has come is replaced by it."""
    lost_s = await the_head_is_away(world, load)
    coordinators = world.processes(NODE, "ray::ServeReplica:drafthouse:Coordinator")
    assert len(coordinators) == 1
    await asyncio.to_thread(world.start_head)
    started_s = time.monotonic()
    while not world.processes(HEAD, "ray::ServeController") + world.processes(NODE, "ray::ServeController"):
        load.check()
        assert time.monotonic() < started_s + LIMIT_S, "no controller"
        await asyncio.sleep(0.2)
    controller_s = time.monotonic() - lost_s
    await load.more(2 * NUM_CLIENTS)
    assert load.num_breaks == 0
    assert world.processes(NODE, "ray::ServeReplica:drafthouse:Coordinator") == coordinators

    load.longest_pause_s = 0.0
    coordinators[0].kill()
    killed_s = time.monotonic()
    await load.more(2 * NUM_CLIENTS)
    assert load.num_breaks == 0
    (replaced,) = world.processes(NODE, "ray::ServeReplica:drafthouse:Coordinator")
    assert replaced.pid != coordinators[0].pid
    print(
        f"head lost for {started_s - lost_s:.1f} s, a controller again after {controller_s:.1f} s; "
        f"coordinator killed then: streams of another after {time.monotonic() - killed_s:.1f} s, longest "
        f"pause {load.longest_pause_s:.1f} s"
    )
    await load.end()
    print(f"{load.num_complete} streams, every one right, {load.num_breaks} breaks")


async def without_redis(world: World, load: Load) -> None:
    """All goes on until there is a new head, which knows nobody."""
    lost_s = await the_head_is_away(world, load)
    await asyncio.to_thread(world.start_head)
    started_s = time.monotonic()
    while world.processes(NODE, "ray::ServeReplica"):
        assert time.monotonic() < started_s + LIMIT_S, "they live on"
        await asyncio.sleep(0.2)
    ended_s = time.monotonic() - started_s
    with contextlib.suppress(httpx.HTTPError):
        answer = await load.client.get("/health")
        assert not answer.is_success
    await load.give_up()
    print(f"head lost for {started_s - lost_s:.1f} s; all ended {ended_s:.1f} s after the new one had come")


SCENARIOS: dict[str, Callable[[World, Load], Awaitable[None]]] = {
    "with": with_redis,
    "without": without_redis,
}


@contextlib.contextmanager
def redis_server(address: str, folder: Path) -> Iterator[str]:
    """Redis that keeps nothing on disk, with a password; yields where it listens."""
    options = {"bind": address, "port": REDIS_PORT, "requirepass": PASSWORD, "dir": folder}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    log = folder / "redis.log"
    with log.open("w") as stream:
        server = subprocess.Popen(
            ["redis-server", *words, "--save", "", "--appendonly", "no"], stdout=stream, stderr=stream
        )
    try:
        until_s = time.monotonic() + 30
        while "Ready to accept connections" not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            time.sleep(0.05)
        yield f"{address}:{REDIS_PORT}"
    finally:
        server.terminate()
        server.wait(30)


async def run(world: World, config: dict[str, Any], scenario: str) -> None:
    wanted = wanted_of(parse_config(config))
    began_s = time.monotonic()
    world.start_head()
    world.start_node()
    python = [sys.executable, __file__, "deploy"]
    world.run(NODE, [*python, world.head, json.dumps(serve_config(config))], {})
    async with connected(world.url) as client:
        await healthy(client)
        print(f"started in {time.monotonic() - began_s:.0f} s", flush=True)
        load = Load(client, wanted)
        load.start()
        await SCENARIOS[scenario](world, load)


def main() -> None:
    name, temp, target, draft, scenario = sys.argv[1:]
    network, folder = Network(name, NUM_HOSTS), Path(temp)
    (folder / "ray").mkdir()
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_TMPDIR": str(folder),
    }
    config = configuration(target, draft)
    with contextlib.ExitStack() as stack:
        redis = None
        if scenario == "with":
            redis = stack.enter_context(redis_server(network.address(OUTSIDE), folder))
        asyncio.run(run(World(network, folder, redis), config, scenario))


if __name__ == "__main__":
    if sys.argv[1] == "deploy":
        deploy(*sys.argv[2:])
    else:
        main()
