"""Clients that do not read what they have asked for: they may hold some memory, for some time.

A server that writes to the client's socket waits in `send` while the socket takes no more. `SlowReaders`
gives each part of a response so long; then the client counts as gone, like one that has closed its
connection.

Ray Serve's replicas are not told whether anybody reads: the response piles up in Serve's HTTP proxy, which
writes to the socket. So this runs in the proxy too (`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names
`proxy_middlewares`); how long to wait it finds in a header of the response.
"""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

WRITE_TIMEOUT_HEADER = "X-Write-Timeout"
"""Seconds that a client may let a stream wait."""
PROXY_CALLBACK = "deploy.openai.slow_readers:proxy_middlewares"
"""What `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` has to be where Serve's proxies are started."""


def proxy_middlewares() -> list[Middleware]:
    """Return what Serve's HTTP proxy runs around every application."""
    return [Middleware(SlowReaders)]


class SlowReaders:
    """Takes a client that reads too slowly for one that has left."""

    def __init__(self, app: ASGIApp, timeout_s: float | None = None) -> None:
        """`timeout_s` is put into responses' headers; None: it is what those say."""
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        writing = _Writing(receive, send, self._timeout_s)
        await self._app(scope, writing.receive, writing.send)


class _Writing:
    """One response."""

    def __init__(self, receive: Receive, send: Send, timeout_s: float | None) -> None:
        self._receive = receive
        self._send = send
        self._own_timeout_s = timeout_s
        self._timeout_s = timeout_s
        self._given_up = asyncio.Event()

    async def send(self, message: Message) -> None:
        """Send a part, unless the client has been given up."""
        if message["type"] == "http.response.start":
            self._settle_timeout(message)
        if self._given_up.is_set():
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError:
            self._given_up.set()

    def _settle_timeout(self, start: Message) -> None:
        if self._own_timeout_s is not None:
            MutableHeaders(raw=start["headers"])[WRITE_TIMEOUT_HEADER] = f"{self._own_timeout_s:g}"
            return
        text = Headers(raw=list(start.get("headers", ()))).get(WRITE_TIMEOUT_HEADER)
        self._timeout_s = _positive(text)

    async def receive(self) -> Message:
        """Return what the client sends, or that it has left."""
        arriving = asyncio.ensure_future(self._receive())
        giving_up = asyncio.ensure_future(self._given_up.wait())
        try:
            await asyncio.wait({arriving, giving_up}, return_when=asyncio.FIRST_COMPLETED)
            return arriving.result() if arriving.done() else {"type": "http.disconnect"}
        finally:
            arriving.cancel()
            giving_up.cancel()


def _positive(text: str | None) -> float | None:
    """Return the number of a header; None for what is none: it may be of any application."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0.0 < seconds < float("inf") else None
