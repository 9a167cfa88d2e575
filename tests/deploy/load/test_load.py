"""The load generator against a server whose delays are known exactly, under a virtual clock."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import statistics
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.load.arrivals import Arrival, RandomArrivals, length_of, read_trace, take
from deploy.load.generator import LoadGenerator, Timeline
from deploy.load.plot import draw
from deploy.load.report import (
    csv_of,
    gaps_s,
    is_good,
    latency_of,
    objectives_of,
    report_of,
)
from deploy.load.workload import PATHS, Endpoint, PlannedRequest, Workload
from specdec.core.errors import ConfigError
from tests.deploy.load.virtual import run_virtually


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(content: str = "x") -> bytes:
    return event({"choices": [{"index": 0, "text": content}]})


def usage(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


DONE = event(b"[DONE]")


@dataclass
class Script(httpx.AsyncByteStream):
    """Pieces of a body, each after its delay."""

    pieces: Sequence[tuple[float, bytes | Exception]]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay_s, piece in self.pieces:
            await asyncio.sleep(delay_s)
            if isinstance(piece, Exception):
                raise piece
            yield piece


class SlowServer(httpx.AsyncBaseTransport):
    """Answers request i with script i, its head after a delay."""

    def __init__(self, *scripts: Any, head_s: float = 0.0) -> None:
        self.scripts = scripts
        self.head_s = head_s
        self.bodies: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        number = len(self.bodies)
        self.bodies.append(json.loads(request.content))
        await asyncio.sleep(self.head_s)
        script = self.scripts[min(number, len(self.scripts) - 1)]
        if isinstance(script, Exception):
            raise script
        if isinstance(script, httpx.Response):
            return script
        return httpx.Response(200, stream=Script(script))


def run(server: SlowServer, times_s: Sequence[float]) -> list[Timeline]:
    planned = [PlannedRequest(at_s=at_s, body={"number": index}) for index, at_s in enumerate(times_s)]

    async def go() -> list[Timeline]:
        async with httpx.AsyncClient(transport=server, base_url="http://server") as client:
            ended: list[Timeline] = []
            timelines = await LoadGenerator(client, "/v1/completions").run(planned, ended.append)
            assert len(ended) == len(timelines)
            return timelines

    return run_virtually(go())


GOOD = ((0.5, text()), (0.25, text("yz")), (0.25, text()), (0.0, usage(7, 5)), (0.5, DONE))


def test_every_delay_is_measured_as_it_is() -> None:
    (timeline,) = run(SlowServer(GOOD, head_s=1.0), [2.0])
    assert (timeline.due_s, timeline.sent_s) == (2.0, 2.0)
    assert timeline.deliveries_s == [3.5, 3.75, 4.0]
    assert timeline.ended_s == 4.5
    assert (timeline.num_prompt_tokens, timeline.num_output_tokens) == (7, 5)
    assert timeline.error is None
    assert latency_of(timeline, "ttft") == 1.5
    assert latency_of(timeline, "itl") == 0.25
    assert gaps_s(timeline) == [0.25, 0.25]
    assert latency_of(timeline, "tpot") == 0.5 / 4
    assert latency_of(timeline, "e2e") == 2.5


def test_the_load_is_open() -> None:
    """The server takes a second for each; four requests a second come all the same."""
    server = SlowServer(((1.0, text()), (0.0, DONE)))
    timelines = run(server, [index / 4 for index in range(20)])
    assert [timeline.sent_s for timeline in timelines] == [index / 4 for index in range(20)]
    assert {latency_of(timeline, "e2e") for timeline in timelines} == {1.0}
    assert [body["number"] for body in server.bodies] == list(range(20))


@pytest.mark.parametrize("after", [(100.0, b""), (0.5, httpx.ReadError("reset"))], ids=["open", "reset"])
def test_what_becomes_of_a_connection_after_the_answer_counts_for_nothing(after: Any) -> None:
    (timeline,) = run(SlowServer((*GOOD, after)), [0.0])
    assert (timeline.error, timeline.ended_s) == (None, 1.5)


def test_what_is_no_text_is_no_delivery() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    said = event({"choices": [{"index": 0, "delta": {"content": "x"}}]})
    end = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": None})
    script = ((1.0, b": a comment\n\n"), (1.0, b"id: 7\n" + role), (1.0, said), (1.0, end), (0.0, DONE))
    (timeline,) = run(SlowServer(script), [0.0])
    assert timeline.deliveries_s == [3.0]
    assert timeline.num_output_tokens == 1, "deliveries, where the server does not count"
    assert timeline.num_prompt_tokens is None
    assert latency_of(timeline, "tpot") is None
    assert latency_of(timeline, "itl") is None


def test_an_answer_without_text_is_one() -> None:
    end = event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    (timeline,) = run(SlowServer(((1.0, end), (0.0, usage(3, 0)), (0.0, DONE))), [0.0])
    assert timeline.error is None
    assert timeline.num_output_tokens == 0


def test_events_cut_anywhere_are_put_together() -> None:
    whole = text("ü") + usage(3, 1) + DONE
    script = [(0.25, whole[index : index + 1]) for index in range(len(whole))]
    (timeline,) = run(SlowServer(script), [0.0])
    assert timeline.error is None
    assert len(timeline.deliveries_s) == 1
    assert timeline.num_prompt_tokens == 3


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "refusal", "content"])
def test_whatever_the_words_are_called_they_are_a_delivery(name: str) -> None:
    """vLLM has called what a model thinks `reasoning_content`, and calls it `reasoning`."""
    said = event({"choices": [{"index": 0, "delta": {name: "x"}}]})
    end = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    (timeline,) = run(SlowServer(((1.0, said), (1.0, said), (1.0, end), (0.0, DONE))), [0.0])
    assert timeline.deliveries_s == [1.0, 2.0]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_what_unicode_calls_the_end_of_a_line_is_text(character: str) -> None:
    """JSON may hold it as it is, and servers that do not escape what they need not send it so."""
    said = json.dumps({"choices": [{"index": 0, "text": f"a{character}b"}]}, ensure_ascii=False).encode()
    (timeline,) = run(SlowServer(((0.5, event(said)), (0.25, DONE.replace(b"\n", b"\r\n")))), [0.0])
    assert timeline.error is None
    assert timeline.deliveries_s == [0.5]


FAILURES = (
    (httpx.Response(429, json={}), "status 429"),
    (httpx.ConnectError("refused"), "ConnectError"),
    (((0.5, text()),), "incomplete stream"),
    (
        ((0.5, text()), (0.0, event({"error": {"code": "request_failed"}})), (0.0, DONE)),
        "error event request_failed",
    ),
    (((0.5, text()), (0.0, event({"error": "bad"})), (0.0, DONE)), "error event"),
    (((0.5, httpx.ReadError("reset")),), "ReadError"),
    (((0.5, event(b"{nonsense")), (0.0, DONE)), "not JSON"),
    (((0.5, DONE),), "empty stream"),
    (((0.5, usage(3, 0)), (0.0, DONE)), "empty stream"),
    (((0.5, event({"choices": [None]})), (0.0, DONE)), "not an event of OpenAI's API"),
    (((0.5, event({"choices": {"text": "x"}})), (0.0, DONE)), "not an event of OpenAI's API"),
    (((0.5, event({"choices": [{"delta": "x"}]})), (0.0, DONE)), "not an event of OpenAI's API"),
    (((0.5, event({"usage": {"completion_tokens": "5"}})), (0.0, DONE)), "not an event of OpenAI's API"),
    (((0.5, text()), (0.0, event({"usage": 5})), (0.0, DONE)), "not an event of OpenAI's API"),
)  # fmt: skip


@pytest.mark.parametrize(("answer", "error"), FAILURES)
def test_failures_are_told_apart_and_end_nothing_else(answer: Any, error: str) -> None:
    timelines = run(SlowServer(answer, GOOD), [0.0, 1.0])
    assert [timeline.error for timeline in timelines] == [error, None]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.Response(400, json={"error": {"message": "no such\n model", "code": "c"}}), "no such model"),
        (httpx.Response(400, json={"error": "bad"}), "bad"),
        (httpx.Response(502, text="<h1>Bad  gateway</h1>"), "<h1>Bad gateway</h1>"),
        (httpx.Response(502, text="x" * 10**6), "x" * 197 + "..."),
        (httpx.Response(400, json={"detail": "?"}), None),
        (httpx.Response(503), None),
        (httpx.Response(503, headers={"content-encoding": "gzip"}, stream=Script(((0.0, b"no"),))), None),
        (httpx.Response(503, stream=Script(((0.1, httpx.ReadError("reset")),))), None),
        (((0.5, event({"error": {"code": "c", "message": "lost"}})), (0.0, DONE)), "lost"),
    ],
)
def test_what_the_server_says_of_a_failure_is_told(answer: Any, reason: str | None) -> None:
    timelines = run(SlowServer(GOOD, answer, httpx.Response(418, text="other")), [0.0, 1.0, 2.0])
    report = report_of(timelines, {})
    (first, *_) = (timeline.error for timeline in timelines if timeline.error is not None)
    assert report.reasons == {"status 418": "other"} | ({} if reason is None else {first: reason})


def test_the_report_is_what_one_works_out_by_hand() -> None:
    # Ten requests, one a second; number i has its first text after i + 1 tenths, and ends a second later.
    scripts = [
        (((index + 1) / 10, text()), (1.0, text()), (0.0, usage(10, 3)), (0.0, DONE)) for index in range(9)
    ]
    server = SlowServer(*scripts, httpx.Response(503))
    timelines = run(server, [float(index) for index in range(10)])
    report = report_of(timelines, objectives_of(["ttft=0.45", "tpot=0.5"]))
    assert (report.num_requests, report.num_completed) == (10, 9)
    assert report.errors == {"status 503": 1}
    assert report.duration_s == pytest.approx(9.9)
    assert report.offered_per_s == pytest.approx(10 / 9)
    assert report.completed_per_s == pytest.approx(9 / 9.9)
    assert (report.num_prompt_tokens, report.num_output_tokens) == (90, 27)
    assert report.output_tokens_per_s == pytest.approx(27 / 9.9)
    ttft = report.latencies["ttft"]
    assert (ttft.number, ttft.mean, ttft.max) == (9, pytest.approx(0.5), pytest.approx(0.9))
    # Position 0.9 * 8 = 7.2 of 0.1 .. 0.9, and so on.
    assert ttft.percentiles == {
        50: pytest.approx(0.5),
        90: pytest.approx(0.82),
        95: pytest.approx(0.86),
        99: pytest.approx(0.892),
    }
    assert report.latencies["tpot"].percentiles[50] == pytest.approx(0.5)
    assert report.latencies["itl"].number == 9
    assert report.latencies["e2e"].max == pytest.approx(1.9)
    # Rounding may put a tpot of 0.5 on either side: see the next test for the objectives.
    generous = report_of(timelines, objectives_of(["ttft=0.45", "tpot=0.6"]))
    assert generous.num_good == 4
    assert generous.goodput_per_s == pytest.approx(4 / 9.9)
    assert generous.good_share == pytest.approx(0.4)
    assert report_of(timelines, {}).num_good == 9, "without objectives: all that are complete"


def timeline(*deliveries_s: float, tokens: int, ended_s: float, **fields: Any) -> Timeline:
    return Timeline(
        due_s=1.0,
        sent_s=1.5,
        deliveries_s=list(deliveries_s),
        num_output_tokens=tokens,
        ended_s=ended_s,
        **fields,
    )


@pytest.mark.parametrize(
    ("objective", "is_met"),
    [
        ("ttft=1.0", True),
        ("ttft=0.999", False),
        ("tpot=0.5", True),
        ("tpot=0.499", False),
        ("itl=1.5", True),
        ("itl=1.499", False),
        ("e2e=4.0", True),
        ("e2e=3.999", False),
    ],
)
def test_objectives(objective: str, is_met: bool) -> None:
    one = timeline(2.0, 2.5, 4.0, tokens=5, ended_s=5.0)
    assert is_good(one, objectives_of([objective])) == is_met
    failed = timeline(2.0, tokens=5, ended_s=2.0, error="status 429")
    assert not is_good(failed, {})
    single = timeline(2.0, tokens=1, ended_s=2.0)
    assert is_good(single, objectives_of(["tpot=0.001", "itl=0.001"])), "it has neither"


def test_being_late_counts_as_latency() -> None:
    report = report_of([timeline(2.0, tokens=1, ended_s=2.0)], {})
    assert report.max_lateness_s == 0.5
    assert report.latencies["ttft"].mean == 1.0


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=0", "ttft=nan", "latency=1", "e2e=inf", "=1"])
def test_objectives_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        objectives_of([text])


def gaps_of(arrivals: RandomArrivals, number: int) -> list[float]:
    times = [arrival.at_s for arrival in take(arrivals, num_requests=number, duration_s=None)]
    return [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("burstiness", [0.0, 0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    gaps = gaps_of(RandomArrivals(rate=5.0, burstiness=burstiness, seed=1), 40_000)
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pvariance(gaps) / 0.2**2 == pytest.approx(burstiness, rel=0.12, abs=1e-9)


def test_poisson_arrivals_are_poisson() -> None:
    """Gaps of a Poisson process are exponential: Kolmogorov-Smirnov, 0.1 % level; bursts are not."""
    from scipy import stats

    poisson = gaps_of(RandomArrivals(rate=2.0, burstiness=1.0, seed=4), 5000)
    assert stats.kstest(poisson, "expon", args=(0, 0.5)).pvalue > 0.001
    bursts = gaps_of(RandomArrivals(rate=2.0, burstiness=2.0, seed=4), 5000)
    assert stats.kstest(bursts, "expon", args=(0, 0.5)).pvalue < 1e-6


def test_arrivals_follow_their_seed_and_end_where_they_should() -> None:
    arrivals = RandomArrivals(rate=10.0, burstiness=1.0, seed=3)
    first = take(arrivals, num_requests=50, duration_s=None)
    assert first == take(arrivals, num_requests=50, duration_s=None)
    assert first != take(RandomArrivals(rate=10.0, burstiness=1.0, seed=4), num_requests=50, duration_s=None)
    until = take(arrivals, num_requests=None, duration_s=3.0)
    assert until == tuple(arrival for arrival in first if arrival.at_s < 3.0)


def test_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text('\ufeff3.5\n\n{"at_s": 1, "prompt_length": 9, "output_length": 4}\n', encoding="utf-8")
    assert read_trace(file, speedup=2.0) == (
        Arrival(at_s=0.5, prompt_length=9, output_length=4),
        Arrival(at_s=1.75),
    )
    workload = Workload(
        endpoint="completions", model="m", prompt_length=length_of("3", ""), output_length=length_of("2", "")
    )
    long, short = workload.plan(read_trace(file))
    assert (len(long.body["prompt"].split()), long.body["max_tokens"]) == (9, 4)
    assert (len(short.body["prompt"].split()), short.body["max_tokens"]) == (3, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x", "neither a number"),
        ("-1", "at_s"),
        ("NaN", "trace:2"),
        ('{"at_s": 1, "size": 2}', "size"),
        ('{"prompt_length": 2}', "at_s"),
        ('{"at_s": 1, "output_length": 0}', "output_length"),
        ("[1]", "at_s"),
    ],
)
def test_a_bad_trace(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(f"1\n{line}\n")
    with pytest.raises(ConfigError, match=message) as error:
        read_trace(file)
    assert f"{file}:2" in str(error.value)


def test_lengths() -> None:
    import random

    def drawn(text: str) -> list[int]:
        generator, length = random.Random(1), length_of(text, "--x")
        return [length(generator) for _ in range(20_000)]

    assert set(drawn("7")) == {7}
    assert set(drawn("3-5")) == {3, 4, 5}
    assert statistics.median(drawn("lognormal:200,0.8")) == pytest.approx(200, rel=0.03)
    assert statistics.mean(drawn("exponential:50")) == pytest.approx(50, rel=0.03)
    assert min(drawn("exponential:1")) == 1
    for wrong in (
        "",
        "0",
        "5-3",
        "a",
        "1.5",
        "lognormal:200",
        "lognormal:0,1",
        "normal:1,2",
        "exponential:x",
    ):
        with pytest.raises(ConfigError, match="--x: must be N"):
            length_of(wrong, "--x")


def test_workloads_are_reproducible_whatever_their_length() -> None:
    def plan(number: int, **fields: Any) -> list[PlannedRequest]:
        lengths = {"prompt_length": length_of("5-50", ""), "output_length": length_of("1-99", "")}
        arrivals = [Arrival(at_s=float(index)) for index in range(number)]
        values: dict[str, Any] = {"endpoint": "completions", "model": "m", **lengths, **fields}
        return Workload(**values).plan(arrivals)

    assert plan(5) == plan(9)[:5]
    assert plan(5, seed=1) != plan(5)
    assert plan(3)[2].body["seed"] == 2
    ids = plan(20, vocab_size=100)
    assert all(16 <= token < 100 for request in ids for token in request.body["prompt"])
    assert len({len(request.body["prompt"]) for request in ids}) > 5
    given = plan(3, prompts=["a", "b"], endpoint="chat", extra={"temperature": 0})
    assert [request.body["messages"][0]["content"] for request in given] == ["a", "b", "a"]
    assert given[0].body["temperature"] == 0
    assert set(PATHS) == {"completions", "chat"}


@pytest.mark.parametrize(
    ("endpoint", "extra", "limits"),
    [
        ("completions", {}, {"max_tokens": 7}),
        ("chat", {}, {"max_completion_tokens": 7}),
        ("completions", {"max_tokens": 3}, {"max_tokens": 3}),
        ("chat", {"max_tokens": 3}, {"max_tokens": 3}),
        ("chat", {"max_completion_tokens": 3}, {"max_completion_tokens": 3}),
    ],
)
def test_an_answer_has_one_bound_in_the_field_of_its_endpoint(
    endpoint: Endpoint, extra: dict[str, int], limits: dict[str, int]
) -> None:
    length = length_of("7", "")
    workload = Workload(endpoint=endpoint, model="m", prompt_length=length, output_length=length, extra=extra)
    (planned,) = workload.plan([Arrival(at_s=0.0)])
    assert {name: value for name, value in planned.body.items() if name.startswith("max")} == limits


def test_csv_and_pictures(tmp_path: Path) -> None:
    timelines = run(SlowServer(GOOD, httpx.Response(429)), [0.0, 1.0])
    objectives = objectives_of(["ttft=0.5"])
    good, failed = csv.DictReader(io.StringIO(csv_of(timelines, objectives)))
    assert (good["ttft_s"], good["e2e_s"], good["num_output_tokens"]) == ("0.500000", "1.500000", "5")
    assert (good["is_good"], good["error"]) == ("1", "")
    assert (failed["is_good"], failed["error"], failed["ttft_s"]) == ("0", "status 429", "")
    for name in ("run.svg", "run.png"):
        draw(timelines, objectives, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    draw(run(SlowServer(httpx.Response(429)), [0.0]), {}, tmp_path / "failures.svg")
    with pytest.raises(ConfigError, match=r"run\.nonsense cannot be written"):
        draw(timelines, {}, tmp_path / "run.nonsense")
