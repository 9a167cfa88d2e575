"""Sends requests when they are due, however the server does, and notes when what came.

Times are those of the event loop's clock, from the start of the run. Latencies count from when a request was
due, not from when it was sent: a generator that cannot keep up would flatter the server else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
from pydantic_core import from_json

from deploy.load.client import kind_of
from deploy.load.workload import PlannedRequest

_DONE = b"[DONE]"
_DATA = b"data:"
_END_S = 1.0
"""So long an answer that is complete is read on, for the sake of its connection."""
_MAX_REFUSAL_BYTES = 1 << 16
_MAX_REASON = 200
"""Characters."""
INCOMPLETE = "incomplete stream"
EMPTY = "empty stream"
NO_EVENT = "not an event of OpenAI's API"


@dataclass(slots=True, kw_only=True)
class Timeline:
    """What became of one request."""

    due_s: float
    sent_s: float = 0.0
    deliveries_s: list[float] = field(default_factory=list)
    """When text came; one delivery may bring several tokens."""
    ended_s: float = 0.0
    num_prompt_tokens: int | None = None
    """None: the server does not say."""
    num_output_tokens: int | None = None
    """As the server counts; the number of deliveries where it does not say."""
    error: str | None = None
    """What kind of failure; None: complete."""
    reason: str | None = None
    """What the server said of the failure."""


class _Failed(Exception):
    """The request failed; the text is the kind of failure."""

    def __init__(self, kind: str, reason: str | None = None) -> None:
        super().__init__(kind)
        self.reason = reason


class LoadGenerator:
    """One run."""

    def __init__(self, client: httpx.AsyncClient, path: str) -> None:
        """`client` has the server as its base URL, and as many connections as there may be requests
        (`load_client`)."""
        self._client = client
        self._template = client.build_request("POST", path, headers={"Content-Type": "application/json"})
        self._template.headers.pop("Content-Length", None)  # of no body
        self._start_s = 0.0

    async def run(
        self, planned: Sequence[PlannedRequest], on_end: Callable[[Timeline], None]
    ) -> list[Timeline]:
        """Send every request at its time; return their timelines, in the same order, when all have ended."""
        self._start_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request in planned:
                await asyncio.sleep(max(0.0, request.at_s - self._now_s()))
                tasks.append(group.create_task(self._one(request, on_end)))
        return [task.result() for task in tasks]

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._start_s

    async def _one(self, request: PlannedRequest, on_end: Callable[[Timeline], None]) -> Timeline:
        timeline = Timeline(due_s=request.at_s, sent_s=self._now_s())
        try:
            response = await self._client.send(self._request(request.body), stream=True)
            async with contextlib.aclosing(response):
                if response.status_code != 200:
                    raise _Failed(f"status {response.status_code}", await _reason(response))
                await self._receive(response, timeline)
        except _Failed as failure:
            timeline.error, timeline.reason = str(failure), failure.reason
        except httpx.HTTPError as error:
            timeline.error = kind_of(error)
        timeline.ended_s = timeline.ended_s or self._now_s()
        on_end(timeline)
        return timeline

    def _request(self, body: Mapping[str, Any]) -> httpx.Request:
        """Return a request like all others: to put its address together anew takes longer than to send it.

        None has the cookies of answers before, which would lead all of them to one of several servers.
        """
        template = self._template
        return httpx.Request(
            template.method,
            template.url,
            headers=template.headers,
            content=msgspec.json.encode(body),
            extensions=template.extensions,
        )

    async def _receive(self, response: httpx.Response, timeline: Timeline) -> None:
        has_answer = False
        lines = _lines(response)
        async for line in lines:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == _DONE:
                timeline.ended_s = self._now_s()
                break
            has_answer |= self._note(_event(data), timeline)
        else:
            raise _Failed(INCOMPLETE)
        if not has_answer:  # no text, and no end of one: nobody could be served faster
            raise _Failed(EMPTY)
        if timeline.num_output_tokens is None:
            timeline.num_output_tokens = len(timeline.deliveries_s)
        # A connection is used again if its answer has been read to the end, which may come a moment later;
        # else the next request has to wait for a new one, and for its handshake.
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(_END_S):
                async for _ in lines:
                    pass

    def _note(self, event: Mapping[str, Any], timeline: Timeline) -> bool:
        """Write down what an event brings; return whether it is a part of an answer, be it only its end."""
        error = event.get("error")
        if error:
            code = error.get("code") if isinstance(error, dict) else None
            raise _Failed(f"error event {code}" if code else "error event", _message(event))
        choices = _objects(event.get("choices") or [])
        has_text = any(_has_text(choice) for choice in choices)
        if has_text:
            timeline.deliveries_s.append(self._now_s())
        for usage in _objects([event.get("usage") or {}]):
            timeline.num_prompt_tokens = _count(usage, "prompt_tokens", timeline.num_prompt_tokens)
            timeline.num_output_tokens = _count(usage, "completion_tokens", timeline.num_output_tokens)
        return has_text or any(choice.get("finish_reason") for choice in choices)


async def _reason(response: httpx.Response) -> str | None:
    """Read what the body of a refusal says, in OpenAI's form or as text, as far as it comes soon."""
    body = b""
    with contextlib.suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(_END_S):
            async for data in response.aiter_bytes():
                body += data
                if len(body) > _MAX_REFUSAL_BYTES:
                    break
    try:
        return _message(from_json(body))
    except ValueError:
        return _shortened(body.decode(errors="replace"))


def _message(answer: object) -> str | None:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return _shortened(message) if isinstance(message, str) else None


def _shortened(text: str) -> str | None:
    line = " ".join(text.split())
    return (line if len(line) <= _MAX_REASON else line[: _MAX_REASON - 3] + "...") or None


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yield lines as server-sent events have them.

    Those of `aiter_lines` end at what Unicode calls a line's end, too, which JSON may hold as it is (U+2028).
    """
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _event(data: bytes) -> Mapping[str, Any]:
    try:
        event = from_json(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise _Failed("not JSON")
    return event


def _objects(values: Any) -> list[Mapping[str, Any]]:
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise _Failed(NO_EVENT)
    return values


def _count(usage: Mapping[str, Any], name: str, before: int | None) -> int | None:
    number = usage.get(name)
    if number is not None and (not isinstance(number, int) or number < 0):
        raise _Failed(NO_EVENT)
    return before if number is None else number


def _has_text(choice: Mapping[str, Any]) -> bool:
    (delta,) = _objects([choice.get("delta") or {}])
    return bool(choice.get("text") or any(delta.get(name) for name in _TEXTS))


_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
"""What a model's words may be called: vLLM and OpenRouter call what it thinks `reasoning`, others
`reasoning_content`."""
