"""A refusal holds for a moment: whoever asks for as much is refused by the door itself."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deploy.openai.early_refusals import EarlyRefusals, refuse_early
from deploy.openai.known_refusals import Demand, KnownRefusals, demand_of
from deploy.openai.metrics import DoorMetrics
from specdec.core.errors import CapacityError, LateError
from tests.deploy.openai.fakes import Door

LATE = "its first token is expected in 4.0 s"
DEMAND = Demand(
    model="m",
    owner="Bearer key",
    priority=0,
    ttft_ms=3000.0,
    limits_s=(90.0, 60.0),
    num_tokens=16,
    ignores_eos=True,
    num_choices=1,
    num_bytes=100,
)


class Clocked:
    """Refusals, by a clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.metrics = DoorMetrics()
        self.refusals = KnownRefusals(self.metrics, lambda: self.now_s)

    def is_refused(self, demand: Demand = DEMAND) -> bool:
        try:
            self.refusals.check(demand)
        except CapacityError:
            return True
        return False

    def num_refused(self) -> dict[str, float]:
        counters = self.metrics.report().counters
        return {
            reason: counters[f'requests_refused_at_door_total{{reason="{reason}"}}']
            for reason in ("full", "late")
        }


def test_a_refusal_holds_for_as_long_as_it_says() -> None:
    door = Clocked()
    assert not door.is_refused()
    door.refusals.note(DEMAND, LateError(LATE, retry_after_s=2.0, holds_s=0.04))
    with pytest.raises(LateError, match=f"no more than this one was just refused: {LATE}") as refusal:
        door.refusals.check(DEMAND)
    assert refusal.value.retry_after_s == 2.0
    door.now_s += 0.039
    assert door.is_refused()
    door.now_s += 0.002
    assert not door.is_refused()
    assert door.num_refused() == {"full": 0.0, "late": 2.0}


def test_no_refusal_holds_for_long_and_some_not_at_all() -> None:
    door = Clocked()
    door.refusals.note(DEMAND, CapacityError("full", retry_after_s=2.0))
    assert not door.is_refused(), "a limit of a key, say"
    for odd in (math.nan, -1.0):
        door.refusals.note(DEMAND, CapacityError("full", retry_after_s=2.0, holds_s=odd))
        assert not door.is_refused()
    door.refusals.note(DEMAND, CapacityError("full", retry_after_s=2.0, holds_s=1e9))
    door.now_s += 0.09
    assert door.is_refused()
    door.now_s += 0.02
    assert not door.is_refused()
    assert door.num_refused() == {"full": 1.0, "late": 0.0}


def test_what_a_door_refuses_itself_makes_nothing_hold_longer() -> None:
    door = Clocked()
    door.refusals.note(DEMAND, LateError(LATE, retry_after_s=2.0, holds_s=0.05))
    with pytest.raises(LateError) as refusal:
        door.refusals.check(DEMAND)
    door.now_s += 0.04
    door.refusals.note(DEMAND, refusal.value)
    door.now_s += 0.02
    assert not door.is_refused()


LESS = {
    "model": "other",
    "owner": "Bearer other",
    "priority": -1,
    "ttft_ms": 3001.0,
    "limits_s": (61.0,),
    "num_tokens": 15,
    "ignores_eos": False,
    "num_choices": 0,
    "num_bytes": 79,
}
AS_MUCH = {
    "priority": 1,
    "ttft_ms": 2999.0,
    "limits_s": (70.0, 59.0),
    "num_tokens": 17,
    "num_choices": 2,
    "num_bytes": 80,
}


@pytest.mark.parametrize("field", LESS)
def test_who_asks_for_less_is_not_refused_for_others(field: str) -> None:
    door = Clocked()
    door.refusals.note(DEMAND, LateError(LATE, retry_after_s=2.0, holds_s=0.05))
    assert not door.is_refused(replace(DEMAND, **{field: LESS[field]}))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", AS_MUCH)
def test_who_asks_for_more_is(field: str) -> None:
    door = Clocked()
    door.refusals.note(DEMAND, LateError(LATE, retry_after_s=2.0, holds_s=0.05))
    assert door.is_refused(replace(DEMAND, **{field: AS_MUCH[field]}))  # type: ignore[arg-type]


def test_the_oldest_are_forgotten_where_there_are_many() -> None:
    door = Clocked()
    for number in range(1000):
        full = CapacityError("full", retry_after_s=1, holds_s=0.1)
        door.refusals.note(replace(DEMAND, owner=str(number)), full)
    assert not door.is_refused(replace(DEMAND, owner="0"))
    assert door.is_refused(replace(DEMAND, owner="999"))


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def test_what_bodies_ask_for() -> None:
    assert demand_of(COMPLETIONS, b'{"prompt": "a"}', None, None) == Demand(
        model=None,
        owner=None,
        priority=0,
        ttft_ms=math.inf,
        limits_s=(),
        num_tokens=16,
        ignores_eos=False,
        num_choices=1,
        num_bytes=3,
    )
    whole = {"prompt": "a", "model": "m", "best_of": 3, "priority": 2, "slo": {"ttft_ms": 5}, "timeout_s": 4}
    asked = demand_of(COMPLETIONS, json.dumps(whole | {"ignore_eos": True}).encode(), "Bearer key", "2.5")
    assert asked is not None
    assert (asked.model, asked.priority, asked.ignores_eos) == ("m", 2, True)
    same, other = (demand_of(COMPLETIONS, b"{}", one, None) for one in ("Bearer key", "Bearer other"))
    assert same is not None
    assert other is not None
    assert same.owner == asked.owner != other.owner
    assert "key" not in str(asked.owner), "keys are kept nowhere"
    assert (asked.ttft_ms, asked.limits_s, asked.num_choices) == (5.0, (4.0, 2.5), 3)


@pytest.mark.parametrize(
    ("path", "limit", "number"),
    [
        (COMPLETIONS, {"max_tokens": 3}, 3),
        (COMPLETIONS, {"max_tokens": None, "n": None, "slo": None, "priority": None}, 16),
        (CHAT, {}, math.inf),
        (CHAT, {"max_tokens": 3}, 3),
        (CHAT, {"max_completion_tokens": 4}, 4),
    ],
)
def test_how_many_tokens_bodies_ask_for(path: str, limit: dict[str, Any], number: float) -> None:
    asked = demand_of(path, json.dumps(limit).encode(), None, None)
    assert asked is not None
    assert asked.num_tokens == number


@pytest.mark.parametrize(
    ("data", "timeout"),
    [(b"", None), (b"{", None), (b"[]", None), (b"\xff", None), (b'{"n": "x"}', None), (b"{}", "soon")],
)
def test_of_what_cannot_be_read_nothing_is_known(data: bytes, timeout: str | None) -> None:
    assert demand_of(COMPLETIONS, data, None, timeout) is None
    door = Clocked()
    door.refusals.note(None, CapacityError("full", retry_after_s=2.0, holds_s=0.1))
    assert not door.refusals.has_any()
    door.refusals.check(None)


CHATTED = [{"role": "user", "content": "hello"}]


def test_what_is_to_be_read_counts_and_nothing_else() -> None:
    prompt = demand_of(
        COMPLETIONS, json.dumps({"prompt": ["abc", "de"], "user": "x" * 99}).encode(), None, None
    )
    assert prompt is not None
    assert prompt.num_bytes == len(json.dumps(["abc", "de"]))
    asked = {"messages": CHATTED, "tools": [{"type": "function"}], "logit_bias": {"5": 1}}
    chat = demand_of(CHAT, json.dumps(asked).encode(), None, None)
    assert chat is not None
    assert chat.num_bytes == len(json.dumps(CHATTED)) + len(json.dumps(asked["tools"]))


def test_what_is_nested_too_deep_is_left_to_the_door() -> None:
    assert demand_of(COMPLETIONS, b'{"x":' + b"[" * 100_000, None, None) is None


def test_of_several_prompts_any_may_have_been_the_one_too_many() -> None:
    door = Clocked()
    door.refusals.note(DEMAND, LateError(LATE, retry_after_s=2.0, holds_s=0.05), num_choices=200)
    assert not door.is_refused()
    assert door.is_refused(replace(DEMAND, num_choices=200))


@pytest.mark.parametrize(
    ("asked", "fresh_s", "old_s"),
    [
        (DEMAND, 0.29, 0.31),
        (replace(DEMAND, ttft_ms=math.inf, limits_s=(1.0, 2.0)), 0.09, 0.11),
        (replace(DEMAND, ttft_ms=math.inf, limits_s=()), 0.49, 0.51),
    ],
)
def test_what_had_little_time_left_says_nothing_of_others(
    asked: Demand, fresh_s: float, old_s: float
) -> None:
    door = Clocked()
    door.refusals.note(asked, LateError(LATE, retry_after_s=2.0, holds_s=0.05), age_s=old_s)
    assert not door.is_refused(asked)
    door.refusals.note(asked, LateError(LATE, retry_after_s=2.0, holds_s=0.05), age_s=fresh_s)
    assert door.is_refused(asked)


def test_a_refusal_that_is_kept_holds_on_to_nothing() -> None:
    class Body:
        pass

    door = Clocked()
    body = Body()
    gone = weakref.ref(body)

    def refused(body: Body) -> None:
        raise LateError(LATE, retry_after_s=2.0, holds_s=0.05)

    try:
        refused(body)
    except LateError as refusal:
        door.refusals.note(DEMAND, refusal)
    del body
    gc.collect()
    assert gone() is None
    assert door.is_refused()


def test_whether_any_holds() -> None:
    door = Clocked()
    assert not door.refusals.has_any()
    door.refusals.note(DEMAND, CapacityError("full", retry_after_s=2.0, holds_s=0.05))
    assert door.refusals.has_any()
    door.now_s += 0.06
    assert not door.refusals.has_any()


@pytest.fixture
def long_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that test are not as quick as refusals are short."""
    monkeypatch.setattr("deploy.openai.known_refusals._MOST_HELD_S", 60.0)


@pytest.mark.usefixtures("long_held")
@pytest.mark.parametrize("stream", [False, True])
def test_the_door_asks_once(stream: bool) -> None:
    door = Door()
    door.service.refuse_with = LateError(LATE, retry_after_s=3, holds_s=60.0)
    body = {"prompt": "abc", "stream": stream, "slo": {"ttft_ms": 50}}
    answers = [door.post("/v1/completions", body) for _ in range(2)]
    assert [one.status_code for one in answers] == [429, 429]
    assert [one.headers["retry-after"] for one in answers] == ["3", "3"]
    assert [one.json()["error"]["code"] for one in answers] == ["deadline_unreachable"] * 2
    assert len(door.service.requests) == 1, "the second one was not asked about"
    text = door.get("/metrics").text
    assert 'ray_drafthouse_requests_refused_at_door_total{reason="late"} 1.0' in text
    assert 'http_requests_total{route="/v1/completions",status="429"} 2.0' in text


@pytest.mark.usefixtures("long_held")
def test_who_asks_for_less_or_comes_back_is_asked_about() -> None:
    door = Door()
    door.service.refuse_with = LateError(LATE, retry_after_s=3, holds_s=60.0)
    body = {"prompt": "abc", "stream": True, "slo": {"ttft_ms": 50}}
    assert door.post("/v1/completions", body).status_code == 429
    door.service.refuse_with = None
    assert door.post("/v1/completions", body).status_code == 429
    more_time = {**body, "slo": {"ttft_ms": 60}}
    answer = door.post("/v1/completions", more_time)
    assert answer.status_code == 200
    last_id = next(line[4:] for line in answer.text.splitlines() if line.startswith("id: "))
    back = door.post("/v1/completions", body, headers={"Last-Event-ID": last_id})
    assert "just refused" not in back.text


@pytest.mark.usefixtures("long_held")
def test_many_prompts_are_refused_for_themselves() -> None:
    door = Door()
    door.service.refuse_with = CapacityError("full", retry_after_s=3, holds_s=60.0)
    assert door.post("/v1/completions", {"prompt": ["abc", "abc", "abc"]}).status_code == 429
    door.service.refuse_with = None
    one = {"prompt": "abcdefghijklmnopqrstuvwxyz", "max_tokens": 99}
    assert door.post("/v1/completions", one).status_code == 200


@pytest.mark.usefixtures("long_held")
def test_a_wrong_body_is_told_so_nevertheless() -> None:
    door = Door()
    door.service.refuse_with = LateError(LATE, retry_after_s=3, holds_s=60.0)
    assert door.post("/v1/completions", {"prompt": "abc"}).status_code == 429
    wrong = door.post("/v1/completions", {"prompt": "abc", "temprature_": 1})
    assert wrong.status_code == 400


# -- before Ray Serve


class Early:
    """What runs before Serve, around an application that answers 200 and remembers what it was sent."""

    def __init__(self) -> None:
        self.metrics = DoorMetrics()
        self.known = KnownRefusals(self.metrics, lambda: 0.0)
        self.bodies: list[bytes] = []
        refuse_early(self.known)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = b""
        while True:
            message = await receive()
            whole += message.get("body", b"")
            if not message.get("more_body", False):
                break
        self.bodies.append(whole)
        await Response(b"served")(scope, receive, send)

    def ask(
        self,
        *parts: bytes,
        path: str = COMPLETIONS,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        late_s: float = 0.0,
    ) -> tuple[int, dict[str, str], bytes]:
        messages: list[Message] = [
            {"type": "http.request", "body": part, "more_body": index < len(parts) - 1}
            for index, part in enumerate(parts)
        ]
        sent: list[Message] = []

        async def receive() -> Message:
            await asyncio.sleep(late_s)
            return messages.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": "http", "method": method, "path": path, "headers": raw}
        asyncio.run(EarlyRefusals(self.app)(scope, receive, send))
        given = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], given, b"".join(one.get("body", b"") for one in sent[1:])


@pytest.fixture
def early() -> Iterator[Early]:
    yield Early()
    refuse_early(None)


BODY = b'{"prompt": "abc", "slo": {"ttft_ms": 50}}'


def refuse(early: Early, path: str = COMPLETIONS) -> None:
    demand = demand_of(path, BODY, "Bearer key", None)
    early.known.note(demand, LateError(LATE, retry_after_s=3.0, holds_s=0.1))


KEY = {"Authorization": "Bearer key"}


@pytest.mark.parametrize("path", [COMPLETIONS, COMPLETIONS + "/", CHAT])
def test_what_is_known_is_refused_before_serve(early: Early, path: str) -> None:
    refuse(early, path)
    status, headers, body = early.ask(BODY, path=path, headers=KEY | {"X-Request-ID": "mine"})
    assert (status, headers["retry-after"], headers["x-request-id"]) == (429, "3", "mine")
    error = json.loads(body)["error"]
    assert error["code"] == "deadline_unreachable"
    assert LATE in error["message"]
    assert not early.bodies
    counters = early.metrics.report().counters
    route = CHAT if path == CHAT else COMPLETIONS
    assert counters[f'http_requests_total{{route="{route}",status="429"}}'] == 1.0
    assert counters['requests_refused_at_door_total{reason="late"}'] == 1.0


def test_who_is_refused_before_serve_has_an_id_of_its_own(early: Early) -> None:
    refuse(early)
    ids = {early.ask(BODY, headers=KEY)[1]["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"headers": {"Authorization": "Bearer other"}},
        {"headers": {}},
        {"headers": KEY | {"Last-Event-ID": "x"}},
        {"headers": KEY | {"Content-Encoding": "gzip"}},
        {"path": "/v1/models"},
        {"path": "/v1/completions/more"},
        {"path": "/typo/v1/completions"},
        {"method": "PUT"},
        {"late_s": 0.2},
    ],
    ids=str,
)
def test_all_others_are_served_with_all_they_have_sent(early: Early, options: dict[str, Any]) -> None:
    refuse(early)
    status, _, body = early.ask(BODY, **{"headers": KEY, **options})
    assert (status, body) == (200, b"served")
    assert early.bodies == [BODY]


def test_a_body_that_comes_as_it_is_given_up_is_not_lost(early: Early) -> None:
    """Whoever is asked for it may have it already when it is asked no more."""
    refuse(early)
    passed: list[asyncio.Task[Message]] = []

    async def scenario() -> None:
        async def late() -> Message:
            await asyncio.sleep(0.2)
            return {"type": "http.request", "body": BODY}

        async def receive() -> Message:
            passed.append(asyncio.ensure_future(late()))
            return await passed[-1]

        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
        await EarlyRefusals(early.app)(scope, receive, send)
        assert sent[0]["status"] == 200

    asyncio.run(scenario())
    assert early.bodies == [BODY]
    assert len(passed) == 1, "what it was about to return is waited for"


def test_a_client_that_takes_nothing_is_not_waited_for(early: Early, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.openai.early_refusals._WRITE_S", 0.05)
    refuse(early)

    async def scenario() -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": BODY}

        async def send(message: Message) -> None:
            await asyncio.Event().wait()

        raw = [(b"authorization", b"Bearer key")]
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": raw}
        async with asyncio.timeout(20):
            await EarlyRefusals(early.app)(scope, receive, send)

    asyncio.run(scenario())
    assert not early.bodies


def test_bodies_in_parts_are_left_to_the_door(early: Early) -> None:
    refuse(early)
    assert early.ask(BODY[:9], BODY[9:], headers=KEY)[0] == 200
    assert early.bodies == [BODY]


def test_nothing_is_refused_early_where_the_door_has_not_said_so(early: Early) -> None:
    refuse(early)
    refuse_early(None)
    assert early.ask(BODY, headers=KEY)[0] == 200
    assert early.bodies == [BODY]
