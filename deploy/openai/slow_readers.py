"""Clients that do not read what they have asked for: they may hold some memory, for some time.

A server that writes to the client's socket waits in `send` while the socket takes no more. `SlowReaders`
bounds how long a client may be waited for: `write_timeout_s`, and a second more for every 16 KiB that it
takes. So one that takes one buffer now and then, to hold all of a long response for hours, is out after
little more than the timeout, and a slow link (128 kbit/s and more) gets the longest response. What a client
is behind is forgotten as time passes in which there is nothing to be sent, for then it is not.
A client that is waited for too long counts as gone, like one that has closed its connection.

Ray Serve's replicas are not told whether anybody reads: Serve takes whatever an application sends at once,
so that a response piles up in its queues, in the replica and in Serve's HTTP proxy, which writes to the
socket. So this runs in the proxy too (`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `proxy_middlewares`);
how long to wait it finds in a header of the response. Where HAProxy speaks to the doors, Serve runs it in
front of each door: HAProxy takes no more than it gets rid of.
"""

from __future__ import annotations

import asyncio
import os

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.openai.serve_headers import SESSION_VARIABLE, ServeHeaders
from deploy.openai.without_route import WithoutRoute

WRITE_TIMEOUT_HEADER = "X-Write-Timeout"
"""Seconds that a client may let a stream wait."""
PROXY_CALLBACK = "deploy.openai.slow_readers:proxy_middlewares"
"""What `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` has to be where Serve's proxies are started."""
LEAST_BYTES_PER_S = 16 << 10
"""Who takes that much may take all the time that the response needs so."""


def proxy_middlewares() -> list[Middleware]:
    """Return what Serve's HTTP proxy runs around every application; the last is the outermost.

    Serve calls it before it starts its server, whose HTTP gets its bounds here: there is no other way to it.
    """
    from deploy.openai import bounded_http
    from deploy.openai.early_refusals import EarlyRefusals

    bounded_http.install()
    return [
        Middleware(WithoutRoute),
        Middleware(SlowReaders),
        Middleware(EarlyRefusals),
        Middleware(ServeHeaders, session_header=os.environ.get(SESSION_VARIABLE)),
    ]


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
        self._patience = None if timeout_s is None else Patience(timeout_s)
        self._given_up = asyncio.Event()

    async def send(self, message: Message) -> None:
        """Send a part, unless the client has been given up."""
        if message["type"] == "http.response.start":
            self._settle_timeout(message)
        if self._given_up.is_set():
            return
        if self._patience is None:
            await self._send(message)
            return
        now_s = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout_at(self._patience.begin(now_s())):
                await self._send(message)
        except TimeoutError:
            self._given_up.set()
        self._patience.end(now_s(), len(message.get("body", b"")))

    def _settle_timeout(self, start: Message) -> None:
        if self._own_timeout_s is not None:
            MutableHeaders(raw=start["headers"])[WRITE_TIMEOUT_HEADER] = f"{self._own_timeout_s:g}"
            return
        text = Headers(raw=list(start.get("headers", ()))).get(WRITE_TIMEOUT_HEADER)
        timeout_s = _positive(text)
        self._patience = None if timeout_s is None else Patience(timeout_s)

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


class Patience:
    """How long a client is waited for, over all parts of a response.

    That a part is taken at once does not mean that the client has caught up: after a wait many are, as long
    as they fit its connection's buffer.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._behind_s = 0.0
        """Seconds of waiting that neither idle time nor what was taken has made up for."""
        self._worth_s = 0.0
        """Of the part before: it may still lie in the buffer."""
        self._begun_s: float | None = None
        self._ended_s: float | None = None

    def begin(self, now_s: float) -> float:
        """Return until when the client is waited for to take the next part."""
        if self._ended_s is not None:
            self._behind_s = max(0.0, self._behind_s - (now_s - self._ended_s))
        self._begun_s = now_s
        return now_s + self._timeout_s - self._behind_s + self._worth_s

    def end(self, now_s: float, num_bytes: int) -> None:
        """Count a part that has been handed over."""
        assert self._begun_s is not None
        waited_s = now_s - self._begun_s
        self._behind_s = max(0.0, self._behind_s + waited_s - self._worth_s)
        self._worth_s = num_bytes / LEAST_BYTES_PER_S
        self._ended_s = now_s


def _positive(text: str | None) -> float | None:
    """Return the number of a header; None for what is none: it may be of any application."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0.0 < seconds < float("inf") else None
