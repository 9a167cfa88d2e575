"""Refuses, before Ray Serve has begun with a request, what the door behind it would refuse (`KnownRefusals`).

Where HAProxy speaks to the doors, Serve runs what its proxy would run in front of each door, in the door's
process. Most of what a refusal costs is behind that: Serve's own way to the application, and its layers. The
door says which refusals are known (`refuse_early`); where Serve's Python proxy is in front, that runs in
another process, and the door looks at them itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.openai.errors import api_error_of
from deploy.openai.known_refusals import Demand, KnownRefusals, demand_of
from deploy.openai.metrics import GENERATING_ROUTES
from deploy.openai.requests import ENCODING_HEADER, TIMEOUT_HEADER
from deploy.openai.resumption import HEADER as LAST_EVENT_ID
from deploy.openai.serve_headers import REQUEST_ID
from specdec.core.errors import CapacityError

_WRITE_S = 30.0
_SOON_S = 0.05
"""A body that is not here by then is left to the door, which says for how long it waits."""


class _Here:
    """What is known in this process."""

    known: KnownRefusals | None = None


def refuse_early(known: KnownRefusals | None) -> None:
    """Have requests of this process refused by what is known; None: by the door alone."""
    _Here.known = known


class EarlyRefusals:
    """ASGI middleware of Serve's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        known = _Here.known
        route = None if known is None or not known.has_any() else _route(scope)
        if known is None or route is None:
            await self._app(scope, receive, send)
            return
        # It is waited for, not cancelled: what it was about to return would be lost.
        first = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({first}, timeout=_SOON_S)
            try:
                known.check(_demand_of(route, scope, first))
            except CapacityError as refusal:
                await _refuse(refusal, known, route, scope, receive, send)
                return
            await self._app(scope, _beginning_with(first, receive), send)
        finally:
            first.cancel()


def _demand_of(route: str, scope: Scope, first: asyncio.Future[Message]) -> Demand | None:
    """Return what is asked for; None where not all of it is here."""
    if not first.done():
        return None
    message = first.result()
    if message["type"] != "http.request" or message.get("more_body", False):
        return None
    headers = Headers(scope=scope)
    return demand_of(
        route, message.get("body", b""), headers.get("authorization"), headers.get(TIMEOUT_HEADER)
    )


def _beginning_with(first: asyncio.Future[Message], receive: Receive) -> Receive:
    is_first = True

    async def receive_again() -> Message:
        nonlocal is_first
        if not is_first:
            return await receive()
        message = await asyncio.shield(first)
        is_first = False
        return message

    return receive_again


def _route(scope: Scope) -> str | None:
    """Return the route of a request for text that may be refused; None: it is something else."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    headers = Headers(scope=scope)
    if LAST_EVENT_ID in headers or ENCODING_HEADER in headers:
        return None
    path: str = scope["path"].removesuffix("/")
    return path if path in GENERATING_ROUTES else None  # under a prefix the door looks itself


async def _refuse(
    refusal: CapacityError, known: KnownRefusals, route: str, scope: Scope, receive: Receive, send: Send
) -> None:
    error = api_error_of(refusal)
    assert error is not None, "there is an answer for every refusal"
    response = error.response()
    # As Serve does, which has not seen it yet.
    response.headers[REQUEST_ID] = Headers(scope=scope).get(REQUEST_ID) or str(uuid4())
    known.metrics.note_answer(route, response.status_code, has_own_limit=False)
    with contextlib.suppress(TimeoutError):  # a client that takes nothing: its connection is closed then
        async with asyncio.timeout(_WRITE_S):
            await response(scope, receive, send)
