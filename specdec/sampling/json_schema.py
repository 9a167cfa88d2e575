"""What of a JSON schema says nothing about the texts that it allows, and is left out before it is compiled.

Libraries that write schemas from types (pydantic, zod) leave names of their own in `format`, which JSON
Schema 2020-12 has as a mere annotation (validation vocabulary, section 7.2.1), and keywords that allow
everything. The compiler refuses what it does not know, so that nothing is promised that is not kept to; it
would refuse these, too.
"""

from __future__ import annotations

from typing import Any, Final

_FORMATS: Final = frozenset(
    {"date-time", "date", "time", "duration", "email", "idn-email", "hostname"}
    | {"idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference"}
    | {"uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex"}
)
"""Those that JSON Schema defines: what cannot be kept to of them is refused by the compiler."""
_WITHOUT_EFFECT: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
}
"""Keywords, and values with which they allow everything."""
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value has a schema under each name."""
_NESTED: Final = frozenset(
    {"items", "additionalProperties", "additionalItems", "prefixItems", "allOf", "anyOf", "oneOf", "not"}
    | {"if", "then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords whose value is a schema, or a list of them."""


def without_annotations(schema: Any) -> Any:
    """Return a schema without what allows everything; `true` as the empty schema.

    What is nested too deeply to be looked at is returned as it is: the compiler has its own bounds.
    """
    try:
        return {} if schema is True else _kept(schema)
    except RecursionError:
        return schema


def _kept(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_kept(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: _kept_value(keyword, value)
        for keyword, value in schema.items()
        if not _allows_everything(keyword, value)
    }


def _kept_value(keyword: str, value: Any) -> Any:
    if keyword in _NAMED and isinstance(value, dict):
        return {name: _kept(one) for name, one in value.items()}
    return _kept(value) if keyword in _NESTED else value


def _allows_everything(keyword: str, value: Any) -> bool:
    if keyword == "format":
        return isinstance(value, str) and value not in _FORMATS
    # 0 == False, and 1 == True, which are no schemas.
    return any(type(value) is type(one) and value == one for one in _WITHOUT_EFFECT.get(keyword, ()))
