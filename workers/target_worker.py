"""The Ray actor that holds one copy of the target model and serves one coordinator."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import ray

from specdec.engine.config import EngineConfig
from specdec.transport.base import PeerAddress, PeerId
from workers.idle_runner import IdleRunner
from workers.process import ServingThread, prepare_logging, prepare_threads, settle_memory

if TYPE_CHECKING:
    from specdec.transport.zmq import ZmqOptions

logger = logging.getLogger(__name__)

_QUIET_S = 1.5
"""Longer than any round waits for drafts: the target hears nothing during that time."""


class TargetWorkerProcess:
    """Loads the target, then serves steps in a thread until it is stopped or its owner dies.

    The constructor blocks while the model loads. Ray kills the actor when the coordinator that made it dies.
    """

    def __init__(
        self, config: EngineConfig, peer_id: PeerId, host: str, owner: PeerAddress, options: ZmqOptions
    ) -> None:
        prepare_logging(peer_id)
        num_threads = prepare_threads(config.target.num_threads)
        # Only now, since OpenMP reads its settings when torch is loaded.
        from specdec.engine.build import build_target
        from specdec.engine.target_server import TargetServer
        from specdec.transport.zmq import ZmqChannel
        from workers.progress import LoggedProgress

        started_s = time.monotonic()
        logger.info("loading target %s (%d threads)", config.target.model, num_threads)
        target = build_target(config, LoggedProgress("target"))
        description = target.description
        logger.info(
            "target ready after %.1f s: %s, %s, %d blocks of %d tokens",
            time.monotonic() - started_s,
            description.model_id,
            description.dtype,
            description.num_blocks,
            description.block_size,
        )
        settle_memory()
        self._channel = ZmqChannel(peer_id, host=host, options=options)
        self._channel.admit([owner])
        server = TargetServer(self._channel, target)
        idle = IdleRunner(target.idle_work, quiet_s=_QUIET_S)

        def serve_once() -> None:
            was_served = server.step(idle.patience_s)
            idle.after(was_served, is_needed=False)

        self._thread = ServingThread("target", serve_once, self._channel.close)

    def address(self) -> PeerAddress:
        """How the coordinator reaches this worker. Answers once the model is loaded."""
        return self._channel.address

    def check_health(self) -> None:
        """Raise when nothing is served any more."""
        if not self._thread.is_alive:
            raise RuntimeError("the target worker's serving thread has ended")

    def stop(self) -> None:
        """Serve no more."""
        self._thread.stop(self._channel.wake)


TargetWorker = ray.remote(TargetWorkerProcess)
"""The actor class; the coordinator gives it resources and a bundle."""
