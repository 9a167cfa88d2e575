"""The same engine behind the cluster's channels.

Import it only once Ray runs (`deploy.local_ray.RaySession`): Ray reads its environment when it is imported.
"""

from __future__ import annotations

import socket

from cluster.application import resolve
from cluster.client import ClusterService
from deploy.config import DrafthouseConfig
from deploy.deployment import Deployment
from specdec.engine.config import EngineConfig

_READY_TIMEOUT_S = 60.0


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
        """End the application."""
        self._deployment.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
