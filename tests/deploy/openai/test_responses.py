"""What a client gets: shapes, counts and order of responses and streams, over a scripted service."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers.processors import TemplateProcessing

from deploy.openai.protocol import ChatMessage
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer, TokenText
from specdec.core.outputs import FinishReason, RequestOutput, TokenLogprobs
from specdec.core.request import Request
from specdec.sampling.noise import choice_seed
from tests.deploy.openai.fakes import DESCRIPTION, PIECES, Door, ScriptedService, error_of, events_of
from tests.deploy.openai.live import live_server

TEXT = "".join(PIECES)


def usage(num_prompt: int, num_generated: int, num_cached: int = 2) -> dict[str, object]:
    """The scripted service says of every choice that 2 tokens of its prompt were cached."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


@pytest.fixture
def door() -> Door:
    return Door()


def test_completion(door: Door) -> None:
    response = door.complete(max_tokens=9)
    assert response.status_code == 200
    body = response.json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == DESCRIPTION.model_id
    assert body["system_fingerprint"] == "0123456789ab-float32-tp1-sample_and_match"
    assert body["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert body["usage"] == usage(3, 5)
    assert door.service.requests[0].params.max_tokens == 9
    assert door.service.aborted == []


def test_chat_completion(door: Door) -> None:
    body = door.chat().json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert door.service.requests[0].params.max_tokens is None


def test_defaults_are_openais(door: Door) -> None:
    door.complete(temperature=None, n=None, stop=None, stream=None, stream_options=None, user=None)
    params = door.service.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.stop) == (
        1,
        1,
        None,
        16,
        (),
    )


def test_sampling_fields_reach_the_service(door: Door) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "min_tokens": 2, "max_tokens": 8,
        "stop": ["a", "b"], "stop_token_ids": [9], "ignore_eos": True, "include_stop_str_in_output": True,
        "logprobs": 3, "logprobs_mode": "processed", "repetition_penalty": 1.5, "presence_penalty": -1,
        "frequency_penalty": 0.25, "allowed_token_ids": [7, 8],
    }  # fmt: skip
    door.complete(**fields, seed=1, speculation={"num_speculative_tokens": 0})
    request = door.service.requests[0]
    seen = {name: getattr(request.params, name) for name in fields}
    assert seen == fields | {"stop": ("a", "b"), "stop_token_ids": (9,), "allowed_token_ids": (7, 8)}
    assert request.num_draft_tokens == 0
    assert request.kv_budget is None


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"temperature": 1e-5}, (0.0, None, 1.0)),
        ({"temperature": 5e-324, "top_p": 0.5}, (0.0, None, 0.5)),
        ({"temperature": 1e-4}, (1e-4, None, 1.0)),
        ({"top_p": 0}, (1.0, 1, 1.0)),
        ({"top_p": 0.0, "top_k": 50, "temperature": 0.7}, (0.7, 1, 1.0)),
        ({"top_p": 1e-9}, (1.0, None, 1e-9)),
    ],
)
def test_what_is_as_good_as_greedy_is_put_as_the_engine_does(
    door: Door, given: dict[str, Any], taken: tuple[float, int | None, float]
) -> None:
    assert door.complete(**given).status_code == 200
    params = door.service.requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == taken


def test_a_drafter_reaches_the_service(door: Door) -> None:
    door.complete(speculation={"drafter": "small"})
    request = door.service.requests[-1]
    assert (request.drafter, request.num_draft_tokens) == ("small", None)


@pytest.mark.parametrize(("given", "amount"), [(512, 512), (0.05, 0.05), ("5%", 0.05), (1.0, 1.0)])
def test_a_kv_budget_reaches_the_service(door: Door, given: object, amount: float) -> None:
    door.complete(speculation={"kv_budget": given})
    (request,) = door.service.requests
    assert (request.kv_budget, type(request.kv_budget)) == (amount, type(amount))
    assert request.num_draft_tokens is None


def test_bias_and_bad_words_become_token_ids(door: Door) -> None:
    """A text is forbidden at the start of a word and within one; this tokenizer has one token per letter."""
    door.complete(logit_bias={"5": 1, "9": -100}, bad_words=["ab", [7, 8, 9]])
    params = door.service.requests[0].params
    assert params.logit_bias == ((5, 1.0), (9, -100.0))
    letters = [ord(letter) - 30 for letter in "ab"]
    assert params.bad_words == (tuple(letters), (ord(" ") - 30, *letters), (7, 8, 9))


@pytest.mark.parametrize("top_k", [0, -1, None, 10**40, DESCRIPTION.vocab_size])
def test_top_k_that_keeps_all_is_none(door: Door, top_k: int | None) -> None:
    assert door.complete(top_k=top_k).status_code == 200
    assert door.service.requests[0].params.top_k is None


def test_prompts_and_choices_are_in_openais_order(door: Door) -> None:
    body = door.complete(prompt=["ab", "c"], n=2, seed=11).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == usage(3, 20, num_cached=2 * 2)
    requests = sorted(door.service.requests, key=lambda request: request.request_id)
    assert [len(request.prompt_token_ids) for request in requests] == [2, 2, 1, 1]
    # A prompt gives the same tokens in a list and alone.
    assert [request.seed for request in requests] == [choice_seed(11, 0), choice_seed(11, 1)] * 2
    assert len({request.request_id for request in requests}) == 4
    assert all(request.params.n == 1 and request.params.seed is None for request in requests)


def test_without_a_seed_every_choice_has_its_own(door: Door) -> None:
    door.complete(prompt=["a", "a"], n=2)
    assert len({request.seed for request in door.service.requests}) == 4


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt_logprobs": 1}, [1, None, 1, None]),
        ({"echo": True, "logprobs": 2}, [2, None, 2, None]),
        # Each choice of a stream echoes by itself.
        ({"echo": True, "logprobs": 2, "stream": True}, [2, 2, 2, 2]),
        # There is nothing else to be done.
        ({"echo": True, "logprobs": 2, "max_tokens": 0}, [2, 2, 2, 2]),
    ],
)
def test_a_prompt_is_scored_for_its_first_choice(
    door: Door, fields: dict[str, object], expected: list[int | None]
) -> None:
    door.complete(prompt=["a", "b"], n=2, **fields)
    requests = sorted(door.service.requests, key=lambda request: request.request_id)
    assert [request.params.prompt_logprobs for request in requests] == expected


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_token_id_prompts(door: Door, prompt: list[int]) -> None:
    assert door.complete(prompt=prompt).status_code == 200
    assert door.service.requests[0].prompt_token_ids == (5, 6, 7)


def test_chat_template_roles_and_parts(door: Door) -> None:
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        # As a client echoes a response back.
        {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "audio": None},
        {"role": "user", "content": "v"},
    ]
    assert door.chat(messages=messages).status_code == 200
    assert prompt_of(door) == "[system]s[user]u[assistant]a[user]v[assistant]"


def test_chat_template_variables(door: Door) -> None:
    door.tokenizer.chat_template = "{{ messages[0].content }}{{ '-no' if enable_thinking is false }}"
    messages = [{"role": "user", "content": "u"}]
    assert door.chat(messages=messages, chat_template_kwargs={"enable_thinking": False}).status_code == 200
    assert prompt_of(door) == "u-no"
    wrong = door.chat(messages=messages, chat_template_kwargs=[1])
    assert (wrong.status_code, error_of(wrong)["param"]) == (400, "chat_template_kwargs")
    assert door.complete(chat_template_kwargs={}).status_code == 200
    assert error_of(door.complete(chat_template_kwargs={"a": 1}))["param"] == "chat_template_kwargs"


def test_what_clients_mark_for_a_cache_is_text_as_any(door: Door) -> None:
    part = {"type": "text", "text": "u", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert door.chat(messages=[{"role": "user", "content": [part]}]).status_code == 200
    assert prompt_of(door) == "[user]u[assistant]"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"refusal": "no"}, "no"),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": "", "refusal": "no"}, "no"),
        ({"content": "well", "refusal": "no"}, "well\nno"),
        ({"content": "well", "refusal": ""}, "well"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": [{"type": "text", "text": "well"}, {"type": "refusal", "refusal": "no"}]}, "well\nno"),
    ],
)
def test_what_the_assistant_refused_with_is_what_it_said(message: dict[str, Any], text: str) -> None:
    seen = ChatMessage.model_validate({"role": "assistant", **message}).for_template()
    assert seen == {"role": "assistant", "content": text}


def prompt_of(door: Door) -> str:
    """The last one, of the fake tokenizer's single characters."""
    return "".join(chr(30 + token_id) for token_id in door.service.requests[-1].prompt_token_ids)


@pytest.mark.parametrize("prompt", ["", None, ["", ""]])
def test_a_text_without_characters_is_what_the_tokenizer_begins_texts_with(prompt: Any) -> None:
    door = Door()
    bos, bos_id = door.tokenizer.bos_token, door.tokenizer.bos_token_id
    assert bos is not None
    assert bos_id is not None
    door.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, bos_id)]
    )
    response = door.complete(prompt=prompt, echo=True)
    assert [choice["text"] for choice in response.json()["choices"]] == [TEXT] * (2 if prompt else 1)
    assert {request.prompt_token_ids for request in door.service.requests} == {(bos_id,)}
    refused = door.complete(prompt=prompt, add_special_tokens=False)
    assert error_of(refused)["param"] == ("prompt[0]" if prompt else "prompt")
    assert error_of(door.post("/v1/completions", {}))["message"] == "prompt is required"


def test_completion_logprobs(door: Door) -> None:
    logprobs = door.complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["#", "$", "%", "&", "'"]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["top_logprobs"][0] == {"#": -0.5, "$": -1.5}
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]


def test_chat_logprobs(door: Door) -> None:
    content = door.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "#",
        "logprob": -0.5,
        "bytes": [35],
        "top_logprobs": [
            {"token": "#", "logprob": -0.5, "bytes": [35]},
            {"token": "$", "logprob": -1.5, "bytes": [36]},
        ],
    }
    assert door.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@dataclass
class Scoring(ScriptedService):
    """Of a target that scores prompts, of which every token has the same two alternatives."""

    def _output(
        self, request: Request, index: int, text: str, finish_reason: FinishReason | None
    ) -> RequestOutput:
        output = super()._output(request, index, text, finish_reason)
        if index or request.params.prompt_logprobs is None:
            return output
        top = ((7, -1.0), (8, -2.0))[: request.params.prompt_logprobs]
        scored = (TokenLogprobs(7, -1.0, top),) * (len(request.prompt_token_ids) - 1)
        return msgspec.structs.replace(output, prompt_logprobs=scored)


LONG = [5] * 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_prompts", [1, 4])
def test_many_logprobs_are_shaped_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, *, stream: bool, num_prompts: int
) -> None:
    """There everything would wait for them: other streams, and the signs of life of the door."""
    door = Door(Scoring())
    threads: set[str] = set()
    token_text = HuggingFaceTokenizer.token_text

    def noting(self: HuggingFaceTokenizer, token_id: int) -> TokenText:
        threads.add(threading.current_thread().name)
        return token_text(self, token_id)

    monkeypatch.setattr(HuggingFaceTokenizer, "token_text", noting)
    fields: dict[str, Any] = {"max_tokens": 5, "logprobs": 2, "echo": True, "stream": stream}
    monkeypatch.setattr("deploy.openai.app.INLINE_LOGPROBS", 1000)
    monkeypatch.setattr("deploy.openai.streaming.INLINE_LOGPROBS", 500)
    response = door.complete(prompt=[LONG] * num_prompts, **fields)
    assert response.status_code == 200
    is_beside = any(name.startswith("beside") for name in threads)
    assert is_beside == (stream or num_prompts == 4)
    if stream:
        firsts = {data["choices"][0]["index"]: data["choices"][0] for _, data in events_of(response)[-2::-1]}
        logprobs = [firsts[index]["logprobs"] for index in range(num_prompts)]
    else:
        assert is_beside == all(name.startswith("beside") for name in threads)
        logprobs = [choice["logprobs"] for choice in response.json()["choices"]]
    assert all(one["token_logprobs"][:200] == [None] + [-1.0] * 199 for one in logprobs)


@pytest.mark.parametrize(
    ("fields", "param", "num_logprobs"),
    [
        ({"prompt_logprobs": 1}, "prompt_logprobs", 800),
        ({"logprobs": 2, "echo": True}, "echo", 1200),
        ({"logprobs": 2, "echo": True, "stream": True}, "echo", 1200),
    ],
)
def test_more_logprobs_of_prompts_than_a_response_may_hold_are_refused_at_once(
    fields: dict[str, Any], param: str, num_logprobs: int
) -> None:
    fields = {"prompt": [LONG, LONG], **fields}
    most = DoorSettings(max_logprobs=num_logprobs + 2 * 5 * 3)  # with those that are generated
    assert Door(Scoring(), most).complete(**fields).status_code == 200
    door = Door(Scoring(), DoorSettings(max_logprobs=num_logprobs - 1))
    refused = door.complete(**fields)
    assert refused.status_code == 400
    error = error_of(refused)
    assert (error["code"], error["param"]) == ("output_too_large", param)
    assert f"{num_logprobs} log-probabilities" in error["message"]
    assert "http.max_logprobs" in error["message"]
    assert door.service.requests == []


def test_more_generated_logprobs_than_a_response_may_hold_end_it(door: Door) -> None:
    """In a stream they are sent as they come."""
    small = Door(settings=DoorSettings(max_logprobs=14))
    assert small.complete(logprobs=2, stream=True).status_code == 200
    refused = small.complete(logprobs=2)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "output_too_large")
    assert small.service.closed == [request.request_id for request in small.service.requests]
    assert Door(settings=DoorSettings(max_logprobs=15)).complete(logprobs=2).status_code == 200
    assert small.complete(best_of=4).status_code == 200, "by which the best is found, are not told"


def test_token_ids_and_metrics_on_request(door: Door) -> None:
    body = door.complete(return_token_ids=True, return_metrics=True, n=2).json()
    assert body["choices"][1]["token_ids"] == [5, 6, 7, 8, 9]
    assert body["choices"][1]["prompt_token_ids"] == list(door.service.requests[0].prompt_token_ids)
    assert body["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [0, 2, 2, 0, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 12,
        "num_lossy_tokens": 0,
        "per_step_accepted": [1, 2, 1, 2],
        "per_step_drafted": [4, 2, 4, 2],
    }
    assert "metrics" not in door.complete().json()


@pytest.mark.parametrize("rule", ["sample_and_match", "rejection", "typical"])
def test_a_lossy_rule_shows_in_every_response(rule: str) -> None:
    described = dataclasses.replace(DESCRIPTION, rule=rule)
    door = Door(ScriptedService(described=described))
    bodies = [door.complete().json(), door.chat().json()]
    for streamed in (door.complete(stream=True), door.chat(stream=True)):
        bodies += [data for _, data in events_of(streamed)[:-1]]
    for body in bodies:
        assert body["system_fingerprint"].endswith(f"-{rule}")
        assert body.get("lossy") == (True if rule == "typical" else None)
    # Nothing is lost at temperature 0 or without drafts.
    assert "lossy" not in door.complete(temperature=0).json()
    assert "lossy" not in door.complete(speculation={"num_speculative_tokens": 0}).json()


def test_streamed_completion(door: Door) -> None:
    response = door.complete(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response)
    assert events[-1] == (None, "[DONE]")
    chunks = [data for _, data in events[:-1]]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == list(PIECES)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    places = [":".join(str(event_id).split(":")[:2]) for event_id, _ in events[:-1]]
    assert places == [f"{chunks[0]['id']}:{place}" for place in ("1", "2", "3", "4", "5f")]


def test_streamed_chat(door: Door) -> None:
    events = events_of(door.chat(stream=True, stream_options={"include_usage": True}, return_metrics=True))
    chunks = [data for _, data in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks[1:-2]] == list(PIECES)
    assert chunks[-2]["choices"][0]["delta"] == {}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage(20, 5)
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_draft_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("include_usage", [False, True])
def test_usage_so_far_in_every_chunk(door: Door, include_usage: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    for response, counts in (
        (door.complete(stream=True, stream_options=options), [1, 2, 3, 4, 5]),
        (door.chat(stream=True, stream_options=options), [0, 1, 2, 3, 4, 5, 5]),
    ):
        chunks = [data for _, data in events_of(response)[:-1]]
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]] == counts
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[0]["usage"]["prompt_tokens"]}
        for chunk in chunks:
            used = chunk["usage"]
            assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
        assert [not chunk["choices"] for chunk in chunks] == [False] * len(counts) + [True] * include_usage
    events = events_of(door.complete(stream=True, n=3, stream_options=options))
    *_, last = (data for _, data in events[:-1] if data["choices"])
    assert last["usage"]["completion_tokens"] == 15, "of all choices together"


def test_streamed_choices_keep_their_index(door: Door) -> None:
    events = events_of(door.complete(stream=True, n=3, logprobs=0))
    texts = {0: "", 1: "", 2: ""}
    for _, data in events[:-1]:
        texts[data["choices"][0]["index"]] += data["choices"][0]["text"]
        assert len(data["choices"][0]["logprobs"]["tokens"]) == 1
    assert texts == {0: TEXT, 1: TEXT, 2: TEXT}
    assert events[-2][0] is not None
    assert events[-2][0].split(":")[1] == "5f,5f,5f"


def test_nothing_to_see_is_no_event() -> None:
    door = Door(ScriptedService(pieces=("", "ab", "", "c")))
    texts = [data["choices"][0]["text"] for _, data in events_of(door.complete(stream=True))[:-1]]
    assert texts == ["ab", "c"]


def test_stop_reason() -> None:
    door = Door(ScriptedService(stop_reason="\n"))
    assert door.complete().json()["choices"][0]["stop_reason"] == "\n"
    assert events_of(door.chat(stream=True))[-2][1]["choices"][0]["stop_reason"] == "\n"


def test_models(door: Door) -> None:
    listed = door.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["scripted"]
    assert door.get("/v1/models/scripted").json() == listed["data"][0]
    assert door.get("/v1/models/").json() == listed, "as it is asked for by who has no name to put there"
    response = door.get("/v1/models/gpt-4")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_served_model_name() -> None:
    door = Door(settings=DoorSettings(served_model_name="org/demo"))
    assert door.get("/v1/models/org/demo").json()["id"] == "org/demo"
    assert door.complete(model="org/demo").json()["model"] == "org/demo"
    assert door.complete(model="scripted").status_code == 404


def test_health_is_true(door: Door) -> None:
    assert door.get("/health").status_code == 200
    door.service.is_ready = False
    response = door.get("/health")
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert error_of(response)["code"] == "not_ready"
    assert door.get("/v1/models").json()["data"] == []
    assert door.complete().status_code == 503


@pytest.mark.parametrize(
    "path", ["/health", "/v1/models", "/v1/models/scripted", "/v1/status", "/metrics", "/openapi.json"]
)
def test_who_sends_head_is_told_what_get_would_say(door: Door, path: str) -> None:
    with live_server(door.app) as url:
        asked, got = httpx.head(f"{url}{path}"), httpx.get(f"{url}{path}")
        assert asked.status_code == got.status_code == 200
        assert asked.headers["content-type"] == got.headers["content-type"]
        assert asked.content == b""
        door.service.is_ready = False
        assert httpx.head(f"{url}/health").status_code == 503
    assert asyncio.run(door.send("HEAD", "/v1/completions")).status_code == 405


def test_prometheus_text(door: Door) -> None:
    door.service.snapshot = {
        "num_requests_running": 3.0,
        "spec_decode_num_drafts": 7.0,
        'spec_decode_num_accepted_tokens_per_pos{position="0"}': 5.0,
        'spec_decode_num_accepted_tokens_per_pos{position="1"}': 4.0,
    }
    door.complete()
    lines = door.get("/metrics").text.splitlines()
    assert "# TYPE ray_drafthouse_num_requests_running gauge" in lines
    assert "ray_drafthouse_num_requests_running 3.0" in lines
    assert "ray_drafthouse_spec_decode_num_drafts_total 7.0" in lines
    assert 'ray_drafthouse_spec_decode_num_accepted_tokens_per_pos_total{position="1"} 4.0' in lines
    assert 'ray_drafthouse_http_requests_total{route="/v1/completions",status="200"} 1.0' in lines
    assert "ray_drafthouse_time_to_first_token_seconds_count 1.0" in lines
    assert "ray_drafthouse_inter_token_latency_seconds_count 4.0" in lines
    assert "ray_drafthouse_e2e_request_latency_seconds_count 1.0" in lines


def test_fingerprint_names_quantization() -> None:
    quantized = dataclasses.replace(DESCRIPTION, quantization="int4-64")
    assert "-float32-int4-64-tp1-" in DoorSettings().system_fingerprint(quantized)


def test_fingerprint_tells_settings_apart() -> None:
    settings = DoorSettings()
    other = dataclasses.replace(DESCRIPTION, dtype="bfloat16")
    assert settings.system_fingerprint(DESCRIPTION) != settings.system_fingerprint(other)
