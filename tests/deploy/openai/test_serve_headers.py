"""Headers that Ray Serve obeys or trips over do not reach it."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path

import pytest
import ray.serve._private as serve_code
from ray.serve._private import constants
from ray.serve._private.http_util import (
    RequestIdMiddleware,
    _apply_middlewares,
    parse_disconnect_disabled_header,
    parse_request_timeout_header,
    parse_session_id_header,
    validate_http_proxy_callback_return,
)
from starlette.types import Message, Receive, Scope, Send

from deploy.openai.serve_headers import (
    REQUEST_ID,
    SESSION_VARIABLE,
    STEERING,
    STEERING_PREFIX,
    ServeHeaders,
)
from deploy.openai.slow_readers import proxy_middlewares

Header = tuple[bytes, bytes]


def passed(*headers: Header, session_header: str | None = None, kind: str = "http") -> list[Header]:
    """Return what reaches the application of these headers."""
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    scope = {"type": kind, "headers": list(headers)}
    middleware = ServeHeaders(app, session_header)
    asyncio.run(middleware(scope, None, None))  # type: ignore[arg-type]
    assert scope["headers"] == list(headers), "it is the server's"
    kept: list[Header] = seen[0]["headers"]
    return kept


@pytest.mark.parametrize(
    "value", [b"\xff", b"", b" ", b"a b", b"a\tb", "\u00e9".encode(), b"\xc3", b"\x7f", b"a" * 129]
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_ids_that_are_none_are_left_out(value: bytes, kind: str) -> None:
    kept = (b"accept", b"*/*")
    assert passed(kept, (b"x-request-id", value), kind=kind) == [kept]
    assert passed((b"X-Request-Id", value), kept, kind=kind) == [kept]


@pytest.mark.parametrize("value", [b"a", b"!~", b"a" * 128, b"9f1c-7e%2F"])
def test_a_client_s_own_id_is_kept_unless_it_sends_several(value: bytes) -> None:
    header = (b"x-request-id", value)
    assert passed(header) == [header]
    assert passed(header, header) == []


@pytest.mark.parametrize(
    "name", [b"serve_multiplexed_model_id", b"Serve-Multiplexed_model-ID", b"x-session-id", b"X_Session_Id"]
)
def test_what_steers_serve_is_left_out_however_it_is_spelt(name: bytes) -> None:
    assert passed((name, b"x"), (b"authorization", b"Bearer a")) == [(b"authorization", b"Bearer a")]


def test_serve_s_session_header_may_have_another_name() -> None:
    assert passed((b"x-user", b"\xff")) == [(b"x-user", b"\xff")]
    assert passed((b"x-user", b"\xff"), session_header="X_User") == []


def test_traces_go_through_as_long_as_they_can_be_read() -> None:
    good = (b"traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01")
    assert passed(good, (b"tracestate", b"a=\xff")) == [good]


def test_names_are_those_of_the_installed_ray() -> None:
    assert constants.SERVE_HTTP_REQUEST_ID_HEADER == REQUEST_ID
    assert {name.replace("_", "-") for name in STEERING} == {
        constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        constants.SERVE_MULTIPLEXED_MODEL_ID.replace("_", "-"),
        constants.SERVE_SESSION_ID,
    }
    assert constants.SERVE_INGRESS_ROUTER_HEADER_PREFIX == STEERING_PREFIX
    text = (Path(serve_code.__file__).parent / "constants.py").read_text()
    assert f'get_env_str("{SESSION_VARIABLE}", "x-session-id")' in text
    headers = set(re.findall(r"^(SERVE\w+_HEADER(?:_PREFIX)?) =", text, re.MULTILINE))
    assert headers == {
        "SERVE_HTTP_REQUEST_ID_HEADER",
        "SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER",
        "SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER",
        "SERVE_INGRESS_ROUTER_HEADER_PREFIX",
    }, "Ray reads headers that nobody here has heard of"


def read_as_serve_does(headers: list[Header]) -> None:
    """What its proxy and its replicas decode, outside of any `try`."""
    by_name = dict(headers)
    for name, value in headers:
        plain = name.decode().lower().replace("-", "_")
        if plain in (constants.SERVE_MULTIPLEXED_MODEL_ID, "x_session_id"):
            value.decode()
        if name.decode() in (constants.SERVE_HTTP_REQUEST_ID_HEADER, "traceparent", "tracestate"):
            value.decode()
    assert parse_request_timeout_header(by_name, 7.0) == 7.0
    assert not parse_disconnect_disabled_header(by_name)
    assert parse_session_id_header(by_name) == ""


def test_whatever_is_sent_serve_reads_it_and_obeys_none_of_it() -> None:
    generator = random.Random(1)
    names = [REQUEST_ID, *STEERING, "serve_multiplexed_model_id", "traceparent", "tracestate", "accept"]
    num_failed = 0
    for _ in range(500):
        headers = [
            (
                generator.choice(names).encode(),
                generator.choice([b"?1", b"-1", b"9", generator.randbytes(generator.randrange(4))]),
            )
            for _ in range(generator.randrange(4))
        ]
        read_as_serve_does(passed(*headers))
        try:
            read_as_serve_does(headers)
        except (UnicodeDecodeError, AssertionError):
            num_failed += 1
    assert num_failed > 100, "none of it would have done any harm"


def test_it_is_the_outermost_of_serve_s_middlewares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve puts ours around its own, which answers with the id and makes one where there is none."""
    monkeypatch.setattr("uvicorn.config.HTTP_PROTOCOLS", {})
    sent: list[Message] = []
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Message) -> None:
        sent.append(message)

    whole = _apply_middlewares(app, validate_http_proxy_callback_return(proxy_middlewares()))
    assert isinstance(whole, ServeHeaders)
    assert RequestIdMiddleware.__name__ in middlewares_of(whole)
    scope = {"type": "http", "headers": [(b"x-request-id", b"\xff")]}
    asyncio.run(whole(scope, None, send))  # type: ignore[arg-type]
    ((name, value),) = seen[0]["headers"]
    assert name == b"x-request-id"
    assert re.fullmatch(rb"[0-9a-f-]{36}", value)
    assert (b"x-request-id", value) in [(key.lower(), text) for key, text in sent[0]["headers"]]


def middlewares_of(app: object) -> list[str]:
    """Return the names of the middlewares around an application, from the outermost."""
    names = []
    while hasattr(app, "_app"):
        names.append(type(app).__name__)
        app = app._app
    return names
