"""`drafthouse batch`: over HTTP and with an engine of its own; what is said, exit codes, Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import HTMLResponse, RedirectResponse, Response
from typer.testing import CliRunner

from deploy.cli.batch import _check
from deploy.cli.main import app
from deploy.openai.keys import ApiKey, digest_api_key
from deploy.openai.settings import DoorSettings
from specdec.core.error_codes import TIMED_OUT
from specdec.core.errors import UserError
from specdec.core.sampling_params import SamplingDefaults
from specdec.engine.engine import Engine
from specdec.engine.targets import local_target
from tests.deploy.certificates import make_certificate
from tests.deploy.openai.fakes import PIECES, Door, ScriptedService
from tests.deploy.openai.live import live_server

runner = CliRunner()
COMMAND = (
    # What starts the tests may have told its children to ignore it, as shells do with background jobs.
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from deploy.cli import main; main()"
)


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = runner.invoke(app, ["batch", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def requests_in(file: Path, number: int, **body: Any) -> Path:
    body = {"prompt": "abc", **body}
    lines = [
        {"custom_id": f"id-{index}", "method": "POST", "url": "/v1/completions", "body": body}
        for index in range(number)
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def results_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_over_http_with_a_key(tmp_path: Path) -> None:
    requests, out = requests_in(tmp_path / "in", 20), tmp_path / "out"
    key = ApiKey(name="a", digest=digest_api_key("right"))
    with live_server(Door(settings=DoorSettings(api_keys=(key,))).app) as url:
        code, _, stderr = invoke(requests, out, "--url", f"{url}/v1", "--api-key", "wrong")
        assert code == 2
        assert "--api-key" in stderr
        code, _, stderr = invoke(requests, out, "--url", url, "--api-key", "right\n", "-j", 3)
        assert code == 0, stderr
        assert "20 answered" in stderr
        code, _, stderr = invoke(requests, out, "--url", url, "--api-key", "right")
        assert code == 0
        assert "20 of 20 are in" in stderr
    assert [result["response"]["status_code"] for result in results_of(out)] == [200] * 20


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (RedirectResponse("https://door.example/v1/models", 308), "leads to https://door.example/v1/models"),
        (RedirectResponse("/login", 302), "status 302 leads to /login"),
        (HTMLResponse("<h1>The plain HTTP request was sent to HTTPS port</h1>", 400), "is the URL right?"),
        (HTMLResponse("<h1>Forbidden</h1>", 403), "status 403, and no JSON: this is not the server itself"),
        (HTMLResponse("<h1>Sign in</h1>", 200), "status 200, and no JSON: this is not the server itself"),
        (Response("[]", 200, media_type="application/json"), "this is not the server itself"),
        (Response("Unauthorized", 401), "--api-key"),
    ],
)
def test_what_is_no_server_is_told_before_the_first_line(
    tmp_path: Path, answer: Response, reason: str
) -> None:
    requests, out = requests_in(tmp_path / "in", 3), tmp_path / "out"
    with live_server(answer, lifespan="off") as url:
        code, _, stderr = invoke(requests, out, "--url", url)
    assert code == 2
    assert reason in stderr
    assert url in stderr
    assert out.read_text() == ""


def test_a_path_too_many_is_told_before_the_first_line(tmp_path: Path) -> None:
    requests, out = requests_in(tmp_path / "in", 3), tmp_path / "out"
    with live_server(Door().app) as url:
        code, _, stderr = invoke(requests, out, "--url", f"{url}/v1/completions")
        assert code == 2
        assert f"{url}/v1/completions/v1/models: status 404: give the URL as it is before /v1" in stderr
        assert out.read_text() == ""


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, json={"data": []}),
        httpx.Response(404, text="Path '/v1/models' not found."),
        httpx.Response(404, json={"detail": "Not Found"}),
        httpx.Response(405, json={"detail": "Method Not Allowed"}),
        httpx.Response(429, text="slow down"),
        httpx.Response(500, text="Internal Server Error"),
        httpx.Response(503, html="<h1>503</h1>"),
    ],
)
def test_a_server_that_starts_or_does_not_list_models_is_one(answer: httpx.Response) -> None:
    async def check(given: httpx.Response) -> None:
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(lambda _: given), base_url="http://door"
        ) as client:
            await _check(client, "http://door")

    asyncio.run(check(answer))
    with pytest.raises(UserError, match="http://door/v1/models: status 302"):
        asyncio.run(check(httpx.Response(302)))


def test_no_proxy_is_asked_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, out = requests_in(tmp_path / "in", 2), tmp_path / "out"
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with live_server(Door().app) as url:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        code, _, stderr = invoke(requests, out, "--url", url)
    assert code == 0, stderr


def test_a_certificate_that_cannot_be_verified_is_taken_when_that_is_asked_for(tmp_path: Path) -> None:
    """As behind a port-forward, whose address no certificate names."""
    requests, out = requests_in(tmp_path / "in", 3), tmp_path / "out"
    tls = make_certificate(tmp_path)
    files = {"ssl_certfile": tls.certificate_file, "ssl_keyfile": tls.key_file}
    with live_server(Door().app, **files) as url:
        code, _, stderr = invoke(requests, out, "--url", url)
        assert code == 2
        assert f"the certificate of {url} cannot be verified" in stderr
        assert "--insecure" in stderr
        assert "nothing answers" not in stderr
        assert out.read_text() == ""
        code, _, stderr = invoke(requests, out, "--url", url, "--insecure")
    assert code == 0, stderr
    assert len(results_of(out)) == 3


def test_a_failure_is_in_the_exit_code_every_time(tmp_path: Path) -> None:
    requests, out = requests_in(tmp_path / "in", 2), tmp_path / "out"
    requests.write_text(requests.read_text() + "nonsense\n")
    with live_server(Door().app) as url:
        for _ in range(2):
            code, _, stderr = invoke(requests, out, "--url", url)
            assert code == 1
            assert "1 of 3 failed" in stderr
            assert "Traceback" not in stderr


def test_mistakes(tmp_path: Path, config: Path) -> None:
    requests = requests_in(tmp_path / "in", 1)
    out = tmp_path / "out"
    assert invoke(requests, out, "--url", "http://127.0.0.1:9")[0] == 2
    os.mkfifo(tmp_path / "pipe")
    for arguments, message in (
        ((tmp_path / "pipe", out), "which is read but once"),
        ((tmp_path / "none", out), "none cannot be read"),
        ((requests, out, "-k", 3), "--num-speculative-tokens is for an engine in this process"),
        ((requests, out, "--dtype", "bfloat16", "--url", "http://a"), "--dtype is for an engine in this"),
        ((requests, out, "--draft", tmp_path), "--draft is for an engine in this process"),
        ((requests, out, "--timeout", "inf"), "--timeout: give a number of seconds"),
        ((requests, requests), "give another one"),
        ((requests, tmp_path / "no" / "out"), "cannot be written"),
        ((requests, tmp_path / "pipe"), "is a pipe or a device"),
        ((requests, out, "--url", "http://x", "-c", config), "either --url, or --config"),
        ((requests, out, "--insecure", "-c", config), "--insecure is for a server"),
        ((requests, out, "--url", "http://a:b"), "is not a URL"),
        ((requests, out, "--url", "ftp://x"), "is not a URL"),
        ((requests, out, "--url", "http://x", "--api-key", "schlüssel"), "(--api-key or DRAFTHOUSE_API_KEY)"),
        ((requests, out, "--url", "http://x", "--api-key", " "), "drafthouse keys new"),
    ):
        code, _, stderr = invoke(*arguments)
        assert code == 2
        assert message in stderr
    assert len(requests.read_text().splitlines()) == 1


def test_with_an_engine_in_this_process(tmp_path: Path, config: Path) -> None:
    requests, out = requests_in(tmp_path / "in", 12, max_tokens=5, temperature=0), tmp_path / "out"
    code, _, stderr = invoke(requests, out, "-c", config)
    assert code == 0, stderr
    texts = {result["response"]["body"]["choices"][0]["text"] for result in results_of(out)}
    assert len(texts) == 1, "the same prompt, greedily"
    assert "60 tokens" in stderr


@pytest.mark.parametrize(("said", "is_greedy"), [("auto", True), ("none", False)])
def test_defaults_of_the_checkpoint_count_as_for_a_server(
    tmp_path: Path, config: Path, said: str, is_greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_target, "sampling_defaults_of", lambda _: SamplingDefaults(temperature=0.0))
    config.write_text(f"{config.read_text()}http: {{generation_config: {said}}}\n")
    requests, out = requests_in(tmp_path / "in", 6, max_tokens=8, ignore_eos=True), tmp_path / "out"
    code, _, stderr = invoke(requests, out, "-c", config)
    assert code == 0, stderr
    texts = {result["response"]["body"]["choices"][0]["text"] for result in results_of(out)}
    assert (len(texts) == 1) is is_greedy


def test_results_do_not_go_down_a_pipe(tmp_path: Path) -> None:
    """`drafthouse batch in.jsonl /dev/stdout | jq`: it would wait for what it has not written yet."""
    requests = requests_in(tmp_path / "in", 1)
    arguments = [sys.executable, "-c", COMMAND, "batch", str(requests), "/dev/stdout"]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "/dev/stdout is a pipe or a device" in done.stderr
    assert not done.stdout


def configured(config: Path, text: str) -> Path:
    config.write_text(f"{config.read_text()}{text}\n")
    return config


def test_more_choices_than_an_engine_takes_in_are_an_error_of_that_line(tmp_path: Path, config: Path) -> None:
    """However long one waits; one process has one engine, whatever a cluster would have."""
    configured(config, "scheduler: {max_num_seqs: 2, max_num_waiting: 0}")
    configured(config, "cluster: {target_groups: {num_groups: 9}}")
    requests, out = requests_in(tmp_path / "in", 1, max_tokens=2, n=8), tmp_path / "out"
    code, _, stderr = invoke(requests, out, "-c", config, "--patience", 1)
    assert code == 1
    assert "1 of 1 failed" in stderr
    (result,) = results_of(out)
    assert result["error"]["message"].startswith(
        "line 1: body.n: n times the number of prompts must be at most 2"
    )
    requests_in(requests, 2, max_tokens=2, n=2)
    out.unlink()
    assert invoke(requests, out, "-c", config)[0] == 0


@pytest.mark.parametrize(("limit", "status"), [("", 413), ("http: {max_body_bytes: 6000000}", 200)])
def test_bodies_are_as_long_as_the_configuration_lets_them_be(
    tmp_path: Path, config: Path, limit: str, status: int
) -> None:
    requests, out = requests_in(tmp_path / "in", 1, max_tokens=2, user="x" * (5 << 20)), tmp_path / "out"
    invoke(requests, out, "-c", configured(config, limit))
    (result,) = results_of(out)
    assert result["response"]["status_code"] == status


@pytest.mark.parametrize(
    ("http", "timeout_s"),
    [("", 0.1), ("http: {request_timeout_s: 9}", 0.1), ("http: {request_timeout_s: 0.1}", 9)],
)
def test_the_shorter_limit_of_time_ends_a_line(
    tmp_path: Path, config: Path, http: str, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def slow(self: Engine, **more: Any) -> Any:
        time.sleep(0.05)
        return step(self, **more)

    monkeypatch.setattr(Engine, "step", slow)
    requests, out = requests_in(tmp_path / "in", 1, max_tokens=48, ignore_eos=True), tmp_path / "out"
    code, _, stderr = invoke(requests, out, "-c", configured(config, http), "--timeout", timeout_s)
    assert code == 1, stderr
    (result,) = results_of(out)
    assert result["response"]["status_code"] == 504
    assert result["error"]["code"] == TIMED_OUT


def test_an_engine_that_fails_ends_the_batch_and_the_same_command_goes_on(
    tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, steps = Engine.step, []

    def broken(self: Engine, **more: Any) -> Any:
        steps.append(self)
        if len(steps) > 2:
            raise RuntimeError("a bug")
        return step(self, **more)

    requests, out = requests_in(tmp_path / "in", 12, max_tokens=40, ignore_eos=True), tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", broken)
        code, _, stderr = invoke(requests, out, "-c", config)
    assert code == 1
    assert "the engine in this process failed; the same command goes on from here" in stderr
    assert out.read_text() == ""
    code, _, stderr = invoke(requests, out, "-c", config)
    assert code == 0, stderr
    assert len(results_of(out)) == 12


def test_interrupted_and_gone_on_with(tmp_path: Path) -> None:
    requests, out = requests_in(tmp_path / "in", 8), tmp_path / "out"
    service = ScriptedService(hold_at=2)
    service.release.set()
    door = Door(service)
    with live_server(door.app) as url:
        assert invoke(requests_in(tmp_path / "few", 3), out, "--url", url)[0] == 0
        service.release.clear()
        arguments = [sys.executable, "-c", COMMAND, "batch", requests, out, "--url", url, "-j", "2"]
        with subprocess.Popen(list(map(str, arguments)), stderr=subprocess.PIPE, text=True) as process:
            try:
                deadline_s = time.monotonic() + 60
                while len(service.requests) < 5:
                    assert time.monotonic() < deadline_s
                    assert process.poll() is None
                    time.sleep(0.01)
                process.send_signal(signal.SIGINT)
                _, stderr = process.communicate(timeout=60)
            finally:
                process.kill()
        assert process.returncode == 130
        assert "goes on from here" in stderr
        assert "Traceback" not in stderr
        assert len(results_of(out)) == 3
        service.hold_at = None
        assert invoke(requests, out, "--url", url)[0] == 0
    assert len(results_of(out)) == 8
    assert all(r["response"]["body"]["choices"][0]["text"] == "".join(PIECES) for r in results_of(out))
