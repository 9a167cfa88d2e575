"""What the overload benchmark counts."""

from __future__ import annotations

import asyncio
import dataclasses
import resource
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import typer
from rich.progress import Progress

from benchmarks import overload
from benchmarks.kept_cells import KeptCells
from benchmarks.overload import (
    Load,
    Overload,
    Plan,
    Streams,
    allow_open_files,
    headlines,
    measure_overload,
    measure_streams,
    most_at_once,
    num_lost,
    summed_up,
)
from benchmarks.report import to_plain
from deploy.load.generator import Timeline
from deploy.openai.settings import DoorSettings
from tests.deploy.openai.fakes import Door, ScriptedService
from tests.deploy.openai.live import live_server


def timeline(
    due_s: float, *, ttft_s: float = 0.1, apart_s: float = 0.01, error: str | None = None
) -> Timeline:
    deliveries = [due_s + ttft_s + apart_s * index for index in range(10)]
    return Timeline(
        due_s=due_s,
        sent_s=due_s,
        deliveries_s=deliveries,
        ended_s=deliveries[-1],
        num_output_tokens=10,
        error=error,
    )


def test_a_byte_is_lost_if_it_is_not_where_it_should_be() -> None:
    assert num_lost("abc", "abc") == 0
    assert num_lost("ab", "abc") == 1
    assert num_lost("abcd", "abc") == 1
    assert num_lost("axc", "abc") == 1
    assert num_lost("bc", "abc") == 3
    assert num_lost("", "ü") == 2


def test_how_many_there_were_at_once() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0.0, 1), (1.0, -1), (1.0, 1), (2.0, -1)]) == 1
    assert most_at_once([(0.0, 1), (0.5, 1), (1.0, -1), (2.0, -1)]) == 2


def test_goodput_is_of_good_requests_behind_the_ramp() -> None:
    timelines = [
        timeline(1.0),  # in the ramp
        timeline(10.0),
        timeline(12.0),
        timeline(13.0, ttft_s=2.0),  # late
        timeline(14.0, apart_s=0.5),  # slow
        timeline(15.0, error="status 429"),
        timeline(19.99),  # ends when nothing is sent any more
    ]
    load = summed_up(
        timelines,
        {"ttft": 1.0, "tpot": 0.1},
        share=5.0,
        turn=0,
        rate=0.35,
        duration_s=20.0,
        refused={},
        stolen=0.0,
    )
    assert load.outcomes == {"good": 4, "late": 2, "status 429": 1}
    assert load.goodput_per_s == pytest.approx(20 / 15)


def test_overload_is_compared_with_the_best_load() -> None:
    def load(share: float, goodput: float, turn: int = 0) -> Load:
        return Load(
            share=share,
            turn=turn,
            requests_per_s=1.0,
            num_requests=1,
            outcomes={},
            goodput_per_s=goodput,
            ttft_p50_s=0.0,
            ttft_p99_s=0.0,
            max_lateness_s=0.0,
            refused={},
            stolen=0.0,
        )

    streams = Streams(
        num_streams=2, num_bytes=9, num_lost_bytes=3, num_complete=2, errors={}, most_at_once=2, seconds=1.0
    )
    assert headlines([load(0.8, 90.0), load(1.1, 100.0), load(5.0, 95.0)], streams) == {
        "goodput_at_5x_vs_peak": 0.95,
        "streams_1000_lost_bytes": 3.0,
    }
    apart = dataclasses.replace(streams, most_at_once=1)
    assert headlines([load(0.8, 100.0), load(5.0, 95.0)], apart) == {"goodput_at_5x_vs_peak": 0.95}
    assert headlines([load(0.8, 100.0), load(5.0, 95.0)], None) == {"goodput_at_5x_vs_peak": 0.95}
    lucky_once = [load(1.1, 130.0), load(5.0, 95.0), load(5.0, 105.0, turn=1), load(1.1, 70.0, turn=1)]
    assert headlines(lucky_once, None) == {"goodput_at_5x_vs_peak": 1.0}


TINY = Plan(
    loads=(0.5, 1.5),
    duration_s=0.4,
    num_turns=2,
    warm_up_s=0.1,
    num_streams=30,
    num_stream_tokens=5,
    num_places=2,
    num_tokens=5,
)
PROMPTS = ["def f(x):", "return x", "pass"]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Have benchmarks ask a scripted service over HTTP; return which servers they have started."""
    started: list[str] = []
    door = Door(ScriptedService(), DoorSettings(served_model_name="demo"))
    with live_server(door.app) as url:

        @contextmanager
        def serving(config: Mapping[str, Any], cores: Sequence[int] | None) -> Iterator[Any]:
            started.append("one for loads" if "speculative_config" in config else "one for streams")
            yield SimpleNamespace(url=url, wait_healthy=lambda: None)

        def wait_compiled(_: str, timeout_s: float, parts: Set[str] = frozenset({"target", "draft"})) -> None:
            assert timeout_s > 0
            started[-1] += f", compiled: {', '.join(sorted(parts))}"

        monkeypatch.setattr(overload, "serving", serving)
        monkeypatch.setattr(overload, "wait_compiled", wait_compiled)
        yield started


@pytest.mark.parametrize(
    ("stolen", "num_tries", "kept"),
    [([0.01], 1, 0.01), ([0.2, 0.04], 2, 0.04), ([0.3, 0.2, 0.06, 0.09, 0.0], 4, 0.06)],
)
def test_what_others_have_disturbed_is_sent_again(
    stolen: list[float], num_tries: int, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dataclasses.replace(TINY, most_tries=4)
    left = iter(stolen)

    async def once(self: Overload, *_: float) -> Load:
        return summed_up([], {}, share=1.5, turn=0, rate=1.0, duration_s=1.0, refused={}, stolen=next(left))

    monkeypatch.setattr(Overload, "_load", once)

    async def send() -> Load:
        async with httpx.AsyncClient() as client:
            return await Overload(plan, client, PROMPTS, lambda: None, [0]).load(1.5, 0, 2.0, 0.1)

    load = asyncio.run(send())
    assert (load.stolen, load.num_tries) == (kept, num_tries)


def test_a_run_that_was_cut_between_loads_measures_the_rest(
    starts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "overload.json"
    send = Overload.load

    async def cut_at_the_second(self: Overload, share: float, turn: int, *others: float) -> Load:
        if share == TINY.loads[1]:
            raise KeyboardInterrupt
        return await send(self, share, turn, *others)

    monkeypatch.setattr(Overload, "load", cut_at_the_second)
    with Progress(disable=True) as progress:
        kept = KeptCells(file, to_plain(TINY), resume=False)
        with pytest.raises(KeyboardInterrupt):
            measure_overload(TINY, tmp_path, PROMPTS, progress, kept)
        monkeypatch.setattr(Overload, "load", send)
        first = KeptCells(file, to_plain(TINY), resume=True)
        found = measure_overload(TINY, tmp_path, PROMPTS, progress, first)
        again = KeptCells(file, to_plain(TINY), resume=True)
        assert measure_overload(TINY, tmp_path, PROMPTS, progress, again) == found
    assert starts == ["one for loads, compiled: draft, target"] * 2, "all was measured then"
    assert [(load.share, load.turn) for load in found["loads"]] == [(0.5, 0), (1.5, 0), (1.5, 1), (0.5, 1)]
    assert found["capacity_requests_per_s"] == first.result("capacity")["requests_per_s"] > 0
    assert all(sum(load.outcomes.values()) == load.num_requests > 0 for load in found["loads"])


def test_streams_are_opened_once_and_compared(
    starts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(ScriptedService().pieces)
    expected = [text] * (TINY.num_streams - 1) + ["def f(y): pass"]
    monkeypatch.setattr(overload, "expected_texts", lambda *_: expected)
    kept = KeptCells(tmp_path / "overload.json", to_plain(TINY), resume=False)
    with Progress(disable=True) as progress:
        streams = measure_streams(TINY, tmp_path, PROMPTS, progress, kept)
        assert measure_streams(TINY, tmp_path, PROMPTS, progress, kept) == streams
    assert starts == ["one for streams, compiled: target"]
    assert (streams.num_complete, streams.errors) == (TINY.num_streams, {})
    assert streams.num_lost_bytes == 1


def test_open_files_are_asked_for_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"soft": 1024, "hard": 4096}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.update(soft=pair[0]))
    allow_open_files(1000)
    assert limits["soft"] == 1024
    allow_open_files(3000)
    assert limits == {"soft": 3000, "hard": 4096}
    with pytest.raises(typer.BadParameter, match="5000 open files, and the hard limit is 4096"):
        allow_open_files(5000)
