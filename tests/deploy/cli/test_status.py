"""`drafthouse status` against a door over a scripted service, and against everything else one may meet."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from typer.testing import CliRunner

import deploy.cli.status as command
from deploy.cli.main import app
from deploy.openai.keys import ApiKey, digest_api_key
from deploy.openai.settings import DoorSettings
from deploy.status import Status
from specdec.core.errors import DrafthouseError, TransportError, UserError
from specdec.transport.status import (
    ChoiceStatus,
    DrafterStatus,
    DraftWorkerStatus,
    OnlineStatus,
    RecentStatus,
    ServiceStatus,
    TargetGroupStatus,
)
from tests.deploy.certificates import make_certificate
from tests.deploy.openai.fakes import Door, ScriptedService
from tests.deploy.openai.live import live_server

runner = CliRunner()
CHOICE = ChoiceStatus(
    mode="draft_ahead",
    is_speculating=True,
    reason="gain",
    explanation="drafting is expected to bring more tokens per second than plain decoding",
    mean_num_draft_tokens=3.25,
    num_requests_by_k={1: 1, 4: 3},
    expected_tokens_per_s=312.0,
    expected_tokens_per_s_by_mode={"lockstep": 280.0, "draft_ahead": 312.0, "plain": 210.0},
    expected_draft_s=0.0098,
    expected_verify_s=0.0133,
    expected_round_s=0.0142,
    expected_acceptance=(0.81, 0.76, 0.7, 0.66),
    pool_worth=1.34,
    mean_kv_budget=512.0,
    bounded_by="slo",
)
RECENT = RecentStatus(
    num_rounds=640,
    tokens_per_s=298.4,
    acceptance=0.74,
    acceptance_by_method={"draft_model": 0.78, "ngram": 0.41},
    mean_acceptance_length=3.96,
    round_s=0.0149,
    draft_wait_s=0.0011,
    draft_s=0.0097,
    verify_s=0.0134,
    coordinator_s=0.0004,
    hidden_share=0.88,
    hit_rate=0.78,
    late_rate=0.02,
)
OFF = msgspec.structs.replace(
    CHOICE,
    mode="lockstep",
    is_speculating=False,
    reason="no_gain",
    explanation="drafting is expected to bring no more tokens per second than plain decoding",
    num_requests_by_k={0: 2},
    mean_num_draft_tokens=0.0,
    pool_worth=0.81,
    bounded_by="none",
)
DRAFTERS = (
    DrafterStatus(
        name="small",
        is_shadow=False,
        num_running=3,
        num_requests=41,
        num_drafted=1000,
        acceptance=0.5,
        tokens_per_pass=2.75,
    ),
    DrafterStatus(
        name="next",
        is_shadow=True,
        num_running=0,
        num_requests=2,
        num_drafted=0,
        acceptance=None,
        tokens_per_pass=None,
    ),
)
SERVICE = ServiceStatus(
    target_groups=(
        TargetGroupStatus(
            id="coordinator-a",
            num_running=4,
            num_waiting=2,
            max_num_running=16,
            num_continued=3,
            kv_cache_usage=0.25,
            utilization=0.63,
            choice=CHOICE,
            recent=RECENT,
            drafters=DRAFTERS,
        ),
        TargetGroupStatus(id="coordinator-b", incarnation=2, num_running=2, max_num_running=16, choice=OFF),
        TargetGroupStatus(id="coordinator-c", is_answering=False, is_serving=False),
    ),
    draft_workers=(
        DraftWorkerStatus(
            id="draft-1",
            since=0.0,
            incarnation=3,
            compile_state="ready",
            is_waited_for=True,
            num_requests=4,
            max_requests=32,
            utilization=0.9,
            online=OnlineStatus(
                version=2,
                num_tried=5,
                num_refused=3,
                num_buffered_tokens=8100,
                acceptance_before=0.41,
                acceptance_after=0.555,
            ),
        ),
        DraftWorkerStatus(
            id="draft-2",
            since=0.0,
            incarnation=1,
            compile_state="ready",
            is_waited_for=False,
            num_requests=0,
            max_requests=32,
            utilization=0.2,
        ),
        DraftWorkerStatus(
            id="draft-3",
            since=0.0,
            incarnation=1,
            compile_state="ready",
            is_waited_for=None,
            num_requests=0,
            max_requests=32,
        ),
    ),
)
KEYS = (ApiKey(name="a", digest=digest_api_key("right")),)


@contextmanager
def served(settings: DoorSettings | None = None, **service: Any) -> Iterator[str]:
    door = Door(ScriptedService(service_status=SERVICE, **service), settings or DoorSettings())
    with live_server(door.app) as url:
        yield url


def invoke(*arguments: str, **environment: str) -> tuple[int, str, str]:
    result = runner.invoke(app, ["status", *arguments], env=environment)
    return result.exit_code, result.stdout, result.stderr


def lines_with(text: str, *words: str) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_everything_is_shown_of_every_target_group() -> None:
    with served() as url:
        code, stdout, _ = invoke(url)
    assert code == 0
    assert "model scripted in float32" in stdout
    assert lines_with(stdout, "coordinator-a", "serving", "4 of 16   ", "2   ", "3   ", "25 %", "63 %")
    assert lines_with(stdout, "coordinator-c", "not answering")
    assert lines_with(stdout, "on, draft_ahead: drafting is expected to bring more tokens")
    assert lines_with(stdout, "off, lockstep: drafting is expected to bring no more tokens")
    assert lines_with(
        stdout,
        "1 for 1 request, 4 for 3 requests (mean 3.25); longer drafts would break somebody's slo.itl_ms",
    )
    assert stdout.count("slo.itl_ms") == 1
    assert lines_with(
        stdout, "312 expected (by mode: lockstep 280, draft_ahead 312, plain 210)", "298 measured"
    )
    assert lines_with(stdout, "0.81 0.76 0.70 0.66 expected by position; 0.74 of draft tokens measured")
    assert "(draft_model 0.78, ngram 0.41), 3.96 tokens per proposal" in " ".join(stdout.split())
    assert lines_with(stdout, "T_draft", "9.8 ms expected, 9.7 ms measured, 88 % hidden", "waited for 1.1 ms")
    assert lines_with(stdout, "T_verify", "13.3 ms expected, 13.4 ms measured")
    assert lines_with(stdout, "78 % hits, 2 % late")
    assert lines_with(stdout, "1.34 of plain decoding", ": worth its devices")
    assert lines_with(stdout, "0.81 of plain decoding", "the draft pool is not worth its devices")
    assert lines_with(
        stdout, "drafter", "small: 3 running, 41 since the start; 0.50 accepted, 2.75 tokens per"
    )
    assert lines_with(stdout, "shadow", "next: looks at 2 requests; no proposals yet")
    assert lines_with(stdout, "draft worker", "requests   places   busy")
    assert lines_with(stdout, "draft-1", "in time", "3", "4 of 32     12 %   90 %")
    assert lines_with(stdout, "draft-2", "was late or silent")
    assert lines_with(stdout, "draft-3", "not asked yet", "0 of 32      0 %      -")
    assert (
        "draft-1 learns online: drafts with version 2; 5 tried, 3 refused; 8100 tokens kept; held-back "
        "acceptance at the last trial 0.410, of the new version 0.555"
    ) in " ".join(stdout.split())
    assert stdout.count("learns online") == 1
    assert lines_with(stdout, "all", "4 of 96      4 %   55 %"), "mean of those that anybody tells of"


def test_where_there_are_no_draft_workers_nothing_is_said_of_a_pool() -> None:
    """Methods that draft at the target are compared with plain decoding, too."""
    alone = msgspec.structs.replace(SERVICE, draft_workers=())
    with live_server(Door(ScriptedService(service_status=alone)).app) as url:
        code, stdout, _ = invoke(url)
    assert code == 0
    assert lines_with(stdout, "worth", "1.34 of plain decoding", ": drafting pays")
    assert lines_with(stdout, "worth", "0.81 of plain decoding", ": drafting does not pay")
    assert "pool" not in stdout.lower()


def test_json_is_the_body_of_the_route() -> None:
    with served() as url:
        code, stdout, _ = invoke(f"{url}/v1", "--json")  # as `serve` prints it
        body = httpx.get(f"{url}/v1/status").json()
    assert code == 0
    shown = json.loads(stdout)
    assert {**shown, "now": 0} == {**body, "now": 0}
    assert shown["object"] == "drafthouse.status"
    assert shown["application"]["model"] == "scripted"
    assert shown["target_groups"][0]["choice"]["num_requests_by_k"] == {"1": 1, "4": 3}
    assert [group["choice"]["bounded_by"] for group in shown["target_groups"][:2]] == ["slo", "none"]


def test_a_server_that_loads_says_so() -> None:
    with served(is_ready=False) as url:
        code, stdout, _ = invoke(url)
    assert code == 0
    assert "not ready" in stdout
    assert "no model takes requests" in stdout


def test_several_models_are_told_apart() -> None:
    first, second = ScriptedService(service_status=SERVICE), ScriptedService(service_status=SERVICE)
    with live_server(Door(first, further={"org/second": second}).app) as url:
        _, both, _ = invoke(url)
        first.is_ready = False
        _, one, _ = invoke(url)
    assert "model scripted in float32" in both
    assert "beside it org/second" in both
    assert lines_with(both, "coordinator-a (scripted)", "serving")
    assert lines_with(both, "coordinator-a (org/second)", "serving")
    assert lines_with(both, "Speculation of coordinator-a (org/second)")
    assert lines_with(both, "draft-1 (scripted)", "in time")
    assert "takes no requests" not in both
    assert "not ready" not in one
    assert "org/second" in one
    assert "takes no requests: the first model (being loaded or replaced)" in one


@pytest.mark.parametrize(
    ("given", "message"),
    [(None, "asks for an API key: give --api-key, or set DRAFTHOUSE_API_KEY"), ("wrong", "does not accept")],
)
def test_a_key_that_is_missing_or_wrong(given: str | None, message: str) -> None:
    with served(DoorSettings(api_keys=KEYS)) as url:
        code, stdout, stderr = invoke(url, *(() if given is None else ("--api-key", given)))
    assert code == 2
    assert message in stderr
    assert not stdout


def test_the_key_may_come_from_the_environment() -> None:
    with served(DoorSettings(api_keys=KEYS)) as url:
        code, stdout, _ = invoke(url, DRAFTHOUSE_API_KEY="right")
    assert code == 0
    assert "right" not in stdout


def test_nothing_runs_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code, _, stderr = invoke(f"127.0.0.1:{port}")
    assert code == 2
    assert f"nothing answers at http://127.0.0.1:{port}" in stderr
    assert "drafthouse serve" in stderr


def test_no_proxy_is_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with served() as url:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        assert invoke(url)[0] == 0
        code, _, stderr = invoke("http://models.invalid")
    assert code == 2
    assert "nothing answers" in stderr


def test_a_certificate_that_cannot_be_verified_is_taken_when_that_is_asked_for(tmp_path: Path) -> None:
    """As behind a port-forward, whose address no certificate names."""
    tls = make_certificate(tmp_path)
    door = Door(ScriptedService(service_status=SERVICE))
    files = {"ssl_certfile": tls.certificate_file, "ssl_keyfile": tls.key_file}
    with live_server(door.app, **files) as url:
        code, stdout, stderr = invoke(url)
        assert code == 2
        assert f"the certificate of {url} cannot be verified" in stderr
        assert "--insecure" in stderr
        assert not stdout
        code, stdout, _ = invoke(url, "--insecure")
    assert code == 0
    assert "model scripted" in stdout


@pytest.mark.parametrize("url", ["ftp://x", "http://127.0.0.1:port"])
def test_what_is_no_url(url: str) -> None:
    code, _, stderr = invoke(url)
    assert code == 2
    assert "is not a URL: write http://HOST:PORT" in stderr


def test_something_else_answers() -> None:
    other = Starlette(routes=[Route("/v1/status", lambda _: PlainTextResponse("fine"))])
    for application in (other, Starlette()):
        with live_server(application) as url:
            code, _, stderr = invoke(url)
        assert code == 2
        assert "is not Drafthouse" in stderr


def test_a_server_without_route_is_not_ready_yet() -> None:
    """What Serve's proxy answers until it knows of an application."""
    answer = PlainTextResponse("Path '/v1/status' not found. Ping http://.../-/routes for routes.", 404)
    with live_server(answer, lifespan="off") as url:
        code, stdout, stderr = invoke(url)
    assert code == 1
    assert f"{url} is not ready yet" in stderr
    assert not stdout


def test_a_server_that_is_in_trouble_is_not_the_users_fault() -> None:
    def fail(_: object) -> PlainTextResponse:
        return PlainTextResponse("no replica", 503)

    with live_server(Starlette(routes=[Route("/v1/status", fail)])) as url:
        code, _, stderr = invoke(url)
    assert code == 1
    assert "cannot say now what it is doing (status 503)" in stderr


def test_a_service_that_cannot_be_reached_is_answered_as_everywhere() -> None:
    class Lost(ScriptedService):
        async def status(self) -> ServiceStatus:
            raise TransportError("gone")

    with live_server(Door(Lost()).app) as url:
        assert httpx.get(f"{url}/v1/status").status_code == 503


def see(monkeypatch: pytest.MonkeyPatch, *looks: DrafthouseError | None) -> None:
    """Let the command fail so at its looks, or see a status (None), and be interrupted at the one after."""
    left = iter(looks)
    with served() as url:
        status = msgspec.json.decode(httpx.get(f"{url}/v1/status").content, type=Status)

    def fetch(client: httpx.Client, url: str) -> Status:
        for error in left:
            if error is None:
                return status
            raise error
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "fetch", fetch)
    monkeypatch.setattr(command.time, "sleep", lambda _: None)
    monkeypatch.setattr(command, "Console", lambda **options: Console(width=120, **options))


AWAY = command.StatusUnavailable("away")
GONE = UserError("nothing answers")


@pytest.mark.parametrize("looks", [(None, AWAY, GONE, None), (AWAY, GONE, None, None)])
def test_watching_goes_on_when_the_server_is_away(
    monkeypatch: pytest.MonkeyPatch, looks: tuple[DrafthouseError | None, ...]
) -> None:
    see(monkeypatch, *looks)
    code, stdout, _ = invoke("http://x", "--watch")
    assert code == 130
    assert "coordinator-a" in stdout


@pytest.mark.parametrize("looks", [(None, AWAY, GONE, None), (AWAY, GONE, None, None)])
def test_watching_as_json_goes_on_too(
    monkeypatch: pytest.MonkeyPatch, looks: tuple[DrafthouseError | None, ...]
) -> None:
    see(monkeypatch, *looks)
    code, stdout, stderr = invoke("http://x", "--watch", "--json")
    assert code == 130
    assert [json.loads(line)["object"] for line in stdout.splitlines()] == ["drafthouse.status"] * 2
    assert stderr.splitlines() == ["error: away", "error: nothing answers"]


@pytest.mark.parametrize("options", [("--watch",), ("--watch", "--json")])
def test_watching_something_that_is_not_there_ends(options: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert invoke(f"127.0.0.1:{port}", *options)[0] == 2
