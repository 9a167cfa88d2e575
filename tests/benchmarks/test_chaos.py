"""What the chaos benchmark draws, reads and counts; the cluster itself is not started here."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Self, cast

import httpx
import psutil
import pytest
import typer

from benchmarks import chaos
from benchmarks.chaos import (
    FULL,
    QUICK,
    Fault,
    Load,
    NotRepaired,
    Plan,
    Record,
    Stream,
    Trouble,
    draw_faults,
    draw_requests,
    p95,
    summary_of,
)
from benchmarks.chaos_cluster import ChaosCluster, NoVictim, _end, _stop
from benchmarks.kept_cells import KeptCells
from benchmarks.reconnecting import Reading, read_stream
from benchmarks.report import to_plain

KINDS = ("kill_a", "kill_b", "hang_c")


def test_every_kind_of_fault_comes_as_often_in_an_order_of_the_seed() -> None:
    drawn = draw_faults(KINDS, 20, seed=1)
    assert set(Counter(drawn).values()) == {6, 7}
    assert drawn == draw_faults(KINDS, 20, seed=1) != draw_faults(KINDS, 20, seed=2)


def test_the_plans_promise_what_they_say() -> None:
    assert (FULL.num_faults, QUICK.num_faults) == (200, 20)
    harm = ("kill_", "hang_", "slow_", "cut_", "starve_", "fill_")
    kinds = [name for name in vars(ChaosCluster) if name.startswith(harm)]
    assert len(kinds) == 14
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


@pytest.mark.parametrize("rest", [0.0, 0.5, 1000.0])
def test_clients_rest_between_streams(monkeypatch: pytest.MonkeyPatch, rest: float) -> None:
    rested: list[float] = []

    async def read(*_: object, reading: Reading, **__: object) -> Reading:
        await asyncio.sleep(0.01)
        reading.token_ids, reading.is_complete, reading.finish_reason = [7], True, "length"
        return reading

    class Clock:
        @staticmethod
        async def sleep(seconds: float) -> None:
            rested.append(seconds)
            if len(rested) == 4:
                load.end()

    monkeypatch.setattr(chaos, "read_stream", read)
    load = Load("http://nowhere", [{}, {}], [[7], [8]], patience_s=1.0, rest=rest)
    monkeypatch.setattr(chaos, "asyncio", Clock)
    asyncio.run(load._client(cast("httpx.AsyncClient", None)))
    assert [stream.is_wrong for stream in load.streams] == [False, True, False, True]
    assert rested == [min(rest * stream.seconds, 3.0) for stream in load.streams]


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


class Victims:
    """What `Trouble` needs of a cluster: the first looks find nobody, and what is harmed stays broken."""

    def __init__(self, *, num_absent: int, heals: bool) -> None:
        self._num_absent = num_absent
        self._heals = heals
        self.harmed: list[float] = []
        self.num_given_up = 0

    def faults(self) -> dict[str, Callable[[Random], None]]:
        return {"kill_a": self._kill}

    def _kill(self, random: Random) -> None:
        if self._num_absent:
            self._num_absent -= 1
            raise NoVictim
        self.harmed.append(random.random())

    def is_whole(self) -> bool:
        return self._heals and not self.num_given_up

    def start_ended_nodes(self) -> int:
        number, self.num_given_up = self.num_given_up, 0
        return number


@pytest.fixture
def quick_plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(chaos, "_POLL_S", 0.001)
    return replace(QUICK, longest_rest_s=0.0, recovery_limit_s=0.02)


def trouble_with(plan: Plan, **victims: Any) -> tuple[Trouble, Victims]:
    cluster = Victims(**victims)
    return Trouble(cast("ChaosCluster", cluster), plan, started_s=0.0), cluster


def test_harm_waits_for_a_victim_and_is_the_same_in_every_part_of_a_run(quick_plan: Plan) -> None:
    trouble, victims = trouble_with(replace(quick_plan, recovery_limit_s=30.0), num_absent=3, heals=True)
    fault = trouble.happen("kill_a", 7)
    assert fault.recovery_s is not None
    trouble.happen("kill_a", 7)
    trouble.happen("kill_a", 8)
    first, again, other = victims.harmed
    assert first == again != other


def test_where_nobody_is_left_to_be_harmed_the_run_ends(quick_plan: Plan) -> None:
    trouble, _ = trouble_with(quick_plan, num_absent=1 << 30, heals=True)
    with pytest.raises(NotRepaired, match="kill_a: nobody is there"):
        trouble.happen("kill_a", 0)


def test_what_does_not_recover_is_not_waited_for_without_end(quick_plan: Plan) -> None:
    trouble, _ = trouble_with(quick_plan, num_absent=0, heals=False)
    assert trouble.happen("kill_a", 0).recovery_s is None


def test_nodes_that_have_been_given_up_are_started_again(
    quick_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "_SUPERVISION_S", 0.0)
    trouble, victims = trouble_with(replace(quick_plan, recovery_limit_s=30.0), num_absent=0, heals=True)
    victims.num_given_up = 1
    fault = trouble.happen("kill_a", 0)
    assert fault.recovery_s is not None
    assert (fault.num_nodes_given_up, trouble.happen("kill_a", 1).num_nodes_given_up) == (1, 0)


def test_a_victim_is_not_there_any_more_when_harm_is_done() -> None:
    """Else a look just then finds everything whole, and a recovery of no time."""
    child = subprocess.Popen(["sleep", "60"])
    victim = psutil.Process(child.pid)
    _stop(victim)
    assert victim.status() == psutil.STATUS_STOPPED
    _end(victim)
    assert victim.status() == psutil.STATUS_ZOMBIE
    child.wait()


def a_stream(request: int, *, is_lost: bool = False) -> Stream:
    return Stream(
        request=request,
        began_s=0.0,
        seconds=1.0,
        is_lost=is_lost,
        is_wrong=False,
        num_breaks=1,
        num_error_events=0,
        longest_pause_s=0.5,
        refusal="no" if is_lost else None,
    )


def test_a_run_that_was_cut_goes_on_with_all_that_it_had(tmp_path: Path) -> None:
    file = tmp_path / "chaos.json"
    faults = [Fault(kind="kill_a", at_s=float(n), recovery_s=None if n == 1 else 2.0) for n in range(3)]
    record = Record(KeptCells(file, to_plain(QUICK), resume=False), QUICK)
    record.keep_fault(faults[0], [a_stream(0), a_stream(1, is_lost=True)])
    record.keep_fault(faults[1], [])
    record.keep_rest([a_stream(2)])
    record = Record(KeptCells(file, to_plain(QUICK), resume=True), QUICK)
    assert record.num_faults == 2
    record.keep_fault(faults[2], [a_stream(3)])
    record.keep_rest([a_stream(4)])
    assert record.faults() == faults
    assert sorted(stream.request for stream in record.streams()) == [0, 1, 2, 3, 4]
    results = record.results({}, None)
    assert results["headlines"] == {
        "faults": 3,
        "lost": 1,
        "wrong": 0,
        "recovery_p95_s": QUICK.recovery_limit_s,
    }
    assert results["num_broken_connections"] == 5
    assert results["refusals"] == {"no": 1}
    assert sum(part["num_faults"] for part in results["parts"]) == 3
    assert all(part["measured"]["commit"] for part in results["parts"])


def test_an_interrupted_run_writes_what_has_happened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "chaos.json"

    class Cluster(ChaosCluster):
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def torment(cluster: object, load: object, plan: Plan, record: Record, tick: object) -> None:
        record.keep_fault(Fault(kind="kill_a", at_s=1.0, recovery_s=2.0), [a_stream(record.num_faults)])
        raise KeyboardInterrupt

    monkeypatch.setattr(chaos, "ChaosCluster", Cluster)
    monkeypatch.setattr(chaos, "tokens_alone", lambda *_: [])
    monkeypatch.setattr(chaos, "torment", torment)
    for number in (1, 2):
        with pytest.raises(typer.Exit):
            chaos.main(quick=True, json=file, resume=number > 1, patience=1.0, family=Path("models/demo"))
        results = json.loads(file.read_text())
        assert results["stopped_by"] == "interrupted"
        assert (results["headlines"]["faults"], results["num_streams"]) == (number, number)


def test_a_run_without_any_fault_yet_has_results(tmp_path: Path) -> None:
    record = Record(KeptCells(None, to_plain(QUICK), resume=False), QUICK)
    assert record.results({}, "cut")["headlines"]["faults"] == 0


def test_results_name_models_not_where_they_lay() -> None:
    config: dict[str, Any] = {"target": {"model": "/some/where/target", "dtype": "float32"}}
    config["cache"] = {"block_size": 16}
    config["speculative_config"] = {"model": "/some/where/draft", "method": "draft_model"}
    named = chaos.named_models(config)
    assert "/some/where" not in json.dumps(named)
    assert named["target"] == {"model": "target", "dtype": "float32"}
    assert named["cache"] == config["cache"]
