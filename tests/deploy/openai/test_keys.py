"""API keys at the door: limits of each, as the official client sees them, and keys that change meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from deploy.api_keys import (
    ApiKeysFile,
    add_api_key,
    follow_api_keys,
    line_of,
    new_api_key,
    read_api_keys,
)
from deploy.openai.app import create_app
from deploy.openai.errors import ApiError
from deploy.openai.keys import ApiKey, KeyRing, Usage, digest_api_key
from deploy.openai.metrics import DoorMetrics
from deploy.openai.middleware import ApiKeys
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.core.clock import ManualClock
from specdec.core.errors import CapacityError, ConfigError, InputError, NotReadyError
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from tests.deploy.openai.fakes import PIECES, Door, ScriptedService, error_of
from tests.deploy.openai.live import live_server

PROMPT_TOKENS = 3
TOKENS = PROMPT_TOKENS + len(PIECES)
"""Of one request for one choice."""


def key_of(text: str, **limits: int) -> ApiKey:
    return ApiKey(name=f"of-{text}", digest=digest_api_key(text), **limits)


class LimitedDoor(Door):
    """A door with keys, under a clock that the test moves."""

    def __init__(self, *keys: ApiKey, service: ScriptedService | None = None, **settings: Any) -> None:
        self.clock = ManualClock()
        self.ring = KeyRing(keys, self.clock)
        super().__init__(service or ScriptedService(), DoorSettings(api_keys=keys, **settings))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.app = create_app(self.service, self.settings, HuggingFaceTokenizer(self.tokenizer), self.ring)

    def ask(self, key: str, **fields: Any) -> httpx.Response:
        return asyncio.run(self.asked(key, **fields))

    async def asked(self, key: str, **fields: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return await self.send("POST", "/v1/completions", json={"prompt": "abc", **fields}, headers=headers)


def test_tokens_per_minute() -> None:
    door = LimitedDoor(key_of("slow", tokens_per_minute=2 * TOKENS), key_of("free"))
    assert [door.ask("slow").status_code for _ in range(3)] == [200, 200, 429]
    refused = door.ask("slow")
    error = error_of(refused)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert f"{2 * TOKENS} tokens per minute" in error["message"]
    wait_s = int(refused.headers["retry-after"])
    assert wait_s == math.ceil(60 / (2 * TOKENS))
    assert door.ask("free").status_code == 200, "keys do not share a limit"
    num_generated = len(door.service.requests)
    door.clock.advance(wait_s - 1)
    assert door.ask("slow", stream=True).status_code == 429, "before a stream begins, too"
    assert len(door.service.requests) == num_generated, "what is refused is not begun"
    door.clock.advance(1)
    assert door.ask("slow").status_code == 200
    text = door.get("/metrics").text
    assert f'ray_drafthouse_api_key_tokens_total{{key="of-slow"}} {3.0 * TOKENS}' in text
    assert 'ray_drafthouse_api_key_refusals_total{key="of-slow",limit="tokens"} 3.0' in text


def test_the_rate_holds_in_the_long_run_whatever_is_asked_for() -> None:
    generator = random.Random(3)
    clock, metrics = ManualClock(), DoorMetrics()
    key = key_of("a", tokens_per_minute=600)
    ring = KeyRing([key], clock)
    num_used = num_refused = 0
    waits_s = []
    for _ in range(4000):
        usage = ring.usage(
            key, num_choices=1, param="n", num_prompt_tokens=generator.randrange(200), metrics=metrics
        )
        try:
            with usage:
                num_generated = generator.randrange(400)
                usage.charge(num_generated)
                num_used = int(metrics.api_key_tokens.labels(key.name)._value.get())
        except CapacityError as error:
            num_refused += 1
            waits_s.append(error.retry_after_s)
        clock.advance(generator.random() * 10)
    minutes = clock.now_s() / 60
    assert num_refused > 1000
    assert 0 < min(waits_s) <= max(waits_s) <= 60
    assert 0.95 * 600 * minutes < num_used < 600 * (minutes + 1) + 600


def test_what_waits_as_long_as_it_is_told_is_let_in() -> None:
    clock = ManualClock()
    key = key_of("a", tokens_per_minute=7)
    ring = KeyRing([key], clock)
    with ring.usage(key, num_choices=1, param="n", num_prompt_tokens=50, metrics=DoorMetrics()):
        pass
    again = ring.usage(key, num_choices=1, param="n", num_prompt_tokens=1, metrics=DoorMetrics())
    with pytest.raises(CapacityError) as refused:
        again.__enter__()
    clock.advance(refused.value.retry_after_s)
    with again:
        pass


def use(ring: KeyRing, key: ApiKey, num_choices: int = 1, num_prompt_tokens: int = 1) -> Usage:
    return ring.usage(
        key, num_choices=num_choices, param="n", num_prompt_tokens=num_prompt_tokens, metrics=DoorMetrics()
    )


@pytest.mark.parametrize(("limit", "num_doors", "part"), [(5, 1, 5), (5, 2, 2), (6, 3, 2), (1, 3, 1)])
def test_doors_share_what_a_key_may_have_at_once(limit: int, num_doors: int, part: int) -> None:
    key = key_of("a", max_concurrency=limit)
    ring = KeyRing([key], ManualClock(), num_doors=lambda: num_doors)
    with contextlib.ExitStack() as running:
        for _ in range(part):
            running.enter_context(use(ring, key))
        for refused in (use(ring, key), ring.preparing(key, DoorMetrics())):
            with pytest.raises(CapacityError, match=f"may have {limit} choices") as told:
                running.enter_context(refused)
            assert (f"{part} by this one of {num_doors} doors" in str(told.value)) == (num_doors > 1)
    with use(ring, key):
        pass


def test_a_request_that_a_key_may_have_is_taken_in_by_one_of_several_doors() -> None:
    """It would not be smaller later: so it is let in when nothing else of the key runs there."""
    key = key_of("a", max_concurrency=8)
    ring = KeyRing([key], ManualClock(), num_doors=lambda: 4)
    with use(ring, key), pytest.raises(CapacityError):
        use(ring, key, num_choices=8).__enter__()
    with use(ring, key, num_choices=8), pytest.raises(CapacityError):
        use(ring, key).__enter__()
    with pytest.raises(ApiError, match="8 at once"):
        use(ring, key, num_choices=9).__enter__()


def test_doors_that_come_and_go_change_what_a_door_grants() -> None:
    num_doors, clock = 1, ManualClock()
    key = key_of("a", tokens_per_minute=60)
    ring = KeyRing([key], clock, num_doors=lambda: num_doors)
    with use(ring, key, num_prompt_tokens=30):
        pass
    num_doors = 2
    with pytest.raises(CapacityError, match="60 tokens per minute, 30 by this one of 2 doors") as refused:
        use(ring, key).__enter__()
    assert refused.value.retry_after_s == pytest.approx(2.0), "one token, at thirty a minute"
    num_doors = 1
    with use(ring, key):
        pass
    num_doors = 100
    clock.advance(60 * 60)
    with use(ring, key):
        pass


def test_the_rate_holds_over_all_doors_together() -> None:
    generator, clock = random.Random(5), ManualClock()
    key = key_of("a", tokens_per_minute=600)
    rings = [KeyRing([key], clock, num_doors=lambda: len(rings)) for _ in range(3)]
    metrics = DoorMetrics()
    for _ in range(4000):
        usage = generator.choice(rings).usage(
            key, num_choices=1, param="n", num_prompt_tokens=generator.randrange(200), metrics=metrics
        )
        with contextlib.suppress(CapacityError), usage:
            usage.charge(generator.randrange(400))
        clock.advance(generator.random() * 10)
    minutes = clock.now_s() / 60
    num_used = metrics.api_key_tokens.labels(key.name)._value.get()
    assert 0.95 * 600 * minutes < num_used < 600 * (minutes + 1) + 3 * 600


REFUSALS = [
    (CapacityError("full", retry_after_s=1), 429),
    (NotReadyError("no model"), 503),
    (InputError("too long", param="prompt"), 400),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("refusal", "status"), REFUSALS, ids=["full", "not ready", "wrong"])
def test_what_is_refused_is_not_charged(refusal: Exception, status: int, stream: bool) -> None:
    door = LimitedDoor(key_of("key", tokens_per_minute=PROMPT_TOKENS))
    door.service.refuse_with = refusal
    assert [door.ask("key", stream=stream).status_code for _ in range(3)] == [status] * 3
    door.service.refuse_with = None
    assert door.ask("key", stream=stream).status_code == 200
    text = door.get("/metrics").text
    assert f'ray_drafthouse_api_key_tokens_total{{key="of-key"}} {float(TOKENS)}' in text


class RefusedLate(ScriptedService):
    """Refuses what has waited for a while."""

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        if self.refuse_with is not None:
            await asyncio.sleep(0.1)
        async for output in super().generate(request):
            yield output


@pytest.mark.parametrize("refusal", [refusal for refusal, _ in REFUSALS])
def test_a_stream_that_is_refused_behind_a_comment_is_not_charged_either(refusal: Exception) -> None:
    key, service = key_of("key", tokens_per_minute=PROMPT_TOKENS), RefusedLate(refuse_with=refusal)
    door = LimitedDoor(key, service=service, stream_keep_alive_s=0.02)
    for _ in range(3):
        refused = door.ask("key", stream=True)
        assert refused.status_code == 200
        assert refused.text.startswith(":")
        assert '"error"' in refused.text
    service.refuse_with = None
    assert door.ask("key", stream=True).status_code == 200
    assert door.ask("key").status_code == 429


def test_what_is_refused_says_nothing_of_how_long_a_choice_takes() -> None:
    key = key_of("a", max_concurrency=1)
    ring, metrics = KeyRing([key], ManualClock()), DoorMetrics()
    for _ in range(50):
        usage = ring.usage(key, num_choices=1, param="n", num_prompt_tokens=1, metrics=metrics)
        with contextlib.suppress(CapacityError), usage:
            usage.charge(0)  # an output without tokens says that it had to leave the queue
            raise CapacityError("full", retry_after_s=1)
    with ring.usage(key, num_choices=1, param="n", num_prompt_tokens=1, metrics=metrics):
        again = ring.usage(key, num_choices=1, param="n", num_prompt_tokens=1, metrics=metrics)
        with pytest.raises(CapacityError) as refused:
            again.__enter__()
    assert refused.value.retry_after_s == 1.0


def test_what_has_begun_is_charged_however_it_ends() -> None:
    key = key_of("a", tokens_per_minute=10)
    ring, metrics = KeyRing([key], ManualClock()), DoorMetrics()
    usage = ring.usage(key, num_choices=2, param="n", num_prompt_tokens=8, metrics=metrics)
    with contextlib.suppress(CapacityError), usage:
        usage.charge(2)
        raise CapacityError("full", retry_after_s=1)  # of the other choice
    assert metrics.api_key_tokens.labels(key.name)._value.get() == 10
    with pytest.raises(CapacityError, match="10 tokens per minute"):
        ring.usage(key, num_choices=1, param="n", num_prompt_tokens=1, metrics=metrics).__enter__()


def test_a_key_that_comes_back_into_the_file_has_used_what_it_has_used() -> None:
    clock = ManualClock()
    key, other = key_of("a", max_concurrency=1, tokens_per_minute=10), key_of("b")
    ring = KeyRing([key, other], clock)
    with use(ring, key, num_prompt_tokens=5):
        ring.replace([other])
        ring.replace([key, other])
        with pytest.raises(CapacityError, match="1 choices"):
            use(ring, key).__enter__()
    with use(ring, key, num_prompt_tokens=200):
        pass
    ring.replace([other])
    clock.advance(600)
    ring.replace([key, other])
    with pytest.raises(CapacityError, match="10 tokens per minute"):
        use(ring, key).__enter__()
    ring.replace([other])
    clock.advance(7200)
    ring.replace([key, other])
    with use(ring, key):
        pass


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": ["abc"] * 3}, "prompt"), ({"n": 3}, "n"), ({"best_of": 3}, "best_of")],
)
def test_what_a_key_never_has_at_once_is_told_by_its_field(fields: dict[str, Any], param: str) -> None:
    door = LimitedDoor(key_of("few", max_concurrency=2))
    refused = door.ask("few", **fields)
    assert refused.status_code == 400
    assert (error_of(refused)["code"], error_of(refused)["param"]) == ("too_many_choices", param)


def test_a_body_is_not_read_where_the_key_has_no_place_for_it() -> None:
    """Or one key's bodies fill the memory of a door while its limits look at one of them."""
    door = LimitedDoor(key_of("few", max_concurrency=1))
    num_read = 0

    async def run() -> None:
        is_held = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            nonlocal num_read
            num_read += 1
            yield b'{"prompt": '
            await is_held.wait()
            yield b'"abc"}'

        headers = {"Authorization": "Bearer few"}
        first = asyncio.create_task(door.send("POST", "/v1/completions", content=body(), headers=headers))
        while num_read == 0:
            await asyncio.sleep(0)
        assert (await door.asked("few")).status_code == 429
        is_held.set()
        assert (await first).status_code == 200
        assert (await door.asked("few")).status_code == 200

    asyncio.run(run())


def test_concurrency() -> None:
    service = ScriptedService(hold_at=2)
    door = LimitedDoor(key_of("few", max_concurrency=2), key_of("other", max_concurrency=1), service=service)

    async def run() -> None:
        running = [asyncio.create_task(door.asked("few", stream=stream)) for stream in (True, False)]
        while len(service.requests) < 2:
            await asyncio.sleep(0)
        refused = await door.asked("few")
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "2 choices" in error_of(refused)["message"]
        other = asyncio.create_task(door.asked("other"))
        while len(service.requests) < 3:
            await asyncio.sleep(0)
        service.release.set()
        assert [(await done).status_code for done in (*running, other)] == [200, 200, 200]
        assert (await door.asked("few", n=2)).status_code == 200, "all places are free again"

    asyncio.run(run())
    too_many = door.ask("few", n=3)
    assert too_many.status_code == 400, "waiting would not help"
    assert error_of(too_many)["param"] == "n"


@pytest.mark.parametrize("stream", [False, True])
def test_places_are_given_back_whatever_happens(stream: bool) -> None:
    door = LimitedDoor(key_of("one", max_concurrency=1))
    for failing in (
        {"refuse_with": CapacityError("full", retry_after_s=1)},
        {"fail_after": 0},
        {"fail_after": 2},
    ):
        for name, value in failing.items():
            setattr(door.service, name, value)
        door.ask("one", stream=stream)
        door.service.refuse_with = door.service.fail_after = None
        assert door.ask("one", stream=stream).status_code == 200


def test_the_official_client_sees_its_own_exceptions() -> None:
    door = LimitedDoor(key_of("key", tokens_per_minute=TOKENS))
    with live_server(door.app) as url:
        with (
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError) as unknown,
        ):
            stranger.completions.create(model="scripted", prompt="abc")
        assert unknown.value.code == "invalid_api_key"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
            client.completions.create(model="scripted", prompt="abc")
            with pytest.raises(openai.RateLimitError) as limited:
                client.completions.create(model="scripted", prompt="abc", stream=True)
    assert limited.value.code == "rate_limit_exceeded"
    assert int(limited.value.response.headers["retry-after"]) == math.ceil(60 / TOKENS)


def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    door = Door(settings=DoorSettings(body_timeout_s=0.05))

    async def run() -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        parts = [{"type": "http.request", "body": b'{"pro', "more_body": True}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await asyncio.sleep(60)
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)

        path = "/v1/completions"
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        await asyncio.wait_for(door.app(scope, receive, send), 20)
        return sent

    sent = asyncio.run(run())
    assert sent[0]["status"] == 408
    assert b"body_timeout" in sent[1]["body"]
    assert door.complete().status_code == 200


def write(file: Path, *lines: str) -> None:
    """Replace the file as a whole, as Kubernetes and editors do."""
    new = file.with_suffix(".new")
    new.write_text("".join(f"{line}\n" for line in lines))
    os.replace(new, file)


def test_whoever_follows_the_file_goes_on_after_what_nobody_foresaw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who stopped would let revoked keys in until the door starts anew."""
    file = tmp_path / "keys"
    text, key = new_api_key("first", max_concurrency=None, tokens_per_minute=None)
    write(file, line_of(key))
    ring = KeyRing(None)
    fails = [True, True, False]

    async def without_threads(work: Callable[[], Any]) -> Any:
        if fails and fails.pop(0):
            raise RuntimeError("can't start new thread")
        return work()

    async def run() -> None:
        monkeypatch.setattr(asyncio, "to_thread", without_threads)
        following = asyncio.create_task(follow_api_keys(ApiKeysFile(file), ring, interval_s=0.001))
        async with asyncio.timeout(20):
            while ring.find(text) is None:
                await asyncio.sleep(0.001)
        following.cancel()

    asyncio.run(run())
    assert len([one for one in caplog.records if one.exc_info]) == 1


def test_keys_change_while_the_server_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    text, first = new_api_key("first", max_concurrency=1, tokens_per_minute=None)
    other_text, second = new_api_key("second", max_concurrency=None, tokens_per_minute=9)
    write(file, "# of the team", "", line_of(first))
    door = LimitedDoor(*read_api_keys(file))

    async def until(status: int, key: str) -> None:
        async with asyncio.timeout(20):
            while (await door.asked(key)).status_code != status:
                await asyncio.sleep(0.001)

    async def run() -> None:
        following = asyncio.create_task(follow_api_keys(ApiKeysFile(file), door.ring, interval_s=0.001))
        try:
            await until(200, text)
            assert (await door.asked(other_text)).status_code == 401
            write(file, line_of(first), line_of(second))
            await until(200, other_text)
            write(file, line_of(second), "team sk-plain-text-secret")
            while not caplog.records:
                await asyncio.sleep(0.001)
            assert (await door.asked(text)).status_code == 200, "a bad file keeps the old keys"
            file.unlink()
            while len(caplog.records) < 2:
                await asyncio.sleep(0.001)
            assert (await door.asked(text)).status_code == 200
            write(file, line_of(second))
            await until(401, text)
            await asyncio.sleep(0.02)
        finally:
            following.cancel()

    with caplog.at_level(logging.WARNING, "deploy"):
        asyncio.run(run())
    bad, gone = (record.getMessage() for record in caplog.records)
    assert f"{file}:2:" in bad
    assert "stay in force" in bad
    assert "cannot be read" in gone
    for secret in (text, other_text, "sk-plain-text-secret"):
        assert secret not in caplog.text


def test_a_file_is_read_when_it_changes_and_only_then(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(file, digest_api_key("a").hex())
    keys = ApiKeysFile(file)
    assert keys.changed() == read_api_keys(file)
    assert keys.changed() is None
    write(file, "two words")
    with pytest.raises(ConfigError):
        keys.changed()
    assert keys.changed() is None
    write(file, digest_api_key("b").hex())
    assert [key.digest for key in keys.changed() or ()] == [digest_api_key("b")]


def test_a_file_that_could_not_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    write(file, digest_api_key("a").hex())
    keys = ApiKeysFile(file)

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
            keys.changed()
        assert keys.changed() is None, "said once"
    assert keys.changed() == read_api_keys(file)
    assert keys.changed() is None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        file.touch()
        with pytest.raises(ConfigError, match="Permission denied"):
            keys.changed()


def test_a_change_that_leaves_size_and_time_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(digest_api_key("a").hex())
    before = file.stat()
    keys = ApiKeysFile(file)
    assert keys.changed() == read_api_keys(file)
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of file systems is coarse
        file.write_text(digest_api_key("b").hex())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert [key.digest for key in keys.changed() or ()] == [digest_api_key("b")]


DIGEST = digest_api_key("right").hex()


def test_what_a_file_may_hold(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    write(
        file,
        "# comment",
        f"alice sha256:{DIGEST} tokens_per_minute=5 max_concurrency=2",
        f"  {digest_api_key('x').hex().upper()}  ",
        f"bob {digest_api_key('y').hex()} min_priority=-10",
    )
    alice, unnamed, bob = read_api_keys(file)
    assert (alice.name, alice.max_concurrency, alice.tokens_per_minute) == ("alice", 2, 5)
    assert alice.digest == digest_api_key("right")
    assert unnamed.digest == digest_api_key("x")
    assert unnamed.name == f"key-{digest_api_key('x').hex()[:8]}"
    assert (bob.name, bob.max_concurrency, bob.min_priority) == ("bob", None, -10)
    assert (alice.min_priority, unnamed.min_priority) == (0, 0)
    write(file, *map(line_of, (alice, unnamed, bob)))
    assert read_api_keys(file) == (alice, unnamed, bob)


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    """Some editors begin a file with one."""
    file = tmp_path / "keys"
    file.write_text(f"alice sha256:{'ab' * 32}\n", encoding="utf-8-sig")
    (key,) = read_api_keys(file)
    assert key.name == "alice"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (DIGEST[:-1], "drafthouse keys new"),
        ("sha256:secret", "drafthouse keys new"),
        ("secret", "fewer than 16 characters"),
        ("tokens_per_minute=200000", "is a limit alone"),
        ("alice sk-secret", "sha256sum"),
        ("secret/name sha256:" + DIGEST, "is not `NAME sha256:HEX"),
        ("alice sha256:" + DIGEST[:-1], "is not `NAME sha256:HEX"),
        (f"alice sha256:{DIGEST} max_concurrency=0", "word 3"),
        (f"{DIGEST} max_concurrency=1 secret", "word 3"),
        (f"alice sha256:{DIGEST} max_concurrency=1 max_concurrency=2", "word 4"),
        (f"alice sha256:{DIGEST} min_priority=-1001", "word 3"),
        (f"alice sha256:{DIGEST} min_priority=1 min_priority=1", "word 4"),
        (f"alice sha256:{DIGEST} min_priority=", "word 3"),
        (f"alice sha256:{digest_api_key('first').hex()}", "digest of another line (the key named first)"),
        (f"first sha256:{DIGEST}", "name of another line (first)"),
    ],
)
def test_a_bad_line_is_named_and_not_shown(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "keys"
    write(file, f"first sha256:{digest_api_key('first').hex()}", "# x", line)
    with pytest.raises(ConfigError) as error:
        read_api_keys(file)
    assert f"{file}:3: " in str(error.value)
    assert message in str(error.value)
    assert "secret" not in str(error.value)


def test_a_key_as_it_is_works_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    keys = ("sk-secret-of-somebody", "another-secret==")
    write(file, f"first sha256:{DIGEST}", keys[0], f"  {keys[1]}")
    with caplog.at_level(logging.WARNING, "deploy"):
        _, bare, other = read_api_keys(file)
    assert (bare.digest, other.digest) == tuple(map(digest_api_key, keys))
    lines = [record.getMessage() for record in caplog.records]
    assert [f"{file}:2 " in lines[0], f"{file}:3 " in lines[1], len(lines)] == [True, True, 2]
    assert "secret" not in caplog.text.replace(str(tmp_path), "")


@pytest.mark.parametrize("name", ["alice", "customer-support-of-the-north"])
def test_a_line_that_was_broken_in_two_makes_no_key_of_its_name(tmp_path: Path, name: str) -> None:
    file = tmp_path / "keys"
    write(file, name, f"sha256:{DIGEST} max_concurrency=4")
    with pytest.raises(ConfigError, match=r"keys:1: is a word .* one line, `NAME sha256:HEX") as error:
        read_api_keys(file)
    assert name not in str(error.value)
    write(file, f"{name} sha256:{DIGEST}")
    assert read_api_keys(file)[0].name == name


@pytest.mark.parametrize("place", [1, 2])
def test_a_key_beside_its_own_line_is_told_from_it(tmp_path: Path, place: int) -> None:
    """As in a file that `drafthouse keys new` has written by its standard output."""
    file = tmp_path / "keys"
    text, key = new_api_key("alice", max_concurrency=None, tokens_per_minute=None)
    lines = [line_of(key)]
    lines.insert(place - 1, text)
    write(file, *lines)
    wanted = f"keys:2: line {place} is the key of line {3 - place} as it is: delete line {place}$"
    with pytest.raises(ConfigError, match=wanted) as error:
        read_api_keys(file)
    assert text not in str(error.value)
    lines.remove(text)
    write(file, *lines)
    assert read_api_keys(file) == (key,)


def test_a_line_is_added_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = [
        new_api_key(name, max_concurrency=None, tokens_per_minute=9)[1] for name in ("alice", "bob", "eve")
    ]
    add_api_key(file, keys[0])
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    add_api_key(file, keys[1])
    file.write_text("# of the team\n" + file.read_text().rstrip("\n"))
    add_api_key(file, keys[2])
    assert read_api_keys(file) == tuple(keys)
    assert file.read_text() == "# of the team\n" + "".join(f"{line_of(key)}\n" for key in keys)
    assert file.stat().st_mode & 0o777 == 0o640


def test_a_line_is_added_to_nothing_that_would_be_refused(tmp_path: Path) -> None:
    _, key = new_api_key("alice", max_concurrency=None, tokens_per_minute=None)
    _, other = new_api_key("alice", max_concurrency=None, tokens_per_minute=None)
    file = tmp_path / "keys"
    os.mkfifo(tmp_path / "pipe")
    for text, place, message in (
        (f"{line_of(other)}\n", file, f"--file: {file} has a key named alice: give another name"),
        ("team sk-secret\n", file, f"--file: {file}:1: is not "),
        ("", tmp_path, f"--file: {tmp_path} is not a file"),
        ("", tmp_path / "pipe", "pipe is not a file"),
        ("", tmp_path / "no" / "keys", "keys cannot be written: No such file"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(message)):
            add_api_key(place, key)
        assert file.read_text() == text


WORD = st.one_of(
    st.sampled_from(
        [
            "alice",
            f"sha256:{DIGEST}",
            DIGEST,
            "max_concurrency=3",
            "tokens_per_minute=0",
            "min_priority=-3",
            "min_priority=9999",
            "#",
            "=",
        ]
    ),
    st.text(min_size=1, max_size=70),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.lists(WORD, max_size=5).map(" ".join), max_size=4))
def test_whatever_a_file_holds_it_is_read_or_refused_by_line(tmp_path: Path, lines: list[str]) -> None:
    file = tmp_path / "keys"
    file.write_bytes("\n".join([*lines, "team SECRETSECRETSECRET"]).encode("utf-8", "replace"))
    with pytest.raises(ConfigError) as error:
        read_api_keys(file)
    messages = str(error.value).split("\n")
    assert all(re.match(rf"http\.api_keys_file: {re.escape(str(file))}:\d+: ", line) for line in messages)
    assert "SECRET" not in str(error.value)


@settings(max_examples=200, deadline=None)
@given(value=st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(lambda key: b"Bearer " + key)))
def test_whatever_is_sent_for_a_key_it_is_a_401(value: bytes) -> None:
    ring = KeyRing([key_of("right")])
    passed: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope)

    scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", value)]}
    with pytest.raises(ApiError) as refused:
        asyncio.run(ApiKeys(app, ring)(scope, None, None))
    assert refused.value.status == 401
    assert not passed


def test_a_key_in_other_letters_is_what_its_bytes_are() -> None:
    door = Door(settings=DoorSettings(api_keys=(key_of("schl\u00fcssel"), key_of("\u00e9t\u00e9"))))
    for text in ("schl\u00fcssel", "\u00e9t\u00e9"):
        headers = {"Authorization": b"Bearer " + text.encode()}
        assert door.post("/v1/completions", {"prompt": "abc"}, headers=headers).status_code == 200


def test_digests_are_not_shown_either() -> None:
    assert DIGEST not in repr(DoorSettings(api_keys=(key_of("right"),)))
    assert repr(digest_api_key("right")) not in repr(key_of("right"))


@pytest.mark.parametrize(
    ("limits", "asked", "given"),
    [
        ({}, None, 0),
        ({}, -1000, 0),
        ({}, 7, 7),
        ({"min_priority": -5}, -1000, -5),
        ({"min_priority": -5}, None, 0),
        ({"min_priority": 100}, None, 100),
        ({"min_priority": 100}, 1000, 1000),
    ],
)
def test_no_request_is_more_urgent_than_its_key_allows(
    limits: dict[str, int], asked: int | None, given: int
) -> None:
    door = LimitedDoor(key_of("key", **limits))
    fields = {} if asked is None else {"priority": asked}
    assert door.ask("key", n=2, **fields).status_code == 200
    assert [request.priority for request in door.service.requests] == [given] * 2


def test_without_keys_every_priority_may_be_had() -> None:
    door = Door()
    door.complete(priority=-1000)
    assert [request.priority for request in door.service.requests] == [-1000]


NO_JSON = b"{"
"""Told at once by whoever parses it."""


def ask_raw(door: LimitedDoor, content: bytes) -> httpx.Response:
    return door.post("/v1/completions", content=content, headers={"Authorization": "Bearer key"})


def test_what_a_key_may_not_have_is_not_even_parsed() -> None:
    door = LimitedDoor(key_of("key", tokens_per_minute=TOKENS))
    assert ask_raw(door, NO_JSON).status_code == 400
    assert door.ask("key").status_code == 200
    assert ask_raw(door, NO_JSON).status_code == 429
    text = door.get("/metrics").text
    assert 'ray_drafthouse_api_key_refusals_total{key="of-key",limit="tokens"} 1.0' in text
    door.clock.advance(60)
    assert ask_raw(door, NO_JSON).status_code == 400


class SlowTokenizer(HuggingFaceTokenizer):
    """Reads a text when it is told to."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.go_on = asyncio.Event()
        self.num_asked = 0

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        self.num_asked += 1
        await self.go_on.wait()
        return await super().encode(text, add_special_tokens=add_special_tokens)


def test_requests_that_are_being_read_count_as_running() -> None:
    """Else all that a key sends at once would be read, whatever it may have."""
    door = LimitedDoor(key_of("key", max_concurrency=2), key_of("other", max_concurrency=1))
    tokenizer = SlowTokenizer(door.tokenizer)
    door.app = create_app(door.service, door.settings, tokenizer, door.ring)

    async def run() -> None:
        asked = [asyncio.create_task(door.asked("key")) for _ in range(6)]
        other = asyncio.create_task(door.asked("other"))
        while sum(task.done() for task in asked) < 4 or tokenizer.num_asked < 3:
            await asyncio.sleep(0)
        assert tokenizer.num_asked == 3
        tokenizer.go_on.set()
        answers = [await task for task in asked]
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429, 429]
        assert (await other).status_code == 200
        many = await door.asked("key", n=2)
        assert many.status_code == 200, "nothing is counted twice, and all places are free again"
        tokenizer.go_on.clear()
        left = asyncio.create_task(door.asked("other"))
        while tokenizer.num_asked < 5:
            await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        tokenizer.go_on.set()
        assert (await door.asked("other")).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_time_runs_while_a_text_waits_to_be_read(path: str) -> None:
    class Stuck(SlowTokenizer):
        async def encode_chat(self, *_: Any, **__: Any) -> tuple[int, ...]:
            return await self.encode("abc", add_special_tokens=True)

    door = Door()
    tokenizer = Stuck(door.tokenizer)
    door.app = create_app(door.service, door.settings, tokenizer)
    what = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "abc"}

    async def run() -> None:
        late = await door.send("POST", path, json=what | {"timeout_s": 0.05})
        assert late.status_code == 504
        assert error_of(late)["code"] == "request_timeout"
        assert "longer than 0.05 s" in error_of(late)["message"]
        assert not door.service.requests
        asyncio.get_running_loop().call_later(0.1, tokenizer.go_on.set)
        assert (await door.send("POST", path, json=what | {"timeout_s": 20})).status_code == 200
        (request,) = door.service.requests
        assert request.timeout_s is not None
        assert 0 < request.timeout_s < 19.95, "what has passed is no more there"

    asyncio.run(run())


def test_while_keys_are_unread_nobody_is_let_in_and_nobody_is_called_wrong() -> None:
    ring = KeyRing(None)
    passed: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        passed.append(scope)

    def ask(path: str) -> None:
        scope = {"type": "http", "path": path, "headers": [(b"authorization", b"Bearer right")]}
        asyncio.run(ApiKeys(app, ring)(scope, None, None))

    assert ring.is_asked_for
    ring.note_unread("keys.txt cannot be read")
    for path in ("/v1/models", "/v1/completions", "/v1/status"):
        with pytest.raises(ApiError) as refused:
            ask(path)
        assert (refused.value.status, refused.value.detail.code) == (503, "api_keys_unread")
    ask("/health")
    ask("/metrics")
    assert len(passed) == 2
    assert ring.why_unread == "keys.txt cannot be read"
    ring.replace([key_of("right")])
    ring.note_unread("keys.txt is gone")
    assert ring.why_unread is None, "what was read last stays"
    ask("/v1/models")
    assert len(passed) == 3


def test_requests_for_text_that_fail_while_keys_are_unread_are_counted_as_such() -> None:
    """Alerts go by the routes for text. Strangers who are refused there have been promised nothing."""
    ring, metrics, door = KeyRing(None), DoorMetrics(), Door()
    tokenizer = HuggingFaceTokenizer(door.tokenizer)
    door.app = create_app(door.service, door.settings, tokenizer, ring, metrics=metrics)

    def counted(route: str, status: int) -> float:
        return metrics.http_requests.labels(route, str(status))._value.get()

    ring.note_unread("keys.txt cannot be read")
    assert door.complete().status_code == door.chat().status_code == 503
    assert door.get("/v1/models").status_code == 503
    assert counted("/v1/completions", 503) == counted("/v1/chat/completions", 503) == 1
    assert counted("other", 503) == 1
    ring.replace([key_of("right")])
    assert door.complete().status_code == 401
    assert (counted("/v1/completions", 401), counted("other", 401)) == (0, 1)
