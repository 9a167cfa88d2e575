"""What every request passes before it reaches a route: key, body size, and the border for failures.

Plain ASGI: nothing here buffers a response.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.openai.errors import ApiError, api_error_of, internal_error
from deploy.openai.metrics import DoorMetrics

_DRAIN_S = 5.0
_DRAIN_TIMES_LIMIT = 16
logger = logging.getLogger(__name__)


def digest_api_key(key: str) -> bytes:
    """Return what is kept of an API key."""
    return hashlib.sha256(key.encode()).digest()


class Border:
    """Counts requests, and turns whatever a route raises into an error body without internals."""

    def __init__(self, app: ASGIApp, metrics: DoorMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with self._metrics.in_progress.track_inprogress():
                await self._app(scope, receive, send_noting_status)
        except Exception as error:
            if status is not None:
                raise  # too late for another status: the server cuts the connection
            api_error = api_error_of(error)
            if api_error is None:
                logger.exception("%s %s failed", scope["method"], scope["path"])
                api_error = internal_error()
            await api_error.response()(scope, receive, send_noting_status)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.http_requests.labels(route, str(status or 499)).inc()


class ApiKeys:
    """Asks for `Authorization: Bearer KEY` under /v1/; does nothing when no keys are configured.

    Routes find the digest of the key that was given in `state.api_key_digest`.
    """

    def __init__(self, app: ASGIApp, digests: Iterable[bytes]) -> None:
        self._app = app
        self._digests = tuple(digests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer 401."""
        if scope["type"] == "http" and self._digests and scope["path"].startswith("/v1"):
            digest = self._check(Headers(scope=scope).get("authorization"))
            scope.setdefault("state", {})["api_key_digest"] = digest
        await self._app(scope, receive, send)

    def _check(self, authorization: str | None) -> bytes:
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise _unauthorized("You did not provide an API key: send Authorization: Bearer YOUR_KEY.", None)
        given = digest_api_key(key.strip())
        # All of them, whether or not one has matched: the time taken says nothing about the keys.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise _unauthorized("Incorrect API key provided.", "invalid_api_key")
        return given


def _unauthorized(message: str, code: str | None) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


class BodyLimit:
    """Answers 413 to bodies above a limit, as soon as their length is known, without holding them."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            await self._refuse(headers.get("expect", "").lower() == "100-continue", receive, send)
            return
        num_bytes = 0
        has_started = False

        async def receive_counting() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise _BodyTooLong
            return message

        async def send_noting_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive_counting, send_noting_start)
        except _BodyTooLong:
            if has_started:
                raise
            await self._refuse(False, receive, send)

    async def _refuse(self, is_body_held_back: bool, receive: Receive, send: Send) -> None:
        """Send 413, then read on for a while before the connection is closed.

        Closing while the client still writes makes its system discard the answer. What is read is dropped.
        """
        error = ApiError(
            413,
            f"The body is longer than {self._max_body_bytes} bytes, the limit of this server.",
            code="request_too_large",
            headers={"Connection": "close"},
        )
        response = error.response()
        start = {"type": "http.response.start", "status": 413, "headers": response.raw_headers}
        await send(start)
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        if not is_body_held_back:
            await self._drain(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self, receive: Receive) -> None:
        num_bytes = 0
        try:
            async with asyncio.timeout(_DRAIN_S):
                while num_bytes <= _DRAIN_TIMES_LIMIT * self._max_body_bytes:
                    message = await receive()
                    num_bytes += len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
        except TimeoutError:
            pass


class _BodyTooLong(Exception):
    """Raised through the application to `BodyLimit`."""
