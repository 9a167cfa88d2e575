"""A client that reads a stream to its end, whatever happens to its connection.

When the connection breaks, or the server says that it cannot serve just now, it sends the same request again
with the id of the last event that it has (`Last-Event-ID`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

_NOT_NOW = frozenset({429, 500, 502, 503, 504})
_WAIT_S = 0.25


@dataclass(slots=True, kw_only=True)
class Reading:
    """What came of one stream."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    is_complete: bool = False
    num_breaks: int = 0
    """Connections that broke after they had brought events."""
    num_error_events: int = 0
    refusal: str | None = None
    """What made the client give up."""
    event_id: str | None = None
    last_event_s: float = 0.0
    longest_pause_s: float = 0.0
    """Between two events, or between the request and the first."""


class _Broken(Exception):
    """This connection brings nothing more."""


async def read_stream(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], *, patience_s: float, reading: Reading
) -> Reading:
    """Fill `reading` from a streamed completion, until it is complete or the server refuses to go on.

    `patience_s` is how long no event may come before the client gives up; `body` asks for token ids.
    """
    reading.last_event_s = time.monotonic()
    while not reading.is_complete and reading.refusal is None:
        if time.monotonic() - reading.last_event_s > patience_s:
            reading.refusal = f"no event for {patience_s:g} s"
            break
        num_before = len(reading.token_ids)
        try:
            await _read_connection(client, path, body, reading)
        except (httpx.HTTPError, _Broken):
            reading.num_breaks += len(reading.token_ids) > num_before
            await asyncio.sleep(_WAIT_S)
    return reading


async def _read_connection(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], reading: Reading
) -> None:
    headers = {} if reading.event_id is None else {"Last-Event-ID": reading.event_id}
    async with client.stream("POST", path, json=body, headers=headers) as response:
        if response.status_code != 200:
            content = (await response.aread()).decode(errors="replace")
            if response.status_code in _NOT_NOW:
                raise _Broken(content)
            reading.refusal = f"{response.status_code}: {content[:300]}"
            return
        async for event_id, data in _events(response):
            now_s = time.monotonic()
            reading.longest_pause_s = max(reading.longest_pause_s, now_s - reading.last_event_s)
            reading.last_event_s = now_s
            if data == "[DONE]":
                reading.is_complete = True
                return
            event = json.loads(data)
            if "error" in event:
                reading.num_error_events += 1
                raise _Broken(data)
            reading.event_id = event_id
            for choice in event["choices"]:
                reading.text += choice["text"]
                reading.token_ids += choice["token_ids"]
                reading.finish_reason = choice["finish_reason"] or reading.finish_reason
    raise _Broken("the body ended early")


async def _events(response: httpx.Response) -> AsyncIterator[tuple[str | None, str]]:
    """Yield (id, data) of whole events."""
    event_id: str | None = None
    data: str | None = None
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            data = line[6:]
        elif not line and data is not None:
            yield event_id, data
            event_id, data = None, None
