"""Connections on real sockets that send no request, or fetch no answer: they hold little, for a while."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import httpx
import pytest
import uvicorn.config
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.openai.bounded_http import MAX_HEAD_BYTES, BoundedHttp, install
from tests.deploy.openai.live import live_server

LIMIT = 4096
BIG = 48 << 20
"""Far more than a connection holds."""


class Hasty(BoundedHttp):
    """With bounds that a test can wait for."""

    max_head_bytes = LIMIT
    head_timeout_s = 0.3
    leftover_timeout_s = 0.3
    rest_timeout_s = 0.5
    max_pipelined = 4
    max_body_bytes = 128 * LIMIT
    open: ClassVar[set[BoundedHttp]] = set()

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.open.discard(self)
        assert self._head_timer is None
        assert self._leftover_timer is None
        assert self._rest_timer is None


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with as many bytes as the path says, or with the length of the body, once that is here."""
    message: Message = {"more_body": True}
    num_bytes = 0
    while message.get("more_body", False):
        message = await receive()
        num_bytes += len(message.get("body", b""))
    wanted = int(scope["path"].rpartition("/")[2] or 0)
    body = str(num_bytes).encode() if wanted == 0 else bytes(wanted)
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class OtherAnswers:
    """By the path: /early does not read what it answers, /open does it afterwards, /broken/N ends behind N
    bytes of more, and /slow waits until its client has left, or is told to answer."""

    def __init__(self) -> None:
        self.may_answer = False
        self.num_left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind, _, size = scope["path"].strip("/").partition("/")
        body = bytes(int(size or 0))
        if kind == "slow":
            await receive()
            while not self.may_answer:
                try:
                    async with asyncio.timeout(0.02):
                        message = await receive()
                except TimeoutError:
                    continue
                if message["type"] == "http.disconnect":
                    self.num_left += 1
                    return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-kind", kind.encode())]})
        while kind == "open" and (await receive()).get("more_body", False):
            pass
        await send({"type": "http.response.body", "body": body, "more_body": kind == "broken"})


@contextmanager
def connected(http: type = Hasty, application: ASGIApp = app, **options: float) -> Iterator[socket.socket]:
    with live_server(application, http=http, **options) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            yield connection


def read_all(connection: socket.socket) -> bytes:
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def read_answer(connection: socket.socket) -> bytes:
    """Read one answer of the application's, without a body to speak of."""
    text = b""
    while not text.partition(b"\r\n\r\n")[2]:
        part = connection.recv(1 << 16)
        assert part, text
        text += part
    return text


def wait_for(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)


def send_for_a_while(connection: socket.socket) -> None:
    for _ in range(1000):
        connection.sendall(b"e" * LIMIT)
        time.sleep(0.01)


def require_refused(answer: bytes, status: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 " + status)
    assert b"connection: close" in head.lower()
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
TOO_LONG = {
    "many": HEAD + b"".join(b"x-%d: %s\r\n" % (number, b"a" * 50) for number in range(200)),
    "one": HEAD + b"x: " + b"a" * 2 * LIMIT,
    "name": HEAD + b"a" * 2 * LIMIT,
    "path": b"GET /" + b"a" * 2 * LIMIT,
    "complete": HEAD + b"x: " + b"a" * 2 * LIMIT + b"\r\n\r\n",
}


@pytest.mark.parametrize("kind", TOO_LONG)
def test_long_heads_are_refused(kind: str) -> None:
    with connected() as connection:
        connection.sendall(TOO_LONG[kind])
        require_refused(read_all(connection), b"431 ")


@pytest.mark.parametrize("kind", TOO_LONG)
def test_uvicorn_itself_takes_them(kind: str) -> None:
    """What the test above shows would not show, if this one failed."""
    with connected("httptools") as connection:  # type: ignore[arg-type]
        connection.sendall(TOO_LONG[kind])
        connection.settimeout(0.5)
        if kind == "complete":
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        else:
            with pytest.raises(TimeoutError):
                connection.recv(100)  # it waits for more


@pytest.mark.parametrize("size", [LIMIT // 2, 8 * LIMIT, 100 * LIMIT])
def test_bodies_may_be_longer(size: int) -> None:
    with connected() as connection:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        for _ in range(2):
            connection.sendall(head % size + bytes(size))
            assert read_answer(connection).endswith(b"\r\n\r\n%d" % size)


CHUNKED = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"%x\r\n%s\r\n" % (LIMIT, b"a" * LIMIT)


def test_a_body_that_nobody_answers_is_bounded() -> None:
    """Serve's proxy takes all of it, while the door behind it hangs, say."""
    answers = OtherAnswers()
    with connected(application=answers) as connection:
        connection.sendall(CHUNKED % b"/slow")
        for _ in range(Hasty.max_body_bytes // LIMIT):
            connection.sendall(CHUNK)
        time.sleep(0.2)
        assert answers.num_left == 0
        connection.sendall(CHUNK)
        require_refused(read_all(connection), b"413 ")
        wait_for(lambda: answers.num_left == 1 and not Hasty.open)


def test_one_that_is_being_answered_is_the_application_s_affair() -> None:
    with connected(application=OtherAnswers()) as connection:
        connection.sendall(CHUNKED % b"/open" + CHUNK)
        assert b"x-kind: open" in connection.recv(1 << 16)
        connection.sendall(CHUNK * (4 * Hasty.max_body_bytes // LIMIT) + b"0\r\n\r\n")
        connection.sendall(b"GET /early HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"x-kind: early" in read_all(connection)


def test_what_is_around_the_pieces_of_a_body_is_bounded_too() -> None:
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = b"1\r\na\r\n" * LIMIT
    with connected() as connection:
        connection.sendall(chunked + pieces + b"0\r\nlast: b\r\n\r\n")
        assert read_answer(connection).endswith(b"\r\n\r\n%d" % LIMIT)
    for endless in (b"1;" + b"e" * 2 * LIMIT, b"0\r\nlast: " + b"e" * 2 * LIMIT):
        with connected() as connection:
            connection.sendall(chunked + pieces + endless)
            with pytest.raises(ConnectionError):
                send_for_a_while(connection)


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEAD, b"\r\n"])
@pytest.mark.parametrize("has_request_before", [False, True])
def test_heads_that_do_not_come_are_not_waited_for(sent: bytes, has_request_before: bool) -> None:
    with connected(timeout_keep_alive=1) as connection:
        if has_request_before:
            connection.sendall(HEAD + b"\r\n")
            read_answer(connection)
        started_s = time.monotonic()
        connection.sendall(sent)
        answer = read_all(connection)
        assert 0.2 < time.monotonic() - started_s < 20
        if sent:
            require_refused(answer, b"408 ")
        else:
            assert answer == b"", "an idle connection ends without a word"


def test_a_byte_now_and_then_gives_no_more_time() -> None:
    with connected() as connection:
        started_s = time.monotonic()
        connection.sendall(HEAD)
        connection.settimeout(0.05)
        answer = b""
        while not answer:
            assert time.monotonic() - started_s < 20
            connection.sendall(b"a")
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_idle_connections_between_requests_are_uvicorn_s_own_affair() -> None:
    with connected(timeout_keep_alive=30) as connection:
        for number in range(2):
            connection.sendall(HEAD + b"\r\n" + HEAD * (number == 1))
            assert read_answer(connection).startswith(b"HTTP/1.1 200")
            if number == 0:
                time.sleep(3 * Hasty.head_timeout_s)
        require_refused(read_all(connection), b"408 ")  # of what has begun with the request before


def test_an_empty_line_behind_a_request_ends_no_answer() -> None:
    """Some clients send one; the answer may take its time."""
    with connected() as connection:
        body = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\na"
        connection.sendall(body)
        time.sleep(3 * Hasty.head_timeout_s)
        connection.sendall(b"b\r\n")
        assert read_answer(connection).endswith(b"\r\n\r\n2")


@pytest.mark.parametrize("closing", [b"", b"Connection: close\r\n"])
def test_who_does_not_fetch_a_complete_answer_is_gone(closing: bytes) -> None:
    with connected() as connection:
        connection.sendall(f"GET /{BIG} HTTP/1.1\r\nHost: x\r\n".encode() + closing + b"\r\n")
        connection.recv(1000)
        assert Hasty.open
        wait_for(lambda: not Hasty.open)


def test_who_fetches_it_slowly_gets_it() -> None:
    with connected() as connection:
        connection.sendall(f"GET /{BIG} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        num_bytes, started_s = 0, time.monotonic()
        while part := connection.recv(1 << 20):
            num_bytes += len(part)
            time.sleep(0.01)
        assert num_bytes > BIG
        assert time.monotonic() - started_s > Hasty.leftover_timeout_s


def test_who_does_not_fetch_a_broken_answer_is_gone() -> None:
    """The server closes it, and waits for what is in its buffer: for ever, where it were left at that."""
    with connected(application=OtherAnswers()) as connection:
        connection.sendall(b"GET /broken/%d HTTP/1.1\r\nHost: x\r\n\r\n" % BIG)
        connection.recv(1000)
        assert Hasty.open
        wait_for(lambda: not Hasty.open)


@pytest.mark.parametrize("answered", [b"", b"a"])
def test_the_rest_of_a_body_that_nobody_reads_is_not_waited_for(answered: bytes) -> None:
    head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    with connected(application=OtherAnswers(), timeout_keep_alive=30) as connection:
        connection.sendall(head + b"a" * 9 + head + answered)
        text = b""
        while text.count(b"x-kind: early") < 2:
            text += (part := connection.recv(1 << 16))
            assert part, text
        started_s = time.monotonic()
        for _ in range(4):
            time.sleep(0.05)
            connection.sendall(b"a")  # a byte now and then gives no more time
        assert read_all(connection) == b""
        assert 0.2 < time.monotonic() - started_s < 20


def test_who_ends_a_body_that_nobody_reads_may_go_on() -> None:
    head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
    with connected(application=OtherAnswers(), timeout_keep_alive=30) as connection:
        for _ in range(2):
            connection.sendall(head)
            assert b"x-kind: early" in read_answer(connection)
            connection.sendall(b"ab")
            time.sleep(2 * Hasty.rest_timeout_s)


def test_who_leaves_is_noticed_though_another_request_waits_behind() -> None:
    answers = OtherAnswers()
    with connected(application=answers) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.2)
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.2)
        assert answers.num_left == 0
        connection.close()
        wait_for(lambda: answers.num_left == 1 and not Hasty.open)


def test_requests_behind_another_are_answered_in_turn_up_to_a_number() -> None:
    answers = OtherAnswers()
    slow, early = (b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % kind for kind in (b"slow", b"early"))
    with connected(application=answers) as connection:
        connection.sendall(slow)
        time.sleep(0.2)
        connection.sendall(early * Hasty.max_pipelined)
        time.sleep(0.2)
        answers.may_answer = True
        text = b""
        while text.count(b"x-kind") <= Hasty.max_pipelined:
            text += connection.recv(1 << 16)
        assert text.count(b"x-kind: slow") == 1
        assert text.index(b"slow") < text.index(b"early")
        answers.may_answer = False
        connection.sendall(slow)
        time.sleep(0.2)
        connection.sendall(early * (Hasty.max_pipelined + 1))
        assert read_all(connection).count(b"x-kind") == 0
        wait_for(lambda: answers.num_left == 1)


def test_nothing_is_written_into_an_answer() -> None:
    answers = OtherAnswers()
    with connected(application=answers) as connection:
        connection.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.2)
        connection.sendall(b"this is no request\r\n\r\n")
        assert read_all(connection) == b""
        wait_for(lambda: answers.num_left == 1)
    with connected() as connection:
        connection.sendall(b"this is no request\r\n\r\n")
        require_refused(read_all(connection), b"400 ")


def test_servers_of_this_process_have_it_once_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Serve starts them: it names no class."""
    monkeypatch.setattr(uvicorn.config, "HTTP_PROTOCOLS", dict(uvicorn.config.HTTP_PROTOCOLS))
    install()
    config = uvicorn.Config(app, log_level=None, log_config=None)
    config.load()
    assert config.http_protocol_class is BoundedHttp
    with live_server(app) as url:
        assert httpx.get(url, headers={"x": "a" * (MAX_HEAD_BYTES // 2)}).status_code == 200
        assert httpx.get(url, headers={"x": "a" * MAX_HEAD_BYTES}).status_code == 431
