"""Values that are of the right type and of no use: each is a 4xx that names its field, or costs nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import json
import sys
import threading
from collections.abc import Coroutine
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import ValidationError

from deploy.openai.errors import input_error_of
from deploy.openai.json_text import read_json
from deploy.openai.protocol import ChatBody, CompletionBody
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.transport.messages import SubmitRequest
from tests.deploy.openai.fakes import DESCRIPTION, Door, ScriptedService, error_of, events_of

DEEP = "[" * 5000 + "]" * 5000
HALF_A_PAIR = '{"const": "\\ud800"}'
LONG = "y" * 100_000
HUGE = 10**400
"""A JSON number that fits neither a float nor a message."""
LONGEST = int("9" * 4300)
"""One more has a digit more than Python writes."""


@pytest.fixture(scope="module")
def door() -> Door:
    door = Door()
    door.tokenizer.chat_template = (
        "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{% endfor %}"
    )
    return door


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (DEEP, "recursion limit"),
        ('{"a":' * 300 + "1" + "}" * 300, "recursion limit"),
        (HALF_A_PAIR, "hex escape"),
        ('{"a": NaN}', "expected value"),
        ('{"a": 1e999}', "not JSON compliant"),
        ('{"a": ' + "1" * 5000 + "}", "out of range"),
        ("{", "EOF"),
    ],
)
def test_what_is_no_json_in_a_string_is_a_value_error(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_json(text)


def test_json_in_a_string_is_read() -> None:
    assert read_json(' {"a": [1, 2.5, null, "\\ud83d\\ude00"]}') == {"a": [1, 2.5, None, "\N{GRINNING FACE}"]}


@pytest.mark.parametrize("text", [DEEP, HALF_A_PAIR])
@pytest.mark.parametrize("field", ["guided_json", "structured_outputs.json"])
def test_nested_json_that_nothing_can_be_made_of(door: Door, field: str, text: str) -> None:
    value = text if field == "guided_json" else {"json": text}
    response = door.complete(**{field.partition(".")[0]: value})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == field
    assert len(response.content) < 1000


def test_arguments_that_nothing_can_be_made_of_are_text(door: Door) -> None:
    assert door.chat(messages=after_a_call(f'{{"a": {HALF_A_PAIR}}}')).status_code == 200
    too_long_for_the_model = door.chat(messages=after_a_call(f'{{"a": {DEEP}}}'))
    assert error_of(too_long_for_the_model)["code"] == "context_length_exceeded"


def after_a_call(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]


def test_arguments_that_are_nested_as_deep_as_may_be_reach_the_template(door: Door) -> None:
    door.service.requests.clear()
    assert door.chat(messages=after_a_call('{"a":' * 20 + "1" + "}" * 20)).status_code == 200
    too_long_for_the_model = door.chat(messages=after_a_call('{"a":' * 199 + "1" + "}" * 199))
    assert error_of(too_long_for_the_model)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("completions", {"logit_bias": {"1": HUGE}}, "logit_bias"),
        ("completions", {"logit_bias": {"1": -HUGE}}, "logit_bias"),
        ("completions", {"logit_bias": {"1" * 5000: 1}}, "logit_bias"),
        ("completions", {"min_tokens": HUGE}, "min_tokens"),
        ("chat", {"min_tokens": HUGE}, "messages"),
        ("chat", {"min_tokens": DESCRIPTION.max_model_len}, "messages"),
        ("completions", {"max_tokens": LONGEST}, "prompt"),
        ("completions", {"min_tokens": LONGEST}, "min_tokens"),
        ("completions", {"prompt": ["abc", "b"], "n": LONGEST}, "n"),
        ("completions", {"best_of": LONGEST}, "best_of"),
        ("chat", {"max_completion_tokens": LONGEST}, "messages"),
        ("completions", {"timeout_s": HUGE}, "timeout_s"),
        ("completions", {"slo": {"itl_ms": HUGE}}, "slo.itl_ms"),
        ("completions", {"bad_words": ["ab"] * 200_000}, "bad_words"),
        ("completions", {"bad_words": [[1]] * 200_000}, "bad_words"),
        ("chat", {"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ("chat", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ("chat", {"tool_choice": {"type": "some_tools"}}, "tool_choice.type"),
        ("chat", {"tool_choice": 5}, "tool_choice"),
        ("chat", {"tool_choice": ["auto"]}, "tool_choice"),
    ],
)
def test_a_value_beyond_all_bounds(door: Door, endpoint: str, fields: dict[str, Any], param: str) -> None:
    response = door.chat(**fields) if endpoint == "chat" else door.complete(**fields)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert "sys." not in response.text


@pytest.mark.parametrize(
    "fields",
    [
        {"speculation": {"kv_budget": HUGE}},
        {"top_k": HUGE},
        {"stop_token_ids": [3] * 100_000},
        {"allowed_token_ids": [5, 6] * 50_000},
        {"seed": (1 << 64) - 1},
        {"timeout_s": sys.float_info.max},
    ],
)
def test_what_is_let_in_fits_a_message(fields: dict[str, Any]) -> None:
    service = ScriptedService()
    assert Door(service).complete(**fields).status_code == 200
    message = msgspec.msgpack.encode(SubmitRequest(service.requests[0]))
    assert len(message) < 1000


@pytest.mark.parametrize(
    "fields", [{LONG: 1}, {"model": LONG}, {"metadata": {LONG: 1}}, {"seed": LONG}, {"stop": [LONG, 5]}]
)
def test_an_error_repeats_no_body(door: Door, fields: dict[str, Any]) -> None:
    response = door.complete(**fields)
    assert response.status_code in {400, 404}
    error_of(response)
    assert len(response.content) < 3000


def test_a_conversation_of_many_empty_messages_is_not_written_in_the_event_loop(door: Door) -> None:
    """Nor are the arguments of earlier calls, which no message's content shows."""
    rendered_in: list[str] = []
    door.tokenizer.chat_template = "{{ messages | length }}"
    original = type(door.tokenizer).apply_chat_template

    class Noting(type(door.tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
            rendered_in.append(threading.current_thread().name)
            return original(self, *arguments, **options)

    door.tokenizer.__class__ = Noting
    assert door.chat(messages=[{"role": "user", "content": ""}] * 2000).status_code == 200
    assert door.chat(messages=after_a_call(json.dumps({"a": LONG}))).status_code == 200
    assert door.chat(messages=[{"role": "user", "content": "hello"}]).status_code == 200
    assert [name.startswith("tokenize") for name in rendered_in] == [True, True, False]


USER = {"role": "user", "content": "a"}
MANY = 500
NAMES = {f"name{index}": 1 for index in range(MANY)}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [1] * MANY}, "messages[0]: must be a JSON object, got 1"),
        ({"messages": [USER] * 3 + [{}] * MANY}, "messages[3].role is required"),
        ({"messages": [USER | NAMES] * MANY}, "unknown field messages[0].name0"),
        ({"messages": [NAMES]}, "messages[0].role is required"),
        (
            {"messages": [{"role": "user", "content": [1] * MANY}]},
            "messages[0].content[0]: must be a JSON object, got 1",
        ),
        (
            {"messages": [USER | {"role": "assistant", "tool_calls": [{}] * MANY}]},
            "messages[0].tool_calls[0].function is required",
        ),
        ({"tools": [1] * MANY}, "tools: list should have at most 128 items"),
        ({"tools": [{}] * 128}, "tools[0].type is required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True} | NAMES}},
            "unknown field",
        ),
        ({"structured_outputs": {"json": 5} | NAMES}, "structured_outputs.json: must be a JSON schema"),
        ({"stop": ["a"] + [5] * MANY}, "stop[1]: input should be a valid string, got 5"),
        ({"stop_token_ids": [0.5] * MANY}, "stop_token_ids[0]: input should be a valid integer, got 0.5"),
        (
            {"allowed_token_ids": ["5"] * MANY},
            "allowed_token_ids[0]: input should be a valid integer, got '5'",
        ),
        ({"metadata": {"class": "a"} | NAMES}, "metadata.name0: input should be a valid string, got 1"),
        ({"metadata": {"class": None}}, "metadata.class: input should be a valid string, got None"),
        ({"metadata": ["class"] * MANY}, "metadata: must be a JSON object"),
        ({"slo": {"ttft_ms": 0} | NAMES}, "slo.ttft_ms: input should be greater than 0, got 0"),
        ({"slo": NAMES | {"ttft_ms": 5}}, "unknown field slo.name0"),
    ],
)
def test_of_many_faults_the_first_is_told_and_few_are_looked_for(
    fields: dict[str, Any], message: str
) -> None:
    body = {"messages": [USER]} | fields
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate(body)
    assert caught.value.error_count() <= (256 if "tools" in fields else 3)  # there are 128 tools at most
    assert str(input_error_of(caught.value)).startswith(message)


def test_names_of_fields_are_told_from_unknown_ones_however_many_there_are() -> None:
    """A field may have another name than its attribute."""
    schema = {"schema": {"type": "object"}} | dict.fromkeys(NAMES)
    body = {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": schema}}
    grammar = ChatBody.model_validate(body).grammar
    assert grammar is not None
    assert json.loads(grammar.text) == schema["schema"]


@pytest.mark.parametrize("prompt", ["abc", ["a", "b"], [1, 2], [[1, 2], [3]]])
def test_nothing_goes_over_a_prompt_a_second_time(prompt: Any) -> None:
    assert CompletionBody.model_validate({"prompt": prompt}).prompt is prompt


def test_a_name_as_long_as_a_body_is_like_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    original = difflib.get_close_matches

    def note(word: str, *arguments: Any, **options: Any) -> list[str]:
        lengths.append(len(word))
        return original(word, *arguments, **options)

    monkeypatch.setattr(difflib, "get_close_matches", note)
    door = Door()
    for name in ("temperatures", "temperature" + "s" * 60, LONG):
        error = error_of(door.complete(**{name: 1}))
        assert error["param"] is not None
        assert error["message"].startswith(
            "unknown field 'temperatur" if name != LONG else "unknown field 'yyy"
        )
        assert ("did you mean 'temperature'?" in error["message"]) == (name == "temperatures")
        assert len(error["message"]) < 150
    assert lengths == [len("temperatures")]


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        ("completions", {"guided_regex": "a" * 101}, "guided_regex"),
        ("completions", {"guided_regex": "\u00e9" * 51}, "guided_regex"),
        (
            "completions",
            {"structured_outputs": {"choice": ["a" * 50, "b" * 50]}},
            "structured_outputs.choice",
        ),
        (
            "chat",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"title": LONG}}}},
            "response_format",
        ),
        (
            "chat",
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
            "tools",
        ),
    ],
)
def test_a_grammar_that_is_too_long_reaches_no_engine(
    endpoint: str, fields: dict[str, Any], param: str
) -> None:
    door = Door(settings=DoorSettings(max_grammar_bytes=100))
    door.tokenizer.chat_template = "{{ tools }}"
    ask = door.chat if endpoint == "chat" else door.complete
    response = ask(n=3, **fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert "at most 100 are allowed" in response.text
    assert not door.service.requests
    assert door.complete(guided_regex="\u00e9" * 50).status_code == 200


async def num_served_until(door: Door, request: Coroutine[Any, Any, httpx.Response]) -> int:
    """Return how often others are served while a request is."""
    slow, num_served = asyncio.create_task(request), 0
    while not slow.done():
        assert (await door.send("GET", "/health")).status_code == 200
        num_served += 1
        await asyncio.sleep(0)  # a request in process gives no turn to anybody by itself
    assert (await slow).status_code in {200, 400}
    return num_served


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "bad_words": [f"w{index}" for index in range(900)]},
        {"prompt": [f"w{index}" for index in range(200)]},
        {"prompt": [[5, 6]] * 200, "echo": True},
    ],
    ids=["bad words", "prompts", "echoed prompts"],
)
def test_others_are_served_while_much_that_is_short_is_tokenized(body: dict[str, Any]) -> None:
    door = Door(ScriptedService(pieces=("a",)))
    alone = asyncio.run(num_served_until(door, door.send("POST", "/v1/completions", json={"prompt": "a"})))
    request = door.send("POST", "/v1/completions", json=body)
    assert asyncio.run(num_served_until(door, request)) > alone + 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompt_that_is_echoed_is_not_written_in_the_event_loop(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.openai.tokenization.INLINE_TOKENS", 20)
    decoded_in: list[str] = []
    original = HuggingFaceTokenizer._decode_long

    def note(self: HuggingFaceTokenizer, token_ids: Any) -> str:
        decoded_in.append(threading.current_thread().name)
        return original(self, token_ids)

    monkeypatch.setattr(HuggingFaceTokenizer, "_decode_long", note)
    door = Door(ScriptedService(described=dataclasses.replace(DESCRIPTION, max_model_len=4096)))
    prompts = [list(range(5, 25)), list(range(5, 26)), list(range(6, 106))]
    response = door.complete(prompt=prompts, echo=True, stream=stream)
    texts = ["", "", ""]
    answers = [data for _, data in events_of(response)[:-1]] if stream else [response.json()]
    for choice in (choice for answer in answers for choice in answer["choices"]):
        texts[choice["index"]] += choice["text"]
    completion = "".join(door.service.pieces)
    assert texts == [f"{door.tokenizer.decode(prompt)}{completion}" for prompt in prompts]
    assert [name.startswith("tokenize") for name in decoded_in] == [True, True]
