"""What every request passes before it reaches a route: key, body size, and the border for failures.

Plain ASGI: nothing here buffers a response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.openai.errors import ApiError, api_error_of, internal_error, keys_unread, shown
from deploy.openai.keys import ApiKey, KeyRing, bearer_of
from deploy.openai.metrics import GENERATING_ROUTES, DoorMetrics
from deploy.openai.paths import is_open, route_path

CLIENT_CLOSED_REQUEST = 499
"""Status that is counted, never sent: there is nobody to send it to."""
_SERVER_FAULT = 500
_DRAIN_S = 5.0
_DRAIN_TIMES_LIMIT = 16
logger = logging.getLogger(__name__)


class Border:
    """Counts requests, and turns whatever a route raises into an error body without internals.

    Routes say in `state.has_own_limit` whether a request's client gave it less time than the server does.
    """

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
        except ClientDisconnect:
            # Before its body was here: nobody is left to be answered, and nothing of ours has failed.
            await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send_noting_status)
        except Exception as error:
            if status is not None:
                raise  # too late for another status: the server cuts the connection
            api_error = api_error_of(error)
            if api_error is None:
                logger.exception("%s %s failed", scope["method"], scope["path"])
                api_error = internal_error()
            await api_error.response()(scope, receive, send_noting_status)
        finally:
            status = status or CLIENT_CLOSED_REQUEST
            has_own_limit = bool(scope.get("state", {}).get("has_own_limit"))
            self._metrics.note_answer(_counted_route(scope, status), status, has_own_limit=has_own_limit)


def _counted_route(scope: Scope, status: int) -> str:
    """Return the route that a request is counted under. What is refused before one was looked for has none.

    Requests for text that fail there, because it is not known which keys are accepted, fail what was promised
    nevertheless. Those of strangers, who are refused there, too, would make that share small.
    """
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        return str(route)
    path = route_path(scope)
    return path if status >= _SERVER_FAULT and path in GENERATING_ROUTES else "other"


class ApiKeys:
    """Asks for `Authorization: Bearer KEY`, but for what is open to anybody; with no keys configured all is.

    But to pages of other web sites: a browser sends what they post without a preflight, if only they do not
    call it JSON, and would have a server work that nobody but its owner can reach.

    Routes find the `ApiKey` that was given in `state.api_key`.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing, allowed_origins: Collection[str] = ()) -> None:
        self._app = app
        self._ring = ring
        self._allowed_origins = allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; or answer 401, 403 to a page, and 503 while the keys are not known."""
        if scope["type"] == "http" and not self._ring.is_asked_for and scope["method"] == "POST":
            self._check_site(Headers(scope=scope))
        if scope["type"] == "http" and self._ring.is_asked_for and not is_open(scope):
            if self._ring.why_unread is not None:
                raise keys_unread()
            key = self._check(Headers(scope=scope).get("authorization"))
            scope.setdefault("state", {})["api_key"] = key
        await self._app(scope, receive, send)

    def _check_site(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or "*" in self._allowed_origins or origin in self._allowed_origins:
            return
        if _is_own_page(origin, headers) and _is_address(origin):
            return
        raise ApiError(
            403,
            f"Pages of {shown(origin)} may not use this server, which asks for no API key: "
            "its http.allowed_origins does not name that site.",
            code="origin_not_allowed",
        )

    def _check(self, authorization: str | None) -> ApiKey:
        text = bearer_of(authorization)
        if not text:
            raise _unauthorized("You did not provide an API key: send Authorization: Bearer YOUR_KEY.", None)
        key = self._ring.find(text)
        if key is None:
            raise _unauthorized("Incorrect API key provided.", "invalid_api_key")
        return key


def _is_own_page(origin: str, headers: Headers) -> bool:
    if headers.get("sec-fetch-site") == "same-origin":  # says the browser, and no page can make it
        return True
    # A proxy in front may have put its own name in place of the one that the page was read from.
    hosts = {headers.get("host", ""), *headers.get("x-forwarded-host", "").split(",")}
    return origin.partition("://")[2].lower() in {host.strip().lower() for host in hosts} - {""}


def _is_address(origin: str) -> bool:
    """Whether an origin says itself where it is: a name may lead elsewhere from one moment to the next, so
    that a page which was read from there comes to be one of ours (DNS rebinding).
    """
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or host.endswith(".localhost") or bool(ip_address(host))
    except ValueError:
        return False


def _unauthorized(message: str, code: str | None) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


class BodyLimit:
    """Answers 413 to bodies above a limit, as soon as their length is known, without holding them.

    Bodies that are not there after `timeout_s` are answered with 408: a client that sends a byte now and then
    would hold a request for as long as it likes.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or answer 408 or 413."""
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
        deadline_s: float | None = asyncio.get_running_loop().time() + self._timeout_s

        async def receive_counting() -> Message:
            nonlocal num_bytes, deadline_s
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                raise _BodyTooSlow from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise _BodyTooLong
            if not message.get("more_body", False):
                deadline_s = None  # what follows is the end of the connection, whenever that is
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
        except _BodyTooSlow:
            if has_started:
                raise
            await self._body_timeout().response()(scope, receive, send)

    def _body_timeout(self) -> ApiError:
        return ApiError(
            408,
            f"The body was not complete after {self._timeout_s:g} s, the limit of this server.",
            code="body_timeout",
            headers={"Connection": "close"},
        )

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


class _BodyTooSlow(Exception):
    """Raised through the application to `BodyLimit`."""
