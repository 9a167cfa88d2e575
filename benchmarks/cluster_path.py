"""The same engine behind the cluster's channels.

Import it only once Ray runs (`deploy.local_ray.RaySession`): Ray reads its environment when it is imported.
"""

from __future__ import annotations

import contextlib
import socket
import time

import httpx
from ray import serve

from benchmarks.compile_states import wait_compiled
from cluster.application import resolve
from cluster.client import ClusterService
from deploy.config import DrafthouseConfig
from deploy.deployment import Deployment
from specdec.engine.config import EngineConfig

_READY_TIMEOUT_S = 60.0
_HEALTHY_TIMEOUT_S = 180.0
_COMPILE_TIMEOUT_S = 60.0
"""Workers compile before they are healthy, and what does not fit `compile.startup_seconds` afterwards."""


class ClusterPath:
    """One configuration served on the connected Ray cluster, and a client on its channels."""

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
        self._deployment = Deployment(self._config)
        self._deployment.start()
        self._wait_healthy()
        wait_compiled(self._deployment.url, _COMPILE_TIMEOUT_S)

    def _wait_healthy(self) -> None:
        """Ask the door, not Serve: its status calls take seconds in a process that imported transformers."""
        deadline_s = time.monotonic() + _HEALTHY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self._deployment.url}/health", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.5)
        raise TimeoutError(f"the cluster was not healthy after {_HEALTHY_TIMEOUT_S:g} s")

    async def service(self) -> ClusterService:
        """Connect to the coordinator from the running event loop."""
        service = ClusterService(resolve(self._config.cluster))
        await service.start()
        await service.wait_ready(_READY_TIMEOUT_S)
        return service

    def close(self) -> None:
        """End the application, and Serve, whose proxy keeps its port."""
        self._deployment.stop()
        serve.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
