"""The requests of a batch: one JSON object per line, `custom_id`, `method`, `url` and `body`."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from deploy.openai.errors import input_error_of
from specdec.core.errors import ConfigError, InputError


class BatchRequest(BaseModel):
    """One request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    custom_id: str = Field(min_length=1)
    """Names the request in the results; no two of a batch have the same."""
    method: Literal["POST"] = "POST"
    url: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]
    """What is sent there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedRequest:
    """A request and where it stands."""

    number: int
    """Line of the file, from 1."""
    request: BatchRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that is no request."""

    number: int
    custom_id: str | None
    """As far as it can be told."""
    message: str
    """Names line and field."""


def num_lines(file: Path) -> int:
    """Return how many lines that are not empty a file has.

    Raises:
        ConfigError: the file cannot be read, or not twice: what has been counted is not there any more then.
    """
    try:
        if not (file.is_file() or file.is_dir()) and file.exists():
            raise ConfigError(
                f"{file} is a pipe or a device, which is read but once: write it to a file first"
            )
        with file.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def read_lines(file: Path) -> Iterator[NumberedRequest | BadLine]:
    """Yield what each line says. Empty lines are skipped; the file is never in memory as a whole."""
    first_line_of: dict[str, int] = {}
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(BOM_UTF8)  # which editors of Windows write
            if not line.strip():
                continue
            item = _parsed(number, line)
            if isinstance(item, NumberedRequest):
                first = first_line_of.setdefault(item.request.custom_id, number)
                if first != number:
                    item = _bad(number, item.request.custom_id, f"custom_id: is that of line {first}, too")
            yield item


def _parsed(number: int, line: bytes) -> NumberedRequest | BadLine:
    try:
        values = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        return _bad(number, None, f"is not JSON: {error}")
    if not isinstance(values, dict):
        return _bad(number, None, "is not a JSON object")
    custom_id = values.get("custom_id")
    try:
        request = BatchRequest.model_validate(values)
        if request.body.get("stream"):
            raise InputError("body.stream: a batch has no streams; leave it out", param="body.stream")
        _require_sendable(request.body)
    except ValidationError as error:
        return _bad(number, custom_id, str(input_error_of(error)))
    except InputError as error:
        return _bad(number, custom_id, str(error))
    return NumberedRequest(number=number, request=request)


def _require_sendable(body: dict[str, Any]) -> None:
    """Raise InputError for what reads as JSON, and cannot be written: 1e999 is infinite."""
    try:
        json.dumps(body, allow_nan=False)
    except ValueError:
        raise InputError("body: holds a number that is too large", param="body") from None


def _bad(number: int, custom_id: object, reason: str) -> BadLine:
    known = custom_id if isinstance(custom_id, str) and custom_id else None
    return BadLine(number=number, custom_id=known, message=f"line {number}: {reason}")
