"""A log line for each request to the API: what, how it ended, how long it took, and under which ids."""

from __future__ import annotations

import logging
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deploy.openai.keys import ApiKey
from deploy.openai.paths import is_api
from workers.logs import LOG_CONTEXT

logger = logging.getLogger(__name__)


class AccessLog:
    """ASGI middleware. Paths are told as routes: what a client writes into one is not ours to keep."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or not is_api(scope):
            await self._app(scope, receive, send)
            return
        status: int | None = None
        started_s = perf_counter()

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            key: ApiKey | None = scope.get("state", {}).get("api_key")
            fields = {
                "method": scope["method"],
                "route": getattr(scope.get("route"), "path", "other"),
                "status": status,
                "seconds": round(perf_counter() - started_s, 6),
                "api_key": None if key is None else key.name,
            }
            logger.info(
                "%s %s %s in %.3f s (%s)",
                *(fields["method"], fields["route"], status, fields["seconds"]),
                LOG_CONTEXT.get().get("request_id", "no id"),
                extra={"fields": fields},
            )
