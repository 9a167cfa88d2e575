"""`drafthouse serve` with two models behind HTTPS, and all the harm that one machine can do to it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch

from benchmarks.full_disk import filled_up
from benchmarks.reconnecting import Reading, read_stream
from benchmarks.starving import can_starve, starve
from deploy.config_file import load_config
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from tests.architectures import save_model
from tests.deploy.certificates import make_certificate
from tests.deploy.serve_process import Server, launch, prompts
from tests.full_disk import needs_mounts, small_disk
from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900), needs_mounts]

MODELS = ("first", "second")
LIMIT_S = 240.0
PATIENCE_S = 120.0
NUM_STREAMS = 3
"""Of each model, at a time."""
CONFIG = """\
target: {{model: target, dtype: float32, device: cpu, num_threads: 1, compile: {{mode: "off"}}}}
speculative_config:
  method: draft_model
  model: draft
  num_speculative_tokens: 3
  controller: fixed
  num_threads: 1
  compile: {{mode: "off"}}
cache: {{num_blocks: 256, block_size: 8}}
cluster:
  drain_timeout_s: 60
  membership: {{lease_s: 3, renew_s: 0.5}}
  health_checks: {{period_s: 1, timeout_s: 3}}
  target_groups: {{bundle: {{num_cpus: 0.5}}}}
  draft_pool: {{bundle: {{num_cpus: 0.5}}}}
models:
  second:
    target: {{model: other, dtype: float32, device: cpu, num_threads: 1, compile: {{mode: "off"}}}}
    speculative_config: {{method: ngram, controller: fixed, prompt_lookup_min: 1}}
    cache: {{num_blocks: 256, block_size: 8}}
    cluster: {{target_groups: {{bundle: {{num_cpus: 0.5}}}}}}
http:
  port: {port}
  served_model_name: first
  tls: {{certificate_file: server.crt, key_file: server.key}}
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, and what its model generates for it alone."""

    body: dict[str, Any]
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class World:
    """The running command, the disk that Ray has its folder on, and what to ask for."""

    server: Server
    disk: Path
    wanted: dict[str, list[Wanted]]

    def metric(self, name: str, model: str) -> float:
        """The sum of a model's series of that name."""
        text = httpx.get(f"{self.server.url}/metrics", timeout=30).text
        series = re.compile(
            rf'^ray_drafthouse_{name}\{{[^}}]*model_name="{model}"[^}}]*\}} (\S+)$', re.MULTILINE
        )
        return sum(float(value) for value in series.findall(text))

    def wait_for(self, name: str, model: str, least: float) -> None:
        """Wait until a metric is so large."""
        until_s = time.monotonic() + LIMIT_S
        while (value := self.metric(name, model)) < least:
            assert time.monotonic() < until_s, f"{name} of {model} is {value}, not {least}"
            time.sleep(0.2)

    def process(self, title: str) -> psutil.Process:
        """The first process of a kind."""
        return next(one for one in self.server.processes() if one.cmdline()[0].startswith(title))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("serve")
    for name, seed in (("target", 1), ("draft", 1), ("other", 2)):
        save_model(folder / name, seed=seed)
    tls = make_certificate(folder)
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = tls.certificate_file
    # Short: Ray puts Unix sockets below it, whose paths may have 107 bytes.
    mount = Path(tempfile.mkdtemp(prefix="dh-", dir="/tmp"))
    try:
        with small_disk(mount, "128m") as disk:
            (disk / "ray").mkdir()
            server = launch(folder, CONFIG.format(port=free_port()), disk / "ray")
            try:
                yield World(server, disk, wanted_of(server.config))
            finally:
                server.clean_up()
    finally:
        shutil.rmtree(mount)
        os.environ.pop("SSL_CERT_FILE")
        if before is not None:
            os.environ["SSL_CERT_FILE"] = before


def wanted_of(config: Path) -> dict[str, list[Wanted]]:
    threads = torch.get_num_threads()
    found: dict[str, list[Wanted]] = {}
    for model in load_config(config).served_models():
        bodies: list[dict[str, Any]] = [
            {
                "model": model.name,
                "prompt": prompt[:30],
                "temperature": float(index % 2),
                "seed": index,
                "max_tokens": 180,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
            }
            for index, prompt in enumerate(prompts(4))
        ]
        params = [
            SamplingParams(
                temperature=body["temperature"], seed=body["seed"], max_tokens=180, ignore_eos=True
            )
            for body in bodies
        ]
        with Engine(model.engine) as engine:
            results = engine.generate([body["prompt"] for body in bodies], params)
        assert model.name is not None
        found[model.name] = [
            Wanted(body, list(result.token_ids)) for body, result in zip(bodies, results, strict=True)
        ]
    torch.set_num_threads(threads)
    return found


class Load:
    """Clients of both models that read streams all the time, in a thread of their own, and check each."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_over = False
        self.num_complete: Counter[str] = Counter()
        self.num_breaks: Counter[str] = Counter()
        self.longest_pause_s = dict.fromkeys(MODELS, 0.0)

    async def run(self) -> None:
        timeout = httpx.Timeout(PATIENCE_S)
        async with httpx.AsyncClient(base_url=self._world.server.url, timeout=timeout) as client:
            await asyncio.gather(
                *(self._client(client, model, number) for model in MODELS for number in range(NUM_STREAMS))
            )

    async def _client(self, client: httpx.AsyncClient, model: str, first: int) -> None:
        for number in itertools.count(first):
            if self._is_over:
                return
            wanted = self._world.wanted[model][number % len(self._world.wanted[model])]
            reading = Reading()
            await read_stream(client, "/v1/completions", wanted.body, patience_s=PATIENCE_S, reading=reading)
            self.num_breaks[model] += reading.num_breaks
            self.longest_pause_s[model] = max(self.longest_pause_s[model], reading.longest_pause_s)
            require(reading, wanted)
            self.num_complete[model] += 1

    def end(self) -> None:
        self._is_over = True

    def more(self, number: int) -> None:
        """Wait until so many more streams of each model are complete."""
        wanted, until_s = {model: self.num_complete[model] + number for model in MODELS}, time.monotonic()
        while any(self.num_complete[model] < least for model, least in wanted.items()):
            assert time.monotonic() < until_s + LIMIT_S, f"streams stand still: {self.num_complete}"
            time.sleep(0.02)


def require(reading: Reading, wanted: Wanted) -> None:
    assert (reading.refusal, reading.finish_reason) == (None, "length")
    assert reading.token_ids == wanted.token_ids


@contextlib.contextmanager
def loaded(world: World) -> Iterator[Load]:
    """Have streams run meanwhile; raise what was wrong with any."""
    load, failures = Load(world), []

    def read() -> None:
        try:
            asyncio.run(load.run())
        except BaseException as failure:  # noqa: BLE001 - raised in the test's own thread
            failures.append(failure)

    thread = Thread(target=read, daemon=True)
    thread.start()
    try:
        load.more(1)
        yield load
        load.more(1)
    finally:
        load.end()
        thread.join(LIMIT_S)
        for failure in failures:
            raise failure
    assert not thread.is_alive()


def tell(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def test_the_official_client_is_served_by_https_each_model_as_itself(world: World) -> None:
    with openai.OpenAI(base_url=f"{world.server.url}/v1", api_key="none", max_retries=0) as client:
        assert [card.id for card in client.models.list()] == list(MODELS)
        for model, all_wanted in world.wanted.items():
            for wanted in all_wanted:
                body = {name: value for name, value in wanted.body.items() if name != "stream"}
                own = {name: body.pop(name) for name in ("ignore_eos", "return_token_ids")}
                answer: Any = client.completions.create(**body, extra_body=own)
                assert (answer.model, answer.choices[0].token_ids) == (model, wanted.token_ids)
                pieces = client.completions.create(**body, extra_body=own, stream=True)
                assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
        with pytest.raises(openai.NotFoundError, match="serves 'first', 'second'"):
            client.completions.create(model="third", prompt="a")
    assert world.wanted["first"][0].token_ids != world.wanted["second"][0].token_ids
    with pytest.raises(httpx.HTTPError):
        httpx.get(world.server.url.replace("https", "http") + "/health")
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{world.server.url}/health", trust_env=False)
    command = [sys.executable, "-c", "from deploy.cli import main; main()", "status", world.server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model first in float32" in done.stdout


@pytest.mark.parametrize("victim", ["ray::DraftWorkerProcess", "ray::TargetWorkerProcess"])
def test_a_worker_that_the_kernel_ends_for_want_of_memory_is_replaced(world: World, victim: str) -> None:
    """And the model that it does not belong to is left alone."""
    if not can_starve():
        pytest.skip("control groups (version 1) cannot be made here")
    losses = {model: world.metric("target_losses_total", model) for model in MODELS}
    failovers = {model: world.metric("failovers_total", model) for model in MODELS}
    with loaded(world) as load:
        began_s = time.monotonic()
        starve(world.process(victim))
        load.more(2)
        if victim == "ray::DraftWorkerProcess":
            world.wait_for("draft_workers", "first", 1)
            accepted = world.metric("spec_decode_num_accepted_tokens_total", "first")
            world.wait_for("spec_decode_num_accepted_tokens_total", "first", accepted + 1)
            hit = set()
        else:
            hit = {model for model in MODELS if world.metric("target_losses_total", model) > losses[model]}
            assert len(hit) == 1
        tell(f"{victim}: {time.monotonic() - began_s:.1f} s, longest pauses {load.longest_pause_s}")
    assert sum(load.num_breaks.values()) == 0
    for model in set(MODELS) - hit:
        assert world.metric("target_losses_total", model) == losses[model]
        assert world.metric("failovers_total", model) == failovers[model]


def test_a_full_disk_costs_log_lines_only(world: World) -> None:
    """Ray's folder is on it: the logs and sockets of all processes."""
    with loaded(world) as load:
        with filled_up(world.disk):
            load.more(4)
            process = world.process("ray::DraftWorkerProcess")
            process.kill()
            process.wait(60)
            load.more(4)
            assert httpx.get(f"{world.server.url}/health", timeout=30).status_code == 200
        world.wait_for("draft_workers", "first", 1)
        accepted = world.metric("spec_decode_num_accepted_tokens_total", "first")
        world.wait_for("spec_decode_num_accepted_tokens_total", "first", accepted + 1)
    assert sum(load.num_breaks.values()) == 0


def test_a_hung_ingress_is_replaced_and_streams_go_on(world: World) -> None:
    with loaded(world) as load:
        ingress = world.process("ray::ServeReplica:drafthouse:Ingress")
        stopped_s = time.monotonic()
        ingress.send_signal(signal.SIGSTOP)
        with contextlib.suppress(psutil.NoSuchProcess):
            ingress.wait(LIMIT_S)
        found_s = time.monotonic() - stopped_s
        load.more(1)
        tell(f"hung ingress: ended after {found_s:.1f} s, all streams on after "
             f"{time.monotonic() - stopped_s:.1f} s")  # fmt: skip
    assert sum(load.num_breaks.values()) > 0, "no stream was interrupted"
    assert found_s < 30, "three checks of three seconds, one second apart"


def test_streams_of_both_models_end_before_the_command_does(world: World) -> None:
    """Last of those with this server, because it is gone afterwards."""
    server = world.server
    readings = {(model, number): Reading() for model in MODELS for number in range(4)}

    async def drain() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            streams = [
                asyncio.create_task(
                    read_stream(
                        client,
                        "/v1/completions",
                        world.wanted[model][number].body | {"speculation": {"num_speculative_tokens": 0}},
                        patience_s=20,
                        reading=reading,
                    )
                )
                for (model, number), reading in readings.items()
            ]
            while not all(reading.token_ids for reading in readings.values()):
                await asyncio.sleep(0.001)
            assert not any(reading.is_complete for reading in readings.values())
            os.kill(server.process.pid, signal.SIGTERM)
            await asyncio.gather(*streams)

    asyncio.run(drain())
    for (model, number), reading in readings.items():
        require(reading, world.wanted[model][number])
        assert reading.num_breaks == reading.num_error_events == 0
    assert server.process.wait(120) == 0, server.log.read_text()
    assert "Traceback" not in server.log.read_text()
    server.wait_all_gone()
