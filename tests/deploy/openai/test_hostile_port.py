"""Raw bytes at the HTTP port: no status above 4xx, no end of the server, and clients are served meanwhile."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from deploy.openai.settings import DoorSettings
from tests.deploy.certificates import make_certificate
from tests.deploy.openai.fakes import PIECES, Door
from tests.deploy.openai.live import live_server
from tests.rubbish import throw

_PATHS = (
    b"/v1/completions",
    b"/v1/chat/completions",
    b"/health",
    b"/metrics",
    b"*",
    b"//",
    b"http://x/",
    b"\xff",
)
_VERSIONS = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"")


def requests(generator: random.Random) -> Iterator[bytes]:
    """What is sent on one connection, piece by piece: nearly HTTP, mostly."""

    def noise(most: int) -> bytes:
        return generator.randbytes(generator.randrange(1, most))

    body = b'{"prompt": "abc", "max_tokens": 3}'
    method = generator.choice([b"POST", b"POST", b"GET", b"PRI", b"CONNECT", noise(6)])
    line = b" ".join((method, generator.choice(_PATHS), generator.choice(_VERSIONS))) + b"\r\n"
    kind = generator.randrange(9)
    if kind == 0:
        yield noise(3000)
    elif kind == 1:
        yield line + b"Host: x\r\nContent-Length: " + generator.choice([b"-1", b"x", b"9" * 30, b"5, 6", b""])
        yield b"\r\n\r\n" + body
    elif kind == 2:
        yield (
            line + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n" + generator.choice([b"zz", b"-5", b"5;x"])
        )
        yield b"\r\n" + noise(50)
    elif kind == 3:
        yield line + b"Host: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + line
    elif kind == 4:
        yield line + b"X: " + b"a" * generator.randrange(1 << 17) + b"\r\n\r\n"
    elif kind == 5:
        yield line + b"".join(b"X-%d: y\r\n" % number for number in range(generator.randrange(3000)))
    elif kind == 6:
        yield line + b"Host: x\r\nContent-Length: %d\r\n\r\n" % (len(body) + 100) + body
    elif kind == 7:
        yield line + b"Host: x\r\n" + noise(40) + b": " + noise(40) + b"\r\n\r\n" + noise(40)
    else:
        for byte in line + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n\r\n":
            yield bytes([byte])


def statuses(url: str) -> set[str]:
    """Statuses of completions that have been counted."""
    text = httpx.get(f"{url}/metrics").text
    return set(re.findall(r'http_requests_total{route="/v1/completions",status="(\d+)"} [1-9]', text))


def test_a_client_that_leaves_within_its_body_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    with live_server(Door().app) as url:
        host, _, port = url.rpartition("/")[2].rpartition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
            time.sleep(0.2)
        until_s = time.monotonic() + 30
        while not (counted := statuses(url)):
            assert time.monotonic() < until_s
            time.sleep(0.02)
    assert counted == {"499"}
    assert "failed" not in caplog.text


COUNTS = [60, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]


@pytest.mark.parametrize("num_connections", COUNTS)
@pytest.mark.parametrize("is_encrypted", [False, True], ids=["http", "https"])
def test_clients_are_served_whatever_others_send(
    num_connections: int, is_encrypted: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tls = make_certificate(tmp_path_factory.mktemp("tls"))
    options = {"ssl_certfile": tls.certificate_file, "ssl_keyfile": tls.key_file} if is_encrypted else {}
    door = Door(settings=DoorSettings(body_timeout_s=1.0))
    with live_server(door.app, **options) as url:
        thrower = threading.Thread(target=throw, args=(url, num_connections, requests))
        thrower.start()
        with httpx.Client(base_url=url, verify=not is_encrypted, timeout=60) as client:
            num_served = 0
            while thrower.is_alive() or not num_served:
                answer = client.post("/v1/completions", json={"prompt": "abc"})
                assert answer.json()["choices"][0]["text"] == "".join(PIECES)
                num_served += 1
                thrower.join(0.05)
            metrics = client.get("/metrics").text
    assert num_served
    assert not re.findall(r'http_requests_total{.*status="5.*} [1-9]', metrics)
