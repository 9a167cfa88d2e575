"""Server-sent events, and a response that notices at once when its client leaves.

Every event carries `id: REQUEST:N[,N...]`: the response id and, per choice, how many generated tokens
the events up to this one account for. It says where a reconnecting client (`Last-Event-ID`) is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from msgspec import UNSET
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deploy.openai.errors import api_error_of, internal_error
from deploy.openai.outputs import ChoiceOutputs
from deploy.openai.protocol import ChatBody
from deploy.openai.requests import PreparedRequest
from deploy.openai.responses import ChatChunks, ChoiceResult, CompletionChunks, metrics_of, usage_of
from deploy.openai.tokenization import DoorTokenizer

T = TypeVar("T")
logger = logging.getLogger(__name__)
_DONE = b"data: [DONE]\n\n"
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
    """The events of one streamed request."""

    def __init__(self, prepared: PreparedRequest, outputs: ChoiceOutputs, tokenizer: DoorTokenizer) -> None:
        chunks = ChatChunks if isinstance(prepared.body, ChatBody) else CompletionChunks
        self._chunks = chunks(prepared, tokenizer)
        self._prepared = prepared
        self._outputs = outputs
        self._results = [ChoiceResult() for _ in prepared.requests]

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield encoded events; the first one only when the first output is there.

        Until then a failure is raised (it becomes a status code); afterwards it becomes an error event.
        """
        is_open = False
        async with self._outputs as outputs:
            try:
                async for index, output in outputs:
                    if not is_open:
                        is_open = True
                        for choice in range(len(self._results)):
                            opening = self._chunks.opening(choice)
                            if opening is not None:
                                yield self._event(opening)
                    self._results[index].count(output)
                    for chunk in self._chunks.pieces(index, output):
                        yield self._event(chunk)
            except Exception as error:
                if not is_open:
                    raise
                yield self._error_event(error)
                yield _DONE
                return
        closing = self._closing()
        if closing is not None:
            yield closing
        yield _DONE

    def _closing(self) -> bytes | None:
        body = self._prepared.body
        if not (body.include_usage or body.return_metrics):
            return None
        usage = usage_of(self._prepared, self._results) if body.include_usage else UNSET
        metrics = metrics_of(self._results) if body.return_metrics else UNSET
        return self._event(self._chunks.closing(usage, metrics))

    def _event(self, data: bytes) -> bytes:
        counts = ",".join(str(result.num_tokens) for result in self._results)
        return b"id: %s:%s\ndata: %s\n\n" % (self._prepared.response_id.encode(), counts.encode(), data)

    def _error_event(self, error: Exception) -> bytes:
        api_error = api_error_of(error)
        if api_error is None:
            logger.error("request %s failed", self._prepared.response_id, exc_info=error)
            api_error = internal_error()
        return self._event(api_error.body())


class EventStreamResponse(Response):
    """Sends events as they come; closes their source when they end or when the client leaves."""

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
        async for event in self._rest:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
