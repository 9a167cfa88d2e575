"""Whatever is sent, the answer is what the OpenAPI document says, and never a failure of the server.

`make test` sends some hundreds of requests, the same ones each time; `full` tens of thousands, some to a real
engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import hypothesis
import hypothesis.strategies as st
import pytest
import schemathesis
from jsonschema import Draft202012Validator, ValidationError
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from deploy.openai.app import create_app
from deploy.openai.document import OPENAPI_PATH, openapi_document
from deploy.openai.requests import TIMEOUT_HEADER
from deploy.openai.resumption import HEADER as LAST_EVENT_ID
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from tests.architectures import make_tokenizer, save_model
from tests.deploy.openai.fakes import CHAT_TEMPLATE, Door, error_of

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
FEW, MANY = 50, 2500
"""Requests to each of the two operations that take a body."""
PHASES = [hypothesis.Phase.explicit, hypothesis.Phase.generate]


def repeatable(max_examples: int) -> hypothesis.settings:
    """The same examples each time; no shrinking, which would send as many requests again."""
    return hypothesis.settings(
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=max_examples,
        phases=PHASES,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


door = Door(settings=DoorSettings(max_body_bytes=1 << 16))
document = schemathesis.openapi.from_asgi(OPENAPI_PATH, door.app)


def call(case: Case) -> Any:
    """Send it, but to no stream that would be resumed: no id is right, and a body would count no more."""
    (case.headers or {}).pop(LAST_EVENT_ID, None)
    return case.call()


def check(case: Case) -> None:
    response = call(case)
    checks = CHECKS
    if response.status_code == 504:  # as asked for: 5e-324 s may be over, on a busy machine
        assert TIMEOUT_HEADER in (case.headers or {}) or "timeout_s" in str(case.body)
        checks = [one for one in CHECKS if one is not not_a_server_error]
    case.validate_response(response, checks=checks)


@document.include(method="POST").parametrize()
@repeatable(FEW)
def test_bodies_are_answered_as_documented(case: Case) -> None:
    check(case)


@document.include(method="GET").parametrize()
@repeatable(10)
def test_other_routes_answer_as_documented(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.timeout(3600)
@document.include(method="POST").parametrize()
@repeatable(MANY)
def test_thousands_of_bodies_are_answered_as_documented(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        ("CompletionBody", {"stop": None, "temperature": None, "n": None, "logit_bias": None}),
        ("CompletionBody", {"user": "me", "suffix": None, "stream_options": None, "store": True}),
        ("ChatBody", {"tools": None, "service_tier": "auto", "response_format": {"type": "text"}}),
        ("ChatBody", {"functions": [], "reasoning_effort": "none"}),
    ],
)
def test_what_is_taken_and_means_nothing_is_in_the_document(schema: str, body: dict[str, Any]) -> None:
    """Gateways check by it."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call], "audio": None}]
    is_chat = schema == "ChatBody"
    body = body | ({"messages": messages} if is_chat else {"prompt": "x"})
    described = {"$ref": f"#/components/schemas/{schema}", "components": openapi_document()["components"]}
    Draft202012Validator(described).validate(body)
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    assert door.post(path, body).status_code == 200
    with pytest.raises(ValidationError):
        Draft202012Validator(described).validate(body | {"use_beam_search": True})


def test_the_document_is_a_valid_one() -> None:
    """Its references lead somewhere, its schemas are schemas, and they take what clients really send."""
    content = door.get(OPENAPI_PATH).json()
    assert content == json.loads(json.dumps(openapi_document()))
    routes = {(route.path, method) for route in door.app.routes for method in route.methods or ()}  # type: ignore[attr-defined]
    documented = {
        (path.replace("{model}", "{model:path}"), method.upper())
        for path, operations in content["paths"].items()
        for method in operations
    }
    assert {one for one in routes if one[1] in ("GET", "POST")} - documented == {(OPENAPI_PATH, "GET")}
    assert documented <= routes

    for path in ("/v1/completions", "/v1/chat/completions"):
        generation = content["paths"][path]["post"]
        assert [one["name"] for one in generation["parameters"]] == [TIMEOUT_HEADER, LAST_EVENT_ID]
        assert "410" in generation["responses"]

    def fits(name: str, body: Any) -> bool:
        return Draft202012Validator({"$ref": f"#/components/schemas/{name}", **content}).is_valid(body)

    usual = {"temperature": 0.5, "stop": "x", "logit_bias": {"5": -1.5}, "bad_words": ["a", [1, 2]]}
    for prompt in ("abc", ["a", "b"], [1, 2], [[1], [2]]):
        body = {"prompt": prompt, "guided_choice": ["a"], **usual}
        assert fits("CompletionBody", body)
        assert door.post("/v1/completions", body).status_code == 200
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], **usual}
    assert fits("ChatBody", chat)
    for name, wrong in (
        ("CompletionBody", {"prompt": 5}),
        ("ChatBody", {}),
        ("ChatBody", chat | {"tempo": 1}),
    ):
        assert not fits(name, wrong)


NAMES = sorted(openapi_document()["components"]["schemas"]["ChatBody"]["properties"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from([2**63, -(2**64), 1e308, "\x00", "\ud800", "5%", "text", "json_object", "auto"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
FIELDS = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=12), VALUES, max_size=6)
RAW = st.binary(max_size=200) | st.builds(lambda value: json.dumps(value).encode(), FIELDS | VALUES)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["Authorization", "Content-Type", "X-Request-Timeout", "Last-Event-ID", "Expect", "traceparent"]
    ),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=40),
)  # fmt: skip
PATHS = st.sampled_from(
    ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/status", "/health", "/metrics"]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(
    lambda name: f"/v1/models/{quote(name)}"
)
METHODS = st.sampled_from(["POST", "POST", "POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])


def check_raw(method: str, path: str, headers: dict[str, str], content: bytes) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    response = door.send(method, path, headers=encoded, content=content)
    answer = asyncio.run(response)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400 and method != "HEAD":
        error_of(answer)


def send_raw(max_examples: int) -> None:
    given = hypothesis.given(method=METHODS, path=PATHS, headers=HEADERS, content=RAW)
    repeatable(max_examples)(given(check_raw))()
    assert door.complete().status_code == 200, "and the next one is served"


def test_whatever_is_sent_is_answered() -> None:
    send_raw(150)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_tens_of_thousands_are_answered() -> None:
    send_raw(20_000)


@pytest.fixture(scope="module")
def engine_document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("target", "draft"):
        save_model(folder / name, seed=1)
    off = CompileConfig(mode="off")
    config = EngineConfig(
        target=ModelConfig(model=str(folder / "target"), dtype="float32", device="cpu", compile=off),
        speculative_config=SpeculativeConfig(
            method="draft_model", model=str(folder / "draft"), num_speculative_tokens=3, compile=off
        ),
        cache=CacheConfig(block_size=8, num_blocks=96),
    )
    engine = AsyncEngine(Engine(config))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    settings = DoorSettings(max_body_bytes=1 << 16, request_timeout_s=5.0)
    app = create_app(engine, settings, HuggingFaceTokenizer(tokenizer))
    yield schemathesis.openapi.from_asgi(OPENAPI_PATH, app).include(method="POST")
    engine.close()


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_real_engine_survives_thousands(engine_document: Any) -> None:
    # Not by `schemathesis.pytest.from_fixture`, which sets a field of test items that pytest no longer has.
    operations = [found.ok() for found in engine_document.get_all_operations()]
    assert len(operations) == 2
    for operation in operations:
        repeatable(1000)(hypothesis.given(case=operation.as_strategy())(send_to_engine))()


def send_to_engine(case: Case) -> None:
    response = call(case)
    if response.status_code != 504:
        case.validate_response(response, checks=CHECKS)
