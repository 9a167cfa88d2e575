"""Streams that bring nothing for a while: comments keep their connections, and no reader sees them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from benchmarks.reconnecting import Reading, read_stream
from deploy.load.generator import LoadGenerator, Timeline
from deploy.load.workload import PlannedRequest
from deploy.openai.settings import DoorSettings
from specdec.core.errors import CapacityError
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from tests.deploy.openai.fakes import PIECES, Door, ScriptedService, error_of, events_of
from tests.deploy.openai.live import live_server

COMMENT = b": keep-alive\n"
KEEP_ALIVE_S = 0.05
TEXT = "".join(PIECES)
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
}


@dataclass
class Pausing(ScriptedService):
    """Brings nothing for a while before some of its tokens."""

    before: tuple[int, ...] = (0, 3)
    pause_s: float = 4 * KEEP_ALIVE_S

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        if 0 in self.before:
            await asyncio.sleep(self.pause_s)
        async for output in super().generate(request):
            if output.first_index and output.first_index in self.before:
                await asyncio.sleep(self.pause_s)
            yield output


def door_of(service: ScriptedService | None = None, **settings: Any) -> Door:
    return Door(service or Pausing(), DoorSettings(**{"stream_keep_alive_s": KEEP_ALIVE_S} | settings))


def text_of(response: httpx.Response) -> str:
    pieces = [data["choices"][0] for _, data in events_of(response)[:-1]]
    return "".join(piece.get("text") or piece.get("delta", {}).get("content") or "" for piece in pieces)


def dispatched(content: bytes) -> list[tuple[str, str]]:
    """Return (last event id, data) of each event as browsers have them: EventSource's rules in full."""
    events = []
    event_id, data = "", ""
    for line in content.decode().split("\n"):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if data:
                events.append((event_id, data.removesuffix("\n")))
            data = ""
        elif name == "id":
            event_id = value
        elif name == "data":
            data += value + "\n"
    return events


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", PROMPTS)
def test_comments_come_between_events_and_belong_to_none(path: str, n: int) -> None:
    response = door_of().post(path, PROMPTS[path] | {"stream": True, "n": n})
    assert response.content.startswith(COMMENT), "before the first token"
    *blocks, end = response.content.split(b"\n\n")
    assert end == b""
    in_blocks = [re.fullmatch(rb"((?:: keep-alive\n)*)((?:id: \S+\n)?data: .*)", block) for block in blocks]
    assert all(in_blocks), "whole lines in front of an event, and no more than that"
    assert sum(bool(found and found[1]) for found in in_blocks) >= 2, "in the two pauses"
    unpaused = door_of(ScriptedService(), stream_keep_alive_s=None)
    plain = unpaused.post(path, PROMPTS[path] | {"stream": True, "n": n})
    assert COMMENT not in plain.content
    without = [data for _, data in dispatched(response.content.replace(COMMENT, b""))]
    assert [data for _, data in dispatched(response.content)] == without
    assert len(without) == len(dispatched(plain.content))
    assert text_of(response) == text_of(plain)


def test_openai_s_client_reads_a_stream_with_comments_whole() -> None:
    """Also behind an event with an id, where an empty line would make it an event without data."""

    async def scenario() -> tuple[list[str], list[str | None]]:
        transport = httpx.ASGITransport(door_of().app)
        http = httpx.AsyncClient(transport=transport, base_url="http://door")
        async with openai.AsyncOpenAI(base_url="http://door/v1", api_key="x", http_client=http) as client:
            stream = await client.completions.create(model="scripted", prompt="abc", stream=True)
            texts = [chunk.choices[0].text async for chunk in stream]
            messages: Any = PROMPTS["/v1/chat/completions"]["messages"]
            chat = await client.chat.completions.create(model="scripted", messages=messages, stream=True)
            contents = [chunk.choices[0].delta.content async for chunk in chat]
        return texts, contents

    texts, contents = asyncio.run(scenario())
    assert texts == list(PIECES)
    assert "".join(filter(None, contents)) == TEXT


def test_the_client_that_reconnects_reads_a_stream_with_comments_whole() -> None:
    async def scenario() -> Reading:
        transport = httpx.ASGITransport(door_of().app)
        body = {"prompt": "abc", "stream": True, "return_token_ids": True}
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            return await read_stream(client, "/v1/completions", body, patience_s=30, reading=Reading())

    reading = asyncio.run(scenario())
    assert (reading.is_complete, reading.text, reading.num_breaks) == (True, TEXT, 0)
    assert reading.token_ids == [5, 6, 7, 8, 9]


def test_load_tests_read_a_stream_with_comments_whole() -> None:
    async def scenario() -> Timeline:
        transport = httpx.ASGITransport(door_of().app)
        body = {"prompt": "abc", "stream": True, "stream_options": {"include_usage": True}}
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            generator = LoadGenerator(client, "/v1/completions")
            (timeline,) = await generator.run([PlannedRequest(at_s=0.0, body=body)], lambda _: None)
        return timeline

    timeline = asyncio.run(scenario())
    assert (timeline.error, timeline.num_output_tokens) == (None, len(PIECES))
    assert len(timeline.deliveries_s) == len(PIECES)


def test_a_comment_is_no_first_token() -> None:
    door = door_of(Pausing(before=(0,)))
    response = door.complete(stream=True)
    assert response.content.startswith(COMMENT)
    metrics = door.get("/metrics").text
    name = "ray_drafthouse_time_to_first_token_seconds"
    assert f"{name}_count 1.0\n" in metrics
    (seconds,) = re.findall(rf"^{name}_sum (\S+)$", metrics, re.MULTILINE)
    assert float(seconds) >= 4 * KEEP_ALIVE_S


def test_outputs_that_nobody_sees_are_a_silence() -> None:
    """A tool call is delivered when it is complete, however long its arguments are; here: no text."""
    service = Steady(pieces=("a", *[""] * 20, "b"))
    response = door_of(service, max_deliveries_per_s=25).complete(stream=True)
    assert text_of(response) == "ab"
    assert response.content.count(COMMENT) >= 2


class Steady(ScriptedService):
    """A token every twenty milliseconds: where deliveries are gathered, there is always one to be taken."""

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        async for output in super().generate(request):
            await asyncio.sleep(0.02)
            yield output


@pytest.mark.parametrize("path", PROMPTS)
def test_a_refusal_is_a_status_unless_comments_came_before_it(path: str) -> None:
    full = CapacityError("full", retry_after_s=3)
    body = PROMPTS[path] | {"stream": True}
    at_once = door_of(Pausing(before=(), refuse_with=full)).post(path, body)
    late = door_of(Pausing(refuse_with=full), stream_keep_alive_s=None).post(path, body)
    for response in (at_once, late):
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")
        assert error_of(response)["code"] == "rate_limit_exceeded"
    door = door_of(Pausing(refuse_with=full))
    assert streams_turned_away(door) == 0
    begun = door.post(path, body)
    assert begun.status_code == 200
    (_, error), (_, done) = events_of(begun)
    assert (error["error"]["code"], done) == ("rate_limit_exceeded", "[DONE]")
    assert streams_turned_away(door) == 1
    assert set(re.findall(r"streams_failed_total{.*} (\S+)", door.get("/metrics").text)) == {"0.0"}


def streams_turned_away(door: Door) -> float:
    (count,) = re.findall(r"(?m)^\w+_streams_turned_away_total (\S+)$", door.get("/metrics").text)
    return float(count)


def test_a_silent_stream_has_its_time_limit() -> None:
    started_s = time.monotonic()
    response = door_of(Pausing(pause_s=30)).complete(stream=True, timeout_s=0.3)
    assert time.monotonic() - started_s < 10
    (_, error), _ = events_of(response)
    assert error["error"]["code"] == "request_timeout"
    assert response.content.startswith(COMMENT)


def test_who_does_not_want_them_gets_no_comments() -> None:
    for door, fields in (
        (door_of(stream_keep_alive_s=None), {}),
        (door_of(), {"stream_options": {"event_ids": False}}),
    ):
        response = door.complete(stream=True, **fields)
        assert text_of(response) == TEXT
        assert COMMENT not in response.content
    assert door_of().complete().json()["choices"][0]["text"] == TEXT


def test_streams_without_ids_have_comments() -> None:
    response = door_of(resume_window_s=0).complete(stream=True)
    assert response.content.startswith(COMMENT + COMMENT)
    assert [place for place, _ in events_of(response)] == [None] * (len(PIECES) + 1)
    assert text_of(response) == TEXT


def test_a_stream_with_comments_is_resumed_behind_its_last_event() -> None:
    door = door_of()
    events = events_of(door.complete(stream=True))
    again = {"Last-Event-ID": str(events[2][0])}
    door.service.remembered = [(str(door.service.requests[0].request_id), (5, 6, 7, 8, 9))]
    response = door.post("/v1/completions", {"prompt": "abc", "stream": True}, headers=again)
    assert response.status_code == 200
    assert COMMENT in response.content
    assert door.service.requests[-1].delivered_token_ids == (5, 6, 7)


@dataclass
class Forgetful(ScriptedService):
    """Nobody remembers streams, and what is generated again takes its time. What was delivered does not come
    again."""

    replay_s: float = 8 * KEEP_ALIVE_S

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        if request.resumption is None:  # it is what is generated again
            await asyncio.sleep(self.replay_s)
        async for output in super().generate(request):
            if output.first_index >= len(request.delivered_token_ids):
                yield output


@pytest.mark.parametrize("path", PROMPTS)
def test_comments_come_while_the_tokens_of_a_resumed_stream_are_generated_again(path: str) -> None:
    body = PROMPTS[path] | {"stream": True}
    door = door_of(Forgetful())
    place = str(events_of(door.post(path, body))[3][0])
    response = door.post(path, body, headers={"Last-Event-ID": place})
    _, replayed, resumed = door.service.requests
    assert len(resumed.delivered_token_ids) == replayed.params.max_tokens > 2
    assert response.content.startswith(3 * COMMENT)
    assert [data for _, data in dispatched(response.content)][-1] == "[DONE]"
    quick = door_of(Forgetful(replay_s=0), stream_keep_alive_s=None)
    at_once = quick.post(path, body, headers={"Last-Event-ID": place})
    assert COMMENT not in at_once.content
    sent_s = re.compile(rb":\d+:(?=[0-9a-f]{8}\.)")
    with_comments = sent_s.sub(b"", response.content.replace(COMMENT, b""))
    assert with_comments == sent_s.sub(b"", at_once.content), "the same events, with the same ids"


@pytest.mark.parametrize(
    ("fail_after", "code", "status"), [(None, "resume_lost", 410), (1, "non_finite_logits", 500)]
)
def test_a_stream_that_is_not_resumed_after_a_comment_keeps_its_place(
    fail_after: int | None, code: str, status: int
) -> None:
    body = {"prompt": "abc", "stream": True}
    place = str(events_of(door_of(Forgetful()).post("/v1/completions", body))[2][0])
    if fail_after is None:
        place = re.sub(r"\.[0-9a-f]+$", ".1", place)  # the checksum of other tokens
    headers = {"Last-Event-ID": place}
    door = door_of(Forgetful(fail_after=fail_after))
    response = door.post("/v1/completions", body, headers=headers)
    assert response.status_code == 200
    assert response.content.startswith(COMMENT)
    (event_id, error), (_, done) = events_of(response)
    assert (event_id, error["error"]["code"], done) == (place, code, "[DONE]")
    counted = re.findall(r"streams_failed_total{.*} (\S+)", door.get("/metrics").text)
    assert sum(map(float, counted)) == (fail_after is not None)
    at_once = door_of(Forgetful(fail_after=fail_after, replay_s=0)).post(
        "/v1/completions", body, headers=headers
    )
    assert (at_once.status_code, error_of(at_once)["code"]) == (status, code)


def test_who_leaves_while_tokens_are_generated_again_is_noticed() -> None:
    place = str(events_of(door_of(Forgetful()).complete(stream=True))[2][0])
    service = ScriptedService(hold_at=0)
    with live_server(door_of(service).app) as url, httpx.Client(timeout=30) as client:
        body, headers = {"prompt": "abc", "stream": True}, {"Last-Event-ID": place}
        with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
            assert response.status_code == 200
            assert next(response.iter_raw()) == COMMENT
        until_s = time.monotonic() + 10
        while not service.closed and time.monotonic() < until_s:
            time.sleep(0.01)
        closed = list(service.closed)  # what the server's end closes is another matter
    assert closed == [service.requests[0].request_id], "nothing is generated for nobody"


def test_who_leaves_in_a_silence_is_noticed() -> None:
    door = door_of(ScriptedService(hold_at=0))
    with live_server(door.app) as url, httpx.Client(timeout=30) as client:
        with client.stream(
            "POST", f"{url}/v1/completions", json={"prompt": "abc", "stream": True}
        ) as response:
            assert response.status_code == 200
            assert next(response.iter_raw()) == COMMENT
        until_s = time.monotonic() + 10
        while not door.service.closed and time.monotonic() < until_s:
            time.sleep(0.01)
    assert door.service.aborted == door.service.closed == [door.service.requests[0].request_id]
