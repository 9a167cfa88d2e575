"""The client of a load against real sockets: nobody waits, connections are kept, failures have names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from deploy.load.client import kind_of, load_client, proxy_of
from deploy.load.generator import LoadGenerator
from deploy.load.workload import PlannedRequest

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


STREAM = (
    HEAD
    + chunk(b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n')
    + chunk(b"data: [DONE]\n\n")
    + chunk(b"")
)


class Server:
    """Reads each request whole, and lets `answer` write."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.num_connections = 0
        self.heads: list[str] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head.decode().lower())
                await reader.readexactly(int(self.heads[-1].split("content-length: ")[1].split("\r\n")[0]))
                await self._answer(writer)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[tuple[Server, str]]:
    server = Server(answer)
    listening = await asyncio.start_server(server.connected, "127.0.0.1", 0)
    async with listening:
        yield server, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def errors_of(
    answer: Answer, *, number: int = 1, read_s: float = 30.0
) -> tuple[Server, list[str | None]]:
    planned = [PlannedRequest(at_s=0.0, body={"number": index}) for index in range(number)]
    async with (
        served(answer) as (server, url),
        load_client(url, headers={"X-Test": "yes"}, connect_s=30.0, read_s=read_s) as client,
    ):
        timelines = await LoadGenerator(client, "/v1/completions").run(planned, lambda _: None)
        return server, [timeline.error for timeline in timelines]


def test_nobody_waits_for_a_connection() -> None:
    """aiohttp's own limit is 100 at once."""
    together = 250
    here: list[int] = []
    all_here = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        here.append(1)
        if len(here) == together:
            all_here.set()
        await all_here.wait()
        writer.write(STREAM)

    server, errors = asyncio.run(errors_of(answer, number=together))
    assert errors == [None] * together
    assert server.num_connections == together
    assert all("x-test: yes" in head for head in server.heads)


@pytest.mark.parametrize("later_s", [0.0, 0.05])
def test_connections_are_kept(later_s: float) -> None:
    """Also where the end of an answer comes after its last event, as servers and proxies send it."""
    end = len(chunk(b""))

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM[:-end])
        await asyncio.sleep(later_s)
        writer.write(STREAM[-end:])

    async def one_after_the_other() -> int:
        async with served(answer) as (server, url), load_client(url, connect_s=30.0, read_s=30.0) as client:
            for _ in range(3):
                generator = LoadGenerator(client, "/v1/completions")
                await generator.run([PlannedRequest(at_s=0.0, body={})], lambda _: None)
            return server.num_connections

    assert asyncio.run(one_after_the_other()) == 1


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _break_off(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM[:-20])
    await writer.drain()
    writer.close()


async def _stall(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD)
    await asyncio.sleep(3.0)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (_hang_up, "ServerDisconnectedError"),
        (_break_off, "ClientPayloadError"),
        (_stall, "SocketTimeoutError"),
    ],
)
def test_failures_have_names_of_their_own(answer: Answer, kind: str) -> None:
    assert asyncio.run(errors_of(answer, read_s=0.5))[1] == [kind]


def test_what_is_no_http_fails_its_own_request_alone() -> None:
    """httpx_aiohttp lets aiohttp's error through, and with it the run would end."""
    answered: list[int] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        answered.append(1)
        if len(answered) == 2:
            writer.write(b"SSH-2.0-x\r\n\r\n")
            writer.close()
        else:
            writer.write(STREAM)

    _, errors = asyncio.run(errors_of(answer, number=5))
    assert sorted(errors, key=str) == ["ClientResponseError", *[None] * 4]


def test_who_is_not_there() -> None:
    async def ask() -> str:
        async with load_client("http://127.0.0.1:9", connect_s=5.0, read_s=5.0) as client:
            with pytest.raises(httpx.TransportError) as raised:
                await client.get("/v1/models")
            return kind_of(raised.value)

    assert asyncio.run(ask()) == "ClientConnectorError"


def test_the_environment_names_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert proxy_of("http://models.example:8000") is None
    monkeypatch.setenv("https_proxy", "http://door.example:3128")
    assert proxy_of("http://models.example:8000") is None
    assert proxy_of("https://models.example") == "http://door.example:3128"
    monkeypatch.setenv("no_proxy", "127.0.0.1,models.example")
    assert proxy_of("https://models.example") is None
    monkeypatch.setenv("all_proxy", "http://any.example:3128")
    assert proxy_of("http://127.0.0.1:8000") is None
    assert proxy_of("http://elsewhere.example") == "http://any.example:3128"
    monkeypatch.delenv("no_proxy")
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert proxy_of(f"http://{host}:8000") is None, "it would look for that on its own machine"


def test_a_proxy_is_asked_in_place_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)

    async def by_proxy() -> tuple[list[str | None], str]:
        async with served(answer) as (server, url):
            monkeypatch.setenv("http_proxy", url)
            async with load_client("http://models.invalid", connect_s=30.0, read_s=30.0) as client:
                generator = LoadGenerator(client, "/v1/completions")
                timelines = await generator.run([PlannedRequest(at_s=0.0, body={})], lambda _: None)
            return [one.error for one in timelines], server.heads[0]

    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    errors, head = asyncio.run(by_proxy())
    assert errors == [None]
    assert head.startswith("post http://models.invalid/v1/completions ")
