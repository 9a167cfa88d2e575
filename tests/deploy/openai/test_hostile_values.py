"""Values that are of the right type and of no use: each is a 4xx that names its field, or costs nothing."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import msgspec
import pytest

from deploy.openai.json_text import read_json
from specdec.transport.messages import SubmitRequest
from tests.deploy.openai.fakes import DESCRIPTION, Door, ScriptedService, error_of

DEEP = "[" * 5000 + "]" * 5000
HALF_A_PAIR = '{"const": "\\ud800"}'
LONG = "y" * 100_000
HUGE = 10**400
"""A JSON number that fits neither a float nor a message."""


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
@pytest.mark.parametrize("field", ["guided_json", "structured_outputs.json", "arguments"])
def test_nested_json_that_nothing_can_be_made_of(door: Door, field: str, text: str) -> None:
    if field == "arguments":
        text = f'{{"a": {text}}}'
        response = door.chat(messages=after_a_call(text))
        param = "messages[1].tool_calls[0].function.arguments"
    else:
        value = text if field == "guided_json" else {"json": text}
        response = door.complete(**{field.partition(".")[0]: value})
        param = field
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert len(response.content) < 1000


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
        ("completions", {"timeout_s": HUGE}, "timeout_s"),
        ("completions", {"slo": {"itl_ms": HUGE}}, "slo.itl_ms"),
        ("completions", {"bad_words": ["ab"] * 200_000}, "bad_words"),
        ("completions", {"bad_words": [[1]] * 200_000}, "bad_words"),
        ("chat", {"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ("chat", {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
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


def test_others_are_served_while_bad_words_are_tokenized() -> None:
    door, num_served = Door(), 0
    words = [f"w{index}" for index in range(900)]

    async def ask() -> int:
        nonlocal num_served
        body = {"prompt": "a", "bad_words": words}
        slow = asyncio.create_task(door.send("POST", "/v1/completions", json=body))
        while not slow.done():
            assert (await door.send("GET", "/health")).status_code == 200
            num_served += 1
            await asyncio.sleep(0)  # a request in process gives no turn to anybody by itself
        return (await slow).status_code

    assert asyncio.run(ask()) in {200, 400}
    assert num_served > 10
