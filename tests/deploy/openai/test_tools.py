"""Tool calls in chats: what the template is told, what is read from replies, and calls that are forced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from deploy.openai.tools import CallReader, ReadCall, read_reply
from tests.deploy.openai.byte_level import byte_level_client
from tests.deploy.openai.fakes import Door, ScriptedService, error_of, events_of

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def parts(calls: list[ReadCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


# ---- reading replies -----------------------------------------------------------------------------

ROME = ("weather", {"city": "Rome", "days": 2})
REPLIES = [
    ("no call", "no call", []),
    (CALL, "", [ROME]),
    (f"Let me see.\n{CALL}\n{CALL}", "Let me see.\n", [ROME, ROME]),
    (f"{CALL} and more", " and more", [ROME]),
    (f"{CALL}\n\n So.\n{CALL}\n \n", "\n\n So.\n", [ROME, ROME]),
    (f"{CALL}\n <tool_call>x</tool_call>\n{CALL}", "\n <tool_call>x</tool_call>\n", [ROME, ROME]),
    (f"{CALL}\n<tool", "\n<tool", [ROME]),
    ('<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ('<tool_call>{"name": "now", "parameters": {"a": 1}}</tool_call>', "", [("now", {"a": 1})]),
    ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ('<tool_call>{"title": "x"}</tool_call> y', '<tool_call>{"title": "x"}</tool_call> y', []),
    ('<tool_call>{"name": "now"}', '<tool_call>{"name": "now"}', []),
    ("a < b <tool", "a < b <tool", []),
]


@pytest.mark.parametrize(("text", "content", "calls"), REPLIES)
def test_reply_is_read(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    found, found_calls = read_reply(text)
    assert found == content
    assert parts(found_calls) == calls
    assert len({call.id for call in found_calls}) == len(calls)


@pytest.mark.parametrize(("text", "content", "calls"), REPLIES)
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_reply_is_read_the_same_in_pieces(
    text: str, content: str, calls: list[tuple[str, Any]], size: int
) -> None:
    reader = CallReader()
    contents, found = [], []
    for start in range(0, len(text), size):
        piece, more = reader.feed(text[start : start + size])
        contents.append(piece)
        found += more
    assert "".join([*contents, reader.end()]) == content
    assert parts(found) == calls


# ---- the door ------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.a }}){% endfor %}"
    "{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}{% endfor %}"
)


def door_with(pieces: tuple[str, ...], template: str = TEMPLATE) -> Door:
    door = Door(ScriptedService(pieces=pieces))
    door.tokenizer.chat_template = template
    return door


def prompt_of(door: Door) -> str:
    return str(door.tokenizer.decode(door.service.requests[-1].prompt_token_ids)).replace(" ", "")


def pieces_of(text: str) -> tuple[str, ...]:
    return tuple(text[start : start + 4] for start in range(0, len(text), 4))


def test_calls_of_a_free_reply_are_read() -> None:
    door = door_with(pieces_of(f"Well: {CALL}"))
    choice = door.chat(tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well: "
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 2}
    assert prompt_of(door).startswith("weather;now;[user]")
    assert door.service.requests[-1].params.grammar is None


def test_calls_in_a_stream() -> None:
    door = door_with(pieces_of(f"Well: {CALL}\n{CALL}"))
    events = [data for _, data in events_of(door.chat(tools=TOOLS, stream=True)) if data != "[DONE]"]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas).rstrip() == "Well:"
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"]["name"] for call in calls] == ["weather"] * 2
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_tools_nothing_is_read() -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        door = door_with(pieces_of(CALL))
        choice = door.chat(**fields).json()["choices"][0]
        assert choice["message"]["content"] == CALL
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        assert "weather" not in prompt_of(door)


def test_results_of_calls_reach_the_template() -> None:
    door = door_with(("ok",))
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 5}'}}
    messages = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    assert door.chat(messages=messages, tools=TOOLS).status_code == 200
    assert prompt_of(door).endswith("[user]when?[assistant](now5)[tool]noon<c1>")


NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS[:1], "tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
    ],
)
def test_bad_tools(fields: dict[str, Any], param: str) -> None:
    door = door_with(("ok",))
    response = door.chat(**fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert door.service.requests == []


def test_template_that_knows_no_tools_is_told_apart() -> None:
    door = door_with(("ok",), "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert error_of(door.chat(tools=TOOLS))["param"] == "tools"
    assert door.chat(tools=TOOLS, tool_choice="none").status_code == 200


# ---- forced calls, over a real engine -----------------------------------------------------------


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    pytest.importorskip("llguidance")
    with byte_level_client(tmp_path_factory.mktemp("bytes")) as client:
        yield client


def forced(client: openai.OpenAI, tool_choice: Any, num_drafted: int = 4, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="bytes",
        messages=[{"role": "user", "content": "weather?"}],
        tools=TOOLS,  # type: ignore[arg-type]
        tool_choice=tool_choice,
        max_completion_tokens=200,
        extra_body={"speculation": {"num_speculative_tokens": num_drafted}},
        **fields,
    )


def test_named_call_keeps_to_its_schema(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    seen = set()
    for num_drafted in (0, 4, 7):
        (reply,) = forced(client, choice, num_drafted, seed=3).choices
        assert reply.finish_reason == "tool_calls"
        assert reply.message.content is None
        (call,) = reply.message.tool_calls
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        seen.add(call.function.arguments)
    assert len(seen) == 1


@pytest.mark.parametrize("seed", range(3))
def test_required_call_is_one_of_the_tools(client: openai.OpenAI, seed: int) -> None:
    (reply,) = forced(client, "required", seed=seed, parallel_tool_calls=False, temperature=0.8).choices
    if reply.finish_reason == "length":
        return  # arguments of `now` may be any object, and a random model may go on for ever
    (call,) = reply.message.tool_calls
    assert call.function.name in ("weather", "now")
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, WEATHER if call.function.name == "weather" else {"type": "object"})


def test_named_call_in_a_stream(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    (whole,) = forced(client, choice, seed=8).choices[0].message.tool_calls
    with forced(client, choice, seed=8, stream=True) as stream:
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert call.index == 0
    assert call.function.name == "weather"
    assert call.function.arguments == whole.function.arguments
    assert not "".join(chunk.delta.content or "" for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


RECURSIVE = {
    "type": ["object", "null"],
    "properties": {
        "size": {"$ref": "#/$defs/size"},
        "child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        "same": {"$ref": "#/properties/size"},
    },
    "required": ["size", "child", "same"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer", "minimum": 0, "maximum": 9}},
}


def create(client: openai.OpenAI, parameters: Any, **fields: Any) -> Any:
    function = {"name": "f", "parameters": parameters}
    return client.chat.completions.create(
        model="bytes",
        messages=[{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        tool_choice="required",
        **fields,
    )


def test_references_are_those_of_the_functions_schema(client: openai.OpenAI) -> None:
    num_checked = 0
    for seed in range(6):
        (reply,) = create(client, RECURSIVE, seed=seed, max_completion_tokens=300).choices
        for call in reply.message.tool_calls or ():
            num_checked += 1
            jsonschema.validate(json.loads(call.function.arguments), RECURSIVE)
    assert num_checked >= 3


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"type": "object", "properties": {"a": {"type": "words"}}}, "tools"),
        ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, "tools"),
        ({"type": "string"}, "tools[0].function.parameters"),
        ({"type": ["string", "null"]}, "tools[0].function.parameters"),
    ],
)
def test_schema_that_cannot_be_kept_to_is_refused(client: openai.OpenAI, parameters: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, parameters)
    assert caught.value.param == param
