"""What Ray Serve's proxy says that has no route to the door yet, as the door would say it.

A proxy that was started a moment ago listens before it has heard of any application, and Serve has it answer
404 then, as it does as long as there is none. Clients take that for final, also those that come back to a
stream because the proxy before has died. HAProxy is mended in the same way (`deploy.haproxy`).
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.openai.errors import not_ready
from deploy.openai.metrics import GENERATING_ROUTES

WITHOUT_ROUTE = re.compile(rb"Path '.*' not found\b")
"""Begins Serve's own 404, of its proxy as of HAProxy; those of doors and other servers begin otherwise."""


class WithoutRoute:
    """ASGI middleware of Serve's proxy."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. What Serve says of other paths may be of other applications."""
        if scope["type"] != "http" or scope.get("path", "").rstrip("/") not in GENERATING_ROUTES:
            await self._app(scope, receive, send)
            return
        start: Message | None = None

        async def look(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] == 404:
                start = message
            elif start is None:
                await send(message)
            else:
                held, start = start, None
                if WITHOUT_ROUTE.match(message.get("body", b"")):
                    await not_ready().response()(scope, receive, send)
                else:
                    await send(held)
                    await send(message)

        await self._app(scope, receive, look)
