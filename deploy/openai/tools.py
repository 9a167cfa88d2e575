"""Tool calls in chats: what clients may send, what the model must write, and how that is read again.

Calls are written as the Hermes and Qwen families write them, and as chat templates show earlier calls to
the model:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

With tool_choice "required", or with a named function, a grammar keeps the model to it, and the arguments to
the function's schema; with "auto" the model is free, and what looks like a call is read as one.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from deploy.openai.body_part import BodyPart
from deploy.openai.json_text import read_json
from specdec.core.sampling_params import Grammar

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolFunction(BodyPart):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Accepted and ignored: arguments of required and named calls always satisfy the schema."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("must be 1 to 64 letters, digits, '_', '-' or '.'")
        return name

    @field_validator("parameters")
    @classmethod
    def _check_parameters(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        kinds = parameters.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise ValueError(f'must be a schema of type "object": arguments are one, got type {kinds!r}')
        return parameters


class Tool(BodyPart):
    """One of `tools`."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(BodyPart):
    """The function that must be called."""

    name: str


class NamedChoice(BodyPart):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(BodyPart):
    """A function that was called earlier in the conversation."""

    name: str
    arguments: str
    """JSON."""

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: str) -> str:
        try:
            is_object = isinstance(read_json(arguments or "{}"), dict)
        except ValueError as error:
            raise ValueError(f"must be JSON: {error}") from None
        if not is_object:
            raise ValueError("must be a JSON object")
        return arguments


class EarlierCall(BodyPart):
    """One of a message's `tool_calls`."""

    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None
    """Accepted and ignored: some clients leave it in what they collected from a stream."""
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates expect it."""
        arguments = read_json(self.function.arguments or "{}")
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


def _named_or_word(value: object) -> object:
    if not isinstance(value, dict | NamedChoice) and value not in ("none", "auto", "required"):
        raise ValueError('must be "none", "auto", "required" or name a function')
    return value


def _choice_kind(value: object) -> str:
    """Decide by its type which of two shapes it is meant to have, so that one complaint comes out."""
    return "<word>" if isinstance(value, str) else "<function>"


_Word = Annotated[Literal["none", "auto", "required"], Tag("<word>")]
_Named = Annotated[NamedChoice, Tag("<function>")]
ToolChoice = Annotated[_Word | _Named, Discriminator(_choice_kind), BeforeValidator(_named_or_word)]


def forced_calls(tools: list[Tool], *, name: str | None, is_parallel: bool) -> Grammar:
    """Return the grammar of a reply that is calls and nothing else.

    Args:
        tools: those that may be called.
        name: the only one that may; None: any.
        is_parallel: whether there may be several calls.
    """
    callable_tools = [tool.function for tool in tools if name in (None, tool.function.name)]
    calls = [f"tool_{index}" for index in range(len(callable_tools))]
    rules = [
        "start: call more" if is_parallel and name is None else "start: call",
        'more: ("\\n" call)*' if is_parallel and name is None else "",
        f'call: "{OPENING}\\n" ({" | ".join(calls)}) "}}\\n{CLOSING}"',
    ]
    for call, tool in zip(calls, callable_tools, strict=True):
        head = json.dumps(f'{{"name": "{tool.name}", "arguments": ')
        # A schema of its own, not a part of one of the call: its references start at its root.
        rules += [f"{call}: {head} {call}_arguments", f"{call}_arguments: %json {_arguments_schema(tool)}"]
    return Grammar("grammar", "\n".join(filter(None, rules)), "tools")


def _arguments_schema(tool: ToolFunction) -> str:
    compact = {"whitespace_flexible": False, "lenient": False}
    return json.dumps(tool.parameters | {"type": "object", "x-guidance": compact})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCall:
    """A call that the model has made."""

    id: str
    name: str
    arguments: str
    """JSON, an object."""


class CallReader:
    """Tells a reply's text from its calls, piece by piece.

    What turns out to be no call (no JSON, no name, never closed) is text.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._pending = ""
        """Text that is not given out yet: it may be part of a call."""
        self._blanks = ""
        """What came directly behind a call so far, as long as nothing can be seen of it."""
        self._is_behind_call = False

    def feed(self, text: str) -> tuple[str, list[ReadCall]]:
        """Take a further piece; return the text and the calls that are certain now."""
        self._pending += text
        content = ""
        calls: list[ReadCall] = []
        while True:
            before, opening, rest = self._pending.partition(OPENING)
            if not opening:
                num_kept = _overlap(self._pending, OPENING)
                content += self._between(self._pending[: len(self._pending) - num_kept])
                self._pending = self._pending[len(self._pending) - num_kept :]
                break
            body, closing, behind = rest.partition(CLOSING)
            content += self._between(before)
            if not closing:
                self._pending = opening + rest
                break
            call = _read_call(body)
            if call is None:
                content += self._between(opening + body + closing)
            else:
                calls.append(call)
                self.num_calls += 1
                self._blanks, self._is_behind_call = "", True
            self._pending = behind
        return content, calls

    def end(self) -> str:
        """Return the text that was held back: no call has come of it."""
        pending, self._pending = self._pending, ""
        return self._between(pending)

    def _between(self, text: str) -> str:
        """Return text outside calls. Line breaks behind a call mean nothing, unless text follows them."""
        if self._is_behind_call and not text.strip():
            self._blanks += text
            return ""
        text, self._blanks, self._is_behind_call = self._blanks + text, "", False
        return text


def read_reply(text: str) -> tuple[str, list[ReadCall]]:
    """Return the text and the calls of a whole reply."""
    reader = CallReader()
    content, calls = reader.feed(text)
    return content + reader.end(), calls


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may begin `mark`."""
    return next((num for num in range(len(mark) - 1, 0, -1) if text.endswith(mark[:num])), 0)


def _read_call(body: str) -> ReadCall | None:
    try:
        call = read_json(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ReadCall(
        id=f"call_{uuid.uuid4().hex}",
        name=call["name"],
        arguments=json.dumps(arguments, ensure_ascii=False),
    )
