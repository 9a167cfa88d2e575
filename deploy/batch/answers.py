"""Who has answered, the server or something on the way to it, and what that means for a batch."""

from __future__ import annotations

import httpx
from pydantic_core import from_json

_PASSING = frozenset({408, 429, 502, 503})
_NOT_ONLY_OF_SERVERS = _PASSING | {httpx.codes.NOT_FOUND, httpx.codes.REQUEST_ENTITY_TOO_LARGE}
"""Refusals that need not be JSON. With 404 Ray's proxy says in plain text that it has no route yet, with 413
a proxy that one body is longer than it takes."""


def is_json(response: httpx.Response, kind: type = object) -> bool:
    """Whether the body is JSON, of that kind."""
    try:
        return isinstance(from_json(response.content), kind)
    except ValueError:
        return False


def is_its_own(response: httpx.Response) -> bool:
    """Whether the server itself has answered: what it refuses, or fails at, it tells in OpenAI's form.

    Ray's proxy answers in its place, in plain text: 404 while it has no route to it, as long as it restarts,
    and 500 where the process that had the request is gone. So may what else is on the way.
    """
    if response.status_code != httpx.codes.NOT_FOUND and not response.is_server_error:
        return True
    try:
        body = from_json(response.content)
    except ValueError:
        return False
    return isinstance(body, dict) and "error" in body


def is_passing(response: httpx.Response) -> bool:
    """Whether the same request may be answered a while later."""
    return response.status_code in _PASSING or not is_its_own(response)


def obstacle(response: httpx.Response) -> str | None:
    """Return what keeps every request from the server, however often it is sent; None: nothing does.

    No line is at fault then, and none may have it for a result.
    """
    status = response.status_code
    if response.is_redirect:
        place = response.headers.get("location") or "nowhere"
        return f"status {status} leads to {place}: give the URL of the server itself"
    if status == httpx.codes.UNAUTHORIZED:
        return f"status {status}: the API key is not accepted"
    if response.is_client_error and status not in _NOT_ONLY_OF_SERVERS and not is_json(response):
        return not_of_a_server(response)
    return None


def not_of_a_server(response: httpx.Response) -> str:
    """Say of an answer that it is none of OpenAI's API."""
    return f"status {response.status_code}, and no JSON: this is not the server itself; is the URL right?"


def retry_after_s(response: httpx.Response) -> float | None:
    """Return how long the server says to wait, if it does so in seconds."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else None
