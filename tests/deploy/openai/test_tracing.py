"""Traces of requests, from an exporter in memory: who is whose child, how long, what was done meanwhile."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.trace import StatusCode

from deploy.openai.app import create_app
from deploy.openai.keys import ApiKey, digest_api_key
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from deploy.openai.tracing import TRACE_ID_HEADER, Tracing, TracingConfig, require_exporter
from specdec.core.error_codes import COORDINATOR_LOST
from specdec.core.errors import ConfigError, RequestFailed
from specdec.core.outputs import RoundTrace, TracedRound
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from tests.architectures import make_tokenizer, save_model
from tests.deploy.openai.fakes import Door, ScriptedService
from tests.deploy.openai.kept_spans import PARENT, Traced, attributes
from tests.deploy.openai.live import live_server

KEY = ApiKey(name="mine", digest=digest_api_key("right"))
UNSAMPLED = PARENT[:-1] + "0"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncEngine]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("target", "draft"):
        save_model(folder / name, seed=1)
    off = CompileConfig(mode="off")
    config = EngineConfig(
        target=ModelConfig(model=str(folder / "target"), dtype="float32", device="cpu", compile=off),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=str(folder / "draft"),
            num_speculative_tokens=3,
            controller="fixed",
            compile=off,
        ),
        cache=CacheConfig(block_size=8, num_blocks=96),
    )
    engine = AsyncEngine(Engine(config))
    yield engine
    engine.close()


def test_a_request_is_told_from_the_door_to_its_rounds(engine: AsyncEngine) -> None:
    traced = Traced(engine)
    body = {"prompt": "def f(x):", "max_tokens": 120, "temperature": 0, "ignore_eos": True, "n": 2}
    response = traced.post(body, traceparent=PARENT)
    assert response.status_code == 200, response.text
    (root,) = traced.named("POST /v1/completions")
    context = root.get_span_context()
    assert response.headers[TRACE_ID_HEADER] == PARENT.split("-")[1] == format(context.trace_id, "032x")
    assert root.parent is not None
    assert format(root.parent.span_id, "016x") == PARENT.split("-")[2]
    assert attributes(root)["drafthouse.request_id"] == response.json()["id"]
    assert attributes(root)["http.response.status_code"] == 200
    choices = traced.named("generate")
    assert sorted(attributes(choice)["drafthouse.choice"] for choice in choices) == [0, 1]
    for choice in choices:
        assert choice.parent is not None
        assert choice.parent.span_id == context.span_id
        mine = [
            span for span in traced.spans() if span.parent and span.parent.span_id == choice.context.span_id
        ]
        assert [span.name for span in mine] == ["queue", "prefill", "decode"]
        for before, after in itertools.pairwise(mine):
            assert abs(before.end_time - after.start_time) < 1000, "parts follow each other (ns)"
        assert root.start_time <= choice.start_time <= choice.end_time <= root.end_time
        told = attributes(choice)
        assert told["gen_ai.usage.output_tokens"] == 120
        prefill, decode = mine[1:]
        events = [(event.name, event.attributes["round"]) for event in (*prefill.events, *decode.events)]
        rounds = [number for name, number in events if name == "commit"]
        assert events == [(name, number) for number in rounds for name in ("propose", "verify", "commit")]
        assert rounds[:16] == list(range(16)), "the first rounds one by one"
        assert len(rounds) < told["drafthouse.num_rounds"] <= 120
        assert len(prefill.events) == 3, "the round of the first token"
        seconds = sum(told[f"drafthouse.{part}_seconds"] for part in ("propose", "verify", "commit"))
        assert 0 < seconds <= (choice.end_time - choice.start_time) / 1e9
        drafted = sum(
            event.attributes["num_draft_tokens"] for event in decode.events if event.name == "propose"
        )
        assert 0 < drafted <= told["drafthouse.num_draft_tokens"]


def test_the_official_client_finds_the_trace_of_its_stream(engine: AsyncEngine) -> None:
    traced = Traced(engine)
    with (
        live_server(traced.app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        answer = client.completions.with_raw_response.create(
            model="target", prompt="abc", max_tokens=5, stream=True, extra_headers={"traceparent": PARENT}
        )
        assert answer.headers[TRACE_ID_HEADER] == PARENT.split("-")[1]
        assert list(answer.parse())
    (root,) = traced.named("POST /v1/completions")
    (decode,) = traced.named("decode")
    assert root.end_time >= decode.end_time, "until the last byte"


def test_only_what_is_asked_for_is_traced() -> None:
    service = ScriptedService()
    traced = Traced(service)
    assert TRACE_ID_HEADER not in traced.post({}, "/health").headers
    assert traced.spans() == []
    assert (
        traced.post({"prompt": "a"}, traceparent=UNSAMPLED).headers[TRACE_ID_HEADER] == PARENT.split("-")[1]
    )
    assert traced.spans() == []
    assert not service.requests[-1].is_traced, "the engine measures nothing for nobody"
    first, second = (
        traced.post({"prompt": "a"}, traceparent="rubbish").headers[TRACE_ID_HEADER] for _ in "12"
    )
    assert first != second
    assert service.requests[-1].is_traced
    assert TRACE_ID_HEADER not in Door(service).complete().headers
    assert not service.requests[-1].is_traced


@pytest.mark.parametrize(
    ("service", "body", "status", "is_error"),
    [
        (ScriptedService(), {"prompt": 5}, 400, False),
        (ScriptedService(is_ready=False), {"prompt": "a"}, 503, True),
        (ScriptedService(refuse_with=ZeroDivisionError("x")), {"prompt": "a"}, 500, True),
    ],
)
def test_failures_end_their_spans(service: ScriptedService, body: Any, status: int, is_error: bool) -> None:
    traced = Traced(service)
    assert traced.post(body).status_code == status
    (root,) = traced.spans()
    assert attributes(root)["http.response.status_code"] == status
    assert (root.status.status_code is StatusCode.ERROR) == is_error


@pytest.mark.parametrize("streams", [False, True])
def test_a_stream_that_fails_behind_its_status_is_told_apart(
    streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """So are the request and the key that it was of, in the log."""
    lost = RequestFailed("the group that had it was lost", code=COORDINATOR_LOST)
    traced = Traced(ScriptedService(failure=lost, fail_after=2), keys=(KEY,))
    response = traced.post({"prompt": "abc", "stream": streams}, authorization="Bearer right")
    assert response.status_code == (200 if streams else 500)
    (root,) = traced.spans()
    assert attributes(root)["error.type"] == COORDINATOR_LOST
    assert root.status.status_code is StatusCode.ERROR
    (line,) = [record for record in caplog.records if record.name == "deploy.openai.failures"]
    request_id = attributes(root)["drafthouse.request_id"]
    after = " after 2 tokens" if streams else ""
    assert line.getMessage() == (
        f"request {request_id} of key mine failed with {COORDINATOR_LOST}{after}: "
        "the group that had it was lost"
    )
    assert line.levelno == logging.WARNING


def test_strangers_do_not_decide_what_is_traced() -> None:
    traced = Traced(ScriptedService(), ratio=0.0, keys=(KEY,))
    for authorization in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}):
        response = traced.post({"prompt": "a"}, traceparent=PARENT, **authorization)
        assert response.status_code == 401
        assert response.headers[TRACE_ID_HEADER] not in {PARENT.split("-")[1], "0" * 32}
    assert traced.spans() == []
    assert traced.post({"prompt": "a"}, traceparent=PARENT, authorization="Bearer right").status_code == 200
    assert [
        attributes(root)["http.response.status_code"] for root in traced.named("POST /v1/completions")
    ] == [200]


def test_no_span_holds_text(engine: AsyncEngine) -> None:
    traced = Traced(engine)
    secret = "xyzzyPLUGH"
    traced.post({"prompt": secret, "user": secret, "max_tokens": 3, "stop": secret}, tracestate=f"a={secret}")
    traced.post({"prompt": "a", "temperature": secret})
    traced.post({}, f"/v1/{secret}")
    texts = [span.to_json() for span in traced.spans()]
    assert len(texts) == 7
    told = [text.replace(json.dumps(f"a={secret}"), "") for text in texts]
    assert not any(secret in json.dumps(json.loads(text)["attributes"]) for text in told)
    assert not any(
        secret in json.dumps([json.loads(text)["events"], json.loads(text)["name"]]) for text in told
    )


def test_rounds_are_told_ever_more_rarely() -> None:
    trace = RoundTrace()
    for index in range(1000):
        times = dict(
            zip(("propose_s", "proposed_s", "verify_s", "verified_s", "committed_s"), range(5), strict=True)
        )
        trace.note(TracedRound(index=index, num_drafted=1, num_committed=2, **times))
    assert [one.index for one in trace.rounds] == [*range(16), 16, 32, 64, 128, 256, 512]
    assert (trace.num_rounds, trace.propose_s, trace.verify_s, trace.commit_s) == (1000, 1000, 1000, 1000)


def test_a_collector_gets_them() -> None:
    """By OTLP over HTTP, as the extra's exporter writes it."""
    received: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        tracing = Tracing.to_collector(
            TracingConfig(endpoint=f"http://127.0.0.1:{server.server_port}/v1/traces", service_name="us")
        )
        tokenizer = HuggingFaceTokenizer(make_tokenizer())
        app = create_app(ScriptedService(), DoorSettings(), tokenizer, tracing=tracing)
        with live_server(app) as url:
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200
        tracing.close()
        server.shutdown()
        thread.join()
    assert {path for path, _ in received} == {"/v1/traces"}
    sent = b"".join(
        content if content[:2] != b"\x1f\x8b" else gzip.decompress(content) for _, content in received
    )
    assert b"POST /v1/completions" in sent
    assert b"service.name" in sent


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"http\.tracing: needs more packages: .*-e '\.\[tracing\]'"):
        require_exporter()


def test_the_access_log_has_routes_and_ids(caplog: pytest.LogCaptureFixture) -> None:
    traced = Traced(ScriptedService())
    with caplog.at_level(logging.INFO, "deploy.openai.access_log"):
        response = traced.post({"prompt": "abc"})
        traced.post({}, "/v1/secret-path")
        traced.post({}, "/health")
    first, second = [record for record in caplog.records if record.name == "deploy.openai.access_log"]
    assert first.getMessage().startswith("POST /v1/completions 200 in ")
    assert response.json()["id"] in first.getMessage()
    assert first.fields["seconds"] > 0  # type: ignore[attr-defined]
    assert second.getMessage().startswith("POST other 404 in ")


def test_under_a_prefix_the_same_is_traced_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Ray Serve's `route_prefix`: the path is whole, and `root_path` says what of it is the prefix."""
    traced = Traced(ScriptedService())
    with caplog.at_level(logging.INFO, "deploy.openai.access_log"):
        response = traced.post({"prompt": "abc"}, "/llm/v1/completions", "/llm")
        assert traced.post({}, "/llm/health", "/llm").status_code == 405
        assert traced.post({}, "/v1/health", "/v1").status_code == 405
    assert response.status_code == 200
    (root,) = traced.named("POST /v1/completions")
    assert response.headers[TRACE_ID_HEADER] == format(root.get_span_context().trace_id, "032x")
    (logged,) = [record for record in caplog.records if record.name == "deploy.openai.access_log"]
    assert logged.getMessage().startswith("POST /v1/completions 200 in ")
