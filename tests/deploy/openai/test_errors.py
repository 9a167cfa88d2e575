"""Bad input and failures: each a status and OpenAI's error body that names the field."""

from __future__ import annotations

import ast
import asyncio
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deploy.openai import errors
from deploy.openai.keys import ApiKey, digest_api_key
from deploy.openai.outputs import SLOW_READER
from deploy.openai.settings import DoorSettings
from specdec.core import error_codes
from specdec.core.error_codes import SHUTTING_DOWN
from specdec.core.errors import (
    CapacityError,
    ChannelClosed,
    InputError,
    LateError,
    NotReadyError,
    RequestFailed,
)
from specdec.core.request import LatencyTarget
from tests.deploy.openai.fakes import PIECES, Door, ScriptedService, error_of, events_of

NAN = float("nan")


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture(scope="module")
def refusing_door() -> Door:
    """For requests of which none gets in."""
    return Door()


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 0, "top_k": -2}, "top_k"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": NAN}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": "x"}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {"128": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"5": "x"}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {str(1 << 70): 1}}, "logit_bias"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [[128]]}, "bad_words"),
        ({"bad_words": [[1, "a"]]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [128]}, "allowed_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x", "y" * 1025]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1 << 70]}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1000}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 200}, "best_of"),
        ({"best_of": 10_000}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use"),
        ({"stream": True, "stream_options": {"event_ids": 0}}, "stream_options.event_ids"),
        ({"speculation": {"num_speculative_tokens": -1}}, "speculation.num_speculative_tokens"),
        ({"speculation": {"k": 1}}, "speculation.k"),
        ({"speculation": {}}, "speculation"),
        ({"speculation": {"drafter": ""}}, "speculation.drafter"),
        ({"speculation": {"kv_budget": 0}}, "speculation.kv_budget"),
        ({"speculation": {"kv_budget": 1.5}}, "speculation.kv_budget"),
        ({"speculation": {"kv_budget": "much"}}, "speculation.kv_budget"),
        ({"speculation": {"kv_budget": True}}, "speculation.kv_budget"),
        ({"metadata": {"class": 3}}, "metadata.class"),
        ({"model": 5}, "model"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [128]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 300}, "prompt"),
        ({"prompt": ["a"] * 300, "n": 1, "best_of": 1}, "prompt"),
        ({"prompt": ["a"] * 200, "n": 2}, "n"),
        ({"prompt": ["a"] * 200, "best_of": 2}, "best_of"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_completion_field(refusing_door: Door, fields: dict[str, Any], param: str, stream: bool) -> None:
    body = {"prompt": "abc", "stream": stream} | fields
    if fields.keys() & {"stream_options"} and "stream" not in fields:
        body.pop("stream")
    # httpx refuses to write NaN, Python's json does not.
    response = refusing_door.post("/v1/completions", content=json.dumps(body))
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert refusing_door.service.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "type": "image"}]}, "messages[0].type"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]},
            "messages[0]",
        ),
        ({"messages": [{"role": "assistant", "refusal": 5}]}, "messages[0].refusal"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}]},
            "messages[0].content[0].refusal",
        ),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
        ({"min_tokens": 20, "max_completion_tokens": 10}, "min_tokens"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "yes"}, "guided_choice"),
        ({"guided_choice": ["yes", 5]}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_grammar": []}, "guided_grammar"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
    ],
)
def test_bad_chat_field(refusing_door: Door, fields: dict[str, Any], param: str) -> None:
    response = refusing_door.chat(**fields)
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert refusing_door.service.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_streams_do_not_have(door: Door, fields: dict[str, Any], param: str) -> None:
    response = door.complete(stream=True, **fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert door.service.requests == []


def test_the_best_choices_are_reported_as_they_were_found(door: Door) -> None:
    response = door.complete(best_of=2, logprobs=0, logprobs_mode="processed")
    assert response.status_code == 400
    assert error_of(response)["param"] == "logprobs_mode"
    assert door.service.requests == []


def test_image_parts_are_refused_by_name(door: Door) -> None:
    text, image = {"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}
    response = door.chat(messages=[{"role": "user", "content": [text, image]}])
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == "messages[0].content[1].type"
    assert error["message"] == "messages[0].content[1].type: input should be 'text', got 'image_url'"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("use_beam_search", True),
    ],
)
def test_unsupported_fields_are_refused_by_name(door: Door, name: str, value: object) -> None:
    response = door.complete(**{name: value})
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == name
    assert "not supported yet" in error["message"]


def test_neutral_values_of_unsupported_fields_are_fine(door: Door) -> None:
    fields = {
        "logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0, "best_of": 1, "echo": False,
        "suffix": None, "user": "me", "metadata": {"class": "code"}, "store": False, "service_tier": "auto",
    }  # fmt: skip
    assert door.complete(**fields).status_code == 200
    chat = {"tools": None, "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"]}
    assert door.chat(**chat, parallel_tool_calls=True).status_code == 200


def test_unknown_field_is_refused_with_the_nearest_name(door: Door) -> None:
    error = error_of(door.complete(max_token=5))
    assert error["param"] == "max_token"
    assert "'max_tokens'" in error["message"]


def test_unknown_model(door: Door) -> None:
    response = door.complete(model="gpt-4")
    assert response.status_code == 404
    error = error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b'{"prompt": ', "invalid_json"),
        (b"", "invalid_json"),
        (b"prompt=abc", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b'{"prompt": "\xff\xfe"}', "invalid_utf8"),
    ],
)
def test_body_that_is_no_json(door: Door, content: bytes, code: str) -> None:
    response = door.post("/v1/completions", content=content)
    assert response.status_code == 400
    assert error_of(response)["code"] == code


@pytest.mark.parametrize(
    ("encodings", "refused"),
    [
        (["gzip"], "gzip"),
        (["identity, GZIP"], "GZIP"),
        (["identity", "zstd"], "zstd"),
        (["identity"], None),
        (["Identity", ""], None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_body_that_is_compressed_is_415(
    door: Door, path: str, encodings: list[str], refused: str | None
) -> None:
    body = (
        {"prompt": "abc"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    )
    headers = [("Content-Encoding", encoding) for encoding in encodings]
    if refused is None:
        assert door.post(path, body, headers=headers).status_code == 200
        return
    response = door.post(path, content=gzip.compress(json.dumps(body).encode()), headers=headers)
    assert response.status_code == 415
    error = error_of(response)
    assert (error["param"], error["code"]) == ("Content-Encoding", "unsupported_encoding")
    assert repr(refused) in error["message"]
    assert door.service.requests == []


@pytest.mark.parametrize("content", [b"[]", b"5", b'"x"', b"null"])
def test_body_that_is_no_object(door: Door, content: bytes) -> None:
    response = door.post("/v1/chat/completions", content=content)
    assert response.status_code == 400
    assert "object" in error_of(response)["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a" * 300},
        {"prompt": "a" * 250, "max_tokens": 7},
        {"prompt": "a", "max_tokens": 1 << 70},
        {"prompt": "a" * 257, "max_tokens": 0, "echo": True},
    ],
)
def test_context_too_long(door: Door, fields: dict[str, Any]) -> None:
    response = door.complete(**fields)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "256" in error["message"]
    assert door.complete(prompt="a" * 250, max_tokens=6).status_code == 200
    assert door.complete(prompt="a" * 256, max_tokens=0, echo=True).status_code == 200


def test_too_long_a_body_is_413() -> None:
    door = Door(settings=DoorSettings(max_body_bytes=1000))
    response = door.complete(prompt="a" * 2000)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"

    async def chunked() -> Any:
        for _ in range(20):
            yield b" " * 100

    response = asyncio.run(door.send("POST", "/v1/completions", content=chunked()))
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"
    assert door.complete().status_code == 200


def test_unknown_path_and_method(door: Door) -> None:
    response = door.post("/v1/embeddings", {})
    assert response.status_code == 404
    assert "/v1/embeddings" in error_of(response)["message"]
    response = door.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    error_of(response)


def test_api_keys() -> None:
    door = Door(
        settings=DoorSettings(
            api_keys=tuple(ApiKey(name=text, digest=digest_api_key(text)) for text in ("right", "x"))
        )
    )
    assert door.complete().status_code == 401
    body = {"prompt": "abc"}
    for wrong in ("Bearer wrong", "Basic right", "right", "Bearer "):
        response = door.post("/v1/completions", body, headers={"Authorization": wrong})
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        error_of(response)
    assert door.post("/v1/completions", body, headers={"Authorization": "Bearer right"}).status_code == 200
    assert door.get("/v1/models").status_code == 401
    assert door.get("/health").status_code == 200


@pytest.mark.parametrize(("shares", "num_salts"), [(False, 6), (True, 3)])
def test_api_keys_keep_cached_prompts_apart(shares: bool, num_salts: int) -> None:
    keys = ["one", "two"]
    door = Door(
        settings=DoorSettings(
            api_keys=tuple(ApiKey(name=key, digest=digest_api_key(key)) for key in keys),
            share_prefixes_between_keys=shares,
        )
    )
    for key in keys * 2:
        for salt in (None, "s", "two"):
            body = {"prompt": "abc"} | ({"cache_salt": salt} if salt else {})
            headers = {"Authorization": f"Bearer {key}"}
            assert door.post("/v1/completions", body, headers=headers).status_code == 200
    owners = [request.owner for request in door.service.requests]
    assert owners == [owners[0]] * 3 + [owners[3]] * 3 + [owners[0]] * 3 + [owners[3]] * 3, "keys take turns"
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
    assert list(dict.fromkeys(owners)) == digests, (
        "as in a keys file, and in speculative_config.online.tenants"
    )
    salts = [request.cache_salt for request in door.service.requests]
    assert salts[:6] == salts[6:], "the same for the same key and body"
    assert len(set(salts)) == num_salts
    assert not any("one" in (salt or "") for salt in salts)


@pytest.mark.cover(1)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (CapacityError("the queue is full", retry_after_s=2.5), 429, "rate_limit_exceeded"),
        (LateError("it would be late", retry_after_s=2.0), 429, "deadline_unreachable"),
        (InputError("prompt is too odd", param="prompt"), 400, None),
        (RequestFailed("it broke twice", code="request_failed_repeatedly"), 500, "request_failed_repeatedly"),
        (ChannelClosed("10.0.0.7:999 is gone"), 503, "unavailable"),
        (NotReadyError("the server is shutting down"), 503, "not_ready"),
        (RequestFailed("the end", code=SHUTTING_DOWN), 503, "shutting_down"),
        (RequestFailed("its time was up", code="request_timeout"), 504, "request_timeout"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
def test_refusal_before_the_first_output_is_a_status(
    stream: bool, refusal: Exception, status: int, code: str | None
) -> None:
    door = Door(ScriptedService(refuse_with=refusal))
    response = door.complete(stream=stream, n=2)
    assert response.status_code == status
    assert error_of(response)["code"] == code
    if status in (429, 503):
        assert int(response.headers["retry-after"]) >= 2
    # What ends workers, or takes too long, is not to be sent again by a client's library on its own.
    is_final = code in ("request_failed_repeatedly", "request_timeout")
    assert response.headers.get("x-should-retry") == ("false" if is_final else None)
    assert "secret" not in response.text
    assert "10.0.0.7" not in response.text


@pytest.mark.parametrize("failure", [None, ZeroDivisionError("secret")])
def test_failure_in_the_middle(failure: Exception | None) -> None:
    door = Door(ScriptedService(fail_after=2, failure=failure))
    response = door.complete(stream=True)
    assert response.status_code == 200
    events = [data for _, data in events_of(response)]
    assert [event["choices"][0]["text"] for event in events[:2]] == list(PIECES[:2])
    assert events[3] == "[DONE]"
    error = events[2]["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == ("non_finite_logits" if failure is None else "internal_error")
    assert "secret" not in response.text

    response = door.complete()
    assert response.status_code == 500
    assert error_of(response)["code"] == error["code"]
    # The first had status 200: no other number would tell that it failed. The second's status does.
    assert failed_streams(door) == {error["code"]: 1.0}


def failed_streams(door: Door) -> dict[str, float]:
    """Return how many streams failed, by code, of those codes of which any did."""
    counted = re.findall(r'streams_failed_total{code="(\w+)"} (\S+)', door.get("/metrics").text)
    assert len(counted) > 5, "they are told from zero on"
    return {code: float(count) for code, count in counted if float(count)}


@pytest.mark.parametrize(
    ("failure", "counted"),
    [
        (RequestFailed("gone", code="coordinator_lost"), {"coordinator_lost": 1.0}),
        (RequestFailed("the end", code=SHUTTING_DOWN), {"shutting_down": 1.0}),
        (RequestFailed("odd", code="a code that nobody has heard of"), {"other": 1.0}),
        (RequestFailed("no token", code="no_token_allowed"), {}),  # what the client asked for
        (RequestFailed("not read", code="slow_reader"), {}),  # counted as such
    ],
)
def test_streams_that_fail_are_counted_by_code(failure: Exception, counted: dict[str, float]) -> None:
    door = Door(ScriptedService(fail_after=2, failure=failure))
    assert '"error"' in door.complete(stream=True).text
    assert failed_streams(door) == counted


def client_timeouts(door: Door) -> dict[str, float]:
    """Return how many requests ran out of time that their client had set, by status."""
    counted = re.findall(r'http_client_timeouts_total{status="(\d+)"} (\S+)', door.get("/metrics").text)
    assert len(counted) == 2, "they are told from zero on"
    return {status: float(count) for status, count in counted if float(count)}


@pytest.mark.parametrize(
    ("of_body", "of_header", "of_server", "is_own"),
    [
        (30, None, None, True),
        (30, None, 60.0, True),
        (None, "30", 60.0, True),
        (None, None, 60.0, False),
        (90, "80", 60.0, False),
        (60, None, 60.0, False),
    ],
)
def test_whose_time_was_up_is_counted(
    of_body: float | None, of_header: str | None, of_server: float | None, is_own: bool
) -> None:
    """Clients may give as little as they like. What the server gives itself was promised."""
    settings = DoorSettings(request_timeout_s=of_server)
    headers = {} if of_header is None else {"X-Request-Timeout": of_header}
    failure = RequestFailed("its time was up", code="request_timeout")
    for fail_after, stream, status in ((0, False, 504), (0, True, 504), (2, True, 200)):
        door = Door(ScriptedService(fail_after=fail_after, failure=failure), settings)
        body = {"prompt": "abc", "stream": stream, "timeout_s": of_body}
        answer = door.post("/v1/completions", body, headers=headers)
        assert answer.status_code == status
        assert "request_timeout" in answer.text
        assert client_timeouts(door) == ({str(status): 1.0} if is_own else {})
        is_ours = status == 200 and not is_own
        assert failed_streams(door) == ({"request_timeout": 1.0} if is_ours else {})


def test_what_fails_for_another_reason_is_no_matter_of_the_clients_time() -> None:
    door = Door(ScriptedService(fail_after=0, failure=RequestFailed("gone", code="coordinator_lost")))
    assert door.complete(timeout_s=30).status_code == 500
    assert client_timeouts(door) == {}


@pytest.mark.parametrize("stream", [False, True])
def test_request_timeout(stream: bool) -> None:
    door = Door(ScriptedService(hold_at=0), DoorSettings(request_timeout_s=0.05))
    response = door.complete(stream=stream)
    assert response.status_code == 504
    assert error_of(response)["code"] == "request_timeout"
    assert response.headers["x-should-retry"] == "false"
    assert door.service.aborted == [door.service.requests[0].request_id]


@pytest.mark.parametrize(
    ("body_s", "header_s", "server_s", "expected_s"),
    [
        (None, None, None, None),
        (2.5, None, None, 2.5),
        (None, "7", None, 7.0),
        (None, None, 9.0, 9.0),
        (3, "2", 9.0, 2.0),
        (3.0, "20", 1.0, 1.0),
    ],
)
def test_the_shortest_time_counts(
    body_s: float | None, header_s: str | None, server_s: float | None, expected_s: float | None
) -> None:
    door = Door(settings=DoorSettings(request_timeout_s=server_s))
    body = {"prompt": "abc", "n": 2, "timeout_s": body_s}
    headers = {} if header_s is None else {"X-Request-Timeout": header_s}
    assert door.post("/v1/completions", body, headers=headers).status_code == 200
    for request in door.service.requests:
        if expected_s is None:
            assert request.timeout_s is None
        else:  # less what the door has needed so far
            assert request.timeout_s is not None
            assert expected_s - 0.5 < request.timeout_s <= expected_s
    assert len(door.service.requests) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_sets_its_own_time(stream: bool) -> None:
    door = Door(ScriptedService(hold_at=0))
    response = door.complete(stream=stream, timeout_s=0.05)
    assert response.status_code == 504
    assert "longer than 0.05 s" in error_of(response)["message"]
    assert client_timeouts(door) == {"504": 1.0}


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", ""])
def test_times_in_the_header_are_checked(door: Door, value: str) -> None:
    response = door.post("/v1/completions", {"prompt": "abc"}, headers={"X-Request-Timeout": value})
    assert response.status_code == 400
    assert error_of(response)["param"] == "X-Request-Timeout"
    assert door.service.requests == []


@pytest.mark.parametrize("field", ["timeout_s", "priority"])
@pytest.mark.parametrize("value", ["soon", 0, -0.5, NAN, True, 10**9, []])
def test_times_and_priorities_in_the_body_are_checked(door: Door, field: str, value: object) -> None:
    if (field, value) in (("timeout_s", 10**9), ("priority", 0)):
        return  # a long time, and the default
    response = door.post("/v1/completions", content=json.dumps({"prompt": "abc", field: value}).encode())
    assert response.status_code == 400
    assert error_of(response)["param"] == field
    assert door.service.requests == []


@pytest.mark.parametrize("priority", [-1000, 0, 3, 1000, None])
def test_priority_reaches_the_engine(door: Door, priority: int | None) -> None:
    assert door.chat(priority=priority, n=2).status_code == 200
    assert [request.priority for request in door.service.requests] == [priority or 0] * 2


@pytest.mark.parametrize(
    "value", [5, [], {"itl_ms": 0}, {"itl_ms": -1.0}, {"ttft_ms": "soon"}, {"e2e_ms": 10.0}, {"itl_ms": NAN}]
)
def test_latency_targets_are_checked(door: Door, value: object) -> None:
    response = door.post("/v1/completions", content=json.dumps({"prompt": "abc", "slo": value}).encode())
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("slo")
    assert door.service.requests == []


def test_latency_targets_and_classes_reach_the_engine() -> None:
    """Only classes that the server knows are told apart."""
    door = Door(settings=DoorSettings(request_classes=frozenset({"code"})))
    fields = {"slo": {"itl_ms": 40.0, "ttft_ms": None}}
    for metadata in ({"class": "code"}, {"class": "poems"}, {}):
        assert door.chat(metadata=metadata, **fields).status_code == 200
    assert door.chat().status_code == 200
    assert [request.class_name for request in door.service.requests] == ["code", "other", "other", "other"]
    targets = [request.slo for request in door.service.requests]
    assert targets == [LatencyTarget(itl_ms=40.0)] * 3 + [None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 2])
def test_client_that_leaves_aborts_at_once(stream: bool, hold_at: int) -> None:
    door = Door(ScriptedService(hold_at=hold_at))

    async def scenario() -> list[dict[str, Any]]:
        body = json.dumps({"prompt": "abc", "stream": stream, "n": 2}).encode()
        leave = asyncio.Event()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "root_path": "", "headers": [], "server": ("door", 80), "client": ("c", 1),
        }  # fmt: skip
        running = asyncio.create_task(door.app(scope, receive, send))
        while len(door.service.requests) < 2:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not running.done()
        assert door.service.aborted == []
        leave.set()
        await asyncio.wait_for(running, 5)
        return sent

    asyncio.run(scenario())
    ids = {request.request_id for request in door.service.requests}
    assert set(door.service.aborted) == ids
    assert set(door.service.closed) == ids


def test_bad_requests_do_not_disturb_a_stream(door: Door) -> None:
    door.service.hold_at = 2

    async def scenario() -> None:
        good = asyncio.create_task(door.send("POST", "/v1/completions", json={"prompt": "a", "stream": True}))
        while not door.service.requests:
            await asyncio.sleep(0)
        for content in (
            b"\xff",
            b"{",
            json.dumps({"prompt": "a", "temperature": NAN}).encode(),
            b"x" * (10 << 20),
        ):
            response = await door.send("POST", "/v1/completions", content=content)
            assert response.status_code in (400, 413)
        door.service.release.set()
        events = events_of(await good)
        assert [data["choices"][0]["text"] for _, data in events[:-1]] == list(PIECES)

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["text", "message"])
def test_messages_may_say_that_they_are_messages(kind: str) -> None:
    """lm-evaluation-harness writes it into every one."""
    messages = [{"role": "user", "content": "x", "type": kind}]
    assert Door().post("/v1/chat/completions", {"messages": messages}).status_code == 200


def _codes_in_sources() -> set[str]:
    """Every text that is given as `code` somewhere in the door, unless it is put together at run time."""
    folder = Path(errors.__file__).parent
    return {
        constant.value
        for path in sorted(folder.glob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "code"
        for constant in ast.walk(keyword.value)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
        if re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", constant.value)
    }


def test_clients_can_look_up_every_code() -> None:
    """On the page of the door; but for those that never leave a process, or the cluster."""
    stay_inside = {
        error_codes.ENGINE_FAILED,
        error_codes.TARGET_LOST,
        error_codes.COORDINATOR_FAILED,
        error_codes.COORDINATOR_CRASHED,
        error_codes.DISPLACED,  # clients see rate_limit_exceeded
    }
    named = {value for name, value in vars(error_codes).items() if name.isupper()}
    assert stay_inside < named
    of_the_door = {errors.DEADLINE_UNREACHABLE, errors.KEYS_UNREAD, SLOW_READER, "invalid_api_key"}
    page = (Path(__file__).resolve().parents[3] / "docs" / "operations" / "door.md").read_text()
    section = page.partition("\n## Errors that clients see\n")[2].partition("\n## ")[0]
    codes = {*named - stay_inside, *of_the_door, *_codes_in_sources()}
    assert {"rate_limit_exceeded", "origin_not_allowed", "request_lost"} < codes
    assert {code for code in codes if f"`{code}`" not in section} == set()


def test_a_byte_order_mark_is_no_part_of_a_body(door: Door) -> None:
    content = b'\xef\xbb\xbf{"prompt": "abc", "max_tokens": 2}'
    response = door.post("/v1/completions", content=content)
    assert response.status_code == 200
