"""Streams that go on after a broken connection: nothing is missing and nothing comes twice."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from typing import Any

import httpx
import msgspec
import pytest

from deploy.openai.app import create_app
from deploy.openai.keys import ApiKey, digest_api_key
from deploy.openai.protocol import CompletionBody
from deploy.openai.requests import PreparedRequest, prepare_completion
from deploy.openai.resumption import FailedForGood, proved
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.core.clock import ManualClock
from specdec.core.error_codes import FAILED_REPEATEDLY
from specdec.core.errors import NotReadyError, RequestFailed
from specdec.core.outputs import FinishReason, RequestOutput
from specdec.core.request import Request
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from tests.architectures import make_tokenizer
from tests.deploy.openai.fakes import DESCRIPTION, Door, ScriptedService, error_of, events_of
from tests.specdec.engine.grammar_models import save_byte_level_model

Event = tuple[str | None, Any]
TOOL = {"type": "function", "function": {"name": "now"}}


class Remembering(AsyncEngine):
    """An engine in process that remembers streams as coordinators do, if it is told to."""

    remembers = False

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.requests: list[Request] = []
        self.streams: dict[tuple[str, bytes], list[int]] = {}

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        async for output in super().generate(request):
            if (resumption := request.resumption) is not None and not request.delivered_token_ids:
                self.streams.setdefault((resumption.name, resumption.proof), []).extend(output.token_ids)
            yield output

    async def recall(self, names: Sequence[str], proof: bytes) -> Sequence[tuple[str, tuple[int, ...]]]:
        known = [(name, self.streams[name, proof]) for name in names if (name, proof) in self.streams]
        # A zombie's attempt, as long but not what was delivered, comes with each.
        return [
            one
            for name, tokens in known
            for one in ((name, tuple(token ^ 1 for token in tokens)), (name, tuple(tokens)))
            if self.remembers
        ]


class Served:
    """A door over a tiny model whose text is random bytes: characters end and begin anywhere."""

    def __init__(self, folder: Any) -> None:
        save_byte_level_model(folder)
        eager = CompileConfig(mode="off")
        config = EngineConfig(
            target=ModelConfig(
                model=str(folder), dtype="float32", device="cpu", num_threads=1, compile=eager
            ),
            speculative_config=SpeculativeConfig(
                method="ngram", num_speculative_tokens=3, controller="fixed"
            ),
            cache=CacheConfig(block_size=8, num_blocks=256),
        )
        self.service = Remembering(Engine(config))
        self.app = create_app(
            self.service, DoorSettings(resume_window_s=900), HuggingFaceTokenizer.load(folder)
        )

    async def post(self, path: str, body: dict[str, Any], event_id: str | None = None) -> list[Event]:
        headers = {} if event_id is None else {"Last-Event-ID": event_id}
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            response = await client.post(path, json=body | {"stream": True}, headers=headers)
        assert response.status_code == 200, response.text
        return events_of(response)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("model"))
    yield served
    served.service.close()


def collected(events: Sequence[Event]) -> dict[str, Any]:
    """Return what a client has made of a stream: each choice, and what came once."""
    choices: dict[int, dict[str, Any]] = {}
    closings = []
    for _, data in events:
        if data == "[DONE]":
            closings.append(data)
            continue
        assert "error" not in data, data
        if not data["choices"]:
            closings.append(data["usage"]["completion_tokens"])
        for piece in data["choices"]:
            choice = choices.setdefault(
                piece["index"],
                {"text": "", "ids": [], "tokens": [], "offsets": [], "roles": 0, "ends": [], "calls": []},
            )
            delta = piece.get("delta", {})
            choice["text"] += piece.get("text") or delta.get("content") or ""
            choice["ids"] += piece.get("token_ids") or []
            choice["roles"] += "role" in delta
            choice["calls"] += [
                (call["index"], call["function"]["name"], call["function"]["arguments"])
                for call in delta.get("tool_calls", ())
            ]
            logprobs = piece.get("logprobs") or {}
            choice["tokens"] += logprobs.get("tokens") or [
                (one["token"], round(one["logprob"], 3)) for one in logprobs.get("content") or []
            ]
            choice["offsets"] += logprobs.get("text_offset") or []
            if piece["finish_reason"] is not None:
                choice["ends"].append((piece["finish_reason"], piece.get("stop_reason")))
    return {"choices": choices, "closings": closings, "created": {data["created"] for _, data in events[:-1]}}


COMPLETION: dict[str, Any] = {"prompt": "def f(x):", "max_tokens": 14, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 14, "ignore_eos": True}
CALLING = CHAT | {"tools": [TOOL], "max_tokens": 80, "ignore_eos": False}
CALL = r'<tool_call>\{"name": "now", "arguments": \{"a": [0-9]{2}\}\}</tool_call>'
FORMAT = {
    "name": "city",
    "schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
BODIES = {
    "plain": COMPLETION,
    "sampled": COMPLETION | {"temperature": 1.0, "return_token_ids": True, "seed": 5},
    "choices": COMPLETION | {"n": 3, "return_token_ids": True, "stream_options": {"include_usage": True}},
    "echo": COMPLETION | {"echo": True, "logprobs": 2},
    "stops": COMPLETION | {"stop": ["ab", "\ufffd\ufffd\ufffd\ufffd"], "max_tokens": 40, "min_tokens": 5},
    "chat": CHAT | {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}},
    "tools": CALLING | {"tool_choice": "required"},
    "calls of its own": CALLING | {"guided_regex": f"(so|well){CALL}{CALL}"},
    "first call only": CALLING | {"guided_regex": f"so{CALL} and {CALL}", "parallel_tool_calls": False},
    "last call not closed": CALLING | {"guided_regex": f"so{CALL} and {CALL.partition('</')[0]}"},
    "format or calls": CALLING | {"response_format": {"type": "json_schema", "json_schema": FORMAT}},
    "running usage": COMPLETION | {"n": 2, "stream_options": {"continuous_usage_stats": True}},
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("remembers", [True, False], ids=["remembered", "replayed"])
@pytest.mark.parametrize("kind", BODIES)
def test_a_stream_goes_on_behind_any_event(served: Served, kind: str, remembers: bool) -> None:
    body = BODIES[kind]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    served.service.remembers = remembers

    async def scenario() -> None:
        events = await served.post(path, body)
        whole = collected(events)
        assert len(events) > 3
        places = [event_id for event_id, _ in events[:-1]]
        assert len(set(places)) == len(places), "two events with one id"
        last = len(places)
        for number in sorted({1, 2, 3, last // 2, last - 2, last - 1, last}):
            event_id = places[number - 1]
            served.service.requests.clear()
            rest = await served.post(path, body, event_id)
            assert collected([*events[:number], *rest]) == whole, (number, event_id, events, rest)
            if remembers:
                assert all(request.resumption is not None for request in served.service.requests)
        # Once more, behind an event of a stream that was resumed itself.
        middle = len(places) // 2
        first = await served.post(path, body, places[middle - 1])
        second = await served.post(path, body, first[1][0])
        assert collected([*events[:middle], *first[:2], *second]) == whole

    asyncio.run(scenario())


def test_a_replay_that_brings_other_tokens_is_no_continuation(served: Served) -> None:
    body = COMPLETION | {"temperature": 1.0}

    async def scenario() -> None:
        served.service.remembers = False
        events = await served.post("/v1/completions", body)
        event_id = str(events[5][0])
        wrong = event_id[:-1] + ("0" if event_id[-1] != "0" else "1")
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            response = await client.post(
                "/v1/completions", json=body | {"stream": True}, headers={"Last-Event-ID": wrong}
            )
        assert response.status_code == 410
        assert error_of(response)["code"] == "resume_lost"

    asyncio.run(scenario())


class HoldingBack(ScriptedService):
    """The first token of second choices has no text yet. What was delivered does not come again."""

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        async for output in super().generate(request):
            if output.first_index >= len(request.delivered_token_ids):
                yield output

    def _output(
        self, request: Request, index: int, text: str, finish_reason: FinishReason | None
    ) -> RequestOutput:
        is_second = str(request.request_id).partition("~")[0].endswith("-1")
        return super()._output(request, index, "" if is_second and not index else text, finish_reason)


def test_a_prompt_is_echoed_though_tokens_without_text_came_before_it() -> None:
    door = Door(HoldingBack(), DoorSettings(resume_window_s=900))
    held_back = door.tokenizer.decode([5])
    fields: dict[str, Any] = {"echo": True, "n": 2, "stop": [f"{held_back}{held_back}{held_back}"]}
    events = events_of(door.complete(stream=True, **fields))
    whole = collected(events)
    number = next(number for number, (_, data) in enumerate(events) if data["choices"][0]["index"] == 1)
    event_id = str(events[number - 1][0])
    assert ":2,1:" in event_id, "a token of the second choice counts as delivered"
    rest = events_of(resume(door, event_id, **fields))
    assert collected([*events[:number], *rest]) == whole


# ---- who may come back, and when -----------------------------------------------------------------


def resume(door: Door, event_id: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"prompt": "abc", "stream": True} | fields
    return door.post("/v1/completions", body, headers={"Last-Event-ID": event_id} | (headers or {}))


def last_id(response: httpx.Response) -> str:
    return str(events_of(response)[1][0])


@pytest.mark.parametrize("text", ["x", "cmpl-1:3", "chatcmpl-" + "0" * 32 + ":1,2:0:00000000.1", "\u00e9"])
def test_what_is_no_event_id_is_refused(text: str) -> None:
    response = resume(Door(), text.encode())  # type: ignore[arg-type]
    assert response.status_code == 400
    assert error_of(response)["code"] == "resume_invalid"
    assert error_of(response)["param"] == "Last-Event-ID"


@pytest.mark.parametrize(
    "change", [{"prompt": "abcd"}, {"temperature": 0.5}, {"n": 2}, {"seed": 1}, {"max_tokens": 3}]
)
def test_another_request_is_refused(change: dict[str, Any]) -> None:
    door = Door()
    event_id = last_id(door.complete(stream=True))
    response = resume(door, event_id, **change)
    assert response.status_code == 400
    assert error_of(response)["code"] == "resume_mismatch"
    chat = door.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "abc"}], "stream": True},
        headers={"Last-Event-ID": event_id},
    )
    assert error_of(chat)["code"] == "resume_mismatch"
    assert not door.service.recalls, "nobody was asked"


def test_another_key_is_refused() -> None:
    keys = tuple(ApiKey(name=name, digest=digest_api_key(name)) for name in ("mine", "other"))
    door = Door(settings=DoorSettings(api_keys=keys))
    mine, other = ({"Authorization": f"Bearer {name}"} for name in ("mine", "other"))
    event_id = last_id(door.post("/v1/completions", {"prompt": "abc", "stream": True}, headers=mine))
    response = resume(door, event_id, other)
    assert response.status_code == 400
    assert error_of(response)["code"] == "resume_mismatch"
    # Whoever forges the readable part has no proof for the coordinators.
    forged = re.sub(r":[0-9a-f]{8}\.", ":00000000.", event_id)
    assert error_of(resume(door, forged, other))["code"] == "resume_mismatch"
    assert not door.service.recalls
    resume(door, event_id, mine)
    ((names, proof),) = door.service.recalls
    assert door.service.requests[0].resumption is not None
    assert (names, proof) == (
        (door.service.requests[0].resumption.name,),
        door.service.requests[0].resumption.proof,
    )


def test_another_model_is_refused() -> None:
    door = Door()
    event_id = last_id(door.complete(stream=True))
    door.service.described = dataclasses.replace(DESCRIPTION, revision="another")
    assert error_of(resume(door, event_id))["code"] == "resume_mismatch"


def test_only_streams_are_resumed() -> None:
    door = Door()
    event_id = last_id(door.complete(stream=True))
    response = resume(door, event_id, stream=False)
    assert response.status_code == 400
    assert error_of(response)["code"] == "resume_invalid"
    off = Door(settings=DoorSettings(resume_window_s=0))
    events = events_of(off.complete(stream=True))
    assert {place for place, _ in events} == {None}, "they would be of no use"
    assert off.service.requests[0].resumption is None
    assert "resume_window_s" in error_of(resume(off, event_id))["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_clients_that_stumble_over_ids_get_none(path: str) -> None:
    door = Door(ScriptedService(fail_after=4))
    prompt = {"messages": [{"role": "user", "content": "abc"}]} if "chat" in path else {"prompt": "abc"}
    body = prompt | {"stream": True, "stream_options": {"event_ids": False, "include_usage": True}}
    response = door.post(path, body)
    lines = [line for line in response.text.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines), "as if each were JSON, which errors are too"
    assert [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]"
    assert door.service.requests[0].resumption is None, "nothing is kept for those that cannot come back"
    with_ids = door.post(path, body | {"stream_options": {"event_ids": True}})
    assert [event_id is not None for event_id, _ in events_of(with_ids)[:-1]] == [True] * (len(lines) - 1)


def aged(event_id: str, age_s: int) -> str:
    """Return the id of an event of a completion as if it had been sent so long ago."""
    response_id, place, _, check = event_id.split(":")
    created_s = int(response_id.split("-")[1][:8], 16)
    return f"{response_id[:5]}{created_s - age_s - 39:08x}{response_id[13:]}:{place}:39:{check}"


def test_what_is_forgotten_and_too_old_has_expired() -> None:
    door = Door()
    old = aged(last_id(door.complete(stream=True)), 61)
    response = resume(door, old)
    assert response.status_code == 410
    assert error_of(response)["code"] == "resume_expired"
    assert len(door.service.requests) == 1, "nothing was generated again"
    # As long as somebody remembers it, it is not too old.
    name = f"{old.partition(':')[0]}-0"
    door.service.remembered = [(name, (5, 6, 7))]
    resume(door, old)
    assert door.service.requests[-1].delivered_token_ids == (5, 6)


@pytest.mark.parametrize("age_s", [61, 190, 355])
def test_what_was_lost_with_its_coordinator_is_generated_again_once_there_is_another(age_s: int) -> None:
    """A target that is lost takes minutes to load, in which nobody can come back."""
    door = Door(HoldingBack(), DoorSettings(resume_window_s=60, failover_timeout_s=300))
    events = events_of(door.complete(stream=True))
    old = aged(str(events[1][0]), age_s)
    door.service.is_ready = False
    assert resume(door, old).status_code == 503
    door.service.is_ready = True
    rest = resume(door, old)
    assert rest.status_code == 200
    replayed, resumed = door.service.requests[1:]
    assert (replayed.params.max_tokens, resumed.delivered_token_ids) == (2, (5, 6))
    choices = [collected([*some, events[-1]])["choices"][0] for some in (events[:2], events_of(rest)[:-1])]
    assert choices[0]["text"] + choices[1]["text"] == collected(events)["choices"][0]["text"]


def test_what_was_lost_is_not_generated_again_for_ever() -> None:
    door = Door(settings=DoorSettings(resume_window_s=60, failover_timeout_s=300))
    response = resume(door, aged(last_id(door.complete(stream=True)), 361))
    assert response.status_code == 410
    assert error_of(response)["code"] == "resume_expired"
    assert "more than 360 s ago" in error_of(response)["message"]
    assert len(door.service.requests) == 1


def test_a_failed_replay_is_an_error_and_no_stream() -> None:
    door = Door(ScriptedService(fail_after=3))
    events = events_of(door.complete(stream=True))
    assert events[-2][1]["error"]["code"] == "non_finite_logits"
    door.service.fail_after = 1
    response = resume(door, str(events[1][0]))
    assert response.status_code == 500
    assert error_of(response)["code"] == "non_finite_logits"
    assert json.loads(response.content)["error"]["message"] == "logits are not finite"


class FailingOnce(HoldingBack):
    """What is generated again never comes, but for the first choice, which fails at once."""

    fails = False

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        if self.fails:
            is_first = request.request_id.partition("~")[0].endswith("-0")
            self.hold_at, self.fail_after = (None, 0) if is_first else (0, None)
        async for output in super().generate(request):
            yield output


@pytest.mark.parametrize("failure", [None, NotReadyError("nobody is there")])
def test_where_one_replay_fails_the_others_are_ended(failure: Exception | None) -> None:
    service = FailingOnce(failure=failure)
    key = ApiKey(name="mine", digest=digest_api_key("mine"), max_concurrency=3)
    door = Door(service, DoorSettings(api_keys=(key,)))
    body = {"prompt": "abc", "n": 3, "stream": True}
    headers = {"Authorization": "Bearer mine"}

    async def scenario() -> httpx.Response:
        events = events_of(await door.send("POST", "/v1/completions", json=body, headers=headers))
        places = [event_id for event_id, _ in events if re.search(r":[1-9],[1-9],[1-9]:", event_id or "")]
        service.fails = True
        service.closed.clear()
        again = headers | {"Last-Event-ID": str(places[0])}
        response = await door.send("POST", "/v1/completions", json=body, headers=again)
        replayed = [request.request_id for request in service.requests[3:]]
        assert len(replayed) == 3
        assert sorted(service.closed) == sorted(replayed), "nothing is generated for nobody"
        service.fails, service.hold_at, service.fail_after = False, None, None
        # Its place is free again.
        assert (await door.send("POST", "/v1/completions", json=body, headers=headers)).status_code == 200
        return response

    response = asyncio.run(scenario())
    expected = (500, "non_finite_logits") if failure is None else (503, "not_ready")
    assert (response.status_code, error_of(response)["code"]) == expected


class Silent(ScriptedService):
    """Coordinators that are not there: nobody says what is remembered."""

    is_left = False

    async def recall(self, names: Sequence[str], proof: bytes) -> Sequence[tuple[str, tuple[int, ...]]]:
        await super().recall(names, proof)
        try:
            await asyncio.Event().wait()
        finally:
            self.is_left = True
        raise AssertionError


@pytest.mark.parametrize("is_recalling", [True, False], ids=["recalling", "replaying"])
def test_a_resumed_request_has_its_time_limit(is_recalling: bool) -> None:
    service = Silent() if is_recalling else ScriptedService()
    door = Door(service)

    async def scenario() -> httpx.Response:
        events = events_of(await door.send("POST", "/v1/completions", json={"prompt": "abc", "stream": True}))
        service.hold_at = 0
        body = {"prompt": "abc", "stream": True, "timeout_s": 0.4}
        headers = {"Last-Event-ID": str(events[1][0])}
        response = await door.send("POST", "/v1/completions", json=body, headers=headers)
        assert service.recalls, "it was on its way"
        assert len(service.closed) == len(service.requests), "and is there no more"
        return response

    response = asyncio.run(scenario())
    assert response.status_code == 504
    assert error_of(response)["code"] == "request_timeout"
    assert error_of(response)["message"] == "The request took longer than 0.4 s."
    assert response.headers["x-should-retry"] == "false"
    assert len(service.requests) == (1 if is_recalling else 2)
    assert not isinstance(service, Silent) or service.is_left


def test_what_resuming_takes_is_taken_off_the_time_of_a_request() -> None:
    class Slow(ScriptedService):
        async def recall(self, names: Sequence[str], proof: bytes) -> Sequence[tuple[str, tuple[int, ...]]]:
            await asyncio.sleep(0.05)
            return await super().recall(names, proof)

    door = Door(Slow())
    event_id = last_id(door.complete(stream=True))
    assert resume(door, event_id, timeout_s=1e6).status_code == 200
    replayed, resumed = door.service.requests[1:]
    assert replayed.timeout_s is not None
    assert resumed.timeout_s is not None
    assert resumed.timeout_s < replayed.timeout_s - 0.04


def proof_of(**fields: Any) -> bytes:
    return proved(prepared_with(**fields), b"key", 60.0).proof


def prepared_with(**fields: Any) -> PreparedRequest:
    body = CompletionBody.model_validate({"prompt": ["abc", "xyz"], "seed": 1, "stream": True} | fields)
    tokenizer = HuggingFaceTokenizer(make_tokenizer())
    return asyncio.run(prepare_completion(body, DESCRIPTION, tokenizer, DoorSettings()))


def test_proofs_tell_parameters_of_each_choice_apart() -> None:
    fields: dict[str, Any] = {"n": 3, "stop": ["x"], "allowed_token_ids": [5, 6]}
    assert proof_of(**fields) == proof_of(**fields)
    assert len({proof_of(**fields | {"stop": [stop]}) for stop in "xyz"}) == 3
    prepared = prepared_with(**fields)
    proofs = {proved(prepared, b"key", 60.0).proof, proved(prepared, b"other", 60.0).proof}
    for index in range(6):
        requests = list(prepared.requests)
        other = msgspec.structs.replace(requests[index].params, top_k=3)
        requests[index] = msgspec.structs.replace(requests[index], params=other)
        proofs.add(proved(dataclasses.replace(prepared, requests=tuple(requests)), b"key", 60.0).proof)
    assert len(proofs) == 2 + 6
    # Whether choices share them is a matter of how they were made.
    apart = [
        msgspec.structs.replace(request, params=msgspec.structs.replace(request.params))
        for request in prepared.requests
    ]
    assert len({id(request.params) for request in apart}) == 6
    assert proved(dataclasses.replace(prepared, requests=tuple(apart)), b"key", 60.0).proof in proofs


def test_parameters_that_choices_share_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_with(n=100, stop=["y" * 1000])
    lengths: list[int] = []
    original = msgspec.msgpack.encode

    def note(value: Any) -> bytes:
        data = original(value)
        lengths.append(len(data))
        return data

    monkeypatch.setattr(msgspec.msgpack, "encode", note)
    proved(prepared, None, 60.0)
    assert len(prepared.requests) == 200
    assert sum(lengths) < 200 * 20 + 2 * 1100


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"prompt": "abc"}, 16),
        ({"prompt": "abc", "max_tokens": 3}, 3),
        ({"prompt": "abc", "max_tokens": 3, "n": 2}, 3),
        ({"messages": [{"role": "user", "content": "abc"}]}, None),
    ],
)
def test_positions_beyond_what_may_be_generated_run_nothing(body: dict[str, Any], most: int | None) -> None:
    """The number is the client's: it would be generated again up to there."""
    door = Door()
    path, body = f"/v1/{'chat/' if 'messages' in body else ''}completions", body | {"stream": True}
    event_id = last_id(door.post(path, body))
    if most is None:
        most = DESCRIPTION.max_model_len - len(door.service.requests[0].prompt_token_ids)
    num_before = len(door.service.requests)
    place = event_id.split(":")[1]
    for num_tokens in (most + 1, 100_000, 999_999_999):
        forged = event_id.replace(f":{place}:", f":{re.sub(r'[0-9]+', str(num_tokens), place, count=1)}:")
        response = door.post(path, body, headers={"Last-Event-ID": forged})
        assert response.status_code == 400
        assert error_of(response)["code"] == "resume_mismatch"
    assert len(door.service.requests) == num_before
    assert not door.service.recalls
    possible = event_id.replace(f":{place}:", f":{re.sub(r'[0-9]+', str(most), place, count=1)}:")
    door.post(path, body, headers={"Last-Event-ID": possible})
    assert len(door.service.requests) > num_before, "it is generated again"
    assert door.service.requests[num_before].params.max_tokens == most


def charged(door: Door, key: str) -> float:
    text = door.get("/metrics").text
    (line,) = (line for line in text.splitlines() if line.startswith(f'{CHARGED}{{key="{key}"}}'))
    return float(line.split()[-1])


CHARGED = "ray_drafthouse_api_key_tokens_total"


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_generated_again_is_charged(is_known: bool) -> None:
    key = ApiKey(name="mine", digest=digest_api_key("mine"))
    door = Door(HoldingBack(), settings=DoorSettings(api_keys=(key,)))
    headers = {"Authorization": "Bearer mine"}
    event_id = last_id(door.post("/v1/completions", {"prompt": "abc", "stream": True}, headers=headers))
    before = charged(door, "mine")
    assert before == 3 + 5
    if is_known:
        door.service.remembered = [(f"{event_id.partition(':')[0]}-0", (5, 6, 7))]
    assert resume(door, event_id, headers).status_code == 200
    replayed = 0 if is_known else 3 + 5  # (the script knows nothing of `max_tokens`)
    assert charged(door, "mine") - before == 3 + 3 + replayed


def test_a_replay_that_is_in_vain_is_charged() -> None:
    key = ApiKey(name="mine", digest=digest_api_key("mine"), tokens_per_minute=20)
    door = Door(settings=DoorSettings(api_keys=(key,)))
    headers = {"Authorization": "Bearer mine"}
    event_id = last_id(door.post("/v1/completions", {"prompt": "abc", "stream": True}, headers=headers))
    forged = re.sub(r"\.[0-9a-f]+$", ".1", event_id)
    codes = [error_of(resume(door, forged, headers))["code"] for _ in range(4)]
    assert codes == ["resume_lost", "resume_lost", "rate_limit_exceeded", "rate_limit_exceeded"]


def failing_for_good() -> tuple[Door, list[Event]]:
    failure = RequestFailed("it took its workers down", code=FAILED_REPEATEDLY)
    door = Door(ScriptedService(fail_after=2, failure=failure))
    events = events_of(door.complete(stream=True))
    assert events[-2][1]["error"]["code"] == FAILED_REPEATEDLY
    door.service.fail_after = None
    return door, events


def test_what_takes_workers_down_is_known_for_as_long_as_it_could_be_generated_again() -> None:
    door = Door(settings=DoorSettings(resume_window_s=60, failover_timeout_s=300))
    door.complete(stream=True)
    resumption = door.service.requests[0].resumption
    assert resumption is not None
    assert (resumption.window_s, resumption.replay_window_s) == (60, 360)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stream_that_takes_workers_down_is_not_gone_on_with(number: int) -> None:
    door, events = failing_for_good()
    for _ in range(2):
        response = resume(door, str(events[number][0]))
        assert response.status_code == 500
        assert response.headers["x-should-retry"] == "false"
        assert error_of(response) == events[-2][1]["error"]
    assert len(door.service.requests) == 1, "nothing was begun again"
    assert not door.service.recalls
    assert door.complete(stream=True).status_code == 200, "another response is another matter"


def test_streams_that_failed_otherwise_are_gone_on_with() -> None:
    failure = RequestFailed("gone", code="coordinator_lost")
    door = Door(ScriptedService(fail_after=2, failure=failure))
    events = events_of(door.complete(stream=True))
    door.service.fail_after = None
    assert resume(door, str(events[1][0])).status_code == 200


def test_failures_are_remembered_while_clients_may_come_back() -> None:
    clock = ManualClock()
    failed = FailedForGood(clock)
    error = RequestFailed("down", code=FAILED_REPEATEDLY)
    failed.note("a", error, 60.0)
    failed.note("b", RequestFailed("other", code="other"), 60.0)
    failed.note("c", error, 0.0)
    failed.check("b")
    failed.check("c")
    clock.advance(59)
    with pytest.raises(RequestFailed, match="down"):
        failed.check("a")
    clock.advance(2)
    failed.check("a")
    for number in range(5000):
        failed.note(str(number), error, 60.0)
    failed.check("0")
    with pytest.raises(RequestFailed):
        failed.check("4999")
    assert len(failed._failures) == 1024
