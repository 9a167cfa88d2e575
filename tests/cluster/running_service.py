"""Streams through the service of a cluster that runs, and its metrics."""

from __future__ import annotations

import asyncio
import operator
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from cluster.config import ClusterConfig
from specdec.core.errors import NotReadyError
from specdec.core.ids import RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from tests.cluster.live_workers import worker


def requests(num: int, *, max_tokens: int, name: str) -> list[Request]:
    """Half greedy, half sampled, of different lengths."""
    return [
        Request(
            request_id=RequestId(f"{name}-{index}"),
            prompt_token_ids=tuple((7 * index + 3 * step) % 100 + 2 for step in range(5 + 9 * index)),
            params=SamplingParams(temperature=float(index % 2), max_tokens=max_tokens, ignore_eos=True),
            seed=1000 + index,
        )
        for index in range(num)
    ]


class Streams:
    """Requests sent through a `ClusterService`, and what came back."""

    def __init__(self, service: object, wanted: Sequence[Request]) -> None:
        self.service = service
        self.tokens: dict[str, list[int]] = {request.request_id: [] for request in wanted}
        self.last: dict[str, RequestOutput] = {}
        self.tasks = [asyncio.create_task(self.consume(request)) for request in wanted]

    async def consume(self, request: Request) -> None:
        async for output in self.service.generate(request):  # type: ignore[attr-defined]
            assert output.first_index == len(self.tokens[request.request_id])
            self.tokens[request.request_id].extend(output.token_ids)
            assert request.request_id not in self.last, "an output after the last one"
            if output.finish_reason is not None:
                self.last[request.request_id] = output

    async def all_have_begun(self) -> None:
        while not all(self.tokens.values()):
            await asyncio.sleep(0.001)
        assert not self.last, "a stream ended before the test could interfere"

    async def finish(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self.tasks), 120)


def with_service(
    config: ClusterConfig, scenario: Callable[[object], Awaitable[None]], *, num_drafters: int = 1
) -> None:
    """Run a scenario against a service that is connected and ready, with drafters there."""
    from cluster.client import ClusterService

    async def main() -> None:
        service = ClusterService(config)
        await service.start()
        try:
            await service.wait_ready(60)
            if num_drafters:
                await metric(service, "draft_workers", lambda value: value >= num_drafters)
            await scenario(service)
        finally:
            await service.close()

    asyncio.run(main())


async def metrics_now(service: object) -> Mapping[str, float]:
    """All metrics; none while a door that is gone is still taken for the one that keeps the account."""
    try:
        values: Mapping[str, float] = await service.metrics()  # type: ignore[attr-defined]
    except NotReadyError:
        return {}
    return values


async def metric(service: object, name: str, holds: Callable[[float], bool], within_s: float = 60) -> float:
    """Wait until a metric is as it should be; return it."""
    until = time.monotonic() + within_s
    while True:
        values = await metrics_now(service)
        if name in values and holds(values[name]):
            return float(values[name])
        assert time.monotonic() < until, f"{name} is {values.get(name)}"
        await asyncio.sleep(0.1)


def outlive_the_target(
    config: ClusterConfig,
    wanted: list[Request],
    expected: Mapping[str, list[int]],
    least: Mapping[str, int],
    *,
    num_drafters: int = 1,
) -> None:
    """Stream while the target's worker dies: tokens are those expected, these metrics rise above `least`.

    No proposal was malformed.
    """
    import ray

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.all_have_begun()
        ray.kill(worker(config, "target"), no_restart=True)
        await streams.finish()
        for request in wanted:
            assert streams.tokens[request.request_id] == expected[request.request_id]
        for name, bound in least.items():
            await metric(service, name, partial(operator.lt, bound))
        values = await service.metrics()  # type: ignore[attr-defined]
        assert not values.get('spec_decode_num_proposals_dropped{reason="malformed"}')

    with_service(config, scenario, num_drafters=num_drafters)
