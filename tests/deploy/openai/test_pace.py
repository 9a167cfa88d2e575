"""Deliveries of streams: what is there goes together, less often with many; first and last at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message

from deploy.openai import pace
from deploy.openai.app import create_app
from deploy.openai.pace import Pace
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from tests.architectures import make_tokenizer
from tests.deploy.openai.fakes import ScriptedService

PIECES = tuple(f"{number} " for number in range(100))
NEVER = 1e-6
"""Deliveries per second: as seldom as may be."""


class Client:
    """One that reads a stream, message by message."""

    def __init__(self, service: ScriptedService, settings: DoorSettings) -> None:
        self._app = create_app(service, settings, HuggingFaceTokenizer(make_tokenizer()))
        self._is_asked = False
        self.deliveries: list[bytes] = []

    async def read(self) -> None:
        body = json.dumps({"model": "scripted", "prompt": "x", "stream": True, "max_tokens": 100}).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }

        async def receive() -> Message:
            if self._is_asked:
                await asyncio.Event().wait()
            self._is_asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body" and message["body"]:
                self.deliveries.append(message["body"])

        await self._app(scope, receive, send)

    @property
    def events(self) -> list[Any]:
        """The data of all events, but for the last."""
        *events, done = b"".join(self.deliveries).decode().split("\n\n")[:-1]
        assert done == "data: [DONE]"
        return [json.loads(event.partition("data: ")[2]) for event in events]

    @property
    def pieces(self) -> tuple[str, ...]:
        return tuple(event["choices"][0]["text"] for event in self.events if "choices" in event)


def read(service: ScriptedService, **settings: Any) -> Client:
    client = Client(service, DoorSettings(**settings))
    asyncio.run(asyncio.wait_for(client.read(), 60))
    return client


async def read_until(client: Client, holds: Callable[[], bool]) -> asyncio.Task[None]:
    reading = asyncio.create_task(client.read())
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)
    return reading


def test_streams_share_what_a_door_delivers() -> None:
    door = Pace(max_per_s=100.0)
    with door.stream():
        assert door.interval_s == pytest.approx(0.01)
        with door.stream(), door.stream():
            assert door.interval_s == pytest.approx(0.03)
        assert door.interval_s == pytest.approx(0.01)


def test_no_stream_waits_for_long_however_many_there_are() -> None:
    door = Pace(max_per_s=NEVER)
    with door.stream():
        assert door.interval_s == 0.25


def test_what_comes_meanwhile_goes_together_and_is_the_same() -> None:
    often = read(ScriptedService(pieces=PIECES), max_deliveries_per_s=1e9)
    seldom = read(ScriptedService(pieces=PIECES), max_deliveries_per_s=10.0)
    assert often.pieces == seldom.pieces == PIECES
    assert len(often.deliveries) > 10 * len(seldom.deliveries)


def test_the_first_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_LONGEST_S", 1000.0)
    service = ScriptedService(hold_at=1)
    client = Client(service, DoorSettings(max_deliveries_per_s=NEVER))

    async def scenario() -> None:
        reading = await read_until(client, lambda: len(client.deliveries) == 1)
        service.release.set()
        await asyncio.wait_for(reading, 30)  # nor does the last

    asyncio.run(scenario())
    assert len(client.pieces) == len(service.pieces)


def test_much_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a client that reads could be taken for one that does not."""
    monkeypatch.setattr(pace, "_LONGEST_S", 1000.0)
    service = ScriptedService(pieces=PIECES, hold_at=40)
    client = Client(service, DoorSettings(max_deliveries_per_s=NEVER, max_unread_outputs=32))

    async def scenario() -> None:
        reading = await read_until(client, lambda: b"".join(client.deliveries).count(b"data:") >= 33)
        service.release.set()
        await asyncio.wait_for(reading, 30)

    asyncio.run(scenario())
    assert client.pieces == PIECES


@pytest.mark.parametrize("num_pieces", [1, 3])
def test_what_came_before_a_failure_is_delivered(num_pieces: int) -> None:
    client = read(ScriptedService(fail_after=num_pieces), max_deliveries_per_s=NEVER)
    assert len(client.pieces) == num_pieces
    assert "error" in client.events[-1]
