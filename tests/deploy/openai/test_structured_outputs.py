"""Outputs that keep to a grammar, through the door over a real engine, by the official client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from deploy.openai.app import create_app
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.sampling.config import GrammarConfig
from tests.deploy.openai.live import live_server
from tests.specdec.engine.grammar_models import save_byte_level_model

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["city", "size"],
    "additionalProperties": False,
}
CHAT = [{"role": "user", "content": "a city, please"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("bytes")
    save_byte_level_model(folder)
    off = CompileConfig(mode="off")
    config = EngineConfig(
        target=ModelConfig(model=str(folder), dtype="float32", device="cpu", compile=off),
        speculative_config=SpeculativeConfig(
            method="draft_model", model=str(folder), num_speculative_tokens=4, controller="fixed", compile=off
        ),
        cache=CacheConfig(block_size=8, num_blocks=400),
        grammar=GrammarConfig(max_bytes=40_000, compile_timeout_s=2.0),
    )
    service = AsyncEngine(Engine(config))
    app = create_app(service, DoorSettings(served_model_name="bytes"), HuggingFaceTokenizer.load(folder))
    try:
        with live_server(app) as url:
            yield url
    finally:
        service.close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in list(fields) if name.startswith(("guided", "struct", "spec"))}
    wanted = {"model": "bytes", "messages": CHAT, "max_completion_tokens": 120, "seed": 5} | fields
    return client.chat.completions.create(**wanted, extra_body=extra)


def test_json_schema(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    texts = set()
    for num_drafted in (0, 1, 4, 8):
        choice = chat(
            client, response_format=wanted, speculation={"num_speculative_tokens": num_drafted}
        ).choices[0]
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        texts.add(choice.message.content)
    assert len(texts) == 1


def test_json_schema_in_a_stream(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    whole = chat(client, response_format=wanted).choices[0].message.content
    with chat(client, response_format=wanted, stream=True) as stream:
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole
    assert len(pieces) > 5


def test_json_object(client: openai.OpenAI) -> None:
    """A random model need not come to an end; what there is must be how an object begins."""
    choice = chat(client, response_format={"type": "json_object"}, temperature=0.5).choices[0]
    text = choice.message.content
    assert text.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_choice": ["left", "right", "a\nb"]}, "left|right|a\nb"),
        ({"guided_grammar": 'start: "x" /[yz]/ "!"'}, "x[yz]!"),
        ({"guided_grammar": 'root ::= "x" [yz] "!"'}, "x[yz]!"),
        ({"guided_json": {"enum": [1, "b"]}}, '1|"b"'),
        ({"guided_json": '{"enum": [1, "b"]}'}, '1|"b"'),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
        ({"structured_outputs": {"choice": ["left"]}}, "left"),
        ({"structured_outputs": {"json": {"const": 5}}}, "5"),
        ({"structured_outputs": {"grammar": 'start: "x"+ "!"'}}, "x+!"),
    ],
)
def test_names_that_users_of_vllm_know(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    response = client.completions.create(
        model="bytes", prompt=["one", "two"], n=2, max_tokens=40, seed=1, extra_body=fields
    )
    assert len(response.choices) == 4
    for choice in response.choices:
        assert re.fullmatch(pattern, choice.text), choice.text
        assert choice.finish_reason == "stop"


def test_response_format_text_is_anything(client: openai.OpenAI) -> None:
    plain = chat(client).choices[0].message.content
    assert chat(client, response_format={"type": "text"}).choices[0].message.content == plain


BAD: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "(a|b"}, "guided_regex"),
    ({"guided_regex": r"[^\x00-\U0010ffff]"}, "guided_regex"),
    ({"guided_regex": "x" * 50_000}, "guided_regex"),
    ({"guided_regex": "(((a{100}){100}){100}){100}"}, "guided_regex"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    (
        {"guided_grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000))},
        "guided_grammar",
    ),
    ({"guided_json": {"type": "texts"}}, "guided_json"),
    ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 2}}, "guided_json"),
    ({"structured_outputs": {"json": {"$ref": "#/nothing"}}}, "structured_outputs.json"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}},
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
def test_unusable_grammars_are_refused_and_disturb_nobody(url: str, stream: bool) -> None:
    plain = {"prompt": "abc", "max_tokens": 60, "seed": 3, "ignore_eos": True}
    expected = httpx.post(f"{url}/v1/completions", json=plain, timeout=60).json()["choices"][0]["text"]

    def post(body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(post, plain) for _ in range(4)]
        answers = [
            pool.submit(post, {"prompt": "abc", "max_tokens": 9, "stream": stream} | fields)
            for fields, _ in BAD
        ]
        for (fields, param), answer in zip(BAD, answers, strict=True):
            response = answer.result()
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["param"] == param
            assert param in error["message"]
            assert error["type"] == "invalid_request_error"
        assert [one.result().json()["choices"][0]["text"] for one in others] == [expected] * 4


def test_grammar_that_becomes_impossible_says_so(url: str, client: openai.OpenAI) -> None:
    """The grammar wants digits behind the a, all of which are forbidden."""
    body = {
        "prompt": "abc",
        "guided_regex": "aaaaaaaa[0-9]",
        "bad_words": [str(digit) for digit in range(10)],
        "max_tokens": 20,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "no_token_allowed"
    assert chat(client, guided_choice=["fine"]).choices[0].message.content == "fine"
