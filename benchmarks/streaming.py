"""Streaming at load: time to the first token, gaps between events, and how even it is among streams.

    python -m benchmarks.streaming --json benchmarks/results/streaming.json    # about ten minutes
    python -m benchmarks.streaming --quick                                     # about two
    python -m benchmarks.streaming --url http://127.0.0.1:8000                 # a server of the demo pair

Requests arrive independently of each other (Poisson), at shares of the rate that plain decoding sustains when
it is never idle, which is measured first. Prompts of 32 to 192 tokens, 32 to 128 new ones, every other
request sampled; each load is run plainly and with speculation on the same arrivals. No prompt is found in a
prefix cache. The target is the demo one made as costly as 26 million parameters (`benchmarks.inflate`), in
bfloat16, in this process; a server runs what it is configured with. `benchmarks.cadence` defines the numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import httpx
import torch
import typer
from rich.progress import Progress

from benchmarks.cadence import Cadence, Timeline, arrival_times, cadence_of
from benchmarks.in_process import engine_config
from benchmarks.inflate import inflate, layers_for_parameters
from benchmarks.report import progress_bar, report_headlines, write_results
from benchmarks.workload import read_prompts
from deploy.openai.resumption import EventId
from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.engine import Engine
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.model.tokenizer import load_tokenizer

_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    loads: tuple[float, ...]
    """Shares of what plain decoding sustains."""
    num_requests: int
    """Of each load and mode."""
    num_saturating: int
    """Sent at once, to find out what it sustains."""
    k: int = 4
    max_num_seqs: int = 32
    num_threads: int = 2
    num_parameters: float = 26e6
    seed: int = 1


FULL = Plan(loads=(0.5, 0.8), num_requests=400, num_saturating=96)
QUICK = Plan(loads=(0.7,), num_requests=80, num_saturating=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    name: str
    prompt: tuple[int, ...]
    num_tokens: int
    temperature: float
    seed: int
    k: int
    salt: str


class Source(Protocol):
    """What streams."""

    def stream(self, ask: Ask) -> AsyncIterator[int]:
        """Yield the number of new tokens of every event."""
        ...


class EngineSource:
    """An engine in this process."""

    def __init__(self, service: AsyncEngine) -> None:
        self._service = service

    async def stream(self, ask: Ask) -> AsyncIterator[int]:
        """See `Source`."""
        request = Request(
            request_id=RequestId(ask.name),
            prompt_token_ids=ask.prompt,
            params=SamplingParams(temperature=ask.temperature, max_tokens=ask.num_tokens, ignore_eos=True),
            seed=ask.seed,
            num_draft_tokens=ask.k,
            cache_salt=ask.salt,
        )
        async for output in self._service.generate(request):
            yield len(output.token_ids)


class HttpSource:
    """A server, through its OpenAI endpoint."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def stream(self, ask: Ask) -> AsyncIterator[int]:
        """See `Source`; event ids say how many tokens there have been. What comes at once is one event."""
        body = {
            "prompt": ask.prompt,
            "max_tokens": ask.num_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "ignore_eos": True,
            "stream": True,
            "speculation": {"num_speculative_tokens": ask.k},
            "cache_salt": ask.salt,
        }
        num_tokens, rest = 0, b""
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for piece in response.aiter_bytes():
                *lines, rest = (rest + piece).split(b"\n")
                before, num_tokens = num_tokens, tokens_until(lines, num_tokens)
                yield num_tokens - before


def tokens_until(lines: Sequence[bytes], num_tokens: int) -> int:
    """Return how many tokens there have been after these lines of a stream, and `num_tokens` before.

    Raises:
        RuntimeError: the stream has ended in an error.
    """
    for line in lines:
        if line.startswith(b"id: "):
            event = EventId.parse(line[4:].decode())
            num_tokens = max((choice.num_tokens for choice in event.positions), default=num_tokens)
        elif line.startswith(b'data: {"error"'):
            raise RuntimeError(line.decode())
    return num_tokens


def draw_requests(text: Sequence[int], number: int, seed: int) -> list[Ask]:
    """Return requests of many lengths, whose prompts are windows of `text` at places of their own."""
    generator = random.Random(seed)
    starts = generator.sample(range(len(text) - 192), number)
    asks = []
    for index, start in enumerate(starts):
        asks.append(
            Ask(
                name=f"{seed}-{index}",
                prompt=tuple(text[start : start + generator.randint(32, 192)]),
                num_tokens=generator.randint(32, 128),
                temperature=float(index % 2),
                seed=index,
                k=0,
                salt="",
            )
        )
    return asks


async def drive(
    source: Source, asks: Sequence[Ask], sent_at_s: Sequence[float], tick: Callable[[], None]
) -> list[Timeline]:
    """Send every request at its time; return what their readers saw."""
    started_s = time.perf_counter()

    async def read(ask: Ask, at_s: float) -> Timeline:
        await asyncio.sleep(started_s + at_s - time.perf_counter())
        sent_s = time.perf_counter()
        events = [(time.perf_counter(), number) async for number in source.stream(ask) if number]
        tick()
        return Timeline(sent_s=sent_s, events=tuple(events))

    return await asyncio.gather(*(read(ask, at_s) for ask, at_s in zip(asks, sent_at_s, strict=True)))


class Bench:
    """Runs a plan against a source."""

    def __init__(self, plan: Plan, source: Source, text: Sequence[int], progress: Progress) -> None:
        self._plan = plan
        self._source = source
        self._text = text
        self._progress = progress
        self._num_runs = 0

    async def run(self) -> dict[str, Any]:
        """Find out what plain decoding sustains, then run every load both ways."""
        await self._cadence("warming up", self._plan.num_saturating // 4, None, self._plan.k)
        saturated = await self._cadence("plain, saturated", self._plan.num_saturating, None, 0)
        asks = draw_requests(self._text, self._plan.num_saturating, self._plan.seed)
        mean_tokens = sum(ask.num_tokens for ask in asks) / len(asks)
        requests_per_s = saturated.tokens_per_s / mean_tokens
        cells = []
        for load in self._plan.loads:
            rate = load * requests_per_s
            cells.append(
                {
                    "load": load,
                    "requests_per_s": rate,
                    "plain": await self._cadence(f"plain, load {load:g}", self._plan.num_requests, rate, 0),
                    "speculative": await self._cadence(
                        f"speculative, load {load:g}", self._plan.num_requests, rate, self._plan.k
                    ),
                }
            )
        return {"saturated": saturated, "cells": cells}

    async def _cadence(self, what: str, number: int, per_second: float | None, k: int) -> Cadence:
        """Measure one run; without a rate all requests are sent at once."""
        self._num_runs += 1
        salt = f"{time.time_ns()}-{self._num_runs}"
        asks = [
            Ask(
                name=f"{salt}-{ask.name}",
                prompt=ask.prompt,
                num_tokens=ask.num_tokens,
                temperature=ask.temperature,
                seed=ask.seed,
                k=k,
                salt=salt,
            )
            for ask in draw_requests(self._text, number, self._plan.seed)
        ]
        times = [0.0] * number if per_second is None else arrival_times(number, per_second, self._plan.seed)
        task = self._progress.add_task(what, total=number)
        timelines = await drive(self._source, asks, times, lambda: self._progress.advance(task))
        return cadence_of(timelines)


def headlines(results: dict[str, Any]) -> dict[str, float]:
    """The numbers to watch: those of the highest load."""
    cell = max(results["cells"], key=lambda one: one["load"])
    numbers: dict[str, float] = {}
    for mode, suffix in (("speculative", ""), ("plain", "_plain")):
        cadence: Cadence = cell[mode]
        for name, values in (("ttft", cadence.ttft_ms), ("itl", cadence.itl_ms)):
            numbers |= {f"{name}_p{percent}_ms{suffix}": value for percent, value in values.items()}
        numbers[f"tpot_p50_ms{suffix}"] = cadence.tpot_ms[50]
        numbers[f"fairness{suffix}"] = cadence.fairness
    plain_slow, slow = cell["plain"].slow_tenth_tpot_ms, cell["speculative"].slow_tenth_tpot_ms
    numbers["slow_streams_cost"] = slow / plain_slow
    return numbers


@contextlib.contextmanager
def engine_source(plan: Plan, family: Path) -> Iterator[Source]:
    """An engine in this process whose target is as costly as the plan says."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        target = Path(name) / "target"
        with torch.inference_mode():
            inflate(family / "target", target, layers_for_parameters(family / "target", plan.num_parameters))
        engine = Engine(
            engine_config(
                target,
                family / "draft",
                "bfloat16",
                max_num_seqs=plan.max_num_seqs,
                num_draft_tokens=plan.k,
                num_threads=plan.num_threads,
            )
        )
        engine.warm_up()
        service = AsyncEngine(engine)
        stack.callback(service.close)
        yield EngineSource(service)


async def measure(
    plan: Plan, source: Source | None, url: str | None, text: Sequence[int], progress: Progress
) -> dict[str, Any]:
    """Measure a source, or a server."""
    if source is not None:
        return await Bench(plan, source, text, progress).run()
    assert url is not None
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client:
        (await client.get("/health")).raise_for_status()
        return await Bench(plan, HttpSource(client), text, progress).run()


def main(
    quick: Annotated[bool, typer.Option(help="One load, fewer requests.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    url: Annotated[str | None, typer.Option(help="Measure this server instead of an engine here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Measure how tokens arrive at load, plainly and with speculation.

    Example: python -m benchmarks.streaming --quick --json runs/streaming.json
    """
    plan = QUICK if quick else FULL
    torch.set_num_threads(plan.num_threads)
    tokenizer = HuggingFaceTokenizer(load_tokenizer(str(models / "target"), trust_remote_code=False))
    text = [token for prompt in read_prompts(models / "prompts.jsonl") for token in tokenizer.encode(prompt)]
    local = contextlib.nullcontext(None) if url is not None else engine_source(plan, models)
    with local as source, progress_bar() as progress:
        results = asyncio.run(measure(plan, source, url, text, progress))
    numbers = headlines(results)
    write_results(json_file, {"plan": plan, "server": url, **results, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
