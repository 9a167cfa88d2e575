"""What is left out of a schema allows everything, and nothing else is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.core.errors import InputError
from specdec.core.sampling_params import Grammar
from specdec.sampling.grammar_library import compile_matcher
from specdec.sampling.json_schema import without_annotations


def nested(schema: Any) -> list[Any]:
    """Wherever a schema may stand."""
    return [
        {"type": "object", "properties": {"a": schema, "format": {"type": "string"}}},
        {"$defs": {"not": schema}, "$ref": "#/$defs/not"},
        {"anyOf": [{"type": "null"}, schema]},
        {"type": "array", "items": schema, "prefixItems": [schema]},
        {"type": "object", "additionalProperties": schema},
    ]


@pytest.mark.parametrize(
    "said",
    [
        {"format": "starts_with"},
        {"format": "password"},
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {}},
        {"propertyNames": True},
        {"dependentRequired": {}},
        {"not": False},
    ],
)
def test_what_allows_everything_is_left_out_wherever_it_stands(said: dict[str, Any]) -> None:
    for kept, given in zip(nested({"type": "string"}), nested({"type": "string"} | said), strict=True):
        assert without_annotations(given) == kept


@pytest.mark.parametrize(
    "schema",
    [
        {"format": "date-time"},
        {"format": "uri-reference"},
        {"format": 3},
        {"uniqueItems": True},
        {"uniqueItems": 0},
        {"propertyNames": {"type": "string", "pattern": "a"}},
        {"propertyNames": False},
        {"not": {}},
        {"not": True},
        {"const": {"format": "mine"}},
        {"enum": [{"uniqueItems": False}]},
        {"default": {"not": False}},
        {"properties": {"uniqueItems": False, "not": False, "format": True}},
        {"properties": ["format"], "items": "format", "anyOf": 1},
        False,
        3,
    ],
)
def test_nothing_else_is(schema: Any) -> None:
    assert without_annotations(schema) == schema


def test_true_is_the_empty_schema() -> None:
    assert without_annotations(True) == {}


def test_what_is_nested_too_deeply_is_left_to_the_compiler() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    assert without_annotations(schema) is schema


@pytest.mark.parametrize(
    ("schema", "is_taken"),
    [
        ({"type": "string", "format": "nanoid", "pattern": "^[a-z]+$"}, True),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}, True),
        (True, True),
        ({"type": "string", "format": "uri-reference"}, False),
        ({"type": "array", "uniqueItems": True}, False),
        (False, False),
    ],
)
def test_the_compiler_takes_what_is_kept(schema: Any, is_taken: bool) -> None:
    compiler = pytest.importorskip("llguidance").LLTokenizer("byte")
    grammar = Grammar("json_schema", json.dumps(schema), "response_format")
    if is_taken:
        assert not compile_matcher(compiler, grammar, 10_000).is_error()
    else:
        with pytest.raises(InputError, match="response_format"):
            compile_matcher(compiler, grammar, 10_000)
