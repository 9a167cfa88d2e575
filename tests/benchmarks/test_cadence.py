"""The arithmetic of streaming: gaps, percentiles, fairness, arrivals."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator

import httpx
import pytest

from benchmarks.cadence import (
    Cadence,
    Timeline,
    arrival_times,
    cadence_of,
    jain,
    percentile,
)
from benchmarks.streaming import Ask, HttpSource, draw_requests, drive, headlines, tokens_until
from tests.deploy.openai.fakes import PIECES, Door, ScriptedService


def stream(sent_s: float, *events: tuple[float, int]) -> Timeline:
    return Timeline(sent_s=sent_s, events=events)


def test_a_stream_as_its_reader_sees_it() -> None:
    one = stream(1.0, (1.5, 1), (1.7, 3), (2.1, 1))
    assert one.first_token_s == 0.5
    assert one.gaps_s == pytest.approx((0.2, 0.4))
    assert one.num_tokens == 5
    assert one.time_per_token_s == pytest.approx(0.6 / 4)
    assert stream(0.0, (1.0, 7)).time_per_token_s is None


def test_many_streams() -> None:
    even = [stream(0.0, *((1.0 + step, 1) for step in range(11))) for _ in range(9)]
    fast = stream(0.0, (2.0, 1), (4.0, 40))
    cadence = cadence_of([*even, fast])
    assert cadence.num_streams == 10
    assert cadence.ttft_ms == {50: 1000.0, 95: 2000.0, 99: 2000.0}
    assert cadence.itl_ms == {50: 1000.0, 95: 1000.0, 99: 2000.0}
    assert cadence.longest_gap_ms[99] == 2000.0
    assert cadence.tpot_ms == {50: 1000.0, 95: 1000.0, 99: 1000.0}
    assert cadence.slow_tenth_tpot_ms == 1000.0
    assert cadence.tokens_per_event == (9 * 11 + 41) / (9 * 11 + 2)
    assert cadence.tokens_per_s == (9 * 11 + 41) / 11
    assert cadence.fairness == pytest.approx(9.05**2 / (10 * (9 + 0.05**2)))


def test_streams_of_one_event_have_no_gaps() -> None:
    cadence = cadence_of([stream(0.0, (0.25, 1))])
    assert (cadence.ttft_ms[50], cadence.itl_ms[99], cadence.fairness) == (250.0, 0.0, 1.0)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 1, 50, 95, 99, 100)] == [1, 1, 50, 95, 99, 100]
    assert percentile([7.0], 99) == 7.0


def test_fairness() -> None:
    assert jain([]) == 1.0
    assert jain([3.0] * 5) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_arrivals_are_independent_and_repeatable() -> None:
    times = arrival_times(4000, 20.0, seed=1)
    assert times == arrival_times(4000, 20.0, seed=1)
    assert times != arrival_times(4000, 20.0, seed=2)
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert statistics.mean(gaps) == pytest.approx(0.05, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.1), "as exponential gaps have it"


def test_requests_have_prompts_of_their_own() -> None:
    asks = draw_requests(range(10_000), 200, seed=3)
    assert asks == draw_requests(range(10_000), 200, seed=3)
    assert len({ask.prompt[0] for ask in asks}) == 200
    assert {32 <= len(ask.prompt) <= 192 and 32 <= ask.num_tokens <= 128 for ask in asks} == {True}
    assert {ask.temperature for ask in asks} == {0.0, 1.0}


class Script:
    """Streams two events for every request."""

    async def stream(self, ask: Ask) -> AsyncIterator[int]:
        yield 1
        yield 0  # an event without tokens: its end, say
        yield ask.num_tokens - 1


def test_every_request_is_sent_and_read() -> None:
    asks = draw_requests(range(1000), 5, seed=1)
    ticks: list[None] = []
    timelines = asyncio.run(drive(Script(), asks, [0.0] * 5, lambda: ticks.append(None)))
    assert len(ticks) == 5
    assert [one.num_tokens for one in timelines] == [ask.num_tokens for ask in asks]
    assert {len(one.events) for one in timelines} == {2}


def test_headlines_are_of_the_highest_load() -> None:
    def cadence(scale: float) -> Cadence:
        return cadence_of([stream(0.0, *((scale * (1 + step), 1) for step in range(5)))])

    cells = [
        {"load": 0.8, "plain": cadence(0.2), "speculative": cadence(0.1)},
        {"load": 0.5, "plain": cadence(9.0), "speculative": cadence(9.0)},
    ]
    numbers = headlines({"cells": cells})
    assert numbers["itl_p99_ms"] == pytest.approx(100.0)
    assert numbers["ttft_p50_ms_plain"] == pytest.approx(200.0)
    assert numbers["slow_streams_cost"] == pytest.approx(0.5)
    assert {"itl_p50_ms", "itl_p95_ms", "ttft_p95_ms", "ttft_p99_ms", "fairness"} <= numbers.keys()


def test_a_server_is_read_by_its_event_ids() -> None:
    door = Door()
    asks = [
        Ask(name="a", prompt=(5, 6), num_tokens=9, temperature=1.0, seed=4, k=3, salt="s"),
        Ask(name="b", prompt=(7,), num_tokens=8, temperature=0.0, seed=4, k=0, salt="s"),
    ]

    async def run() -> list[Timeline]:
        transport = httpx.ASGITransport(door.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            return await drive(HttpSource(client), asks, [0.0, 0.0], lambda: None)

    assert [one.num_tokens for one in asyncio.run(run())] == [len(PIECES)] * 2
    for ask, request in zip(asks, door.service.requests, strict=True):
        assert request.prompt_token_ids == ask.prompt
        assert (request.params.max_tokens, request.params.temperature) == (ask.num_tokens, ask.temperature)
        assert (request.num_draft_tokens, request.cache_salt, request.params.ignore_eos) == (ask.k, "s", True)


def test_lines_of_a_stream() -> None:
    response = b"id: cmpl-" + 32 * b"0"
    lines = [response + b":3:0:1234abcd.5", b'data: {"id": "error"}', b"", response + b":5f:0:1234abcd.6"]
    lines += [b"", response + b":end:1:1234abcd", b"data: [DONE]"]
    assert tokens_until(lines, 1) == 5
    assert tokens_until([b"data: [DONE]"], 4) == 4
    with pytest.raises(RuntimeError, match="gone"):
        tokens_until([b'data: {"error":{"message":"gone"}}'], 4)


def test_a_server_that_fails_fails_the_benchmark() -> None:
    door = Door(ScriptedService(fail_after=2))
    ask = Ask(name="a", prompt=(5, 6), num_tokens=9, temperature=1.0, seed=4, k=3, salt="s")

    async def run() -> None:
        transport = httpx.ASGITransport(door.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
            await drive(HttpSource(client), [ask], [0.0], lambda: None)

    with pytest.raises(RuntimeError, match="error"):
        asyncio.run(run())
