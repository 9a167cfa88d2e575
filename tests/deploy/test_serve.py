"""`drafthouse serve` as a user runs it: a process, a local Ray cluster, tiny models, the OpenAI client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from benchmarks.reconnecting import Reading, read_stream
from deploy.config_file import load_config
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from tests.architectures import make_model
from tests.deploy.raw_headers import HEADERS_THAT_SERVE_READS, raw_answer
from tests.deploy.serve_process import STOP_S, Server, prompts, start
from tests.strangers import require_token

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
_MAX_KILLS = 5
_ABORTED = 'request_success_total{finished_reason="abort"}'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start(tmp_path_factory.mktemp("serve"))
    try:
        yield server
    finally:
        server.clean_up()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def engine(server: Server) -> Iterator[Engine]:
    """The same configuration in this process."""
    threads = torch.get_num_threads()
    with Engine(load_config(server.config).engine()) as engine:
        yield engine
    torch.set_num_threads(threads)


def test_curl_line_works(server: Server) -> None:
    assert server.process.stdout is not None
    command = server.process.stdout.readline()
    done = subprocess.run(["sh", "-c", f"{command.strip()} -sS"], capture_output=True, text=True, check=True)
    assert '"text_completion"' in done.stdout


def test_greedy_is_what_transformers_and_the_engine_generate(
    server: Server, client: openai.OpenAI, engine: Engine
) -> None:
    model, batch = make_model("llama", seed=1), prompts(8)
    completion: Any = client.completions.create(
        model="tiny",
        prompt=batch,
        temperature=0,
        max_tokens=24,
        extra_body={"ignore_eos": True, "return_token_ids": True, "return_metrics": True},
    )
    served = [choice.token_ids for choice in completion.choices]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert served == [list(result.token_ids) for result in engine.generate(batch, params)]
    for prompt, token_ids in zip(batch, served, strict=True):
        with torch.no_grad():
            output = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=24,
                min_new_tokens=24,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert token_ids == output[0][len(prompt) :].tolist()
    assert completion.metrics["speculative_decoding"]["num_accepted_draft_tokens"] > 0


def exported_by_ray(server: Server) -> str:
    """Return what Ray says to Prometheus on the node; the port is in a file of its session."""
    port = next(server.ray_folder.rglob("metrics_export_port*")).read_text().strip()
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text


@pytest.mark.full
def test_ray_exports_what_the_ingress_says(server: Server, client: openai.OpenAI) -> None:
    client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4, extra_body={"ignore_eos": True})
    wanted = ("generation_tokens_total", "time_to_first_token_seconds_bucket", "http_requests_total")
    until_s = time.monotonic() + 60
    while missing := [name for name in wanted if f"\nray_drafthouse_{name}{{" not in exported_by_ray(server)]:
        assert time.monotonic() < until_s, missing
        time.sleep(1)


def test_sixteen_seeded_streams_are_what_the_engine_generates(client: openai.OpenAI, engine: Engine) -> None:
    batch = prompts(16)

    def stream(index: int) -> str:
        with client.completions.create(
            model="tiny",
            prompt=batch[index],
            temperature=0.9,
            seed=index,
            max_tokens=30,
            stream=True,
            extra_body={"ignore_eos": True},
        ) as chunks:
            return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(16) as pool:
        served = list(pool.map(stream, range(16)))
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=30, ignore_eos=True) for seed in range(16)
    ]
    assert served == [result.text for result in engine.generate(batch, params)]


def test_bad_requests_are_answered_and_named(server: Server, client: openai.OpenAI) -> None:
    url = f"{server.url}/v1/completions"
    for content, status, param in (
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        (b'{"prompt": "a", "max_tokens": -1}', 400, "max_tokens"),
        (b'{"prompt": "", "max_tokens": 1}', 400, "prompt"),
        (b"\xff", 400, None),
        (b'{"prompt": "' + b"a" * (10 << 20) + b'"}', 413, None),
    ):
        response = httpx.post(url, content=content, timeout=60)
        assert response.status_code == status
        assert response.json()["error"]["param"] == param
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        response = httpx.request(method, server.url + path)
        assert response.status_code == status
        assert "message" in response.json()["error"]
    completion = client.completions.create(
        model="tiny", prompt="ab", max_tokens=2, extra_body={"ignore_eos": True}
    )
    assert completion.choices[0].text


def test_long_bodies_and_answers_pass(server: Server) -> None:
    """Of more than gRPC lets through by itself, which Serve's proxy speaks to the doors."""
    body = json.dumps({"prompt": [list(range(5, 105))] * 80, "max_tokens": 1, "prompt_logprobs": 20})
    answer = httpx.post(f"{server.url}/v1/completions", content=body.encode().ljust(4 << 20), timeout=120)
    assert answer.status_code == 200
    assert len(answer.content) > 5 << 20
    assert len(answer.json()["choices"]) == 80


@pytest.mark.parametrize("headers", HEADERS_THAT_SERVE_READS)
def test_headers_that_serve_itself_reads_do_no_harm(server: Server, headers: tuple[bytes, ...]) -> None:
    answer = raw_answer(server.url, *headers)
    assert answer.startswith(b"HTTP/1.1 200"), answer
    assert b'"tiny"' in answer


def test_a_client_s_own_request_id_is_told_back(server: Server) -> None:
    assert b"\r\nx-request-id: mine-1\r\n" in raw_answer(server.url, b"X-Request-ID: mine-1").lower()


def test_headers_without_end_are_refused(server: Server) -> None:
    answer = raw_answer(server.url, *(b"x-%d: %s" % (number, b"a" * 1000) for number in range(100)))
    assert answer.startswith(b"HTTP/1.1 431"), answer


def test_status_command(server: Server) -> None:
    command = [sys.executable, "-c", "from deploy.cli import main; main()", "status", server.url]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "model tiny in float32" in done.stdout
    assert "on, lockstep: k is fixed by the configuration" in done.stdout
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    status = json.loads(done.stdout)
    assert status["application"]["is_ready"]
    assert [group["is_serving"] for group in status["target_groups"]] == [True]
    assert [worker["incarnation"] for worker in status["draft_workers"]] == [1]


@pytest.mark.parametrize("is_stream", [True, False])
def test_client_that_leaves_frees_its_blocks(server: Server, is_stream: bool) -> None:
    body = {"prompt": "ab", "max_tokens": 250, "ignore_eos": True, "stream": is_stream, "n": 4}
    before, deadline_s = server.metric(_ABORTED), time.monotonic() + 60
    while server.metric(_ABORTED) == before:  # on a busy machine a request may end before we are gone
        assert time.monotonic() < deadline_s
        if is_stream:
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
                next(response.iter_lines())
        else:
            with contextlib.suppress(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.1)
        while server.metric("num_requests_running") != 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    assert server.metric("kv_cache_usage_perc") == 0


def test_workers_are_separate_processes(server: Server) -> None:
    titles = {" ".join(process.cmdline()) for process in server.processes()}
    for name in ("TargetWorkerProcess", "DraftWorkerProcess", "Coordinator", "DraftPool", "Ingress"):
        assert any(name in title for title in titles), titles


def test_streams_outlive_the_ingress_replica(server: Server, engine: Engine) -> None:
    bodies: list[dict[str, Any]] = [
        {
            "prompt": prompt[:30],
            "temperature": index % 2,
            "seed": index,
            "max_tokens": 200,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "speculation": {"num_speculative_tokens": 0},
        }
        for index, prompt in enumerate(prompts(4))
    ]
    for _ in range(_MAX_KILLS):
        readings = asyncio.run(_killing_the_ingress(server, bodies))
        if any(reading.num_breaks for reading in readings):
            break
    else:
        raise AssertionError(f"no stream was interrupted, {_MAX_KILLS} times")
    params = [
        SamplingParams(temperature=body["temperature"], seed=body["seed"], max_tokens=200, ignore_eos=True)
        for body in bodies
    ]
    alone = engine.generate([body["prompt"] for body in bodies], params)
    for reading, result in zip(readings, alone, strict=True):
        assert (reading.refusal, reading.finish_reason) == (None, "length")
        assert reading.token_ids == list(result.token_ids)
    until_s = time.monotonic() + 60
    while server.metric("kv_cache_usage_perc") or server.metric("num_requests_running"):
        assert time.monotonic() < until_s, "what nobody waits for is still served"
        time.sleep(0.2)


async def _killing_the_ingress(server: Server, bodies: list[dict[str, Any]]) -> list[Reading]:
    """Read streams to their ends; the ingress replica is killed as soon as all have begun.

    On a busy machine the first may be complete before the last one's beginning is heard of here.
    """
    # Looked for before there are streams: that may take longer than they do.
    (ingress,) = [p for p in server.processes() if "ServeReplica:drafthouse:Ingress" in p.cmdline()[0]]
    readings = [Reading() for _ in bodies]
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        streams = [
            asyncio.create_task(read_stream(client, "/v1/completions", body, patience_s=120, reading=reading))
            for body, reading in zip(bodies, readings, strict=True)
        ]
        while not all(reading.token_ids for reading in readings):
            await asyncio.sleep(0.001)
        ingress.kill()
        await asyncio.wait_for(asyncio.gather(*streams), 240)
    return readings


def test_ctrl_c_leaves_nothing(server: Server) -> None:
    """Last of those with this server, because it is gone afterwards."""
    stop_gracefully(server, signal.SIGINT)


@pytest.mark.full
def test_sigterm_to_all_processes_serves_what_is_running(tmp_path: Path) -> None:
    """As `timeout` and systemd send it: Ray's processes must not end before what they serve."""
    server = start(tmp_path)
    try:
        stop_gracefully(server, signal.SIGTERM)
    finally:
        server.clean_up()


@pytest.mark.full
def test_ray_lets_nobody_in_who_has_not_the_token_that_the_command_made(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".cache").symlink_to(Path.home() / ".cache")  # kernels that have been compiled
    server = start(tmp_path, home=home)
    try:
        body = {"prompt": "ab", "max_tokens": 20, "ignore_eos": True, "stream": True}
        assert "[DONE]" in httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text
        (raylet,) = (process for process in server.processes() if process.name() == "raylet")
        option = "--gcs-address="
        (address,) = (word for word in raylet.cmdline() if word.startswith(option))
        require_token(address.removeprefix(option), (home / ".ray" / "auth_token").read_text())
    finally:
        server.clean_up()


@pytest.mark.full
def test_a_dead_raylet_ends_the_command_with_a_message(tmp_path: Path) -> None:
    server = start(tmp_path)
    try:
        (raylet,) = (process for process in server.processes() if process.name() == "raylet")
        raylet.kill()
        assert server.process.wait(STOP_S) == 1
        assert (
            f"error: raylet (process {raylet.pid}) of the local Ray cluster has died"
            in server.log.read_text()
        )
        server.wait_all_gone()
    finally:
        server.clean_up()


def stop_gracefully(server: Server, number: signal.Signals) -> None:
    """Send a signal to the whole group while a request is running; check its end, and that all is gone."""
    body = {"prompt": "ab", "max_tokens": 250, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        while server.metric("num_requests_running") == 0 and not running.done():
            time.sleep(0.02)
        os.killpg(server.process.pid, number)
        assert server.process.wait(STOP_S) == 0, server.log.read_text()
        assert "[DONE]" in running.result().text
    assert "stopped" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()
    server.wait_all_gone()
