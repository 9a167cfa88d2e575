"""Headers that Ray Serve obeys, or trips over, before a request has reached any door: anybody may send them.

Serve decodes some values as UTF-8 outside of everything that would answer an error (one byte 0xff is a 500
in plain text, for which no door was asked), and obeys others: a client could give itself another time limit,
have the end of its connection overlooked, or choose a replica. `ServeHeaders` leaves out what may be either;
it runs in Serve's proxy, and where HAProxy speaks to the doors, in front of each door (`deploy.haproxy` does
the same in HAProxy).
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

REQUEST_ID = "x-request-id"
"""Serve's name for a request in its logs; it makes one where there is none."""
REQUEST_ID_FORM = "[!-~]{1,128}"
"""A regular expression that HAProxy reads as Python does."""
STEERING = (
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "serve-multiplexed-model-id",
    "x-session-id",
)
"""What Serve obeys. It takes `_` for `-`, and so do we."""
STEERING_PREFIX = "x-serve-router-"
SESSION_VARIABLE = "RAY_SERVE_SESSION_ID_HEADER_KEY"
"""By which Serve's processes may have another name for `x-session-id`."""

_REQUEST_ID = REQUEST_ID.encode()
_TRACE_HEADERS = (b"traceparent", b"tracestate")
"""Serve decodes them where its own tracing is on."""
_GOOD_REQUEST_ID = re.compile(REQUEST_ID_FORM.encode())


class ServeHeaders:
    """ASGI middleware, to be the outermost."""

    def __init__(self, app: ASGIApp, session_header: str | None = None) -> None:
        """`session_header` is what Serve calls it here, if not `x-session-id`."""
        self._app = app
        names = STEERING if session_header is None else (*STEERING, session_header.lower())
        self._steering = frozenset(name.replace("_", "-").encode() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or connection, without those headers."""
        if "headers" in scope:
            scope = {**scope, "headers": self._kept(scope["headers"])}
        await self._app(scope, receive, send)

    def _kept(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        # Of several ids Serve takes the first for the answer and the last for everything else.
        num_ids = sum(name.lower() == _REQUEST_ID for name, _ in headers)
        return [
            (name, value) for name, value in headers if self._is_kept(name.lower(), value, num_ids=num_ids)
        ]

    def _is_kept(self, name: bytes, value: bytes, *, num_ids: int) -> bool:
        if name == _REQUEST_ID:
            return num_ids == 1 and _GOOD_REQUEST_ID.fullmatch(value) is not None
        if name in _TRACE_HEADERS:
            return value.isascii()
        plain = name.replace(b"_", b"-")
        return (
            name.isascii() and plain not in self._steering and not plain.startswith(STEERING_PREFIX.encode())
        )
