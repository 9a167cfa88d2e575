"""Tool calls in chats: what clients may send, what the model must write, and how that is read again.

Calls are written as the Hermes and Qwen families write them, and as chat templates show earlier calls to
the model:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

With tool_choice "required", or with a named function, a grammar keeps the model to it, and the arguments to
the function's schema; with "auto" the model is free, and what looks like a call of one of the tools is read
as one. With "auto" and a `response_format` the grammar allows either: an answer in that format, or calls.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType
from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from deploy.openai.body_part import BodyPart
from deploy.openai.json_text import read_json
from specdec.core.sampling_params import Grammar
from specdec.sampling.grammar_library import JSON_WHITESPACE, STANDS_FOR
from specdec.sampling.json_schema import without_annotations

OPENING = "<tool_call>"
CLOSING = "</tool_call>"
MAX_TOOLS = 128
_JSON_BLANKS = " \t\r\n"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OUTSIDE_STRINGS = re.compile(r'["<\\]')
_IN_STRING = re.compile(r'["\x00-\x1f]|\\.', re.DOTALL)
"""What to look at on the way to the end of a call. Control characters are in no string of JSON."""
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""The templates of Mistral's models refuse calls whose ids are not of this length and of these characters."""


class ToolFunction(BodyPart):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = Field(
        default_factory=lambda: {"type": "object", "properties": {}, "additionalProperties": False}
    )
    """JSON schema of its arguments; without it there are none."""
    strict: bool | None = None
    """Accepted and ignored: arguments satisfy the schema where a grammar keeps calls to it (forced ones, and
    those beside a `response_format`)."""

    ignored = frozenset({"cache_control"})

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

    ignored = frozenset({"cache_control"})


class NamedFunction(BodyPart):
    """The function that must be called."""

    name: str


class NamedChoice(BodyPart):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BodyPart):
    """Those of `tools` that may be called."""

    mode: Literal["auto", "required"]
    """What `tool_choice` would be if there were no others."""
    tools: list[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)


class AllowedChoice(BodyPart):
    """`tool_choice` that leaves some of `tools` out."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(BodyPart):
    """A function that was called earlier in the conversation."""

    name: str
    arguments: str = ""
    """JSON, unless the model has failed to write any."""

    ignored = frozenset({"parsed_arguments"})  # OpenAI's library adds it to what it has parsed

    @property
    def read_arguments(self) -> dict[str, Any] | str:
        """The arguments as an object, or as they were written if they are none."""
        try:
            read = read_json(self.arguments or "{}")
        except ValueError:
            return self.arguments
        return read if isinstance(read, dict) else self.arguments


class EarlierCall(BodyPart):
    """One of a message's `tool_calls`."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    # What clients leave in that they collected from a stream, and what gateways to other services add.
    ignored = frozenset({"index", "cache_control", "extra_content", "provider_specific_fields"})

    def for_template(self) -> dict[str, Any]:
        """Return it as chat templates expect it."""
        function = {"name": self.function.name, "arguments": self.function.read_arguments}
        return {"id": self.id, "type": "function", "function": function}


def _object_or_word(value: object) -> object:
    if not isinstance(value, dict | NamedChoice | AllowedChoice) and value not in (
        "none",
        "auto",
        "required",
    ):
        raise ValueError('must be "none", "auto" or "required", or name a function or allowed_tools')
    return value


def _choice_kind(value: object) -> str:
    """Decide which of three shapes it is meant to have, so that one complaint comes out."""
    if isinstance(value, str):
        return "<word>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<function>"


_Word = Annotated[Literal["none", "auto", "required"], Tag("<word>")]
_Named = Annotated[NamedChoice, Tag("<function>")]
_Allowed = Annotated[AllowedChoice, Tag("<allowed>")]
ToolChoice = Annotated[
    _Word | _Named | _Allowed, Discriminator(_choice_kind), BeforeValidator(_object_or_word)
]


def forced_calls(tools: list[Tool], *, name: str | None, is_parallel: bool) -> Grammar:
    """Return the grammar of a reply that is calls and nothing else.

    Args:
        tools: those that may be called.
        name: the only one that may; None: any.
        is_parallel: whether there may be several calls.
    """
    callable_tools = [tool for tool in tools if name in (None, tool.function.name)]
    rules = _call_rules(callable_tools, is_parallel=is_parallel and name is None)
    return Grammar("grammar", "\n".join(["start: calls", *rules]), "tools")


def answer_or_calls(answer: Grammar, tools: list[Tool], *, is_parallel: bool) -> Grammar:
    """Return the grammar of a reply that is either `answer`, which is JSON, or calls as if they were forced.

    The first character decides: no JSON begins with a tag. Nor is there a call within JSON: its quotes would
    have backslashes.
    """
    schema = {"type": "object"} if answer.kind == "json_object" else json.loads(answer.text)
    text = _schema_text(schema, whitespace_pattern=JSON_WHITESPACE)
    rules = [
        "start: answer | calls",
        f"answer: %json {text} {STANDS_FOR}{answer.param}",
        *_call_rules(tools, is_parallel=is_parallel),
    ]
    # Either may be what cannot be kept to, which the compiler does not tell apart.
    return Grammar("grammar", "\n".join(rules), f"{answer.param} with tools")


def _call_rules(tools: list[Tool], *, is_parallel: bool) -> list[str]:
    calls = [f"tool_{index}" for index in range(len(tools))]
    rules = [
        *(["calls: call more", 'more: ("\\n" call)*'] if is_parallel else ["calls: call"]),
        f'call: "{OPENING}\\n" ({" | ".join(calls)}) "}}\\n{CLOSING}"',
    ]
    for call, tool in zip(calls, tools, strict=True):
        head = json.dumps(f'{{"name": "{tool.function.name}", "arguments": ')
        schema = _schema_text(tool.function.parameters | {"type": "object"})
        # A schema of its own, not a part of one of the call: its references start at its root.
        rules += [
            f"{call}: {head} {call}_arguments",
            f"{call}_arguments: %json {schema} {STANDS_FOR}parameters of {tool.function.name}",
        ]
    return rules


def _schema_text(schema: dict[str, Any] | bool, *, whitespace_pattern: str | None = None) -> str:
    """Return a schema as a grammar holds it. Without whitespace between its parts, unless there is a pattern.

    What the compiler is told comes last: a schema of a client does not tell it otherwise.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    told: dict[str, Any] = {"whitespace_flexible": whitespace_pattern is not None, "lenient": False}
    if whitespace_pattern is not None:
        told["whitespace_pattern"] = whitespace_pattern
    text = json.dumps(without_annotations(schema) | {"x-guidance": told})
    # This, which stands in strings alone, would have the grammar taken for GBNF.
    return text.replace("::=", ":\\u003a=")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadCall:
    """A call that the model has made."""

    id: str
    name: str
    arguments: str
    """JSON, an object, as the model has written it."""


class _WrittenCall(msgspec.Struct):
    """What a model has written between the tags. Arguments are only looked at to know that they are JSON:
    read and written anew, numbers would not be those that it has chosen.
    """

    name: str
    arguments: Raw | UnsetType = UNSET
    parameters: Raw = Raw(b"{}")


class _Ending:
    """Looks for the tag that closes a call, in what follows the opening one, as that grows.

    What stands in JSON's strings is no tag: a call may write about calls.
    """

    def __init__(self) -> None:
        self.place: int | None = None
        """Where the tag begins, once it has been found."""
        self._num_read = 0
        self._is_in_string = False

    def is_certain(self, text: str) -> bool:
        """Read on in a text that begins as the one before; say whether it is certain where the call ends.

        If so, there is a `place`, or there is none because the text is no JSON, whatever is still to come.
        """
        while True:
            mark = (_IN_STRING if self._is_in_string else _OUTSIDE_STRINGS).search(text, self._num_read)
            if mark is None:
                # The last character may escape the next one.
                self._num_read = len(text) - text.endswith("\\", self._num_read)
                return False
            if mark[0] == '"':
                self._is_in_string = not self._is_in_string
            elif not self._is_in_string:
                tag = text[mark.start() : mark.start() + len(CLOSING)]
                if tag == CLOSING:
                    self.place = mark.start()
                elif CLOSING.startswith(tag):
                    self._num_read = mark.start()
                    return False
                return True
            elif len(mark[0]) == 1:
                return True
            self._num_read = mark.end()


class CallReader:
    """Tells a reply's text from its calls, piece by piece; how it is cut into pieces makes no difference.

    What turns out to be no call (no JSON object, no name of a tool, never closed) is text, but for calls
    within it.
    """

    def __init__(self, *, names: Collection[str] | None = None, is_parallel: bool = True) -> None:
        """Tools have these names (None: any). Unless it `is_parallel`, only the first call counts; others are
        dropped."""
        self.num_calls = 0
        self._names = names
        self._is_parallel = is_parallel
        self._pending = ""
        """Text that is not given out yet: it may be part of a call."""
        self._ending = _Ending()
        """Of what is pending, where that begins with an opening tag."""
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
                return content, calls
            content += self._between(before)
            self._pending = opening + rest
            begun = rest.lstrip(_JSON_BLANKS)
            if not begun or (begun.startswith("{") and not self._ending.is_certain(rest)):
                return content, calls  # it may become a call
            place = self._ending.place
            call = None if place is None else self._read(rest[:place])
            self._ending = _Ending()
            if place is None or call is None:
                # The tag is text, and so is what follows it, unless there is another one.
                content += self._between(opening)
                self._pending = rest
            else:
                calls += self._counted(call)
                self._pending = rest[place + len(CLOSING) :]

    def end(self, *, is_complete: bool = False) -> tuple[str, list[ReadCall]]:
        """Return what was held back: text, the calls in it, or a last call that was not closed.

        Such a call counts if the reply `is_complete`: the model ended it by itself.
        """
        content = ""
        calls: list[ReadCall] = []
        while self._pending.startswith(OPENING):
            body = self._pending.removeprefix(OPENING)
            call = self._read(body) if is_complete else None
            if call is not None:
                self._pending = ""
                return content, calls + self._counted(call)
            self._pending, self._ending = body, _Ending()
            content += self._between(OPENING)
            held_back, within = self.feed("")
            content, calls = content + held_back, calls + within
        pending, self._pending = self._pending, ""
        return content + self._between(pending), calls

    def _read(self, body: str) -> ReadCall | None:
        call = _read_call(body)
        return call if call is not None and (self._names is None or call.name in self._names) else None

    def _counted(self, call: ReadCall) -> list[ReadCall]:
        """Return what is given out of a further call."""
        self._blanks, self._is_behind_call = "", True
        if self.num_calls and not self._is_parallel:
            return []
        self.num_calls += 1
        return [call]

    def _between(self, text: str) -> str:
        """Return text outside calls. Line breaks behind a call mean nothing, unless text follows them."""
        if self._is_behind_call and not text.strip():
            self._blanks += text
            return ""
        text, self._blanks, self._is_behind_call = self._blanks + text, "", False
        return text


def read_reply(
    text: str,
    *,
    names: Collection[str] | None = None,
    is_complete: bool = False,
    is_parallel: bool = True,
) -> tuple[str, list[ReadCall]]:
    """Return the text and the calls of a whole reply; `CallReader` says what the rest means."""
    reader = CallReader(names=names, is_parallel=is_parallel)
    content, calls = reader.feed(text)
    held_back, last_calls = reader.end(is_complete=is_complete)
    return content + held_back, calls + last_calls


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may begin `mark`."""
    return next((num for num in range(len(mark) - 1, 0, -1) if text.endswith(mark[:num])), 0)


def _read_call(body: str) -> ReadCall | None:
    try:
        call = msgspec.json.decode(body.encode(), type=_WrittenCall)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    arguments = bytes(call.parameters if call.arguments is UNSET else call.arguments)
    if not arguments.startswith(b"{"):
        return None
    text = arguments.decode()
    try:
        read_json(text)  # as it is when the client sends it back: what cannot come back is no call
    except ValueError:
        return None
    return ReadCall(id=_call_id(), name=call.name, arguments=text)


def _call_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
