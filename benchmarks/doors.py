"""What lies between clients and doors: Ray Serve's Python proxy, and its HAProxy.

    python -m benchmarks.doors --json benchmarks/results/doors.json     # about ten minutes
    python -m benchmarks.doors --quick                                  # about three

`drafthouse serve` with a target of one small layer, so that what is before it can be seen, once behind each
(`http.proxy`), by turns. Clients are on the same machine, and take their share of its cores.

- requests: one after the other on one connection, to what the door knows by itself (`/v1/models`);
- connections: the same, a new connection for each;
- completions: of one token, one after the other;
- streams: many at once; every text is compared with what one process without speculation writes. The CPU
  time of proxy and door meanwhile is that of their processes.
"""

from __future__ import annotations

import asyncio
import ssl
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.progress import Progress

from benchmarks import overload
from benchmarks.compile_states import wait_compiled
from benchmarks.overload import Streams, completion, expected_texts, stream_all, streams_config
from benchmarks.random_models import Shape, write_random_model
from benchmarks.report import progress_bar, report_headlines, write_results
from benchmarks.served import ServedProcess, serving
from benchmarks.workload import read_prompts
from deploy.config import HttpConfig
from deploy.proxies import ProxyKind

_COMPILE_S = 300.0
_SMALL = Shape(hidden_size=64, intermediate_size=128, num_layers=1, num_kv_heads=1)
_TITLES: Mapping[str, tuple[str, ...]] = {
    "proxy": ("ray::ProxyActor", "ray::HAProxyManager", "haproxy"),
    "door": ("ray::ServeReplica:drafthouse:Ingress",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run against each of them."""

    num_turns: int
    num_requests: int
    """Of each kind, one after the other."""
    num_streams: int
    num_stream_tokens: int
    kinds: tuple[ProxyKind, ...] = ("python", "haproxy")


FULL = Plan(num_turns=3, num_requests=500, num_streams=1000, num_stream_tokens=64)
QUICK = Plan(num_turns=1, num_requests=100, num_streams=200, num_stream_tokens=24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one turn of one of them came to."""

    proxy: ProxyKind
    milliseconds: Mapping[str, Mapping[str, float]]
    """By kind of request: p50, p99."""
    streams: Streams
    cpu_s: Mapping[str, float]
    """While streams ran."""


async def one_after_the_other(number: int, send: Callable[[], Awaitable[httpx.Response]]) -> dict[str, float]:
    """Return how long requests took, in milliseconds; a tenth more are sent first, and not counted."""
    taken_ms = []
    for index in range(number + number // 10):
        began_s = time.perf_counter()
        (await send()).raise_for_status()
        if index >= number // 10:
            taken_ms.append(1000.0 * (time.perf_counter() - began_s))
    return {"p50": statistics.median(taken_ms), "p99": sorted(taken_ms)[int(0.99 * (len(taken_ms) - 1))]}


async def measure(
    plan: Plan,
    kind: ProxyKind,
    server: ServedProcess,
    bodies: Sequence[Mapping[str, Any]],
    expected: Sequence[str],
    tick: Callable[[], None],
) -> Turn:
    """Send everything to one server."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    one_token = {**completion("def f(", 1, 0), "stream": False}
    del one_token["stream_options"]
    milliseconds = {}
    # A client makes one of its own else, for longer than all the rest takes, though it speaks plain HTTP.
    tls = ssl.create_default_context()

    async def anew() -> httpx.Response:
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0, verify=tls) as new:
            return await new.get("/v1/models")

    async with httpx.AsyncClient(base_url=server.url, timeout=600.0, limits=limits) as client:
        sends: dict[str, Callable[[], Awaitable[httpx.Response]]] = {
            "requests": lambda: client.get("/v1/models"),
            "connections": anew,
            "completions": lambda: client.post("/v1/completions", json=one_token),
        }
        for name, send in sends.items():
            milliseconds[name] = await one_after_the_other(plan.num_requests, send)
        before = server.cpu_seconds(_TITLES)
        streams = await stream_all(client, bodies, expected, tick)
        after = server.cpu_seconds(_TITLES)
    return Turn(
        proxy=kind,
        milliseconds=milliseconds,
        streams=streams,
        cpu_s={part: after[part] - before[part] for part in after},
    )


def measure_all(plan: Plan, family: Path, prompts: Sequence[str], progress: Progress) -> list[Turn]:
    """Run all turns."""
    of_streams = overload.Plan(
        loads=(), duration_s=0.0, num_streams=plan.num_streams, num_stream_tokens=plan.num_stream_tokens
    )
    bodies = [
        completion(prompts[index % len(prompts)][:80], plan.num_stream_tokens, index)
        for index in range(plan.num_streams)
    ]
    expected = expected_texts(of_streams, family, bodies, progress)
    config = streams_config(of_streams, family)
    turns = []
    for turn in range(plan.num_turns):
        for kind in plan.kinds if turn % 2 == 0 else plan.kinds[::-1]:
            task = progress.add_task(f"turn {turn + 1}: {kind}", total=plan.num_streams)
            values = {**config, "http": {**config["http"], "proxy": kind}}
            with serving(values) as server:
                server.wait_healthy()
                wait_compiled(server.url, _COMPILE_S, {"target"})
                tick = partial(progress.advance, task)
                turns.append(asyncio.run(measure(plan, kind, server, bodies, expected, tick)))
    return turns


def headlines(turns: Sequence[Turn]) -> dict[str, float]:
    """The numbers to watch: medians over turns."""
    numbers: dict[str, float] = {}
    for kind in dict.fromkeys(turn.proxy for turn in turns):
        own = [turn for turn in turns if turn.proxy == kind]
        for name in own[0].milliseconds:
            numbers[f"{kind}_{name}_p50_ms"] = statistics.median(
                turn.milliseconds[name]["p50"] for turn in own
            )
        rates = [turn.streams.num_complete / turn.streams.seconds for turn in own]
        numbers[f"{kind}_streams_per_s"] = statistics.median(rates)
        for part in _TITLES:
            numbers[f"{kind}_streams_{part}_cpu_s"] = statistics.median(turn.cpu_s[part] for turn in own)
        numbers[f"{kind}_lost_bytes"] = float(sum(turn.streams.num_lost_bytes for turn in own))
    return numbers


def main(
    quick: Annotated[bool, typer.Option(help="One turn, with fewer requests and streams.")] = False,
    only: Annotated[str | None, typer.Option(help="python or haproxy: nothing of the other one.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    models: Annotated[
        Path, typer.Option(help="Folder with target/ (for its tokenizer) and prompts.jsonl.")
    ] = Path("models/demo"),
) -> None:
    """Compare Ray Serve's Python proxy with its HAProxy.

    Example: python -m benchmarks.doors --quick --json runs/doors.json
    """
    plan = QUICK if quick else FULL
    if only is not None:
        plan = replace(plan, kinds=(HttpConfig.model_validate({"proxy": only}).proxy,))
    prompts = read_prompts(models / "prompts.jsonl")
    with progress_bar() as progress, tempfile.TemporaryDirectory() as folder:
        write_random_model(models / "target", Path(folder) / "target", _SMALL)
        turns = measure_all(plan, Path(folder), prompts, progress)
    numbers = headlines(turns)
    report_headlines(numbers)
    write_results(json_file, {"plan": plan, "turns": turns, "headlines": numbers})


if __name__ == "__main__":
    typer.run(main)
