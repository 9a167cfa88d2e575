"""OpenAI's error body, and which failure becomes which status.

Every error that leaves the server has one shape:

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

`message` is meant for the person who sent the request; nothing of the server's inside is in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from pydantic import ValidationError
from starlette.responses import Response

from specdec.core.error_codes import (
    FAILED_REPEATEDLY,
    GRAMMAR_FAILED,
    INVALID_GRAMMAR,
    NO_TOKEN_ALLOWED,
    OUTPUT_TOO_LARGE,
    SHUTTING_DOWN,
    TIMED_OUT,
)
from specdec.core.errors import (
    CapacityError,
    InputError,
    LateError,
    NotReadyError,
    RequestFailed,
    TransportError,
)

DEADLINE_UNREACHABLE = "deadline_unreachable"
"""Code of a refusal: as things are, the request would not be served in the time that it gives."""
KEYS_UNREAD = "api_keys_unread"
"""Code of refusals while the door cannot read the file of its API keys."""
NOT_READY_RETRY_AFTER_S = 2.0
"""What a client is told to wait for while the model loads or its workers are replaced."""
_MAX_SHOWN_INPUT = 80
_MAX_SHOWN_PARAM = 200
_MAX_MESSAGE = 2000
"""Characters. Names of fields and models are the client's, and may be as long as a body."""
_ASKED_FOR_TOO_MUCH = frozenset({NO_TOKEN_ALLOWED, GRAMMAR_FAILED, INVALID_GRAMMAR, OUTPUT_TOO_LARGE})
"""Codes of failures that lie in what the client asked for, though they show only on the way."""
RETRY_AFTER_HEADER = "Retry-After"
SHOULD_RETRY_HEADER = "x-should-retry"
_NOT_AGAIN: Mapping[str, str] = {SHOULD_RETRY_HEADER: "false"}
"""By which OpenAI's clients do not send a request again on their own."""
_WORDS = {"model_type": "must be a JSON object", "dict_type": "must be a JSON object"}
"""Where pydantic's own words are about Python."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The inside of OpenAI's error body."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's error body."""

    error: ErrorDetail


class ApiError(Exception):
    """A failure with everything that the client is to see of it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",  # noqa: A002 - the field's name in the body
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        param = None if param is None else _cut(param, _MAX_SHOWN_PARAM)
        self.detail = ErrorDetail(message=_cut(message, _MAX_MESSAGE), type=type, param=param, code=code)
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """Return the JSON body."""
        return msgspec.json.encode(ErrorBody(error=self.detail))

    def response(self) -> Response:
        """Return the HTTP response."""
        return Response(self.body(), self.status, headers=self.headers, media_type="application/json")


def too_many_logprobs(num_logprobs: int, most: int, param: str) -> ApiError:
    """Return the refusal of a response that would be too large."""
    return ApiError(
        400,
        f"The response would hold {num_logprobs} log-probabilities or more, and no more than {most} "
        "(http.max_logprobs) are sent at once: ask for fewer alternatives, or of fewer tokens at a time.",
        param=param,
        code=OUTPUT_TOO_LARGE,
    )


def not_ready() -> ApiError:
    """No model takes requests (yet, or any more)."""
    return ApiError(
        503,
        "The model is not ready: it is being loaded, replaced or shut down. Try again shortly.",
        type="server_error",
        code="not_ready",
        headers=_retry_after(NOT_READY_RETRY_AFTER_S),
    )


def keys_unread(why: str | None = None) -> ApiError:
    """It is not known yet which API keys are accepted: this says nothing of the one that was sent."""
    what = why or "its log, and /health, say why"
    return ApiError(
        503,
        f"The server has not been able to read its API keys, so that nobody can be let in: {what}",
        type="server_error",
        code=KEYS_UNREAD,
        headers=_retry_after(NOT_READY_RETRY_AFTER_S),
    )


def request_timeout(message: str) -> ApiError:
    """The request was not complete in the time that the client, or the server, gave it."""
    # Clients' libraries would send it again, on their own, to a server that has too much to do.
    return ApiError(504, message, type="server_error", code=TIMED_OUT, headers=_NOT_AGAIN)


def took_too_long(limit_s: float | None) -> ApiError:
    """The door's own clock says that the time of a request is up."""
    return request_timeout(f"The request took longer than {limit_s:g} s.")


def internal_error() -> ApiError:
    """Something broke that the client can do nothing about."""
    return ApiError(
        500,
        "The server had an error while processing your request.",
        type="server_error",
        code="internal_error",
    )


def api_error_of(error: Exception) -> ApiError | None:
    """Return the client's view of an expected failure, or None for an unexpected one (a bug: log it)."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, CapacityError):
        return ApiError(
            429,
            str(error),
            type="rate_limit_error",
            code=DEADLINE_UNREACHABLE if isinstance(error, LateError) else "rate_limit_exceeded",
            headers=_retry_after(error.retry_after_s),
        )
    if isinstance(error, NotReadyError):
        return not_ready()
    if isinstance(error, RequestFailed):
        return _request_failed(error)
    if isinstance(error, TransportError):
        return ApiError(
            503,
            "The model's workers cannot be reached right now. Try again shortly.",
            type="server_error",
            code="unavailable",
            headers=_retry_after(NOT_READY_RETRY_AFTER_S),
        )
    return None


def _request_failed(error: RequestFailed) -> ApiError:
    if error.code == SHUTTING_DOWN:
        return ApiError(
            503,
            "The server was shut down before the request was complete. Try again shortly.",
            type="server_error",
            code=SHUTTING_DOWN,
            headers=_retry_after(NOT_READY_RETRY_AFTER_S),
        )
    if error.code == TIMED_OUT:
        return request_timeout(str(error))
    if error.code in _ASKED_FOR_TOO_MUCH:
        return ApiError(400, str(error), param=error.param, code=error.code)
    # OpenAI's clients send what got a 500 again, unless told not to: each time it would end workers.
    headers = _NOT_AGAIN if error.code == FAILED_REPEATEDLY else None
    return ApiError(500, str(error), type="server_error", code=error.code, headers=headers)


def input_error_of(error: ValidationError) -> InputError:
    """Turn pydantic's first complaint into one that names the field as the client wrote it."""
    first = error.errors(include_url=False)[0]
    param = _cut(param_of(first["loc"]), _MAX_SHOWN_PARAM)
    kind, given = first["type"], first.get("input")
    if kind == "missing":
        return InputError(f"{param} is required", param=param)
    if kind == "extra_forbidden":
        return InputError(f"unknown field {param}", param=param)
    reason = _WORDS.get(kind) or first["msg"].removeprefix("Value error, ")
    reason = reason[:1].lower() + reason[1:]
    if kind == "value_error":
        return InputError(f"{param}: {reason}" if param else reason, param=param or None)
    return InputError(f"{param}: {reason}, got {shown(given)}", param=param or None)


def param_of(location: tuple[int | str, ...]) -> str:
    """Write a pydantic location the way a client writes it: `messages[0].content`.

    Names in angle brackets tell alternatives of one field apart; clients know nothing of them.
    """
    text = ""
    for part in location:
        if isinstance(part, str) and part.startswith("<"):
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def shown(given: object) -> str:
    """Write what a client gave as Python would, or the beginning of it: it may be as long as a body."""
    # More than is shown stays, so that what was cut here is marked as cut.
    given = given[: _MAX_SHOWN_INPUT + 1] if isinstance(given, str) else given
    return _cut(repr(given), _MAX_SHOWN_INPUT)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def _retry_after(seconds: float) -> dict[str, str]:
    return {RETRY_AFTER_HEADER: str(max(1, math.ceil(seconds)))}
