"""The client that sends a load: many requests at once, for little CPU time of its own."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from deploy.loopback import is_loopback

_IDLE_S = 3.0
"""Connections are not used again after that. uvicorn closes them after 5 s, and who sends on one that is
just being closed has a failure that is nobody's fault."""


def load_client(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    connect_s: float,
    read_s: float,
    is_any_certificate_taken: bool = False,
) -> httpx.AsyncClient:
    """Return a client of `url` with as many connections as there are requests.

    It speaks through aiohttp, parsed in C. Streams of 40 events take 1.1 ms of it, those of httpx's own
    transport 3.7 ms, and that looks at every connection whenever a request begins or ends. On a machine that
    serves, too, all of it is taken from the server.
    """

    def session() -> aiohttp.ClientSession:
        trust = httpx.create_ssl_context(verify=not is_any_certificate_taken)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S, ssl=trust)
        # With `trust_env` it would look in the environment, and in a thread in .netrc, for every request.
        return aiohttp.ClientSession(
            connector=connector, proxy=proxy_of(url), cookie_jar=aiohttp.DummyCookieJar()
        )

    return httpx.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=httpx.Timeout(connect_s, read=read_s, pool=None),
        transport=_Transport(client=session),
    )


class _Transport(AiohttpTransport):
    """Tells whatever goes wrong as httpx does.

    Of aiohttp's errors some are let through as they are, that of an answer which is no HTTP among them.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except aiohttp.ClientError as error:
            raise httpx.TransportError(str(error)) from error


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a URL (`HTTP_PROXY`, `HTTPS_PROXY`, `NO_PROXY`).

    None is asked for what is on this machine: it would look for that on its own.
    """
    parts = httpx.URL(url)
    if is_loopback(parts.host) or proxy_bypass(parts.host):
        return None
    proxies = getproxies()
    return proxies.get(parts.scheme) or proxies.get("all")


def kind_of(error: httpx.HTTPError) -> str:
    """Return the name of what went wrong: aiohttp's own, whose translation takes a lost connection for one
    that was never made."""
    return type(error.__cause__ or error).__name__
