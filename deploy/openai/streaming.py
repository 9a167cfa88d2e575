"""Server-sent events, and a response that notices at once when its client leaves.

Every event but `[DONE]` carries an id that begins with `RESPONSE:N[,N...]`: the response id and, per choice,
how many generated tokens the events up to this one account for. It says where a reconnecting client
(`Last-Event-ID`) is; `resumption` has the rest of it. There are none where streams cannot be resumed, or
where the client wants none. Between events there are comments where nothing has come for a while, so that
nobody in front takes the connection for dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.openai.delivery_budget import DeliveryBudget
from deploy.openai.failures import RequestFailures
from deploy.openai.logprobs import INLINE_LOGPROBS, num_logprobs_of
from deploy.openai.outputs import ChoiceOutputs
from deploy.openai.protocol import ChatBody, GenerationBody
from deploy.openai.requests import PreparedRequest
from deploy.openai.responses import (
    ChatChunks,
    ChoiceResult,
    CompletionChunks,
    RunningUsage,
    metrics_of,
    usage_of,
)
from deploy.openai.resumption import ChoicePosition, Delivered, format_event_id
from deploy.openai.tokenization import DoorTokenizer
from deploy.openai.work_beside import WorkBeside
from specdec.core.outputs import RequestOutput

T = TypeVar("T")
_DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n"
"""A line of the event to come, which clients skip. An empty line behind it would be the end of an event, for
some of one that has no data: OpenAI's client takes the last id that has come for its beginning."""
_LINE_ENDS = tuple((one.encode(), b"\\u%04x" % ord(one)) for one in "\x85\u2028\u2029")
"""What some clients take for the end of a line, though it is none in server-sent events (httpx's
`iter_lines`), and how JSON writes it so that nobody does. In UTF-8 no other character holds these bytes."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ClientLeft(Exception):
    """The client closed the connection before the response was complete."""


async def until_client_leaves(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Run `work`, but cancel it as soon as the client disconnects.

    The request's body must have been received. Raises whatever `work` raises.

    Raises:
        ClientLeft: the client disconnected; `work` has been cancelled and has ended.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientLeft
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """The events of one streamed request, or those that a client who has come back does not have yet."""

    def __init__(
        self,
        prepared: PreparedRequest,
        outputs: ChoiceOutputs,
        tokenizer: DoorTokenizer,
        budget: DeliveryBudget,
        failures: RequestFailures,
        beside: WorkBeside,
    ) -> None:
        """`outputs` are those of all requests of `prepared`; `budget` and `beside` are the door's."""
        is_chat = isinstance(prepared.body, ChatBody)
        self._chunks = (ChatChunks if is_chat else CompletionChunks)(prepared, tokenizer)
        self._prepared = prepared
        self._outputs = outputs
        self._budget = budget
        self._failures = failures
        self._beside = beside
        self._results = [ChoiceResult() for _ in prepared.requests]
        self._positions = [ChoicePosition(is_open=not is_chat) for _ in prepared.requests]
        self._is_ended = False
        self._running = list(range(len(prepared.requests)))
        """Choices that `outputs` has, in its order."""

    def skip(
        self, positions: Sequence[ChoicePosition], delivered: Mapping[int, Delivered], *, is_ended: bool
    ) -> None:
        """Leave out what a client has already; `outputs` are of the choices that are not finished there.

        `is_ended` means that it has the closing event too.
        """
        self._is_ended = is_ended
        self._positions = list(positions)
        self._running = [index for index, position in enumerate(positions) if not position.is_finished]
        for result, position in zip(self._results, positions, strict=True):
            result.num_tokens = position.num_tokens
        for index, what in delivered.items():
            self._chunks.skip(index, what.token_ids, what.text, what.finish_reason)

    async def deliveries(self, keep_alive: KeepAlive) -> AsyncGenerator[bytes]:
        """Yield encoded events, those together that are there at once, and a comment after each silence.

        Until the first of either a failure is raised (it becomes a status code); afterwards it becomes an
        error event.
        """
        has_begun = is_open = False
        events: list[bytes] = []
        taken: list[tuple[int, RequestOutput]] = []
        """What is in `events`."""
        with self._budget.stream():
            try:
                async with self._outputs as outputs:  # which hear of what has failed
                    while not outputs.is_complete:
                        if await outputs.is_silent(keep_alive.due_s):
                            has_begun = True
                            yield keep_alive.or_comment(b"")
                            continue
                        running, output = await anext(outputs)
                        if not is_open:
                            has_begun = is_open = True
                            events += self._openings()
                        events += await self._events_of(self._running[running], output)
                        taken.append((running, output))
                        if outputs.is_waiting or outputs.is_complete:
                            continue
                        outputs.note_delivery(taken)
                        taken.clear()
                        yield keep_alive.or_comment(b"".join(events))
                        events.clear()
                        await outputs.gather(self._budget.interval_s)
            except Exception as error:
                if not has_begun:
                    raise
                num_tokens = sum(result.num_tokens for result in self._results)
                events.append(self._event(self._failures.take(error, num_tokens)))
            else:
                events += self._closing()
        self._outputs.note_delivery(taken)
        yield b"".join((*events, _DONE))

    def _openings(self) -> Iterator[bytes]:
        for choice, position in enumerate(self._positions):
            opening = None if position.is_open else self._chunks.opening(choice, self._running_usage())
            position.is_open = True
            if opening is not None:
                yield self._event(opening)

    async def _events_of(self, index: int, output: RequestOutput) -> list[bytes]:
        if num_logprobs_of(output) <= INLINE_LOGPROBS:
            return list(self._shaped(index, output))
        return await self._beside.do(lambda: list(self._shaped(index, output)))

    def _shaped(self, index: int, output: RequestOutput) -> Iterator[bytes]:
        self._results[index].count(output)
        self._positions[index].count(output)
        chunks = self._chunks.pieces(index, output, self._running_usage())
        for number, chunk in enumerate(chunks, 1):
            if number == len(chunks):
                self._positions[index].is_finished = output.finish_reason is not None
            yield self._event(chunk)

    def _running_usage(self) -> RunningUsage:
        body = self._prepared.body
        if body.has_running_usage:
            return usage_of(self._prepared, self._results)
        return None if body.include_usage else UNSET

    def _closing(self) -> Iterator[bytes]:
        body = self._prepared.body
        if self._is_ended or not (body.include_usage or body.return_metrics):
            return
        usage = usage_of(self._prepared, self._results) if body.include_usage else UNSET
        metrics = metrics_of(self._results) if body.return_metrics else UNSET
        yield self._event(self._chunks.closing(usage, metrics), is_ended=True)

    def _event(self, data: bytes, *, is_ended: bool = False) -> bytes:
        if not self._prepared.has_event_ids:
            return _event(data)
        return _event(data, format_event_id(self._prepared, self._positions, is_ended=is_ended))


def _event(data: bytes, event_id: bytes | None = None) -> bytes:
    for character, escape in _LINE_ENDS:
        if character in data:
            data = data.replace(character, escape)
    return b"data: %s\n\n" % data if event_id is None else b"id: %s\ndata: %s\n\n" % (event_id, data)


async def resumed_deliveries(
    find: Callable[[], Coroutine[Any, Any, EventStream]],
    keep_alive: KeepAlive,
    failures: RequestFailures,
    event_id: str,
) -> AsyncGenerator[bytes]:
    """Yield the deliveries of a stream that has to be found first; until it is, a comment after each silence.

    Failures are as in `EventStream.deliveries`. `event_id` is that of the last event that the client has: it
    stays so where the stream is not found.
    """
    has_begun = False
    work = asyncio.ensure_future(find())
    try:
        while await keep_alive.is_due_before(work):
            has_begun = True
            yield keep_alive.or_comment(b"")
        deliveries = work.result().deliveries(keep_alive)
        first = await anext(deliveries)
    except Exception as error:
        if not has_begun:
            raise
        yield _event(failures.take(error), event_id.encode()) + _DONE
        return
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    async with contextlib.aclosing(deliveries):
        yield first
        async for delivery in deliveries:
            yield delivery


class KeepAlive:
    """When a stream is to get a comment, also where outputs come that clients see nothing of: a tool call is
    delivered when it is complete."""

    def __init__(self, body: GenerationBody, after_s: float | None) -> None:
        """Begin now. `after_s` without a delivery bring a comment; None: they do not."""
        # Who wants no ids takes every line for JSON.
        self._after_s = math.inf if after_s is None or not body.wants_event_ids else after_s
        self.due_s = asyncio.get_running_loop().time() + self._after_s
        """By the loop's clock."""

    async def is_due_before(self, work: asyncio.Future[Any]) -> bool:
        """Wait for `work`, until a comment is due; return whether it is."""
        await asyncio.wait({work}, timeout=max(0.0, self.due_s - asyncio.get_running_loop().time()))
        return not work.done()

    def or_comment(self, delivery: bytes) -> bytes:
        """Return what is to be written now: a comment instead of an empty delivery, if one is due."""
        now_s = asyncio.get_running_loop().time()
        if not delivery and now_s < self.due_s:
            return delivery
        self.due_s = now_s + self._after_s
        return delivery or _KEEP_ALIVE


class EventStreamResponse(Response):
    """Sends deliveries as they come; closes their source when they end or when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        async with contextlib.aclosing(self._rest):
            with contextlib.suppress(ClientLeft):
                await until_client_leaves(self._send_all(send), receive)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for delivery in self._rest:
            await send({"type": "http.response.body", "body": delivery, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
