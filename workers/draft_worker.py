"""The Ray actor that drafts for any number of coordinators."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from specdec.core.idle_work import WorkState, idle_work_of, state_of
from specdec.engine.config import EngineConfig
from specdec.engine.draft_pool.shares import DraftShareConfig
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
    import torch

    from specdec.engine.draft_pool.hidden_inbox import HiddenInbox
    from specdec.engine.draft_pool.text_tap import LearnableText
    from specdec.proposers.base import Proposer
    from specdec.proposers.heads_factory import LoadedDrafter
    from specdec.transport.base import TensorChannel
    from specdec.transport.lane_choice import TensorLane
    from specdec.transport.zmq import ZmqOptions
    from workers.online_trainer import PackedVersion

logger = logging.getLogger(__name__)

_QUIET_S = 0.5
"""How long no request must have been present before idle work begins."""
_NUMBER_BYTES = 4
"""Of a hidden state, at most."""


class DraftWorkerProcess:
    """Loads the drafter, then serves rounds in a thread until it is stopped or its owner dies.

    The constructor blocks while the model is loaded and, within `compile.startup_seconds`, compiled.
    """

    def __init__(
        self,
        config: EngineConfig,
        peer_id: PeerId,
        host: str,
        options: ZmqOptions,
        shares: DraftShareConfig,
        listener: StartListener | None = None,
        other_ranks: Sequence[Mapping[str, Any]] = (),
        tensors: TensorLane = "gloo",
        rank_silence_s: float = 20.0,
        step_timeout_s: float = 120.0,
    ) -> None:
        """`shares`: what it takes on; `other_ranks`: actor options of ranks 1, 2, ... of the draft model, of
        which this is rank 0; `tensors`: how hidden states travel from targets; `rank_silence_s`: for how long
        another rank may not run; `step_timeout_s`: how long a batch may take.
        """
        prepare_logging(peer_id)
        speculative = config.speculative_config
        num_threads = prepare_threads(threads_per_rank(speculative.num_threads, 1 + len(other_ranks)))
        # Only now, since OpenMP reads its settings when torch is loaded.
        from specdec.engine.build_drafter import (
            build_draft_grammars,
            build_draft_proposer,
            build_remote_heads,
        )
        from specdec.engine.draft_pool.server import DraftServer
        from specdec.engine.draft_pool.text_tap import TextTap
        from specdec.model.devices import device_name, resolve_device
        from specdec.transport.nccl import nccl_lanes
        from specdec.transport.zmq import ZmqChannel

        require_own_gpus_used(speculative.device)
        started_s = time.monotonic()
        logger.info("loading drafter %s (%d threads)", speculative.model or speculative.method, num_threads)
        self._inbox: HiddenInbox | None = None
        proposer: Proposer
        if speculative.has_remote_heads:
            heads = build_remote_heads(config)
            device = resolve_device(speculative.device)
            lanes = nccl_lanes(tensors, device)
            channel = open_tensor_channel(peer_id, host, options, lanes)
            self._inbox = _hidden_inbox(
                heads, speculative.hidden_memory_bytes, channel, None if lanes is None else device
            )
            proposer = heads.proposer(self._inbox)
        else:
            ranks = lead_ranks("draft", config, host, other_ranks, rank_silence_s)
            proposer = build_draft_proposer(config, ranks)
        self._device = device_name(resolve_device(speculative.device))
        progress = StartProgress("draft", listener)
        self._works = idle_work_of(proposer)
        run_at_start(self._works, budget_s=speculative.compile.startup_seconds, report=progress.compiling)
        logger.info(
            "drafter ready after %.1f s (compiling: %s)", time.monotonic() - started_s, self.compile_state()
        )
        settle_memory()
        self._channel = ZmqChannel(peer_id, host=host, options=_bounded(options, config))
        grammars = build_draft_grammars(config)
        self._tap = None if speculative.online is None else TextTap(speculative.online)
        self._server = server = DraftServer(
            self._channel,
            proposer,
            grammars=grammars,
            shares=shares,
            tap=self._tap,
            hidden=self._inbox,
            max_message_bytes=options.max_message_bytes,
            max_draft_tokens=speculative.num_speculative_tokens,
        )
        self._proposer = proposer
        self._step_timeout_s = step_timeout_s
        self._taking = False
        idle = IdleRunner(self._works, quiet_s=_QUIET_S)

        def serve_once() -> None:
            was_served = server.step(idle.patience_s)
            idle.after(was_served, is_needed=server.num_sequences > 0)

        def close() -> None:
            self._channel.close()
            grammars.close()
            if self._inbox is not None:
                self._inbox.close()

        self._thread = ServingThread("draft", serve_once, close)
        progress.ready()

    def address(self) -> PeerAddress:
        """How coordinators reach this worker. Answers once it serves."""
        return self._channel.address

    def device(self) -> str:
        """What the drafter runs on (its first rank), in words."""
        return self._device

    def compile_state(self) -> WorkState:
        """What has become of compiling the forward."""
        return state_of(self._works)

    def tensor_address(self) -> PeerAddress | None:
        """Where target workers send hidden states to; None: they are not needed."""
        return None if self._inbox is None else self._inbox.address

    def admit(
        self, coordinators: list[PeerAddress], targets: Sequence[tuple[PeerAddress, PeerId]] = ()
    ) -> None:
        """Serve exactly these coordinators, and forget what others asked for.

        `targets`: from where hidden states come, with the coordinators whose sequences they are of.
        """
        # First: who may speak to the channel must find the server willing to hear it.
        self._server.retain([coordinator.peer_id for coordinator in coordinators])
        self._channel.admit(coordinators)
        if self._inbox is not None:
            self._inbox.admit(targets)

    def check_health(self) -> dict[str, float]:
        """Return counters; raise when nothing is served any more."""
        if not self._thread.is_alive:
            raise RuntimeError("the draft worker's serving thread has ended")
        if self._server.at_work_s > self._step_timeout_s:
            raise RuntimeError(f"the draft worker has been at one batch for {self._server.at_work_s:.0f} s")
        counters = dict(self._server.counters)
        if self._inbox is not None:
            counters.update(self._inbox.counters)
        server = self._server
        return {
            "num_sequences": float(server.num_sequences),
            "memory_held": server.memory_held,
            **counters,
        }

    def take_texts(self) -> Sequence[LearnableText]:
        """Return, once, the texts that have ended since the last call, as far as they may be learnt from."""
        return () if self._tap is None else self._tap.take()

    def can_use_version(self) -> bool:
        """Whether other weights could be taken now. To be asked before all of them are sent."""
        return not self._taking and self.compile_state() != "pending"

    def use_version(self, version: PackedVersion) -> bool:
        """Draft with other weights from the next batch on; nobody waits while they are prepared.

        Return False where that cannot be yet, as `can_use_version` says: ask that again.
        """
        from safetensors.torch import load

        from specdec.model.renewal import TakesWeights

        proposer = self._proposer
        assert isinstance(proposer, TakesWeights), "checked by SpeculativeConfig"
        if not self.can_use_version():
            return False
        staged = proposer.stage_weights(load(version.weights))
        self._taking = True

        def take() -> None:
            if proposer.take_weights(staged):
                self._server.count({"online_versions_taken": 1})
                logger.info("drafting with version %d of the weights", version.number)
            self._taking = False

        self._server.before_next(take)
        return True

    def count(self, counts: dict[str, int]) -> None:
        """Tell coordinators what was counted elsewhere, by metric name."""
        self._server.count(counts)

    def stop(self) -> None:
        """Serve no more."""
        self._thread.stop(self._channel.wake)


def _bounded(options: ZmqOptions, config: EngineConfig) -> ZmqOptions:
    """Take no longer messages, and keep no more of them, than a coordinator has use for.

    At most it tells of all that it runs, from the first token on, and goes on before it has an answer.
    """
    from specdec.engine.build_drafter import longest_draft_message

    longest = longest_draft_message(config)
    if longest is None:
        return options
    most_bytes = (1 + config.scheduler.max_num_seqs) * longest
    return dataclasses.replace(
        options,
        max_received_bytes=longest,
        max_queued_bytes=min(options.max_queued_bytes, most_bytes),
    )


def _hidden_inbox(
    heads: LoadedDrafter, memory_bytes: int, channel: TensorChannel, device: torch.device | None
) -> HiddenInbox:
    """Rows that come to a GPU stay there (`device`), for it is there that they are read."""
    from specdec.engine.draft_pool.hidden_inbox import HiddenInbox

    return HiddenInbox(
        channel,
        layers=heads.hidden_layers,
        width=heads.state_width,
        max_rows=max(1, memory_bytes // (heads.state_width * _NUMBER_BYTES)),
        device=device,
    )


DraftWorker = ray.remote(DraftWorkerProcess)
"""The actor class; the draft pool gives it resources and a bundle."""
