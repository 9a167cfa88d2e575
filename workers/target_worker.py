"""The Ray actor that holds one copy of the target model and serves one coordinator."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from specdec.core.idle_work import WorkState, state_of
from specdec.engine.config import EngineConfig
from specdec.transport.base import PeerAddress, PeerId
from workers.idle_runner import IdleRunner, run_at_start
from workers.process import (
    ServingThread,
    open_tensor_channel,
    prepare_logging,
    prepare_threads,
    require_own_gpus_used,
    settle_memory,
)
from workers.progress import StartListener, StartProgress
from workers.rank_worker import lead_ranks, threads_per_rank

if TYPE_CHECKING:
    from specdec.engine.targets.hidden_sender import HiddenSender
    from specdec.engine.targets.kept_rows import KeptRows
    from specdec.transport.base import TensorChannel
    from specdec.transport.lane_choice import TensorLane
    from specdec.transport.zmq import ZmqOptions

logger = logging.getLogger(__name__)

_QUIET_S = 1.5
"""Longer than any round waits for drafts: the target hears nothing during that time."""


class TargetWorkerProcess:
    """Loads the target, then serves steps in a thread until it is stopped or its owner dies.

    The constructor blocks while the model is loaded and, within `compile.startup_seconds`, compiled. Ray
    kills the actor when the coordinator that made it dies.
    """

    def __init__(
        self,
        config: EngineConfig,
        peer_id: PeerId,
        host: str,
        owner: PeerAddress,
        options: ZmqOptions,
        listener: StartListener | None = None,
        other_ranks: Sequence[Mapping[str, Any]] = (),
        tensors: TensorLane = "gloo",
        rank_silence_s: float = 20.0,
    ) -> None:
        """`other_ranks`: actor options of ranks 1, 2, ... of the target, of which this is rank 0; `tensors`:
        how hidden states travel to draft workers; `rank_silence_s`: for how long another rank may not run.
        """
        prepare_logging(peer_id)
        num_threads = prepare_threads(threads_per_rank(config.target.num_threads, 1 + len(other_ranks)))
        # Only now, since OpenMP reads its settings when torch is loaded.
        from specdec.engine.build_target import build_target
        from specdec.engine.targets.target_server import TargetServer
        from specdec.model.devices import resolve_device
        from specdec.transport.nccl import nccl_lanes
        from specdec.transport.zmq import ZmqChannel

        require_own_gpus_used(config.target.device)
        started_s = time.monotonic()
        logger.info("loading target %s (%d threads)", config.target.model, num_threads)
        progress = StartProgress("target", listener)
        ranks = lead_ranks("target", config, host, other_ranks, rank_silence_s)
        target = build_target(config, progress, ranks)
        description = target.description
        logger.info(
            "target loaded after %.1f s: %s, %s, %d blocks of %d tokens",
            time.monotonic() - started_s,
            description.model_id,
            description.dtype,
            description.num_blocks,
            description.block_size,
        )
        self._works = target.idle_work
        run_at_start(self._works, budget_s=config.target.compile.startup_seconds, report=progress.compiling)
        logger.info(
            "target ready after %.1f s (compiling: %s)", time.monotonic() - started_s, self.compile_state()
        )
        settle_memory()
        self._channel = ZmqChannel(peer_id, host=host, options=options)
        self._channel.admit([owner])
        self._sender: HiddenSender | None = None
        if config.speculative_config.has_remote_heads:
            device = resolve_device(config.target.device)
            lanes = nccl_lanes(tensors, device)
            self._sender = _hidden_sender(target.hidden, open_tensor_channel(peer_id, host, options, lanes))
        server = TargetServer(self._channel, target, hidden=self._sender)
        idle = IdleRunner(self._works, quiet_s=_QUIET_S)

        def serve_once() -> None:
            was_served = server.step(idle.patience_s)
            idle.after(was_served, is_needed=False)

        def close() -> None:
            self._channel.close()
            if self._sender is not None:
                self._sender.close()

        self._thread = ServingThread("target", serve_once, close)
        progress.ready()

    def address(self) -> PeerAddress:
        """How the coordinator reaches this worker. Answers once it serves."""
        return self._channel.address

    def tensor_address(self) -> PeerAddress | None:
        """Who draft workers get hidden states from; None: they need none."""
        return None if self._sender is None else self._sender.address

    def compile_state(self) -> WorkState:
        """What has become of compiling the forward."""
        return state_of(self._works)

    def check_health(self) -> None:
        """Raise when nothing is served any more."""
        if not self._thread.is_alive:
            raise RuntimeError("the target worker's serving thread has ended")

    def stop(self) -> None:
        """Serve no more."""
        self._thread.stop(self._channel.wake)


def _hidden_sender(kept: KeptRows | None, channel: TensorChannel) -> HiddenSender:
    from specdec.engine.targets.hidden_sender import HiddenSender

    assert kept is not None, "a target keeps what heads in draft workers read"
    return HiddenSender(channel, kept)


TargetWorker = ray.remote(TargetWorkerProcess)
"""The actor class; the coordinator gives it resources and a bundle."""
