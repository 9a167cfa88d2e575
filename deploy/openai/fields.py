"""Types of fields that clients may write in several ways, or whose values need more than a type."""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator

from specdec.core.sampling_params import MAX_BAD_WORDS, MAX_BIAS
from specdec.kv.selection import BudgetAmount, read_budget

_MAX_ID_DIGITS = 18


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _token_ids(value: object) -> object:
    """Each once: what is said a million times is said to every process that serves the request."""
    if isinstance(value, list) and _is_token_ids(value):
        return tuple(dict.fromkeys(value))
    return _one_or_many(value)


def _top_k(value: object) -> object:
    """0 and -1 are how clients of other servers switch top_k off."""
    return None if value in (0, -1) and not isinstance(value, bool) else value


def _logit_bias(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    pairs = []
    for token, bias in value.items():
        if not token.isascii() or not token.isdigit() or len(token) > _MAX_ID_DIGITS:
            raise ValueError(f"keys must be token ids, got {token!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"values must be numbers, got {bias!r}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:  # an integer may be too long for a float
            raise ValueError(f"values must be between -{MAX_BIAS} and {MAX_BIAS}, got {bias}")
        pairs.append((int(token), float(bias)))
    return tuple(pairs)


def _bad_words(value: object) -> object:
    if not isinstance(value, list) or not all(
        isinstance(item, str) or (isinstance(item, list) and _is_token_ids(item)) for item in value
    ):
        raise ValueError("must be a list of strings or of lists of token ids")
    if len(value) > MAX_BAD_WORDS:  # before any of them is tokenized
        raise ValueError(f"takes at most {MAX_BAD_WORDS} of them, got {len(value)}")
    if not all(value):
        raise ValueError("must not hold an empty string or list")
    return tuple(item if isinstance(item, str) else tuple(item) for item in value)


def _metadata(value: object) -> object:
    """Leave out what follows the first value that is no string: it is the one that is told."""
    if not isinstance(value, dict):
        return value
    faults = (index for index, item in enumerate(value.values()) if not isinstance(item, str))
    first = next(faults, None)
    return value if first is None else dict(islice(value.items(), first + 1))


def _is_token_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _prompt(value: object) -> object:
    """Check the four shapes of a prompt in one message (a union of types would complain four times)."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        if all(isinstance(item, str) for item in value) or _is_token_ids(value):
            return value
        if all(isinstance(item, list) and _is_token_ids(item) for item in value):
            return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    )


TopK = Annotated[int | None, BeforeValidator(_top_k)]
# Of what is wrong in a list as long as a body, the first is told: the rest is not looked for.
Strings = Annotated[
    tuple[str, ...],
    Field(fail_fast=True),
    BeforeValidator(_one_or_many, json_schema_input_type=str | list[str]),
]
TokenIds = Annotated[tuple[int, ...], Field(fail_fast=True), BeforeValidator(_token_ids)]
Metadata = Annotated[dict[str, str], BeforeValidator(_metadata, json_schema_input_type=dict[str, str])]
LogitBias = Annotated[
    tuple[tuple[int, float], ...], BeforeValidator(_logit_bias, json_schema_input_type=dict[str, float])
]
BadWords = Annotated[
    tuple[str | tuple[int, ...], ...],
    BeforeValidator(_bad_words, json_schema_input_type=list[str | list[int]]),
]
KvBudgetAmount = Annotated[
    BudgetAmount, BeforeValidator(read_budget, json_schema_input_type=int | float | str)
]
_PromptShapes = str | list[str] | list[int] | list[list[int]]
Prompt = Annotated[_PromptShapes, PlainValidator(_prompt, json_schema_input_type=_PromptShapes)]
