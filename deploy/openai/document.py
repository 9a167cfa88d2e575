"""The OpenAPI document at /openapi.json: bodies and answers, from the types that read and write them."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema

from deploy.openai.bodies import ChatResponse, CompletionResponse, ModelCard, ModelList
from deploy.openai.errors import ErrorBody
from deploy.openai.protocol import (
    ADDED_TO_REPLIES,
    EMPTY_REPLY_FIELDS,
    HARMLESS,
    NOT_SUPPORTED_YET,
    ChatBody,
    ChatMessage,
    CompletionBody,
    RefusalPart,
    TextPart,
)
from deploy.openai.tools import CalledFunction, EarlierCall, Tool, ToolFunction
from deploy.status import STATUS_PATH, Status

OPENAPI_PATH = "/openapi.json"
_REFERENCE = "#/components/schemas/"
_ANSWERS = (CompletionResponse, ChatResponse, ModelList, ModelCard, Status, ErrorBody)
_PARTS = (ChatMessage, TextPart, RefusalPart, Tool, ToolFunction, EarlierCall, CalledFunction)
"""Parts of bodies in which something is ignored."""
_REFUSALS = {
    "401": "API keys are configured, and none or a wrong one was sent.",
    "500": "Something broke that the client can do nothing about.",
    "503": "No model takes requests now.",
}
_REFUSED_BODIES = _REFUSALS | {
    "400": "A field is wrong; `param` names it.",
    "403": "A page of a web site that is not allowed asks, and there are no API keys.",
    "404": "There is no such model here.",
    "408": "The body did not arrive in time.",
    "410": "A stream cannot be resumed any more.",
    "413": "The body is too long.",
    "415": "The body is compressed, which nothing here undoes.",
    "429": "The queue is full, or the API key is at a limit.",
    "504": "The request was not complete in its time.",
}
_KEY: list[dict[str, list[str]]] = [{"key": []}, {}]
"""A key, or none where none are configured."""
_EVENT = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "Request and numbers of tokens so far, if ids are wanted."},
        "data": {"type": "string", "description": "A chunk as JSON, an error body, or [DONE]."},
    },
    "required": ["data"],
}


def openapi_document() -> dict[str, Any]:
    """Return the document."""
    bodies = (CompletionBody, ChatBody)
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=_REFERENCE + "{model}"
    )
    _, answers = msgspec.json.schema_components(_ANSWERS, ref_template=_REFERENCE + "{name}")
    taken = definitions["$defs"].keys() & answers.keys()
    assert not taken, f"bodies and answers share names: {sorted(taken)}"
    return {
        "openapi": "3.1.0",
        "info": {"title": "Drafthouse", "version": metadata.version("drafthouse")},
        "paths": {
            "/v1/completions": {"post": _generation("Completions", CompletionBody, CompletionResponse)},
            "/v1/chat/completions": {"post": _generation("Chat completions", ChatBody, ChatResponse)},
            "/v1/models": {"get": _reading("What is loaded", ModelList)},
            "/v1/models/{model}": {
                "get": _reading("One model", ModelCard, "404")
                | {
                    "parameters": [
                        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
                    ]
                }
            },
            STATUS_PATH: {"get": _reading("What runs, and what the controllers have chosen", Status)},
            "/health": {
                "get": {
                    "summary": "Whether a request would be tried",
                    "responses": {
                        "200": _answer("It would.", {"type": "object"}),
                        "503": _refusal(_REFUSALS["503"]),
                    },
                }
            },
            "/metrics": {
                "get": {
                    "summary": "Prometheus text",
                    "responses": {"200": {"description": "All series.", "content": {"text/plain": {}}}},
                }
            },
        },
        "components": {
            "schemas": _as_taken(definitions["$defs"]) | answers,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _as_taken(bodies: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of bodies with what is taken and means nothing: who checks by them refuses no more
    than the server does.
    """
    for body in bodies.values():
        required = body.get("required", ())
        for name, schema in body.get("properties", {}).items():
            if name not in required:
                body["properties"][name] = _or_null(schema)
    ignored = {name: {"description": "Ignored."} for name in sorted(HARMLESS)}
    neutral = {
        name: {"description": "Not supported yet: these alone are taken.", "enum": [None, *values]}
        for name, values in sorted(NOT_SUPPORTED_YET.items())
    }
    for body in (CompletionBody, ChatBody):
        properties = bodies[body.__name__]["properties"]
        bodies[body.__name__]["properties"] = ignored | neutral | properties
    for part in _PARTS:
        bodies[part.__name__]["properties"] |= {
            name: {"description": "Ignored."} for name in sorted(part.ignored)
        }
    message = bodies[ChatMessage.__name__]
    message["required"] = [name for name in message["required"] if name != "content"]
    message["properties"]["content"] = _or_null(message["properties"]["content"])
    message["properties"] |= {name: {"description": "Ignored."} for name in sorted(ADDED_TO_REPLIES)}
    for name in sorted(EMPTY_REPLY_FIELDS):
        message["properties"][name] = {"description": "Not supported yet.", "enum": [None, []]}
    return bodies


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    told = ("title", "description", "default")
    outer = {name: value for name, value in schema.items() if name in told}
    inner = {name: value for name, value in schema.items() if name not in told}
    return {"anyOf": [inner, {"type": "null"}], **outer}


def _generation(summary: str, body: type, answer: type) -> dict[str, Any]:
    done = _answer("Complete, or with `stream` as server-sent events.", _named(answer))
    done["content"]["text/event-stream"] = {"schema": _EVENT}
    return {
        "summary": summary,
        "security": _KEY,
        "parameters": [
            {
                "name": "X-Request-Timeout",
                "in": "header",
                "description": "Longest time for the request in seconds.",
                "schema": {"type": "number", "exclusiveMinimum": 0},
            },
            {
                "name": "Last-Event-ID",
                "in": "header",
                "description": "Id of the last event that has come of a stream, to go on behind it with the "
                "same request.",
                "schema": {"type": "string"},
            },
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _named(body)}}},
        "responses": {"200": done} | {code: _refusal(text) for code, text in _REFUSED_BODIES.items()},
    }


def _reading(summary: str, answer: type, *others: str) -> dict[str, Any]:
    refusals = _REFUSALS | {code: _REFUSED_BODIES[code] for code in others}
    return {
        "summary": summary,
        "security": _KEY,
        "responses": {"200": _answer("Read now.", _named(answer))}
        | {code: _refusal(text) for code, text in refusals.items()},
    }


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _refusal(description: str) -> dict[str, Any]:
    return _answer(description, _named(ErrorBody))


def _named(kind: type) -> dict[str, Any]:
    return {"$ref": _REFERENCE + kind.__name__}
