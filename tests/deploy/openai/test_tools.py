"""Tool calls in chats: what the template is told, what is read from replies, and calls that are forced."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.openai.json_text import read_json
from deploy.openai.protocol import ChatBody
from deploy.openai.tools import CLOSING, OPENING, CallReader, ReadCall, read_reply
from specdec.core.sampling_params import Grammar
from specdec.sampling.grammar_library import compile_matcher
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
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def parts(calls: list[ReadCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


# ---- reading replies -----------------------------------------------------------------------------

ROME = ("weather", {"city": "Rome", "days": 2})
INNER = '<tool_call>{"name": "now", "arguments": {"a": "<tool_call>{"}}</tool_call>'
ABOUT_CALLS = (
    '<tool_call>{"name": "now", "arguments": {"a": "</tool_call>", "b": "\\\\\\"</tool_call>{"}}</tool_call>'
)
ON_CALLS = ("now", {"a": "</tool_call>", "b": '\\"</tool_call>{'})
CLOSED = '<tool_call>{"name": "now"}</tool_call>'
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
    (f"Write <tool_call> first. {CALL}", "Write <tool_call> first. ", [ROME]),
    (f"<tool_call><tool_call>\n{CALL}", "<tool_call><tool_call>\n", [ROME]),
    (f"<tool_call>{{x}} or {CALL}", "<tool_call>{x} or ", [ROME]),
    (f'<tool_call>{{"a": 1}}</tool_call>{CALL}', '<tool_call>{"a": 1}</tool_call>', [ROME]),
    (f"</tool_call>{CALL}</tool_call>", "</tool_call></tool_call>", [ROME]),
    (INNER, "", [("now", {"a": "<tool_call>{"})]),
    (f"<tool_call>{{{INNER}", "<tool_call>{", [("now", {"a": "<tool_call>{"})]),
    ("<tool_call> \n{x <tool_call>{y", "<tool_call> \n{x <tool_call>{y", []),
    ("<tool_call>\n \t", "<tool_call>\n \t", []),
    (f"{ABOUT_CALLS} x", " x", [ON_CALLS]),
    (f"{ABOUT_CALLS}{CALL}", "", [ON_CALLS, ROME]),
    (ABOUT_CALLS[:60], ABOUT_CALLS[:60], []),
    (f'<tool_call>{{"x{NOW}', '<tool_call>{"x', [("now", {})]),
    (f'<tool_call>{{"x{CLOSED}', '<tool_call>{"x', [("now", {})]),
    (f'<tool_call>{{"x\\\\"{CLOSED}" x', '<tool_call>{"x\\\\"" x', [("now", {})]),
    (f'<tool_call>{{\\"x{CLOSED}', '<tool_call>{\\"x', [("now", {})]),
    (f"<tool_call>{{</tool_{CLOSED}", "<tool_call>{</tool_", [("now", {})]),
]


@pytest.mark.parametrize(("text", "content", "calls"), REPLIES)
def test_reply_is_read(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    found, found_calls = read_reply(text)
    assert found == content
    assert parts(found_calls) == calls
    assert len({call.id for call in found_calls}) == len(calls)
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call.id) for call in found_calls), "as Mistral's templates want"


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
    held_back, last_calls = reader.end()
    assert "".join([*contents, held_back]) == content
    assert parts(found + last_calls) == calls


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a":0.10, "b":1e2,  "c": 12345678901234567890.123456789}',
        '{"a": -' + "7" * 300 + "}",
        '{"a": ' + "[" * 150 + "]" * 150 + "}",
        '{"a": "\\u00e9\\/\u00e9"}',
        "{ }",
    ],
)
def test_arguments_are_what_the_model_has_written(arguments: str) -> None:
    """Numbers are not written anew: they would be others."""
    content, calls = read_reply(f'<tool_call>\n{{"name": "f", "arguments": {arguments} }}\n</tool_call>')
    assert content == ""
    assert [call.arguments for call in calls] == [arguments]


def calls_in(text: str, is_complete: bool) -> list[tuple[str, Any]]:
    """Return the calls in a reply by trying every closing tag, and its end."""
    found = []
    while OPENING in text:
        text = text.partition(OPENING)[2]
        ends = [closing.start() for closing in re.finditer(CLOSING, text)]
        for end in [*ends, *([len(text)] if is_complete else [])]:
            with contextlib.suppress(ValueError):
                call = read_json(text[:end])
                if isinstance(call, dict) and "name" in call:
                    found.append((call["name"], call.get("arguments", {})))
                    text = text[end:]
                    break
    return found


@settings(max_examples=400, deadline=None)
@given(data=st.data(), is_complete=st.booleans(), is_parallel=st.booleans())
def test_how_a_reply_is_cut_makes_no_difference(
    data: st.DataObject, is_complete: bool, is_parallel: bool
) -> None:
    part = st.sampled_from(
        [
            CALL,
            INNER,
            "<tool_call>",
            "</tool_call>",
            '{"name": "now"}',
            "{",
            "}",
            " ",
            "\n",
            "<",
            "x",
            '"',
            "\\",
            ABOUT_CALLS,
            CLOSED,
        ]
    )
    text = "".join(data.draw(st.lists(part, max_size=12)))
    content, calls = read_reply(text, is_complete=is_complete, is_parallel=is_parallel)
    reader = CallReader(is_parallel=is_parallel)
    found, found_calls = "", []
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=30)))
    for start, end in itertools.pairwise([0, *places, len(text)]):
        piece, more = reader.feed(text[start:end])
        found, found_calls = found + piece, found_calls + more
    piece, more = reader.end(is_complete=is_complete)
    assert found + piece == content
    assert parts(found_calls + more) == parts(calls)
    assert reader.num_calls == len(calls)
    every = calls_in(text, is_complete)
    assert parts(calls) == (every if is_parallel else every[:1])
    if not is_parallel:
        everything, every_call = read_reply(text, is_complete=is_complete)
        assert (everything, parts(every_call)[:1]) == (content, parts(calls))
    if not calls:
        assert content == text


def test_text_is_held_back_no_longer_than_it_may_be_a_call() -> None:
    reader = CallReader()
    assert [reader.feed(piece)[0] for piece in ("so <tool", "_call", ">", " \n", "is a tag. <")] == [
        *("so ", "", "", ""),
        "<tool_call> \nis a tag. ",
    ]
    assert reader.feed("b> <tool_call>{")[0] == "<b> "
    assert reader.end() == ("<tool_call>{", [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('<tool_call>{"name": "now"}', "", [("now", {})]),
        ('<tool_call>\n{"name": "now"}\n', "", [("now", {})]),
        (f'{CALL}\n<tool_call>{{"name": "now"}}', "", [ROME, ("now", {})]),
        ('<tool_call>{x <tool_call>{"name": "now"}', "<tool_call>{x ", [("now", {})]),
        ('<tool_call>{"name": "now"', '<tool_call>{"name": "now"', []),
        ('<tool_call>{"name": "now"} or so', '<tool_call>{"name": "now"} or so', []),
        ('<tool_call>{"title": "now"}', '<tool_call>{"title": "now"}', []),
    ],
)
def test_a_last_call_need_not_be_closed_where_the_reply_has_ended(
    text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    found, found_calls = read_reply(text, is_complete=True)
    assert (found, parts(found_calls)) == (content, calls)
    assert read_reply(text)[0].endswith(text.rpartition("<tool_call>")[2]), "cut, it is text"


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


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_where_no_more_are_wanted(stream: bool) -> None:
    text = f"Well: {CALL}\n{NOW}\n{NOW} That is all."
    for wanted, names in ((True, ["weather", "now", "now"]), (False, ["weather"])):
        reply = told(door_with(pieces_of(text)), stream=stream, parallel_tool_calls=wanted)
        assert reply == ("Well:  That is all.", names, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_last_call_that_is_not_closed(stream: bool) -> None:
    text = NOW.removesuffix("\n</tool_call>")
    assert told(door_with(pieces_of(text)), stream=stream) == ("", ["now"], "tool_calls")
    cut = Door(ScriptedService(pieces=pieces_of(text), finish_reason="length"))
    cut.tokenizer.chat_template = TEMPLATE
    assert told(cut, stream=stream) == (text, [], "length")


def told(door: Door, *, stream: bool, **fields: Any) -> tuple[str, list[str], str]:
    """Return text, names of calls and finish reason of a reply."""
    response = door.chat(tools=TOOLS, stream=stream, **fields)
    if not stream:
        (choice,) = response.json()["choices"]
        message = choice["message"]
        calls = message.get("tool_calls", [])
        names = [call["function"]["name"] for call in calls]
        return message["content"] or "", names, choice["finish_reason"]
    choices = [data["choices"][0] for _, data in events_of(response)[:-1]]
    made = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert [call["index"] for call in made] == list(range(len(made)))
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    return content, [call["function"]["name"] for call in made], choices[-1]["finish_reason"]


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


def test_what_openais_library_adds_to_a_reply_is_taken_back() -> None:
    door = door_with(("ok",))
    function = {"name": "now", "arguments": '{"a": 5}', "parsed_arguments": {"a": 5}}
    messages = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": '{"b": 1}', "parsed": {"b": 1}},
        {
            "role": "assistant",
            "content": None,
            "parsed": None,
            "tool_calls": [{"id": "c", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    assert door.chat(messages=messages, tools=TOOLS).status_code == 200
    assert "(now5)" in prompt_of(door)
    of_a_user = [{"role": "user", "content": "a", "parsed": {"b": 1}}]
    assert error_of(door.chat(messages=of_a_user))["param"] == "messages[0].parsed"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Ro', '"{\\"city\\":\\"Ro"'),
        ("[1]", '"[1]"'),
        ("", "{}"),
        (None, "{}"),
        ('{"a": 5}', '{"a":5}'),
    ],
)
def test_arguments_of_earlier_calls_need_not_be_json(arguments: str | None, shown: str) -> None:
    """A model may have failed to write any; LangChain sends such calls back as they were."""
    template = (
        "{% for m in messages %}[{{ m.role }}]"
        "{% for c in m.tool_calls or [] %}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
    )
    door = door_with(("ok",), template)
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "that is no JSON"},
    ]
    assert door.chat(messages=messages).status_code == 200
    assert prompt_of(door) == f"[user][assistant]({shown})[tool]"


def test_what_gateways_add_is_left_out() -> None:
    door = door_with(("ok",))
    mark = {"type": "ephemeral"}
    function = {"name": "now", "arguments": '{"a": 5}'}
    of_a_gateway = {"id": "c", "index": 0, "extra_content": {"google": {}}, "provider_specific_fields": {}}
    reply = {
        "role": "assistant",
        "content": [{"type": "text", "text": "well", "cache_control": mark}],
        "id": "chatcmpl-1",
        "thinking_blocks": [{"type": "thinking"}],
        "provider_specific_fields": {"refusal": None},
        "tool_calls": [{**of_a_gateway, "cache_control": mark, "function": function}],
    }
    messages = [
        {"role": "user", "content": "when?", "cache_control": mark},
        reply,
        {"role": "tool", "tool_call_id": "c", "content": "noon", "cache_control": mark},
    ]
    (tool, *_) = TOOLS
    marked = [{**tool, "cache_control": mark, "function": {**tool["function"], "cache_control": mark}}]
    assert door.chat(messages=messages, tools=marked).status_code == 200
    marked_prompt = prompt_of(door)
    plain = [
        {"role": "user", "content": "when?"},
        {"role": "assistant", "content": "well", "tool_calls": [{"id": "c", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    assert door.chat(messages=plain, tools=[tool]).status_code == 200
    assert prompt_of(door) == marked_prompt


@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_content": None},
        {"reasoning": None, "reasoning_content": "hm"},
        {"reasoning": "hm", "reasoning_content": "hm"},
    ],
)
def test_what_a_model_thought_reaches_the_template(thought: dict[str, Any]) -> None:
    door = door_with(
        ("ok",), "{% for m in messages %}[{{ m.reasoning_content or '' }}]{{ m.content }}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", **thought},
        {"role": "user", "content": "c", "name": "d"},
    ]
    assert door.chat(messages=messages).status_code == 200
    assert prompt_of(door) == "[]a[hm]b[]c"
    refused = door.chat(messages=[{"role": "user", "content": "a", **thought}])
    assert "reasoning" in error_of(refused)["message"]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


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
        ({"tools": TOOLS, "tool_choice": allowed("required", "now"), "guided_regex": "a"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "now", "then")}, "tool_choice"),
        ({"tool_choice": allowed("auto", "now")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": TOOLS, "tool_choice": allowed("none", "now")}, "tool_choice.allowed_tools.mode"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
            "tool_choice.allowed_tools",
        ),
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


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_tools_of_the_request_are_called(stream: bool) -> None:
    other = '<tool_call>{"name": "other"}</tool_call>'
    assert told(door_with(pieces_of(f"{other} {NOW}")), stream=stream) == (f"{other} ", ["now"], "tool_calls")
    assert told(door_with(pieces_of(other)), stream=stream) == (other, [], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_only_tools_that_are_allowed_are_called(stream: bool) -> None:
    door = door_with(pieces_of(f"{CALL} {NOW}"))
    reply = told(door, stream=stream, tool_choice=allowed("auto", "now", "now"))
    assert reply == (f"{CALL} ", ["now"], "tool_calls")
    assert prompt_of(door).startswith("now;[user]")
    assert door.service.requests[-1].params.grammar is None


def test_allowed_tools_are_as_if_there_were_no_others() -> None:
    for mode in ("auto", "required"):
        for fields in ({}, {"response_format": PLACE_FORMAT}, {"parallel_tool_calls": False}):
            bodies = [
                ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields, **choice})
                for choice in (
                    {"tools": TOOLS, "tool_choice": allowed(mode, "now")},
                    {"tools": TOOLS[1:], "tool_choice": mode},
                )
            ]
            some, others = bodies
            assert some.grammar == others.grammar
            assert some.template_tools == others.template_tools
            assert some.callable_names == others.callable_names == {"now"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_a_format_is_for_text_and_forced_calls_are_none(choice: Any) -> None:
    for wanted in (PLACE_FORMAT, {"type": "json_object"}):
        grammar = grammar_of(response_format=wanted, tool_choice=choice)
        assert grammar == grammar_of(tool_choice=choice)
        assert grammar.param == "tools"
    assert door_with(("ok",)).chat(tools=TOOLS, tool_choice=choice, response_format=PLACE_FORMAT).is_success


def test_calls_are_echoed_to_templates_that_check_their_ids() -> None:
    """As Mistral's do."""
    template = (
        "{% if tools %}tools{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}{{ c.id }}"
        "{% endfor %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    door = door_with(pieces_of(f"{NOW}\n{NOW}"), template)
    user = {"role": "user", "content": "when?"}
    message = door.chat(messages=[user], tools=TOOLS).json()["choices"][0]["message"]
    ids = [call["id"] for call in message["tool_calls"]]
    results = [{"role": "tool", "tool_call_id": one, "content": "noon"} for one in ids]
    assert door.chat(messages=[user, message, *results], tools=TOOLS).status_code == 200
    assert "".join(ids) in prompt_of(door)
    message["tool_calls"][0]["id"] = "call_1"
    assert error_of(door.chat(messages=[user, message, *results], tools=TOOLS))["param"] == "messages"


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


def test_a_function_without_parameters_is_called_without_arguments(client: openai.OpenAI) -> None:
    for parameters in (openai.omit, None):
        function = {"name": "now"} | ({} if parameters is openai.omit else {"parameters": parameters})
        (reply,) = client.chat.completions.create(
            model="bytes",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
            tool_choice="required",
            parallel_tool_calls=False,
            seed=3,
            max_completion_tokens=100,
        ).choices
        (call,) = reply.message.tool_calls or ()
        assert json.loads(call.function.arguments) == {}


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
    if param == "tools":
        assert "tools: parameters of f: " in str(caught.value)


# ---- an answer in a format, or calls --------------------------------------------------------------

PLACE = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/name"}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"name": {"type": "string", "maxLength": 5}},
    "description": "::= is no sign of a grammar here",
}
COMPACT = '<tool_call>\n{"name": "weather", "arguments": {"city":"Rome","days":2}}\n</tool_call>'
PLACE_FORMAT = {"type": "json_schema", "json_schema": {"name": "p", "schema": PLACE}}


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether it is a whole text of the grammar, by the library that keeps models to it."""
    llguidance = pytest.importorskip("llguidance")
    matcher = compile_matcher(llguidance.LLTokenizer("byte"), grammar, 100_000)
    token_ids = list(text.encode())
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and bool(matcher.is_accepting())


def grammar_of(**fields: Any) -> Grammar:
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "tools": TOOLS} | fields)
    assert body.grammar is not None
    return body.grammar


BLANKS = " \n" * 8
FORMATS: list[tuple[Any, list[str], list[str]]] = [
    (
        PLACE_FORMAT,
        ['{"place": "Rome"}', '{"place":"Rome"}', f'{{{BLANKS}"place"{BLANKS}: "<tool"}}'],
        ['{"place": 5}', '{"other": "x"}', "Rome", f'{{{BLANKS} "place": "Rome"}}'],
    ),
    (
        {"type": "json_object"},
        ["{}", '{"a": [1, "<tool_call>"]}', f'{{"a"{BLANKS}:5}}'],
        ["[1]", "5", '"a"', f'{{"a"{BLANKS} :5}}'],
    ),
    ({"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}, ['"<tool_call>"'], ["x", "{}"]),
    (
        {"type": "json_schema", "json_schema": {"schema": {"enum": [5, [], None]}}},
        ["5", "[]", "null"],
        ["x", ""],
    ),
]


@pytest.mark.parametrize(("wanted", "answers", "others"), FORMATS, ids=lambda value: str(value)[:40])
def test_with_a_format_a_reply_is_an_answer_or_calls(
    wanted: Any, answers: list[str], others: list[str]
) -> None:
    grammar = grammar_of(response_format=wanted)
    for text in [*answers, COMPACT, f"{COMPACT}\n{NOW}"]:
        assert accepts(grammar, text), text
    for text in [
        *others,
        f"So: {COMPACT}",
        f"{COMPACT}{answers[0]}",
        f"{answers[0]}\n{COMPACT}",
        "<tool_call>",
    ]:
        assert not accepts(grammar, text), text
    wrong = COMPACT.replace("Rome", "rome")
    assert not accepts(grammar, wrong), "arguments satisfy the function's schema"
    one_only = grammar_of(response_format=wanted, parallel_tool_calls=False)
    assert accepts(one_only, COMPACT)
    assert accepts(one_only, answers[0])
    assert not accepts(one_only, f"{COMPACT}\n{NOW}")
    # The answers are those that there are without tools.
    alone = grammar_of(response_format=wanted, tool_choice="none")
    assert [accepts(alone, text) for text in [*answers, *others, COMPACT]] == [
        *[True] * len(answers),
        *[False] * (len(others) + 1),
    ]


def test_a_schemas_own_directions_for_the_compiler_do_not_count() -> None:
    loose = {"x-guidance": {"whitespace_flexible": True, "lenient": True, "whitespace_pattern": "x*"}}
    wanted = {"type": "json_schema", "json_schema": {"schema": PLACE | loose}}
    grammar = grammar_of(response_format=wanted)
    assert accepts(grammar, '{ "place": "Rome"}')
    assert not accepts(grammar, '{xx"place": "Rome"}')


def test_other_grammars_are_as_they_are_without_tools() -> None:
    assert grammar_of(guided_regex="a+") == Grammar("regex", "a+", "guided_regex")
    assert grammar_of(response_format={"type": "text"}, guided_json={}).param == "guided_json"


def ask_for_place(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        model="bytes",
        messages=[{"role": "user", "content": "where?"}],
        tools=TOOLS[:1],  # type: ignore[arg-type]
        response_format=PLACE_FORMAT,  # type: ignore[arg-type]
        max_completion_tokens=200,
        **fields,
    )


def test_a_model_gives_an_answer_or_calls(client: openai.OpenAI) -> None:
    kinds = set()
    for seed in range(8):
        with ask_for_place(client, seed=seed, stream=True) as stream:
            chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
        content = "".join(chunk.delta.content or "" for chunk in chunks)
        calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        (whole,) = ask_for_place(client, seed=seed).choices
        assert (whole.message.content or "") == content
        assert [call.function.arguments for call in whole.message.tool_calls or ()] == [
            call.function.arguments for call in calls
        ]
        assert whole.finish_reason == chunks[-1].finish_reason
        if whole.finish_reason == "length":
            continue
        kinds.add(whole.finish_reason)
        if calls:
            assert whole.finish_reason == "tool_calls"
            assert content == ""
            for call in calls:
                jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        else:
            jsonschema.validate(json.loads(content), PLACE)
    assert kinds == {"stop", "tool_calls"}


@pytest.mark.parametrize("is_of_tool", [False, True])
def test_a_format_with_tools_that_cannot_be_kept_to_is_refused(
    client: openai.OpenAI, is_of_tool: bool
) -> None:
    good, bad = {"type": "object"}, {"type": "object", "not": {}}
    function = {"name": "f", "parameters": bad if is_of_tool else good}
    schema = good if is_of_tool else bad
    with pytest.raises(openai.BadRequestError, match=r'response_format with tools: .*"not"'):
        client.chat.completions.create(
            model="bytes",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        )
