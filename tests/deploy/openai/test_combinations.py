"""Fields of a request together, by the official client: a stream brings what the whole response has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from tests.deploy.openai.byte_level import byte_level_client
from tests.pairwise import Case, pairwise_cover

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer", "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "put", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
CALLED = r'(so: )?<tool_call>\{"name": "now", "arguments": \{"a": [0-9]{1,3}\}\}</tool_call>( and more)?'
OUTPUTS: dict[str, dict[str, Any]] = {
    "free": {},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    },
    "json_object": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "(\u00e9|\u4e16\u754c|\U0001f680){2,9}"}},
    "choice": {"guided_choice": ["yes", "no", "\u00fcber"]},
    "tools: not used": {"tools": TOOLS, "tool_choice": "none"},
    "tools: auto": {"tools": TOOLS},
    "tools: called by itself": {"tools": TOOLS, "guided_regex": CALLED},
    "tools: auto, one only": {"tools": TOOLS, "guided_regex": CALLED * 2, "parallel_tool_calls": False},
    "tools: auto, or JSON": {
        "tools": TOOLS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
    "tools: required": {"tools": TOOLS, "tool_choice": "required"},
    "tools: one only": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "tools: named": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "put"}}},
}
SHARED = {
    "n": (1, 3),
    "temperature": (0, 0.8, 1.3),
    "stop": (None, "a", ("}", "\u00e9")),
    "max_tokens": (1, 7, 90),
    "speculation": (0, 4),
    "return_token_ids": (False, True),
    "include_usage": (False, True),
    "bias": (None, 5.0),
    "penalty": (0.0, 1.5),
}
CHATS = pairwise_cover({**SHARED, "logprobs": (None, 0, 2), "output": tuple(OUTPUTS)}, lambda case: True)
PROMPTS: dict[str, Any] = {
    "text": "def f(\u00e9\U0001f680",
    "texts": ["abc", "\u4e16"],
    "ids": [40, 41, 42],
    "lists of ids": [[40], [41, 42]],
}
COMPLETIONS = pairwise_cover(
    {
        **SHARED,
        "logprobs": (None, 0, 3),
        "echo": (False, True),
        "prompt": tuple(PROMPTS),
        "min_tokens": (0, 5),
    },
    lambda case: case["min_tokens"] <= case["max_tokens"],  # type: ignore[operator]
)


def few_by_default(cases: list[Case], number: int = 5) -> list[Any]:
    """Parameters: the first cases, and the others for the full run."""
    return [
        pytest.param(case, id=str(index), marks=[] if index < number else [pytest.mark.full])
        for index, case in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with byte_level_client(tmp_path_factory.mktemp("bytes")) as client:
        yield client


@dataclass
class Choice:
    """What one choice has come to."""

    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    num_top: list[int] = field(default_factory=list)
    finish: list[tuple[str, Any]] = field(default_factory=list)

    def add_calls(self, calls: Any) -> None:
        self.calls += [(call.function.name, json.loads(call.function.arguments)) for call in calls or ()]

    def add_logprobs(self, logprobs: Any) -> None:
        if logprobs is None:
            return
        if hasattr(logprobs, "content"):
            self.tokens += [one.token for one in logprobs.content]
            self.logprobs += [one.logprob for one in logprobs.content]
            self.num_top += [len(one.top_logprobs) for one in logprobs.content]
            for one in logprobs.content:
                assert one.token.startswith("bytes:") or bytes(one.bytes).decode() == one.token
        else:
            self.tokens += logprobs.tokens
            self.logprobs += logprobs.token_logprobs
            self.offsets += logprobs.text_offset
            self.num_top += [-1 if top is None else len(top) for top in logprobs.top_logprobs]

    def add(self, one: Any, part: Any, text: str) -> None:
        self.text += text
        self.add_calls(getattr(part, "tool_calls", None))
        self.add_logprobs(one.logprobs)
        self.token_ids += getattr(one, "token_ids", None) or ()
        if one.finish_reason is not None:
            self.finish.append((one.finish_reason, getattr(one, "stop_reason", None)))


def require_same(streamed: list[Choice], whole: list[Choice]) -> None:
    for ours, theirs in zip(streamed, whole, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        ours.logprobs = theirs.logprobs
        assert ours == theirs
        assert len(ours.finish) == 1


def fields_of(case: Case) -> dict[str, Any]:
    """What both endpoints are sent."""
    stop = case["stop"]
    extra: dict[str, Any] = {
        "speculation": {"num_speculative_tokens": case["speculation"]},
        "return_token_ids": case["return_token_ids"],
        "repetition_penalty": 1.0 + float(case["penalty"]) / 10,  # type: ignore[arg-type]
    }
    fields: dict[str, Any] = {
        "model": "bytes",
        "seed": 11,
        "n": case["n"],
        "temperature": case["temperature"],
        "stop": list(stop) if isinstance(stop, tuple) else stop,
        "frequency_penalty": case["penalty"],
        "extra_body": extra,
    }
    if case["bias"] is not None:
        fields["logit_bias"] = {"97": case["bias"], "98": -100}
    return fields


def read_stream(
    events: Any, num_choices: int, part_of: Any, text_of: Any, *, include_usage: bool
) -> tuple[list[Choice], Any]:
    choices, usage, num_closing = [Choice() for _ in range(num_choices)], None, 0
    for event in events:
        for one in event.choices:
            assert num_closing == 0, "something after the usage"
            assert not choices[one.index].finish, "something after the end"
            part = part_of(one)
            choices[one.index].add(one, part, text_of(one, part) or "")
        if not event.choices:
            num_closing, usage = num_closing + 1, event.usage
    assert num_closing == include_usage
    return choices, usage


@pytest.mark.parametrize("case", few_by_default(CHATS))
def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI, case: Case) -> None:
    fields = fields_of(case)
    output = dict(OUTPUTS[str(case["output"])])
    for name in ("structured_outputs", "guided_choice", "guided_regex"):
        if name in output:
            fields["extra_body"][name] = output.pop(name)
    if case["logprobs"] is not None:
        fields |= {"logprobs": True, "top_logprobs": case["logprobs"]}
    fields |= output | {
        "messages": [{"role": "user", "content": "\u00e9 and \U0001f680"}],
        "max_completion_tokens": case["max_tokens"],
    }
    whole = client.chat.completions.create(**fields)
    expected = [Choice() for _ in whole.choices]
    for one, choice in zip(whole.choices, expected, strict=True):
        choice.add(one, one.message, one.message.content or "")
        assert (one.finish_reason == "tool_calls") <= bool(choice.calls)
        if not choice.calls:
            assert one.message.content is not None
    include_usage = bool(case["include_usage"])
    if include_usage:
        fields["stream_options"] = {"include_usage": True}
    with client.chat.completions.create(**fields, stream=True) as events:
        found, usage = read_stream(
            events,
            len(expected),
            lambda one: one.delta,
            lambda one, delta: delta.content,
            include_usage=include_usage,
        )
    require_same(found, expected)
    if include_usage:
        assert usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]
        assert usage.prompt_tokens == whole.usage.prompt_tokens  # type: ignore[union-attr]
    require_output(str(case["output"]), expected)


def require_output(kind: str, choices: list[Choice]) -> None:
    """What ended by itself is what was asked for."""
    for choice in choices:
        ((reason, stopped_by),) = choice.finish
        if reason == "length" or stopped_by is not None:
            continue
        if kind == "json_schema":
            assert json.loads(choice.text).keys() == {"name", "size"}
        elif kind == "choice":
            assert choice.text in {"yes", "no", "\u00fcber"}
        elif kind == "tools: called by itself":
            assert reason == "tool_calls"
            assert [name for name, _ in choice.calls] == ["now"]
            assert choice.text in {"", "so: ", " and more", "so:  and more"}
        elif kind == "tools: auto, one only":
            assert reason == "tool_calls"
            assert [name for name, _ in choice.calls] == ["now"]
        elif kind == "tools: auto, or JSON":
            if reason == "stop":
                assert json.loads(choice.text).keys() == {"name", "size"}
            else:
                assert choice.calls
                assert choice.text == ""
        elif kind == "tools: named":
            assert [name for name, _ in choice.calls] == ["put"]
            assert choice.text == ""


@pytest.mark.parametrize("case", few_by_default(COMPLETIONS))
def test_a_streamed_completion_is_the_whole_one(client: openai.OpenAI, case: Case) -> None:
    fields = fields_of(case)
    fields["extra_body"]["min_tokens"] = case["min_tokens"]
    fields |= {
        "prompt": PROMPTS[str(case["prompt"])],
        "echo": case["echo"],
        "logprobs": case["logprobs"],
        "max_tokens": case["max_tokens"],
    }
    whole = client.completions.create(**fields)
    expected = [Choice() for _ in whole.choices]
    for one, choice in zip(whole.choices, expected, strict=True):
        choice.add(one, None, one.text)
        if case["logprobs"] is not None:
            num_generated = len(choice.token_ids) if case["return_token_ids"] else len(choice.tokens)
            assert len({len(choice.tokens), len(choice.offsets), len(choice.logprobs)}) == 1
            assert len(choice.tokens) >= num_generated
    include_usage = bool(case["include_usage"])
    if include_usage:
        fields["stream_options"] = {"include_usage": True}
    with client.completions.create(**fields, stream=True) as events:
        found, usage = read_stream(
            events, len(expected), lambda one: None, lambda one, _: one.text, include_usage=include_usage
        )
    require_same(found, expected)
    if include_usage:
        assert usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_all_kinds_of_output_are_among_the_combinations() -> None:
    assert {case["output"] for case in CHATS} == set(OUTPUTS)
    assert 20 <= len(CHATS) <= 100
    assert 10 <= len(COMPLETIONS) <= 60
