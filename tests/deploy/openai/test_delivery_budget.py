"""Deliveries of streams: what is there goes together, less often with many; first and last at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.types import Message

from deploy.openai import delivery_budget
from deploy.openai.app import create_app
from deploy.openai.delivery_budget import DeliveryBudget
from deploy.openai.metrics import DoorMetrics
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.core.errors import CapacityError
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from tests.architectures import make_tokenizer
from tests.deploy.openai.fakes import ScriptedService

PIECES = tuple(f"{number} " for number in range(100))
ITL = "ray_drafthouse_inter_token_latency_seconds"
NEVER = 1e-6
"""Deliveries per second: as seldom as may be."""


class Client:
    """One that reads a stream, message by message."""

    def __init__(self, service: ScriptedService, settings: DoorSettings) -> None:
        self.metrics = DoorMetrics()
        self._app = create_app(
            service, settings, HuggingFaceTokenizer(make_tokenizer()), metrics=self.metrics
        )
        self._is_asked = False
        self.deliveries: list[bytes] = []
        self.fields: dict[str, Any] = {}

    async def read(self) -> None:
        fields = {"model": "scripted", "prompt": "x", "stream": True, "max_tokens": 100} | self.fields
        body = json.dumps(fields).encode()
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

    def gaps(self) -> tuple[float, float]:
        """Return number and sum of the times between deliveries, as the door's metrics have them."""
        values = [self.metrics.registry.get_sample_value(f"{ITL}_{name}") for name in ("count", "sum")]
        assert None not in values
        return values[0] or 0.0, values[1] or 0.0

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
    door = DeliveryBudget(max_per_s=100.0)
    with door.stream():
        assert door.interval_s == pytest.approx(0.01)
        with door.stream(), door.stream():
            assert door.interval_s == pytest.approx(0.03)
        assert door.interval_s == pytest.approx(0.01)


def test_no_stream_waits_for_long_however_many_there_are() -> None:
    door = DeliveryBudget(max_per_s=NEVER)
    with door.stream():
        assert door.interval_s == 0.25


def test_what_comes_meanwhile_goes_together_and_is_the_same() -> None:
    often = read(ScriptedService(pieces=PIECES), max_deliveries_per_s=1e9)
    seldom = read(ScriptedService(pieces=PIECES), max_deliveries_per_s=10.0)
    assert often.pieces == seldom.pieces == PIECES
    assert len(often.deliveries) > 10 * len(seldom.deliveries)


def test_the_first_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery_budget, "_LONGEST_S", 1000.0)
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
    monkeypatch.setattr(delivery_budget, "_LONGEST_S", 1000.0)
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


class Steady(ScriptedService):
    """A token every two milliseconds."""

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        async for output in super().generate(request):
            yield output
            await asyncio.sleep(0.002)


def test_times_between_tokens_are_those_that_clients_see() -> None:
    """Where tokens are gathered for a tenth of a second, that, though each comes after two milliseconds."""
    seldom = read(Steady(pieces=PIECES), max_deliveries_per_s=10.0)
    number, seconds = seldom.gaps()
    assert number == len(seldom.deliveries) - 1
    assert seconds / number > 0.05
    often = read(Steady(pieces=PIECES), max_deliveries_per_s=1e9)
    number, seconds = often.gaps()
    assert number == len(often.deliveries) - 1 > 50
    assert seconds / number < 0.05


def test_each_choice_has_times_of_its_own_however_deliveries_are_shared() -> None:
    pieces = tuple(f"{number} " for number in range(8))
    client = Client(ScriptedService(pieces=pieces), DoorSettings(max_deliveries_per_s=1e9))
    client.fields = {"n": 3}
    asyncio.run(asyncio.wait_for(client.read(), 60))
    number, _ = client.gaps()
    assert 0 < number <= 3 * min(len(client.deliveries), len(pieces) - 1)
    first = client.metrics.registry.get_sample_value("ray_drafthouse_time_to_first_token_seconds_count")
    ends = client.metrics.registry.get_sample_value("ray_drafthouse_e2e_request_latency_seconds_count")
    assert (first, ends) == (3.0, 3.0)


def test_what_is_not_delivered_is_not_timed() -> None:
    """A refusal, and a failure before the first token."""
    for service in (
        ScriptedService(refuse_with=CapacityError("full", retry_after_s=1)),
        ScriptedService(fail_after=0),
    ):
        client = Client(service, DoorSettings())
        asyncio.run(asyncio.wait_for(client.read(), 60))
        assert client.gaps() == (0.0, 0.0)
