"""Thousands of requests of every kind through one engine and its door: what does the process grow by?

    python -m benchmarks.soak --json benchmarks/results/soak.json    # 6000 requests, about three minutes
    python -m benchmarks.soak --quick                                # 900

The demo pair in bfloat16, with prefix caches, behind the HTTP application in this process. Requests draw
their lengths, sampling parameters, priority, number of choices, drafting and timeout at random; some begin
alike, some are left by their reader, some run out of time. KV pools are small, so that the warm-up writes to
all of them: what grows after it is not a pool. Resident memory is read at even intervals with the engine
idle; growth is the median of the last quarter of the readings less that of the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import torch
import typer
from rich.progress import Progress

from benchmarks.report import progress_bar, report_headlines, write_results
from benchmarks.workload import read_prompts
from deploy.openai.app import create_app
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer as DoorTokenizer
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.model.tokenizer import load_tokenizer

_MIB = 1 << 20
_NUM_STEMS = 8
_LEAVE_SHARE = 0.1
_HURRIED_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run."""

    num_requests: int
    num_warm_up: int
    num_readings: int
    """Of memory, at even intervals after the warm-up."""
    num_at_once: int = 24
    pool_bytes: int = 24 << 20
    num_threads: int = 2
    seed: int = 1


FULL = Plan(num_requests=6000, num_warm_up=1200, num_readings=40)
QUICK = Plan(num_requests=900, num_warm_up=300, num_readings=12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The process between two waves of requests."""

    num_requests: int
    """Served so far, warm-up included."""
    resident_bytes: int
    num_objects: int
    """That Python's collector knows of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One HTTP request, and whether its reader stays."""

    body: dict[str, Any]
    leaves_after_s: float | None
    """When the reader hangs up, if there is no answer by then; None: it stays."""


def draw_visits(texts: Sequence[str], number: int, seed: int) -> list[Visit]:
    """Return HTTP requests of every kind."""
    generator = random.Random(seed)
    stems = [generator.choice(texts)[: generator.randint(100, 500)] for _ in range(_NUM_STEMS)]
    return [_draw_visit(generator, stems, texts) for _ in range(number)]


def _draw_visit(generator: random.Random, stems: Sequence[str], texts: Sequence[str]) -> Visit:
    text = generator.choice(texts)
    prompt = text[generator.randint(0, len(text) // 2) :][: generator.randint(20, 400)]
    if generator.random() < 0.4:
        prompt = generator.choice(stems) + prompt[:60]
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": generator.randint(1, 48),
        "temperature": generator.choice([0.0, 0.7, 1.0]),
        "stream": generator.random() < 0.7,
        "n": generator.choice([1, 1, 1, 1, 2, 3]),
        "priority": generator.choice([0, 0, 0, -1, 1]),
    }
    optional: dict[str, Any] = {
        "top_p": 0.9,
        "top_k": 20,
        "logprobs": 2,
        "stop": ["\n\n"],
        "frequency_penalty": 0.3,
        "ignore_eos": True,
        "seed": generator.getrandbits(32),
        "speculation": {"num_speculative_tokens": generator.randint(0, 6)},
        "cache_salt": f"tenant {generator.randint(0, 3)}",
        "return_metrics": True,
    }
    body |= {name: value for name, value in optional.items() if generator.random() < 0.25}
    if generator.random() < _HURRIED_SHARE:
        body["timeout_s"] = generator.uniform(0.001, 0.2)
    leaves = body["stream"] and generator.random() < _LEAVE_SHARE
    return Visit(body=body, leaves_after_s=generator.uniform(0.0, 0.12) if leaves else None)


def growth_mb(readings: Sequence[Reading]) -> float:
    """Return by how much resident memory grew: the last quarter of the readings less the first (medians)."""
    quarter = max(1, len(readings) // 4)
    first, last = readings[:quarter], readings[-quarter:]
    return (_median_bytes(last) - _median_bytes(first)) / _MIB


def growth_kb_per_request(readings: Sequence[Reading]) -> float:
    """Return the slope of resident memory over requests served (least squares)."""
    slope, _ = statistics.linear_regression(
        [one.num_requests for one in readings], [one.resident_bytes / 1024 for one in readings]
    )
    return slope


def _median_bytes(readings: Sequence[Reading]) -> float:
    return statistics.median(one.resident_bytes for one in readings)


def resident_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Return the process's resident memory (Linux)."""
    for line in status.read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{status} states no VmRSS")


class Soak:
    """Sends visits to an application in this process, wave by wave."""

    def __init__(self, client: httpx.AsyncClient, num_at_once: int) -> None:
        self._client = client
        self._places = asyncio.Semaphore(num_at_once)
        self.statuses: dict[int, int] = {}
        """Answers by HTTP status; 0 for readers who left."""

    async def wave(self, visits: Sequence[Visit]) -> None:
        """Send them, some at once, and wait for the last."""
        await asyncio.gather(*map(self._visit, visits))

    async def _visit(self, visit: Visit) -> None:
        async with self._places:
            status = await self._send(visit)
            self.statuses[status] = self.statuses.get(status, 0) + 1

    async def _send(self, visit: Visit) -> int:
        if visit.leaves_after_s is None:
            return (await self._client.post("/v1/completions", json=visit.body)).status_code
        # The client in this process reads whole responses, so a reader who leaves is a cancelled request.
        request = asyncio.create_task(self._client.post("/v1/completions", json=visit.body))
        await asyncio.wait({request}, timeout=visit.leaves_after_s)
        if request.done():
            return request.result().status_code
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        return 0


def engine_config(plan: Plan, family: Path) -> EngineConfig:
    """The demo pair with small pools."""
    cache = {"memory_bytes": plan.pool_bytes}
    return EngineConfig.model_validate(
        {
            "target": {
                "model": str(family / "target"),
                "dtype": "bfloat16",
                "num_threads": plan.num_threads,
            },
            "speculative_config": {
                "method": "draft_model",
                "controller": "fixed",
                "model": str(family / "draft"),
                "num_threads": plan.num_threads,
                "cache": cache,
            },
            "cache": cache,
            "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 256},
        }
    )


def run_soak(plan: Plan, family: Path, progress: Progress) -> dict[str, Any]:
    """Serve all requests with an engine of their own; return readings and what happened."""
    engine = Engine(engine_config(plan, family))
    engine.warm_up()
    return asyncio.run(_measure(plan, family, engine, progress))


async def _measure(plan: Plan, family: Path, engine: Engine, progress: Progress) -> dict[str, Any]:
    service = AsyncEngine(engine)
    tokenizer = DoorTokenizer(load_tokenizer(str(family / "target"), trust_remote_code=False))
    app = create_app(service, DoorSettings(), tokenizer)
    visits = draw_visits(read_prompts(family / "prompts.jsonl"), plan.num_requests, plan.seed)
    task = progress.add_task("soaking", total=plan.num_requests)
    readings: list[Reading] = []
    try:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://soak", timeout=None) as client:
            soak = Soak(client, plan.num_at_once)
            size = -(-(plan.num_requests - plan.num_warm_up) // plan.num_readings)
            ends = [plan.num_warm_up, *range(plan.num_warm_up + size, plan.num_requests, size)]
            started_s, done = time.perf_counter(), 0
            for end in (*ends, plan.num_requests):
                await soak.wave(visits[done:end])
                progress.advance(task, end - done)
                done = end
                readings.append(await _reading(service, done))
            seconds = time.perf_counter() - started_s
        metrics = dict(await service.metrics())
    finally:
        service.close()
    return {
        "readings": readings,
        "statuses": soak.statuses,
        "seconds": seconds,
        "metrics": metrics,
    }


async def _reading(service: AsyncEngine, num_requests: int) -> Reading:
    while True:
        metrics = await service.metrics()
        if not metrics["num_requests_running"] and not metrics["num_requests_waiting"]:
            break
        await asyncio.sleep(0.01)
    gc.collect()
    return Reading(
        num_requests=num_requests, resident_bytes=resident_bytes(), num_objects=len(gc.get_objects())
    )


def headlines(results: dict[str, Any]) -> dict[str, float]:
    """The numbers to watch."""
    readings: list[Reading] = results["readings"]
    num_objects = readings[-1].num_objects - readings[0].num_objects
    return {
        "soak_growth_mb": growth_mb(readings),
        "soak_growth_kb_per_request": growth_kb_per_request(readings),
        "soak_new_objects": float(num_objects),
        "soak_requests": float(readings[-1].num_requests),
        "soak_resident_mb": readings[-1].resident_bytes / _MIB,
    }


def main(
    quick: Annotated[bool, typer.Option(help="900 requests.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    num_requests: Annotated[int | None, typer.Option(min=100, help="So many instead.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Serve thousands of requests and measure what the process grows by.

    Example: python -m benchmarks.soak --quick --json runs/soak.json
    """
    plan = QUICK if quick else FULL
    if num_requests is not None:
        plan = Plan(num_requests=num_requests, num_warm_up=num_requests // 5, num_readings=plan.num_readings)
    torch.set_num_threads(plan.num_threads)
    with progress_bar() as progress:
        results = run_soak(plan, models, progress)
    numbers = headlines(results)
    write_results(json_file, {"plan": plan, **results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
