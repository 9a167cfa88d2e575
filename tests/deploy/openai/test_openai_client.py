"""The official OpenAI client against a real server on loopback."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from specdec.core.errors import CapacityError, RequestFailed
from tests.deploy.openai.fakes import PIECES, Door, ScriptedService
from tests.deploy.openai.live import live_server

TEXT = "".join(PIECES)
MESSAGES: Any = [{"role": "user", "content": "abc"}]


@pytest.fixture
def door() -> Door:
    return Door()


@pytest.fixture
def url(door: Door) -> Iterator[str]:
    with live_server(door.app) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completion(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="scripted", prompt="abc", logprobs=1)
    assert completion.choices[0].text == TEXT
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.tokens == ["#", "$", "%", "&", "'"]
    assert completion.usage is not None
    assert completion.usage.total_tokens == 8


def test_chat(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="scripted", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, max_completion_tokens=9
    )
    assert [choice.message.content for choice in completion.choices] == [TEXT, TEXT]
    logprobs = completion.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["#", "$"]


def test_streams(client: openai.OpenAI) -> None:
    with client.completions.create(model="scripted", prompt="abc", stream=True) as stream:
        assert [chunk.choices[0].text for chunk in stream] == list(PIECES)
    with client.chat.completions.create(
        model="scripted", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def test_stream_helper_of_the_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="scripted", messages=MESSAGES) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT
    assert final.choices[0].finish_reason == "stop"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted"]
    assert client.models.retrieve("scripted").owned_by == "drafthouse"


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI, door: Door) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="scripted", prompt="abc", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="abc")
    assert missing.value.code == "model_not_found"
    door.service.refuse_with = CapacityError("full", retry_after_s=3)
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(model="scripted", prompt="abc")
    assert full.value.response.headers["retry-after"] == "3"
    door.service.refuse_with = None
    door.service.fail_after = 1
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model="scripted", prompt="abc", stream=True))


def test_ten_megabytes_get_an_answer_not_a_reset(url: str, client: openai.OpenAI) -> None:
    body = b'{"prompt": "' + b"a" * (10 << 20) + b'"}'
    response = httpx.post(f"{url}/v1/completions", content=body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert client.completions.create(model="scripted", prompt="abc").choices[0].text == TEXT


def test_body_announced_and_held_back_is_refused_without_reading(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert b" 413 " in connection.recv(4096).split(b"\r\n")[0]


@pytest.mark.parametrize("stream", [False, True])
def test_closed_connection_aborts(url: str, door: Door, stream: bool) -> None:
    door.service.hold_at = 1
    with httpx.Client(timeout=30) as client:
        body = {"prompt": "abc", "stream": stream}
        if stream:
            with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{url}/v1/completions", json=body, timeout=0.3)
    deadline_s = time.monotonic() + 10
    while not door.service.aborted and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert door.service.aborted == [door.service.requests[0].request_id]
    assert door.service.closed == door.service.aborted


def test_utf8_survives(url: str, door: Door, client: openai.OpenAI) -> None:
    door.service.pieces = ("h\u00e9", "\u4e16\u754c", "\U0001f680\n\u2028")
    stream = client.completions.create(model="scripted", prompt="abc", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "".join(door.service.pieces)


def test_no_character_of_a_text_ends_a_line(url: str, door: Door) -> None:
    """Clients that read lines as `str.splitlines` does (LiteLLM, by httpx) would lose these events."""
    door.service.pieces = ("a\x85b", "\u2028", "c\u2029\x0b\x0c\x1c\x1d\x1ed")
    body = {"prompt": "abc", "stream": True, "logprobs": 0}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == "".join(door.service.pieces)


def test_ready_only_when_the_service_is() -> None:
    door = Door(ScriptedService(is_ready=False))
    with live_server(door.app) as url:
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "abc"})
        assert response.status_code == 503
        assert "retry-after" in response.headers
        door.service.is_ready = True
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize(("code", "num_attempts"), [("request_failed_repeatedly", 1), ("odd", 2)])
def test_what_failed_repeatedly_is_not_sent_again(door: Door, url: str, code: str, num_attempts: int) -> None:
    """Each attempt would end workers; of another failure the client's library makes another attempt."""
    door.service.refuse_with = RequestFailed("it broke", code=code)
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=1) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.completions.create(model="scripted", prompt="abc")
    assert len(door.service.requests) == num_attempts
