"""Which part of a path says what is asked for, and which paths are for anybody."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.openai.document import OPENAPI_PATH

METRICS_PATH = "/metrics"
HEALTH_PATH = "/health"
_OPEN = frozenset({HEALTH_PATH, METRICS_PATH, OPENAPI_PATH})
"""Answered without an API key: probes, scrapers and browsers have none. Everything else takes one."""
_API = "/v1/"


def route_path(scope: Scope) -> str:
    """Return the path as routes see it.

    Under a `route_prefix` Ray Serve says in `root_path` where the application is mounted and leaves `path`
    whole; routes are found by what is behind it. Whatever looks at paths has to look at the same.
    """
    path: str = scope["path"]
    mounted_at: str = scope.get("root_path", "")
    behind = path.removeprefix(mounted_at)
    # As Starlette's router does it: /llm is no prefix of /llmx.
    return path if behind and not behind.startswith("/") else behind


def is_open(scope: Scope) -> bool:
    """Whether a request needs no API key."""
    return route_path(scope) in _OPEN


def is_api(scope: Scope) -> bool:
    """Whether it is a request to the API: one that is logged and traced."""
    return route_path(scope).startswith(_API)


class TrailingSlashes:
    """ASGI middleware: a path with a slash at its end is the one without.

    A redirect would name the scheme and host that are seen here, which are not the client's behind a proxy
    that ends TLS, and many clients do not send a body again.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].removesuffix("/") or "/"}
        await self._app(scope, receive, send)
