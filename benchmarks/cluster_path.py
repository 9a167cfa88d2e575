"""The same engine behind the cluster's channels, driven like the one in this process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence

from benchmarks.in_process import batch_requests
from cluster.application import resolve
from cluster.client import ClusterService
from deploy.config import DrafthouseConfig
from deploy.deployment import Deployment
from deploy.local_ray import RaySession
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.service import GenerationService

_READY_TIMEOUT_S = 60.0


class ClusterPath:
    """A local Ray cluster of two CPUs that serves one configuration, and a client on its channels."""

    def __init__(self, engine: EngineConfig) -> None:
        self._config = DrafthouseConfig.model_validate(
            {
                "target": engine.target,
                "speculative_config": engine.speculative_config,
                "cache": engine.cache,
                "scheduler": engine.scheduler,
                "http": {"port": _free_port()},
            }
        )
        self._session = RaySession(address=None, num_cpus=2, show_logs=False)
        self._session.open()
        self._deployment = Deployment(self._config, frozenset())
        self._deployment.start()
        for _ in self._deployment.wait_ready():
            pass

    async def service(self) -> ClusterService:
        """Connect to the coordinator from the running event loop."""
        service = ClusterService(resolve(self._config.cluster))
        await service.start()
        await service.wait_ready(_READY_TIMEOUT_S)
        return service

    def close(self) -> None:
        """End everything that was started."""
        self._deployment.stop()
        self._session.close()


async def run_batch(
    service: GenerationService, prompts: Sequence[tuple[int, ...]], num_tokens: int, k: int, name: str
) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """Generate for all prompts at once; return seconds and tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    requests = batch_requests(prompts, params, k, name)

    async def one(index: int) -> tuple[int, ...]:
        tokens: list[int] = []
        async for output in service.generate(requests[index]):
            tokens.extend(output.token_ids)
        return tuple(tokens)

    started_s = time.perf_counter()
    results = await asyncio.gather(*(one(index) for index in range(len(requests))))
    return time.perf_counter() - started_s, tuple(results)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
