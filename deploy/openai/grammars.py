"""The fields that say what the output must look like, in OpenAI's form and in vLLM's two."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, model_validator

from deploy.openai.body_part import BodyPart
from deploy.openai.json_text import read_json
from specdec.core.errors import InputError
from specdec.core.sampling_params import Grammar, GrammarKind


def _schema_text(value: object) -> str:
    """Return a JSON schema as text; it may come as an object or as text already."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError as error:
            raise ValueError(f"must be a JSON schema: {error}") from None
    if not isinstance(value, dict | bool):
        raise ValueError("must be a JSON schema: an object")
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise ValueError(f"must be a JSON schema: {error}") from None


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a string that is not empty")
    return value


def _choices_text(value: object) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise ValueError("must be a list of strings that are not empty")
    return json.dumps(value, ensure_ascii=False)


SchemaText = Annotated[str, PlainValidator(_schema_text, json_schema_input_type=dict[str, Any] | bool | str)]
GrammarText = Annotated[str, PlainValidator(_text, json_schema_input_type=str)]
ChoicesText = Annotated[str, PlainValidator(_choices_text, json_schema_input_type=list[str])]


class SchemaFormat(BodyPart):
    """What `response_format.json_schema` holds."""

    name: str = ""
    """Ignored: nothing here shows it to the model."""
    description: str = ""
    """Ignored: nothing here shows it to the model."""
    schema_text: SchemaText = Field(alias="schema")
    """The schema. Keywords that cannot be kept to are refused, whatever `strict` says."""
    strict: bool = False
    """Accepted and ignored: the output always satisfies the schema."""


class ResponseFormat(BodyPart):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InputError(
                'response_format.json_schema is needed with type "json_schema", and only there',
                param="response_format.json_schema",
            )
        return self


class StructuredOutputs(BodyPart):
    """vLLM's `structured_outputs`: one of these."""

    json_text: SchemaText | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    choice: ChoicesText | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class GrammarFields(BodyPart):
    """Fields of which at most one may say what the output must look like."""

    response_format: ResponseFormat | None = None
    """JSON, or JSON that satisfies a schema."""
    structured_outputs: StructuredOutputs | None = None
    """JSON schema, regular expression, list of choices, or grammar (Lark's notation or GBNF)."""
    guided_json: SchemaText | None = None
    """As `structured_outputs.json`."""
    guided_regex: GrammarText | None = None
    """As `structured_outputs.regex`."""
    guided_choice: ChoicesText | None = None
    """As `structured_outputs.choice`."""
    guided_grammar: GrammarText | None = None
    """As `structured_outputs.grammar`."""

    @model_validator(mode="after")
    def _check_one_grammar(self) -> GrammarFields:
        given = self._grammars()
        if len(given) > 1:
            raise InputError(
                f"{given[1].param} cannot be combined with {given[0].param}", param=given[1].param
            )
        return self

    @property
    def grammar(self) -> Grammar | None:
        """What the output must look like; None: anything."""
        return next(iter(self._grammars()), None)

    @property
    def has_response_format(self) -> bool:
        """Whether it is `response_format` that says what the output must look like."""
        return self.response_format is not None and self.response_format.type != "text"

    def _grammars(self) -> list[Grammar]:
        wanted = self.response_format or ResponseFormat(type="text")
        nested = self.structured_outputs or StructuredOutputs()
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_text
        fields: list[tuple[GrammarKind, str | None, str]] = [
            ("json_schema", schema, "response_format"),
            ("json_object", "" if wanted.type == "json_object" else None, "response_format"),
            ("json_object", "" if nested.json_object else None, "structured_outputs.json_object"),
            ("json_schema", nested.json_text, "structured_outputs.json"),
            ("regex", nested.regex, "structured_outputs.regex"),
            ("choice", nested.choice, "structured_outputs.choice"),
            ("grammar", nested.grammar, "structured_outputs.grammar"),
            ("json_schema", self.guided_json, "guided_json"),
            ("regex", self.guided_regex, "guided_regex"),
            ("choice", self.guided_choice, "guided_choice"),
            ("grammar", self.guided_grammar, "guided_grammar"),
        ]
        return [Grammar(kind, text, param) for kind, text, param in fields if text is not None]
