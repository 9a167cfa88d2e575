"""A grammar of every kind, prompts and parameters for requests that keep to them, and what came of them."""

from __future__ import annotations

import json
from typing import Any

from specdec.core.sampling_params import Grammar, SamplingParams
from specdec.engine.offline import GenerationResult

PROMPTS = [[40, 41, 42], [100, 7, 300, 12, 5], [2000, 2001]]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["red", "green", 3, None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "maxItems": 4},
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "kind", "sizes", "is_new"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "regex": Grammar("regex", r"(ab|cd){3,6} [0-9]{2,4}(\.[0-9]{1,4})?!"),
    "choice": Grammar(
        "choice", json.dumps(["yes", "no", 'a "quoted" word', "caf\u00e9 \u4f60\u597d", "line\nbreak"])
    ),
    "lark": Grammar(
        "grammar", 'start: expr\nexpr: NUMBER | "(" expr OP expr ")"\nNUMBER: /[0-9]{1,3}/\nOP: /[-+*]/'
    ),
    "gbnf": Grammar("grammar", 'root ::= "x" item "y"\nitem ::= [a-c] | [a-c] [a-c] [0-9]'),
}


def params_of(kind: str, **fields: Any) -> SamplingParams:
    return SamplingParams(grammar=GRAMMARS[kind], **{"max_tokens": 120, "seed": 3, **fields})


def streams(results: list[GenerationResult]) -> list[tuple[tuple[int, ...], str, str]]:
    return [(one.token_ids, one.text, one.choices[0].finish_reason) for one in results]
