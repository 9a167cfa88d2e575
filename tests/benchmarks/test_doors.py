"""What the benchmark of proxies counts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest

from benchmarks.doors import Turn, headlines, one_after_the_other
from benchmarks.overload import Streams

STREAMS = Streams(
    num_streams=10, num_bytes=100, num_lost_bytes=0, num_complete=10, errors={}, most_at_once=10, seconds=5.0
)
TURN = Turn(
    proxy="python",
    milliseconds={"requests": {"p50": 4.0, "p99": 9.0}},
    streams=STREAMS,
    cpu_s={"proxy": 2.0, "door": 3.0},
)


def test_what_is_sent_first_is_not_counted() -> None:
    statuses: list[int] = []

    async def send() -> httpx.Response:
        statuses.append(200)
        await asyncio.sleep(0.05 if len(statuses) <= 2 else 0.0)
        return httpx.Response(200, request=httpx.Request("GET", "http://x"))

    taken = asyncio.run(one_after_the_other(20, send))
    assert len(statuses) == 22
    assert 0.0 < taken["p50"] <= taken["p99"] < 50.0


def test_a_refusal_is_no_measurement() -> None:
    async def send() -> httpx.Response:
        return httpx.Response(503, request=httpx.Request("GET", "http://x"))

    with pytest.raises(httpx.HTTPStatusError):
        asyncio.run(one_after_the_other(10, send))


def test_each_proxy_has_its_medians() -> None:
    slower = replace(TURN, milliseconds={"requests": {"p50": 6.0, "p99": 9.0}})
    lossy = replace(TURN, proxy="haproxy", streams=replace(STREAMS, num_lost_bytes=3, seconds=2.0))
    numbers = headlines([TURN, slower, lossy])
    assert numbers["python_requests_p50_ms"] == 5.0
    assert numbers["python_streams_per_s"] == 2.0
    assert numbers["haproxy_streams_per_s"] == 5.0
    assert (numbers["python_lost_bytes"], numbers["haproxy_lost_bytes"]) == (0.0, 3.0)
    assert numbers["haproxy_streams_proxy_cpu_s"] == 2.0
