"""Clients on real sockets that do not read: they hold little memory, and not for long."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable

import pytest
from starlette.types import Message, Scope

from deploy.openai.app import create_app
from deploy.openai.early_refusals import EarlyRefusals
from deploy.openai.serve_headers import ServeHeaders
from deploy.openai.settings import DoorSettings
from deploy.openai.slow_readers import (
    LEAST_BYTES_PER_S,
    WRITE_TIMEOUT_HEADER,
    Patience,
    SlowReaders,
    proxy_middlewares,
)
from deploy.openai.tokenization import HuggingFaceTokenizer
from deploy.openai.without_route import WithoutRoute
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from tests.architectures import make_tokenizer
from tests.deploy.openai.fakes import Door, ScriptedService, events_of
from tests.deploy.openai.live import live_server

BODY = {"model": "scripted", "prompt": "x", "stream": True, "max_tokens": 100}
PIECE = "x" * 16_384
NUM_PIECES = 4000
"""Far more than a connection holds."""


def ask(url: str) -> socket.socket:
    """Send a request and read nothing."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
    body = json.dumps(BODY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(60)
    parts = []
    while part := connection.recv(1 << 20):
        parts.append(part)
        if part.endswith(b"0\r\n\r\n"):
            break
    return b"".join(parts)


def test_who_reads_nothing_for_too_long_is_gone() -> None:
    service = ScriptedService(pieces=(PIECE,) * NUM_PIECES)
    settings = DoorSettings(write_timeout_s=0.3, max_unread_outputs=NUM_PIECES)
    app = create_app(service, settings, HuggingFaceTokenizer(make_tokenizer()))
    with live_server(app) as url, ask(url) as connection:
        wait_for(lambda: bool(service.closed))
        (request,) = service.requests
        assert service.closed == [request.request_id]
        wait_for(lambda: b"data: [DONE]" not in read_all(connection))  # the connection was closed: cut off


def test_who_leaves_too_much_unread_is_told_so_when_it_reads() -> None:
    service = ScriptedService(pieces=(PIECE,) * NUM_PIECES)
    settings = DoorSettings(write_timeout_s=60.0, max_unread_outputs=32)
    app = create_app(service, settings, HuggingFaceTokenizer(make_tokenizer()))
    with live_server(app) as url, ask(url) as connection:
        wait_for(lambda: bool(service.aborted))
        text = read_all(connection)
        assert text.count(b"x" * 1000) > 0
        assert len(text) < 0.5 * NUM_PIECES * len(PIECE)
        *_, error, done = (line for line in text.split(b"\n") if line.startswith(b"data:"))
        assert done == b"data: [DONE]"
        assert json.loads(error[5:])["error"]["code"] == "slow_reader"


def test_a_reader_that_keeps_up_gets_everything() -> None:
    service = ScriptedService(pieces=(PIECE,) * 200)
    settings = DoorSettings(write_timeout_s=5.0, max_unread_outputs=16)
    app = create_app(service, settings, HuggingFaceTokenizer(make_tokenizer()))
    with live_server(app) as url, ask(url) as connection:
        text = read_all(connection)
    assert f"{WRITE_TIMEOUT_HEADER}: 5".lower().encode() in text.lower()
    assert text.count(PIECE.encode()) == 200
    assert b"data: [DONE]" in text


class Backlog(ScriptedService):
    """All that it answers is there at once, as after a stall of the door."""

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        for index, text in enumerate(self.pieces):
            is_last = index == len(self.pieces) - 1
            yield self._output(request, index, text, "stop" if is_last else None)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_more_than_may_wait_at_once_is_read_all_the_same(stream: bool, n: int) -> None:
    pieces = tuple(f"{number} " for number in range(100))
    door = Door(Backlog(pieces=pieces), DoorSettings(max_unread_outputs=16))
    response = door.complete(stream=stream, n=n, max_tokens=100)
    assert response.status_code == 200
    bodies = [data for _, data in events_of(response)[:-1]] if stream else [response.json()]
    texts = [""] * n
    for body in bodies:
        for choice in body["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["".join(pieces)] * n


@pytest.mark.parametrize(("header", "is_given_up"), [("0.05", True), ("soon", False), (None, False)])
def test_in_serve_s_proxy_the_response_says_how_long(
    header: str | None, is_given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("uvicorn.config.HTTP_PROTOCOLS", {})
    route, middleware, early, headers = proxy_middlewares()
    assert early.cls is EarlyRefusals
    assert route.cls is WithoutRoute
    assert middleware.cls is SlowReaders
    assert headers.cls is ServeHeaders

    async def scenario() -> None:
        heard: list[Message] = []

        async def application(scope: Scope, receive: object, send: object) -> None:
            headers = [] if header is None else [(WRITE_TIMEOUT_HEADER.lower().encode(), header.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})  # type: ignore[operator]
            hearing = asyncio.ensure_future(receive())  # type: ignore[operator]
            await send({"type": "http.response.body", "body": b"x"})  # type: ignore[operator]
            heard.append(await hearing)

        async def receive() -> Message:
            return await asyncio.get_running_loop().create_future()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        serving = asyncio.ensure_future(middleware.cls(application)({"type": "http"}, receive, send))
        await asyncio.wait({serving}, timeout=20 if is_given_up else 0.2)
        assert serving.done() == is_given_up
        assert heard == ([{"type": "http.disconnect"}] if is_given_up else [])
        serving.cancel()

    asyncio.run(scenario())


BUFFER_BYTES = 48 << 10
"""What uvicorn takes after a wait, before it waits again."""
PART_BYTES = 1 << 10


def seconds_held(bytes_per_s: float, total_bytes: int, part_bytes: int = PART_BYTES) -> tuple[float, bool]:
    """Send a response that is all there to a client that drains its buffer so fast.

    Return how long it held it, and whether it got everything.
    """
    patience, now_s, num_buffered = Patience(30.0), 0.0, 0
    for _ in range(0, total_bytes, part_bytes):
        until_s = patience.begin(now_s)
        if num_buffered >= BUFFER_BYTES:
            wait_s = num_buffered / bytes_per_s
            if now_s + wait_s > until_s:
                return until_s, False
            now_s, num_buffered = now_s + wait_s, 0
        patience.end(now_s, part_bytes)
        num_buffered += part_bytes
        now_s += 1e-4
    return now_s, True


@pytest.mark.parametrize("part_bytes", [256, PART_BYTES, BUFFER_BYTES, 8 << 20])
@pytest.mark.parametrize("drains_every_s", [2.0, 15.0, 29.0])
def test_who_takes_a_buffer_now_and_then_is_not_kept_for_long(drains_every_s: float, part_bytes: int) -> None:
    held_s, is_complete = seconds_held(BUFFER_BYTES / drains_every_s, 64 << 20, part_bytes)
    in_time_s = 30 + (64 << 20) / LEAST_BYTES_PER_S
    assert held_s <= in_time_s
    assert is_complete == (BUFFER_BYTES / drains_every_s >= LEAST_BYTES_PER_S)
    if part_bytes <= PART_BYTES and drains_every_s > 3:
        assert held_s < 45
    each_alone_s = (64 << 20) / BUFFER_BYTES * drains_every_s
    assert is_complete or each_alone_s > 2 * held_s, "a limit for each part alone would not have ended it"


@pytest.mark.parametrize("part_bytes", [100, PART_BYTES, 100 << 10, 8 << 20])
def test_a_slow_and_steady_link_gets_a_long_response(part_bytes: int) -> None:
    held_s, is_complete = seconds_held(1.25 * LEAST_BYTES_PER_S, 32 << 20, part_bytes)
    assert is_complete
    assert part_bytes > BUFFER_BYTES or held_s > 1000


def test_what_a_stream_is_behind_is_forgotten_while_nothing_is_to_be_sent() -> None:
    """A link that stalls now and then, under tokens that come slowly."""
    patience, now_s = Patience(30.0), 0.0
    for _ in range(20):
        assert patience.begin(now_s) >= now_s + 29
        patience.end(now_s + 25, 300)
        now_s += 25 + 40
    assert patience.begin(now_s) >= now_s + 29
    patience.end(now_s + 25, 300)
    assert patience.begin(now_s + 25) < now_s + 25 + 6, "without a pause it is still behind"


def test_who_drains_a_little_now_and_then_is_gone() -> None:
    """On a real connection: each part alone is taken in time."""
    service = ScriptedService(pieces=(PIECE[:1024],) * NUM_PIECES * 4)
    settings = DoorSettings(write_timeout_s=0.5, max_unread_outputs=4 * NUM_PIECES)
    app = create_app(service, settings, HuggingFaceTokenizer(make_tokenizer()))
    with live_server(app) as url, ask(url) as connection:
        until_s = time.monotonic() + 60
        while not service.closed:
            connection.recv(2048)
            assert time.monotonic() < until_s
            time.sleep(0.1)
    assert len(service.closed) == 1
