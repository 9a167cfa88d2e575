"""What clients send stays between them and the model: not in logs, not in metrics, not in others' timing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deploy.openai.app import create_app
from deploy.openai.keys import ApiKey, digest_api_key
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.core.errors import ChannelClosed, RequestFailed
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from tests.architectures import make_tokenizer, save_model
from tests.deploy.openai.fakes import CHAT_TEMPLATE, Door, ScriptedService

SECRET = "xyzzyPLUGH"
"""What nobody but its sender may see. The tokenizers of tests know its letters one by one."""
MESSAGES = [{"role": "user", "content": SECRET}]
OFF = CompileConfig(mode="off")
BODIES: list[tuple[str, Any]] = [
    ("/v1/completions", {"prompt": SECRET}),
    ("/v1/completions", {"prompt": SECRET, "stream": True, "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": [SECRET, SECRET], "n": 2, "user": SECRET, "metadata": {"class": SECRET}}),
    ("/v1/completions", {"prompt": "a", "stop": [SECRET], "bad_words": [SECRET], "cache_salt": SECRET}),
    ("/v1/completions", {"prompt": "a", "model": SECRET}),
    ("/v1/completions", {"prompt": "a", "temperature": SECRET}),
    ("/v1/completions", {"prompt": "a", SECRET: 1}),
    ("/v1/completions", {"prompt": SECRET * 1000}),
    ("/v1/completions", {"prompt": "a", "guided_regex": f"({SECRET}"}),
    ("/v1/completions", {"prompt": "a", "guided_grammar": f"start: {SECRET}"}),
    ("/v1/completions", {"prompt": "a", "guided_json": {"type": SECRET}, "stream": True}),
    ("/v1/completions", {"prompt": "a", "guided_choice": [SECRET, "b"], "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 8}),
    ("/v1/chat/completions", {"messages": MESSAGES, "stream": True, "max_tokens": 8}),
    ("/v1/chat/completions", {"messages": [*MESSAGES, {"role": "user", "content": "refuse"}]}),
    ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": "a"}]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{"function": {"name": SECRET}}]}),
    (f"/v1/{SECRET}", {}),
]  # fmt: skip
FAILURES = [
    (None, 2),
    (ZeroDivisionError("a bug"), 0),
    (ZeroDivisionError("a bug"), 2),
    (RequestFailed("it broke twice", code="request_failed_repeatedly"), 0),
    (ChannelClosed("10.0.0.7:999 is gone"), 2),
]
"""With the number of pieces after which it happens."""


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Every line of every logger, tracebacks included. HTTP clients of the test itself say what they send."""
    for name in ("httpx", "httpcore", "asyncio"):
        caplog.set_level(logging.WARNING, name)
    with caplog.at_level(logging.DEBUG):
        for name in ("specdec", "deploy", "cluster", "workers"):
            caplog.set_level(logging.DEBUG, name)
        yield caplog


def assert_silent(log: pytest.LogCaptureFixture, metrics: str, *others: str) -> None:
    for text in (SECRET, SECRET.lower(), *others):
        assert text not in log.text
        assert text not in metrics


@pytest.mark.parametrize(("failure", "fail_after"), FAILURES, ids=repr)
def test_whatever_goes_wrong_logs_and_metrics_hold_no_text(
    failure: Exception | None, fail_after: int, log: pytest.LogCaptureFixture
) -> None:
    door = Door(ScriptedService(fail_after=fail_after, failure=failure))
    for path, body in BODIES:
        try:
            door.post(path, body)
        except ZeroDivisionError:
            assert body.get("stream"), "a stream that has begun is cut"
    for content in (f'{{"prompt": "{SECRET}'.encode(), f"{SECRET}\xff".encode("latin-1")):
        assert door.post("/v1/completions", content=content).status_code == 400
    if isinstance(failure, ZeroDivisionError):
        assert "ZeroDivisionError" in log.text, "something is logged here"
    assert_silent(log, door.get("/metrics").text)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("target", "draft"):
        save_model(folder / name, seed=1)
    config = EngineConfig(
        target=ModelConfig(model=str(folder / "target"), dtype="float32", device="cpu", compile=OFF),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=str(folder / "draft"),
            num_speculative_tokens=3,
            controller="fixed",
            compile=OFF,
        ),
        cache=CacheConfig(block_size=4, num_blocks=96),
    )
    engine = AsyncEngine(Engine(config))
    yield engine
    engine.close()


def ask(
    engine: AsyncEngine, settings: DoorSettings, bodies: list[tuple[str, Any, str | None]]
) -> tuple[list[httpx.Response], str]:
    """Send bodies, each under an API key or none, one after the other; return answers, and metrics then."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    app = create_app(engine, settings, HuggingFaceTokenizer(tokenizer))

    async def send_all() -> tuple[list[httpx.Response], str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as client:
            answers = []
            for path, body, key in bodies:
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                answers.append(await client.post(path, json=body, headers=headers, timeout=60))
            return answers, (await client.get("/metrics")).text

    return asyncio.run(send_all())


def test_the_engine_is_as_silent(engine: AsyncEngine, log: pytest.LogCaptureFixture) -> None:
    tokenizer = HuggingFaceTokenizer(make_tokenizer())
    token_ids = asyncio.run(tokenizer.encode(SECRET, add_special_tokens=False))
    answers, metrics = ask(engine, DoorSettings(), [(path, body, None) for path, body in BODIES])
    assert {answer.status_code for answer in answers} >= {200, 400, 404}
    assert_silent(log, metrics, ", ".join(map(str, token_ids[:5])), " ".join(map(str, token_ids[:5])))


@pytest.mark.parametrize("shares", [False, True])
def test_a_key_cannot_find_out_what_others_have_sent(engine: AsyncEngine, shares: bool) -> None:
    """By the tokens that were cached, which is what the time until the first token tells."""
    settings = DoorSettings(
        api_keys=tuple(ApiKey(name=name, digest=digest_api_key(name)) for name in ("alice", "mallory")),
        share_prefixes_between_keys=shares,
    )
    body = {"prompt": f"{shares}: the patient is Alice", "max_tokens": 2, "temperature": 0}
    forged = {**body, "cache_salt": f"{digest_api_key('alice').hex()} "}
    asked = [(body, "alice"), (body, "mallory"), (forged, "mallory"), (body, "alice")]
    answers, _ = ask(engine, settings, [("/v1/completions", one, key) for one, key in asked])
    usages = [answer.json()["usage"] for answer in answers]
    cached = [usage.get("prompt_tokens_details", {}).get("cached_tokens", 0) for usage in usages]
    texts = {json.dumps(answer.json()["choices"]) for answer in answers}
    assert len(texts) == 1, "a salt never changes an answer"
    assert [num_tokens > 0 for num_tokens in cached] == [False, shares, False, True]
