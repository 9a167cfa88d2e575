"""Clients that ask again as soon as they have an answer: a batch that stays full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from deploy.load.generator import LoadGenerator, Timeline
from deploy.load.workload import PlannedRequest


class ClosedLoop:
    """So many clients of one server."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        path: str,
        body: Callable[[], Mapping[str, Any]],
        tick: Callable[[], None],
    ) -> None:
        """Send what `body` returns, another one each time; `tick` is called for every answer."""
        self._client = client
        self._path = path
        self._body = body
        self._tick = tick

    async def run(self, num_clients: int, until_s: float) -> list[Timeline]:
        """Ask until a time of the event loop's clock; return when all that was asked by then is answered.

        Raises:
            RuntimeError: a request failed: what was measured is not what a full batch does.
        """
        answers = await asyncio.gather(*(self._ask(until_s) for _ in range(num_clients)))
        timelines = [timeline for each in answers for timeline in each]
        failed = [timeline.error for timeline in timelines if timeline.error is not None]
        if failed:
            raise RuntimeError(f"without overload, {len(failed)} requests failed: {failed[0]}")
        return timelines

    async def _ask(self, until_s: float) -> list[Timeline]:
        loop = asyncio.get_running_loop()
        timelines = []
        while loop.time() < until_s:
            planned = [PlannedRequest(at_s=0.0, body=dict(self._body()))]
            generator = LoadGenerator(self._client, self._path)
            timelines += await generator.run(planned, lambda _: self._tick())
        return timelines
