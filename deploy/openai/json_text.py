"""JSON in a string: what clients, and models, write into fields that hold it as text."""

from __future__ import annotations

import json

from pydantic_core import from_json


def read_json(text: str) -> object:
    """Return the value, by the same rules as a request's body.

    The standard library's parser takes more than JSON, and more than can be handed on: NaN, halves of
    surrogate pairs, which no encoder writes, and any depth, at the end of which is a RecursionError.

    Raises:
        ValueError: it is not JSON, is nested deeper than 200 levels, or has numbers out of range.
    """
    value: object = from_json(text, allow_inf_nan=False)
    json.dumps(value, allow_nan=False)  # 1e999 is read as infinity
    return value
