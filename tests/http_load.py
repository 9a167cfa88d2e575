"""Clients that read streams over HTTP all the time, reconnect where they have to, and check every token."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.reconnecting import Reading, read_stream
from deploy.config import DrafthouseConfig
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine

NUM_CLIENTS = 3
LIMIT_S = 300.0
PATIENCE_S = 200.0
MAX_TOKENS = 120


def connected(url: str) -> httpx.AsyncClient:
    """A client with the patience of its readers, and a connection for each."""
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(PATIENCE_S))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request, and what the target generates for it alone."""

    body: dict[str, Any]
    token_ids: list[int]


def wanted_of(config: DrafthouseConfig) -> list[Wanted]:
    prompts = [[(7 * index + 3 * step) % 100 + 2 for step in range(5 + 9 * index)] for index in range(6)]
    params = [
        SamplingParams(temperature=float(index % 2), seed=index, max_tokens=MAX_TOKENS, ignore_eos=True)
        for index in range(len(prompts))
    ]
    with Engine(config.served_models()[0].engine) as engine:
        results = engine.generate(prompts, params)
    return [
        Wanted(
            {
                "model": "m",
                "prompt": prompt,
                "temperature": one.temperature,
                "seed": one.seed,
                "max_tokens": MAX_TOKENS,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": True,
            },
            list(result.token_ids),
        )
        for prompt, one, result in zip(prompts, params, results, strict=True)
    ]


@dataclass(slots=True)
class Load:
    """The clients, and what they have seen."""

    client: httpx.AsyncClient
    wanted: list[Wanted]
    num_complete: int = 0
    num_breaks: int = 0
    longest_pause_s: float = 0.0
    readings: list[Reading] = field(default_factory=list)
    """Of the streams that run."""
    _is_over: bool = False
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def start(self) -> None:
        self._tasks += [asyncio.create_task(self._client()) for _ in range(NUM_CLIENTS)]

    async def _client(self) -> None:
        while not self._is_over:
            wanted = self.wanted[next(self._numbers) % len(self.wanted)]
            reading = Reading()
            self.readings.append(reading)
            await read_stream(
                self.client, "/v1/completions", wanted.body, patience_s=PATIENCE_S, reading=reading
            )
            self.readings.remove(reading)
            self.num_breaks += reading.num_breaks
            self.longest_pause_s = max(self.longest_pause_s, reading.longest_pause_s)
            assert (reading.refusal, reading.finish_reason) == (None, "length"), reading
            assert reading.token_ids == wanted.token_ids
            self.num_complete += 1

    async def more(self, number: int) -> None:
        """Wait until so many more streams are complete, those that run now included."""
        least, until_s = self.num_complete + number, time.monotonic() + LIMIT_S
        while self.num_complete < least:
            self.check()
            assert time.monotonic() < until_s, f"streams stand still at {self.num_complete}"
            await asyncio.sleep(0.02)

    def check(self) -> None:
        """Raise what has gone wrong so far."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def end(self) -> None:
        self._is_over = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), LIMIT_S)

    async def give_up(self) -> None:
        """Stop without waiting for what will not come."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
