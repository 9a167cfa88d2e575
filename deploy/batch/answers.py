"""Who has answered, the server or something on the way to it, and what that means for a batch."""

from __future__ import annotations

from typing import Any

import httpx
from pydantic_core import from_json

from deploy.openai.without_route import WITHOUT_ROUTE
from specdec.core.error_codes import COORDINATOR_LOST, GRAMMAR_NOT_COMPILED, REPLAY_FAILED

_PASSING = frozenset({408, 429, 502, 503})
_NOT_ONLY_OF_SERVERS = _PASSING | {httpx.codes.NOT_FOUND, httpx.codes.REQUEST_ENTITY_TOO_LARGE}
"""Refusals that need not be JSON. With 404 Ray's proxy says in plain text that it has no route yet, with 413
a proxy that one body is longer than it takes."""
_MISHAPS = frozenset({COORDINATOR_LOST, REPLAY_FAILED, GRAMMAR_NOT_COMPILED, "request_lost", "request_abort"})
"""Codes of failures (500) of which nothing is known to lie in the request."""
_WHO_ASKS = ("auth", "key", "permission", "origin", "country")
"""Parts of codes and types, among servers with OpenAI's API, of refusals (403) that mind no text."""


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


def is_without_route(response: httpx.Response) -> bool:
    """Whether Ray Serve is there, and has no route yet to what is to answer: it starts, or starts again."""
    is_missing = response.status_code == httpx.codes.NOT_FOUND
    return is_missing and WITHOUT_ROUTE.match(response.content) is not None


def is_mishap(response: httpx.Response) -> bool:
    """Whether the server itself has failed, and says that it was not for the request."""
    return response.is_server_error and str(_error(response).get("code")) in _MISHAPS


def is_passing(response: httpx.Response) -> bool:
    """Whether the same request may be answered a while later."""
    return response.status_code in _PASSING or not is_its_own(response) or is_mishap(response)


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
    if status == httpx.codes.FORBIDDEN and is_json(response) and not _is_of_one_text(response):
        return f"status {status}: the API key is not accepted, or not from here"
    if response.is_client_error and status not in _NOT_ONLY_OF_SERVERS and not is_json(response):
        return not_of_a_server(response)
    return None


def not_of_a_server(response: httpx.Response) -> str:
    """Say of an answer that it is none of OpenAI's API."""
    return f"status {response.status_code}, and no JSON: this is not the server itself; is the URL right?"


def _is_of_one_text(response: httpx.Response) -> bool:
    """Whether a 403 may be about what one request says (a filter's word, say): it tells so in OpenAI's form,
    and names nothing else.
    """
    error = _error(response)
    names = f"{error.get('code')} {error.get('type')}".lower()
    return bool(error) and not any(part in names for part in _WHO_ASKS)


def _error(response: httpx.Response) -> dict[str, Any]:
    """Return what is told in OpenAI's form; nothing where the body has another."""
    try:
        body = from_json(response.content)
    except ValueError:
        return {}
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}


def retry_after_s(response: httpx.Response) -> float | None:
    """Return how long the server says to wait, if it does so in seconds."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else None
