"""What is left of goodput when five times as much is asked as can be served; and 1,000 streams at once.

    python -m benchmarks.overload --json benchmarks/results/overload.json     # about ten minutes
    python -m benchmarks.overload --quick                                     # under five

Both over HTTP against `drafthouse serve` on this machine, which also sends the load: what refusing costs, and
what sending costs, is taken from the same cores.

Overload: requests arrive at random (Poisson) whatever the server does, each with the limit that it sets for
its first token (`slo.ttft_ms`); who is refused does not come back. A request is good if it is complete, had
its first token within that limit, and its tokens at most `_SLOWER` times as far apart as with a full batch
and no queue. Goodput is the tokens of good requests per second, without the first part of each run. Its peak
is the best of several loads around capacity, which is measured first with as many clients as the batch has
places.

Streams: so many requests are sent at once, and every text is compared with what one process without
speculation writes. A byte is lost if it is not where it should be.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from pydantic_core import from_json
from rich.progress import Progress

from benchmarks.report import progress_bar, report_headlines, write_results
from benchmarks.served import serving
from benchmarks.workload import read_prompts
from deploy.config_file import parse_config
from deploy.load.arrivals import RandomArrivals, take
from deploy.load.generator import LoadGenerator, Timeline
from deploy.load.report import Latency, is_good, latency_of
from deploy.load.workload import PlannedRequest
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine

_PATH = "/v1/completions"
_MODEL = "demo"
_SLOWER = 3.0
_RAMP = 0.25
"""Share of a run that is left out at its beginning: the queue fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run."""

    loads: tuple[float, ...]
    """Of capacity; the largest is the overload."""
    duration_s: float
    """Of one load."""
    num_streams: int = 1000
    num_stream_tokens: int
    num_places: int = 16
    num_tokens: int = 256
    ttft_s: float = 3.0
    prompt_characters: int = 160
    num_threads: int = 1
    seed: int = 7


FULL = Plan(loads=(0.7, 0.9, 1.1, 1.4, 5.0), duration_s=60.0, num_stream_tokens=64)
QUICK = Plan(loads=(0.8, 1.1, 5.0), duration_s=24.0, num_stream_tokens=24)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load."""

    share: float
    """Of capacity."""
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


class Overload:
    """Drives one server with loads."""

    def __init__(
        self, plan: Plan, client: httpx.AsyncClient, prompts: Sequence[str], tick: Callable[[], None]
    ) -> None:
        self._plan = plan
        self._client = client
        self._prompts = prompts
        self._tick = tick
        self._num_sent = 0

    async def capacity(self) -> tuple[float, float]:
        """Return requests per second, and the usual seconds per token, with every place of the batch
        taken."""
        plan = self._plan
        loop = asyncio.get_running_loop()
        await self._keep_asking(loop.time() + plan.duration_s / 4)  # the controller makes up its mind
        began_s = loop.time()
        timelines = await self._keep_asking(began_s + plan.duration_s / 2)
        last_s = loop.time() - began_s
        apart_s = [seconds for one in timelines if (seconds := latency_of(one, "tpot")) is not None]
        return len(timelines) / last_s, statistics.median(apart_s)

    async def _keep_asking(self, until_s: float) -> list[Timeline]:
        """As many clients as there are places, each asking again once it has its answer."""
        loop = asyncio.get_running_loop()

        async def ask() -> list[Timeline]:
            timelines = []
            while loop.time() < until_s:
                timelines += await self._send([PlannedRequest(at_s=0.0, body=self._body(None))])
            return timelines

        answers = await asyncio.gather(*(ask() for _ in range(self._plan.num_places)))
        timelines = [timeline for each in answers for timeline in each]
        failed = [timeline.error for timeline in timelines if timeline.error is not None]
        if failed:
            raise RuntimeError(f"without overload, {len(failed)} requests failed: {failed[0]}")
        return timelines

    async def load(self, share: float, capacity_per_s: float, apart_s: float) -> Load:
        """Send a share of capacity; return what became of it."""
        plan = self._plan
        rate = share * capacity_per_s
        arrivals = take(
            RandomArrivals(rate=rate, burstiness=1.0, seed=plan.seed),
            num_requests=None,
            duration_s=plan.duration_s,
        )
        limit_ms = 1000.0 * plan.ttft_s
        planned = [PlannedRequest(at_s=one.at_s, body=self._body({"ttft_ms": limit_ms})) for one in arrivals]
        timelines = await self._send(planned)
        objectives: dict[Latency, float] = {"ttft": plan.ttft_s, "tpot": _SLOWER * apart_s}
        return summed_up(timelines, objectives, share=share, rate=rate, duration_s=plan.duration_s)

    async def _send(self, planned: Sequence[PlannedRequest]) -> list[Timeline]:
        return await LoadGenerator(self._client, _PATH).run(planned, lambda _: self._tick())

    def _body(self, slo: Mapping[str, float] | None) -> dict[str, Any]:
        plan = self._plan
        self._num_sent += 1
        text = self._prompts[self._num_sent % len(self._prompts)]
        # Where it begins differs each time: the prefix cache would find the same prompts again.
        start = self._num_sent // len(self._prompts)
        body = completion(text[start : start + plan.prompt_characters], plan.num_tokens, self._num_sent)
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
    rate: float,
    duration_s: float,
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
        requests_per_s=rate,
        num_requests=len(timelines),
        outcomes=outcomes,
        goodput_per_s=num_good_tokens / (duration_s - began_s),
        ttft_p50_s=ttfts[len(ttfts) // 2] if ttfts else 0.0,
        ttft_p99_s=ttfts[int(0.99 * (len(ttfts) - 1))] if ttfts else 0.0,
        max_lateness_s=max((one.sent_s - one.due_s for one in timelines), default=0.0),
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
            problem = type(error).__name__
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
        "http": {"served_model_name": _MODEL},
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
        "cache": {"memory_bytes": 512 << 20},
        "scheduler": {"max_num_seqs": plan.num_streams, "max_num_batched_tokens": 2 * plan.num_streams},
        "http": {"served_model_name": _MODEL},
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


def measure_overload(plan: Plan, family: Path, prompts: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Serve the demo pair, find its capacity, and send loads."""
    task = progress.add_task("overload: starting", total=None)

    async def run(url: str) -> dict[str, Any]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:
            bench = Overload(plan, client, prompts, lambda: progress.advance(task))
            progress.update(task, description="overload: capacity")
            capacity_per_s, apart_s = await bench.capacity()
            loads = []
            for share in plan.loads:
                progress.update(task, description=f"overload: {share:g} x {capacity_per_s:.1f} requests/s")
                loads.append(await bench.load(share, capacity_per_s, apart_s))
            metrics = (await client.get("/metrics")).text
        return {
            "capacity_requests_per_s": capacity_per_s,
            "seconds_per_token": apart_s,
            "loads": loads,
            "refused": {
                line.split(" ")[0]: float(line.split(" ")[1])
                for line in metrics.splitlines()
                if line.startswith("ray_drafthouse_requests_refused")
            },
        }

    with serving(overload_config(plan, family)) as server:
        server.wait_healthy()
        return asyncio.run(run(server.url))


def measure_streams(plan: Plan, family: Path, prompts: Sequence[str], progress: Progress) -> Streams:
    """Serve the demo target, and open all streams at once."""
    bodies = [
        completion(
            prompts[index % len(prompts)][: plan.prompt_characters // 2], plan.num_stream_tokens, index
        )
        for index in range(plan.num_streams)
    ]
    expected = expected_texts(plan, family, bodies, progress)
    task = progress.add_task("streams", total=plan.num_streams)

    async def run(url: str) -> Streams:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=600.0, limits=limits) as client:
            return await stream_all(client, bodies, expected, lambda: progress.advance(task))

    with serving(streams_config(plan, family)) as server:
        server.wait_healthy()
        return asyncio.run(run(server.url))


def headlines(loads: Sequence[Load], streams: Streams) -> dict[str, float]:
    """The numbers to watch."""
    peak = max(load.goodput_per_s for load in loads)
    overload = max(loads, key=lambda load: load.share)
    return {
        "goodput_at_5x_vs_peak": overload.goodput_per_s / peak if peak > 0 else 0.0,
        "streams_1000_lost_bytes": float(streams.num_lost_bytes),
    }


def main(
    quick: Annotated[bool, typer.Option(help="Shorter runs of fewer loads.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Measure goodput under five times the load that can be served, and 1,000 streams at once.

    Example: python -m benchmarks.overload --quick --json runs/overload.json
    """
    plan = QUICK if quick else FULL
    prompts = read_prompts(models / "prompts.jsonl")
    with progress_bar() as progress:
        overload = measure_overload(plan, models, prompts, progress)
        streams = measure_streams(plan, models, prompts, progress)
    numbers = headlines(overload["loads"], streams)
    results = {"plan": plan, "overload": overload, "streams": streams, "headlines": numbers}
    write_results(json_file, results)
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
