"""What is left of goodput when five times as much is asked as can be served; and 1,000 streams at once.

    python -m benchmarks.overload --json benchmarks/results/overload.json              # about 13 minutes
    python -m benchmarks.overload --json benchmarks/results/overload.json --resume     # the rest of a run
    python -m benchmarks.overload --quick                                              # about five
    python -m benchmarks.overload --proxy python --json benchmarks/results/overload_python.json

Both through Ray Serve's HAProxy (`http.proxy: haproxy`), or through its Python proxy, whose work for all who
are refused is taken from the models where they share cores.

Both over HTTP against `drafthouse serve` on this machine, which also sends the load. Of more than two cores
the sender has one for itself; of two, what sending costs is taken from the server, which gives way to it.

Overload: requests arrive at random (Poisson) whatever the server does, each with the limit that it sets for
its first token (`slo.ttft_ms`); who is refused does not come back. A request is good if it is complete, had
its first token within that limit, and its tokens at most `_SLOWER` times as far apart as with a full batch
and no queue. Goodput is the tokens of good requests per second, without the first part of each run, and the
mean of several turns through all loads, there and back. Its peak is the best of the loads around capacity,
which is measured first with as many clients as the batch has places.

Streams: so many requests are sent at once, and every text is compared with what one process without
speculation writes. A byte is lost if it is not where it should be.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from pydantic_core import from_json
from rich.progress import Progress

from benchmarks.closed_loop import ClosedLoop
from benchmarks.compile_states import wait_compiled
from benchmarks.cores import keep_to, part_with_a_core
from benchmarks.interruption import end_on_sigterm
from benchmarks.kept_cells import KeptCells
from benchmarks.report import progress_bar, report_headlines, to_plain, write_results
from benchmarks.served import serving
from benchmarks.stolen import stolen_seconds
from benchmarks.workload import piece, read_prompts
from deploy.config_file import parse_config
from deploy.load.arrivals import RandomArrivals, take
from deploy.load.client import kind_of, load_client
from deploy.load.generator import LoadGenerator, Timeline
from deploy.load.report import Latency, is_good, latency_of
from deploy.load.workload import PlannedRequest
from deploy.proxies import ProxyKind
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine

_PATH = "/v1/completions"
_MODEL = "demo"
_SLOWER = 3.0
_MOST_STOLEN = 0.05
"""Share of the server's cores: 0.15 cost a third of the tokens where it was seen."""
_COMPILE_S = 300.0
_RAMP = 0.25
"""Share of a run that is left out at its beginning: the queue fills."""
_CAPACITY, _STREAMS = "capacity", "streams"
"""What is measured beside loads, as `kept_cells` knows it."""
_REFUSED = "ray_drafthouse_requests_refused"
_FILES_PER_STREAM = 3
"""In the process that has most open: Serve's proxy has a socket to each client, and pipes and logs beside."""
_TIMEOUT_S = 120.0
_STREAMS_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run."""

    loads: tuple[float, ...]
    """Of capacity; the largest is the overload."""
    duration_s: float
    """Of one load."""
    num_turns: int = 1
    """Through all loads. The best of loads that were sent once would be best by chance too."""
    most_tries: int = 1
    """At a load, in one turn: what others on the same machine have disturbed is sent again."""
    warm_up_s: float = 20.0
    """Until the controller has made up its mind. Where that was not waited for, 1.1 times the capacity
    brought more than it should: what was sent as five times of it was less."""
    num_streams: int = 1000
    num_stream_tokens: int
    """So many that none has ended when the last begins."""
    num_places: int = 16
    num_tokens: int = 256
    ttft_s: float = 3.0
    prompt_characters: int = 160
    num_threads: int = 1
    seed: int = 7
    proxy: ProxyKind = "haproxy"
    """Which of Ray Serve's proxies clients speak to."""


FULL = Plan(loads=(0.9, 1.1, 1.4, 5.0), duration_s=28.0, num_turns=4, most_tries=4, num_stream_tokens=256)
QUICK = Plan(loads=(1.2, 5.0), duration_s=28.0, num_turns=2, num_stream_tokens=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load, sent once."""

    share: float
    """Of capacity."""
    turn: int
    requests_per_s: float
    num_requests: int
    outcomes: Mapping[str, int]
    """good, late, and kinds of failures."""
    goodput_per_s: float
    """Tokens of good requests."""
    ttft_p50_s: float
    """Of complete requests."""
    ttft_p99_s: float
    max_lateness_s: float
    """How much later than it was due a request was sent."""
    refused: Mapping[str, float]
    """By series of the server: how many it refused meanwhile."""
    stolen: float
    """Share of the time of the server's cores that others on the same machine had."""
    num_tries: int = 1
    """Of which this one was the least disturbed."""


class Overload:
    """Drives one server with loads."""

    def __init__(
        self,
        plan: Plan,
        client: httpx.AsyncClient,
        prompts: Sequence[str],
        tick: Callable[[], None],
        cores: Sequence[int],
    ) -> None:
        self._plan = plan
        self._cores = frozenset(cores)
        self._client = client
        self._prompts = prompts
        self._tick = tick
        self._num_sent = 0

    async def warm_up(self) -> None:
        """Let the controller make up its mind."""
        await self._keep_asking(asyncio.get_running_loop().time() + self._plan.warm_up_s)

    async def capacity(self) -> tuple[float, float]:
        """Return requests per second, and the usual seconds per token, with every place of the batch
        taken."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        timelines = await self._keep_asking(began_s + self._plan.duration_s / 2)
        last_s = loop.time() - began_s
        apart_s = [seconds for one in timelines if (seconds := latency_of(one, "tpot")) is not None]
        return len(timelines) / last_s, statistics.median(apart_s)

    async def _keep_asking(self, until_s: float) -> list[Timeline]:
        """As many clients as there are places, each asking again once it has its answer."""
        clients = ClosedLoop(self._client, _PATH, lambda: self._body(None), self._tick)
        return await clients.run(self._plan.num_places, until_s)

    async def load(self, share: float, turn: int, capacity_per_s: float, apart_s: float) -> Load:
        """Send a share of capacity, again if others had the cores meanwhile; return what became of it."""
        tries: list[Load] = []
        while len(tries) < self._plan.most_tries and all(one.stolen > _MOST_STOLEN for one in tries):
            tries.append(await self._load(share, turn, capacity_per_s, apart_s))
        least = min(tries, key=lambda one: one.stolen)
        return dataclasses.replace(least, num_tries=len(tries))

    async def _load(self, share: float, turn: int, capacity_per_s: float, apart_s: float) -> Load:
        plan = self._plan
        rate = share * capacity_per_s
        arrivals = take(
            RandomArrivals(rate=rate, burstiness=1.0, seed=plan.seed + turn),
            num_requests=None,
            duration_s=plan.duration_s,
        )
        limit_ms = 1000.0 * plan.ttft_s
        planned = [PlannedRequest(at_s=one.at_s, body=self._body({"ttft_ms": limit_ms})) for one in arrivals]
        before, stolen_s, began_s = await self._refused(), stolen_seconds(self._cores), time.monotonic()
        timelines = await self._send(planned)
        cores_s = (time.monotonic() - began_s) * len(self._cores)
        stolen = (stolen_seconds(self._cores) - stolen_s) / cores_s
        refused = {
            series: count - before.get(series, 0.0) for series, count in (await self._refused()).items()
        }
        objectives: dict[Latency, float] = {"ttft": plan.ttft_s, "tpot": _SLOWER * apart_s}
        return summed_up(
            timelines,
            objectives,
            share=share,
            turn=turn,
            rate=rate,
            duration_s=plan.duration_s,
            refused=refused,
            stolen=stolen,
        )

    async def _refused(self) -> dict[str, float]:
        lines = (await self._client.get("/metrics")).text.splitlines()
        return {
            name: float(count) for name, count in (s.split(" ")[:2] for s in lines if s.startswith(_REFUSED))
        }

    async def _send(self, planned: Sequence[PlannedRequest]) -> list[Timeline]:
        return await LoadGenerator(self._client, _PATH).run(planned, lambda _: self._tick())

    def _body(self, slo: Mapping[str, float] | None) -> dict[str, Any]:
        plan = self._plan
        self._num_sent += 1
        prompt = piece(self._prompts, self._num_sent, plan.prompt_characters)
        body = completion(prompt, plan.num_tokens, self._num_sent)
        return body if slo is None else {**body, "slo": slo}


def completion(prompt: str, num_tokens: int, seed: int) -> dict[str, Any]:
    """Return the body of a streamed request."""
    return {
        "model": _MODEL,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": float(seed % 2),
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def summed_up(
    timelines: Sequence[Timeline],
    objectives: Mapping[Latency, float],
    *,
    share: float,
    turn: int,
    rate: float,
    duration_s: float,
    refused: Mapping[str, float],
    stolen: float,
) -> Load:
    """Return what a run came to. What ended in the ramp, or after the last arrival, is not goodput."""
    outcomes: dict[str, int] = {}
    num_good_tokens = 0
    began_s = _RAMP * duration_s
    for timeline in timelines:
        good = is_good(timeline, objectives)
        outcome = "good" if good else timeline.error or "late"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if good and began_s <= timeline.ended_s <= duration_s:
            num_good_tokens += timeline.num_output_tokens or 0
    ttfts = sorted(
        seconds for one in timelines if one.error is None and (seconds := latency_of(one, "ttft")) is not None
    )
    return Load(
        share=share,
        turn=turn,
        requests_per_s=rate,
        num_requests=len(timelines),
        outcomes=outcomes,
        goodput_per_s=num_good_tokens / (duration_s - began_s),
        ttft_p50_s=ttfts[len(ttfts) // 2] if ttfts else 0.0,
        ttft_p99_s=ttfts[int(0.99 * (len(ttfts) - 1))] if ttfts else 0.0,
        max_lateness_s=max((one.sent_s - one.due_s for one in timelines), default=0.0),
        refused=refused,
        stolen=stolen,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Many streams at once."""

    num_streams: int
    num_bytes: int
    """Of the texts that were expected."""
    num_lost_bytes: int
    num_complete: int
    errors: Mapping[str, int]
    most_at_once: int
    """Streams that had begun and not ended."""
    seconds: float


async def stream_all(
    client: httpx.AsyncClient,
    bodies: Sequence[Mapping[str, Any]],
    expected: Sequence[str],
    tick: Callable[[], None],
) -> Streams:
    """Send all at once; compare every text."""
    loop = asyncio.get_running_loop()
    errors: dict[str, int] = {}
    steps: list[tuple[float, int]] = []

    async def read(body: Mapping[str, Any]) -> str:
        text, is_done = "", False
        began_s: float | None = None
        try:
            async with client.stream("POST", _PATH, json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    is_done = is_done or line == "data: [DONE]"
                    if not line.startswith("data: {"):
                        continue
                    began_s = began_s or loop.time()
                    event = from_json(line[6:])
                    text += "".join(choice["text"] for choice in event.get("choices", ()))
            problem = None if is_done else "incomplete"
        except httpx.HTTPError as error:
            problem = kind_of(error)
        if problem is not None:
            errors[problem] = errors.get(problem, 0) + 1
        if began_s is not None:
            steps.extend([(began_s, 1), (loop.time(), -1)])
        tick()
        return text

    began_s = loop.time()
    texts = await asyncio.gather(*(read(body) for body in bodies))
    return Streams(
        num_streams=len(texts),
        num_bytes=sum(len(text.encode()) for text in expected),
        num_lost_bytes=sum(map(num_lost, texts, expected)),
        num_complete=len(texts) - sum(errors.values()),
        errors=errors,
        most_at_once=most_at_once(steps),
        seconds=loop.time() - began_s,
    )


def num_lost(text: str, expected: str) -> int:
    """Return how many bytes of what was expected are not where they should be, and how many are too many."""
    given, wanted = text.encode(), expected.encode()
    num_equal = sum(1 for one, other in zip(given, wanted, strict=False) if one == other)
    return max(len(given), len(wanted)) - num_equal


def most_at_once(steps: Sequence[tuple[float, int]]) -> int:
    """Return the largest number that there was, from moments at which it changed."""
    most = number = 0
    for _, step in sorted(steps):
        number += step
        most = max(most, number)
    return most


def overload_config(plan: Plan, family: Path) -> dict[str, Any]:
    """Return the demo pair with a small batch, so that five times its capacity can be sent."""
    model = {"dtype": "bfloat16", "num_threads": plan.num_threads}
    return {
        "target": {"model": str((family / "target").resolve()), **model},
        "speculative_config": {
            "method": "draft_model",
            "model": str((family / "draft").resolve()),
            "num_threads": plan.num_threads,
        },
        "cache": {"memory_bytes": 256 << 20},
        "scheduler": {"max_num_seqs": plan.num_places},
        # As in the presets for CPUs: whoever computes has the cores that deliveries do not take.
        "http": {
            "served_model_name": _MODEL,
            "max_deliveries_per_s": 150,
            "niceness": 10,
            "proxy": plan.proxy,
        },
    }


def streams_config(plan: Plan, family: Path) -> dict[str, Any]:
    """Return the demo target, with places for all streams at once and identical text in every batch."""
    return {
        "target": {
            "model": str((family / "target").resolve()),
            "dtype": "bfloat16",
            "batch_invariant": True,
            "num_threads": plan.num_threads,
        },
        "cache": {"memory_bytes": 2 << 30},
        "scheduler": {"max_num_seqs": plan.num_streams, "max_num_batched_tokens": 2 * plan.num_streams},
        "http": {"served_model_name": _MODEL, "proxy": plan.proxy},
    }


def expected_texts(
    plan: Plan, family: Path, bodies: Sequence[Mapping[str, Any]], progress: Progress
) -> list[str]:
    """Return what one process without speculation writes."""
    config = parse_config({**streams_config(plan, family), "speculative_config": {"method": "none"}}).engine()
    task = progress.add_task("expected texts", total=len(bodies))
    with Engine(config) as engine:
        params = [
            SamplingParams(
                max_tokens=body["max_tokens"],
                temperature=body["temperature"],
                seed=body["seed"],
                ignore_eos=True,
            )
            for body in bodies
        ]
        results = engine.generate(
            [body["prompt"] for body in bodies],
            params,
            progress=lambda done, _: progress.update(task, completed=done),
        )
    return [result.text for result in results]


def measure_overload(
    plan: Plan,
    family: Path,
    prompts: Sequence[str],
    progress: Progress,
    kept: KeptCells,
    cores: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Serve the demo pair (on `cores`), find its capacity, and send the loads that are not measured yet."""
    task = progress.add_task("overload: starting", total=None)
    sent = _turns(plan)

    async def run(url: str) -> None:
        async with load_client(url, connect_s=_TIMEOUT_S, read_s=_TIMEOUT_S) as client:
            bench = Overload(
                plan,
                client,
                prompts,
                lambda: progress.advance(task),
                sorted(os.sched_getaffinity(0)) if cores is None else cores,
            )
            progress.update(task, description="overload: capacity")
            await bench.warm_up()
            if not kept.is_kept(_CAPACITY):
                capacity_per_s, apart_s = await bench.capacity()
                kept.keep(_CAPACITY, {"requests_per_s": capacity_per_s, "seconds_per_token": apart_s})
            capacity = kept.result(_CAPACITY)
            for number, cell in enumerate(sent, start=1):
                if not kept.is_kept(cell):
                    share, turn = cell
                    rate = capacity["requests_per_s"]
                    progress.update(
                        task,
                        description=f"overload {number}/{len(sent)}: {share:g} x {rate:.1f} requests/s",
                    )
                    load = await bench.load(share, turn, rate, capacity["seconds_per_token"])
                    kept.keep(cell, {"load": to_plain(load)})

    if not all(kept.is_kept(cell) for cell in (_CAPACITY, *sent)):
        with serving(overload_config(plan, family), cores) as server:
            server.wait_healthy()
            # A worker that was ready before it was compiled goes on with that while it is idle, and is
            # many times as fast afterwards: capacity would not be that of the loads.
            wait_compiled(server.url, _COMPILE_S)
            asyncio.run(run(server.url))
    capacity = kept.result(_CAPACITY)
    return {
        "capacity_requests_per_s": capacity["requests_per_s"],
        "seconds_per_token": capacity["seconds_per_token"],
        "loads": [Load(**kept.result(cell)["load"]) for cell in sent],
    }


def _turns(plan: Plan) -> list[tuple[float, int]]:
    """Return (share, turn) in the order of sending: there and back, so that no load is always the last."""
    return [
        (share, turn)
        for turn in range(plan.num_turns)
        for share in (plan.loads if turn % 2 == 0 else plan.loads[::-1])
    ]


def measure_streams(
    plan: Plan,
    family: Path,
    prompts: Sequence[str],
    progress: Progress,
    kept: KeptCells,
    cores: Sequence[int] | None = None,
) -> Streams:
    """Serve the demo target (on `cores`), and open all streams at once, unless that is measured."""
    if not kept.is_kept(_STREAMS):
        kept.keep(_STREAMS, {"streams": to_plain(_open_streams(plan, family, prompts, progress, cores))})
    return Streams(**kept.result(_STREAMS)["streams"])


def _open_streams(
    plan: Plan, family: Path, prompts: Sequence[str], progress: Progress, cores: Sequence[int] | None
) -> Streams:
    bodies = [
        completion(
            prompts[index % len(prompts)][: plan.prompt_characters // 2], plan.num_stream_tokens, index
        )
        for index in range(plan.num_streams)
    ]
    expected = expected_texts(plan, family, bodies, progress)
    task = progress.add_task("streams", total=plan.num_streams)

    async def run(url: str) -> Streams:
        async with load_client(url, connect_s=_STREAMS_TIMEOUT_S, read_s=_STREAMS_TIMEOUT_S) as client:
            return await stream_all(client, bodies, expected, lambda: progress.advance(task))

    with serving(streams_config(plan, family), cores) as server:
        server.wait_healthy()
        wait_compiled(server.url, _COMPILE_S, {"target"})
        return asyncio.run(run(server.url))


def allow_open_files(wanted: int) -> None:
    """Let this process, and those that it starts, have so many files and sockets open.

    Raises:
        typer.BadParameter: the system does not let them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < wanted:
        raise typer.BadParameter(
            f"this needs {wanted} open files, and the hard limit is {hard} (ulimit -Hn): raise that"
        )
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def goodput_by_share(loads: Sequence[Load]) -> dict[float, float]:
    """Return tokens of good requests per second for each share of capacity, the mean of its turns."""
    shares = dict.fromkeys(load.share for load in loads)
    return {
        share: statistics.fmean(load.goodput_per_s for load in loads if load.share == share)
        for share in shares
    }


def headlines(loads: Sequence[Load], streams: Streams | None) -> dict[str, float]:
    """The numbers to watch; without streams where these were not opened yet, or were not all open at once."""
    goodput = goodput_by_share(loads)
    peak = max(goodput.values())
    numbers = {"goodput_at_5x_vs_peak": goodput[max(goodput)] / peak if peak > 0 else 0.0}
    if streams is not None and streams.most_at_once == streams.num_streams:
        numbers["streams_1000_lost_bytes"] = float(streams.num_lost_bytes)
    return numbers


def main(
    quick: Annotated[bool, typer.Option(help="Shorter runs of fewer loads.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was cut, where it was.")
    ] = False,
    proxy: Annotated[
        ProxyKind, typer.Option(help="Which of Ray Serve's proxies clients speak to.")
    ] = "haproxy",
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Measure goodput under five times the load that can be served, and 1,000 streams at once.

    What is measured is kept beside FILE until the run is at its end.

    Example: python -m benchmarks.overload --quick --json runs/overload.json
    Example: python -m benchmarks.overload --proxy python --json runs/overload-python.json
    """
    end_on_sigterm()
    plan = dataclasses.replace(QUICK if quick else FULL, proxy=proxy)
    allow_open_files(_FILES_PER_STREAM * plan.num_streams)
    prompts = read_prompts(models / "prompts.jsonl")
    own, cores = part_with_a_core()
    keep_to(own)
    setting = {"plan": plan, "num_cores": {"server": len(cores), "is_shared_with_sender": own == cores}}
    kept = KeptCells(json_file, to_plain(setting), resume=resume)
    with progress_bar() as progress:
        overload = measure_overload(plan, models, prompts, progress, kept, cores)
        numbers = headlines(overload["loads"], None)
        write_results(json_file, {**setting, "overload": overload, "headlines": numbers})
        streams = measure_streams(plan, models, prompts, progress, kept, cores)
    numbers = headlines(overload["loads"], streams)
    write_results(json_file, {**setting, "overload": overload, "streams": streams, "headlines": numbers})
    kept.forget()
    if streams.most_at_once < streams.num_streams:
        typer.echo(
            f"only {streams.most_at_once} of {streams.num_streams} streams were open at once", err=True
        )
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
