"""What the chaos benchmark draws, reads and counts; the cluster itself is not started here."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from benchmarks.chaos import FULL, QUICK, Fault, Load, draw_faults, draw_requests, p95, summary_of
from benchmarks.chaos_cluster import ChaosCluster
from benchmarks.reconnecting import Reading, read_stream

KINDS = ("kill_a", "kill_b", "hang_c")


def test_every_kind_of_fault_comes_as_often_in_an_order_of_the_seed() -> None:
    drawn = draw_faults(KINDS, 20, seed=1)
    assert set(Counter(drawn).values()) == {6, 7}
    assert drawn == draw_faults(KINDS, 20, seed=1) != draw_faults(KINDS, 20, seed=2)


def test_the_plans_promise_what_they_say() -> None:
    assert (FULL.num_faults, QUICK.num_faults) == (200, 20)
    kinds = [name for name in vars(ChaosCluster) if name.startswith(("kill_", "hang_", "slow_", "cut_"))]
    assert len(kinds) == 9
    assert set(draw_faults(kinds, QUICK.num_faults, QUICK.seed)) == set(kinds)


def test_requests_differ_and_half_of_them_are_greedy() -> None:
    bodies = draw_requests(QUICK, [str(number) * 300 for number in range(9)])
    assert len({json.dumps(body) for body in bodies}) == QUICK.num_requests
    assert Counter(body["temperature"] for body in bodies) == {0.0: 6, 1.0: 6}


def test_recovery_that_did_not_come_counts_with_the_limit() -> None:
    faults = [Fault(kind=kind, at_s=0.0, recovery_s=s) for kind, s in (("a", 1.0), ("a", None), ("b", 4.0))]
    assert summary_of(faults, 60.0) == {
        "a": {"number": 2, "median_s": 30.5, "max_s": 60.0},
        "b": {"number": 1, "median_s": 4.0, "max_s": 4.0},
    }
    assert p95([float(number) for number in range(1, 21)]) == 19.0
    assert p95([3.0]) == 3.0


class Script:
    """An endpoint that breaks connections, refuses and fails by a script, and remembers what it was asked."""

    def __init__(self, *answers: tuple[int, list[str]]) -> None:
        self._answers = list(answers)
        self.asked: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.headers.get("Last-Event-ID"))
        status, events = self._answers.pop(0)
        if status != 200:
            return httpx.Response(status, json={"error": {"message": "no"}})

        async def content() -> AsyncIterator[bytes]:
            for event in events:
                if event == "broken":
                    raise httpx.ReadError("broken")
                yield event.encode()

        return httpx.Response(200, content=content())

    def read(self, patience_s: float = 30.0) -> Reading:
        async def run() -> Reading:
            async with httpx.AsyncClient(transport=httpx.MockTransport(self), base_url="http://x") as client:
                return await read_stream(client, "/v1", {}, patience_s=patience_s, reading=Reading())

        return asyncio.run(run())


def event(number: int, finish: str | None = None) -> str:
    choice = {"text": chr(64 + number), "token_ids": [number], "finish_reason": finish}
    return f"id: r:{number}\ndata: {json.dumps({'choices': [choice]})}\n\n"


ERROR = f"id: r:2\ndata: {json.dumps({'error': {'message': 'no'}})}\n\n"
DONE = "data: [DONE]\n\n"


def test_a_reader_goes_on_behind_the_last_whole_event() -> None:
    half = event(3)[:-9]
    script = Script(
        (503, []),
        (200, [event(1), event(2), half, "broken"]),
        (429, []),
        (200, [event(3)]),  # ends without a word
        (200, [ERROR]),
        (200, [event(4, "length"), DONE]),
    )
    reading = script.read()
    assert script.asked == [None, None, "r:2", "r:2", "r:3", "r:3"]
    assert (reading.text, reading.token_ids) == ("ABCD", [1, 2, 3, 4])
    assert (reading.is_complete, reading.finish_reason) == (True, "length")
    assert (reading.num_breaks, reading.num_error_events) == (2, 1)


def test_a_reader_gives_up_when_it_is_refused_or_out_of_patience() -> None:
    refused = Script((200, [event(1), "broken"]), (410, [])).read()
    assert refused.refusal is not None
    assert refused.refusal.startswith("410")
    assert not refused.is_complete
    bored = Script(*[(503, [])] * 50).read(patience_s=0.3)
    assert bored.refusal == "no event for 0.3 s"


@pytest.mark.parametrize(
    ("tokens", "finish", "is_complete", "is_wrong"),
    [
        ([1, 2, 3], "length", True, False),
        ([1, 2, 4], "length", True, True),
        ([1, 2], "length", True, True),
        ([1, 2, 2, 3], "length", True, True),
        ([1, 2, 3], "stop", True, True),
        ([1, 2], None, False, False),
        ([2], None, False, True),
    ],
)
def test_a_stream_is_wrong_if_anything_is_twice_or_missing_or_else(
    tokens: list[int], finish: str | None, is_complete: bool, is_wrong: bool
) -> None:
    reading = Reading(token_ids=tokens, finish_reason=finish, is_complete=is_complete)
    assert Load._is_wrong(reading, [1, 2, 3]) is is_wrong


def test_the_deployment_of_a_plan_is_a_valid_one() -> None:
    for plan in (FULL, QUICK):
        config = ChaosCluster(plan.shape, Path("models/demo")).config
        assert config.http.num_replicas == 2
        assert config.target.tensor_parallel_size == plan.shape.tensor_parallel_size
