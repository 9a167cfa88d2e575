"""A coordinator's target group: makes engines over fresh target workers and the draft pool."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from cluster.config import ClusterConfig
from cluster.directory import Member
from cluster.placement import ModelRanks
from cluster.pool_drafter import capabilities_in_pool
from cluster.runtime import bind_host, channel_options, new_peer_id, rank_options, worker_options
from cluster.start_reports import StartReporter
from cluster.worker_handle import WorkerHandle
from specdec.core.description import TargetDescription
from specdec.core.errors import TransportError
from specdec.core.idle_work import WorkState
from specdec.engine.build import kv_budgets_of
from specdec.engine.config import EngineConfig
from specdec.engine.controllers import controller_for, cost_profile_of, drafters_of, modes_of
from specdec.engine.draft_pool.hidden_routing import HiddenRouting
from specdec.engine.draft_pool.message_lengths import longest_message_bytes
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.engine import Engine
from specdec.engine.synthetic import require_real
from specdec.engine.targets.remote_target import RemoteTarget, RemoteTargetTimes
from specdec.engine.text.tokenizer import Tokenizer, build_tokenizer
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.registry import create_each, create_proposer, with_fallback
from specdec.proposers.target_facts import TargetFacts
from specdec.scheduling.speculation.cost import assumed_profile
from specdec.scheduling.speculation.cost_profile import CostProfile
from specdec.transport.base import Channel, PeerAddress, PeerId
from specdec.transport.status import DraftLinkStatus
from specdec.transport.zmq import KeyPair, ZmqChannel
from workers.target_worker import TargetWorker

logger = logging.getLogger(__name__)

_DRAFTERS_S = 10.0
"""So long a first start waits for draft workers, to measure what drafts cost."""
_LOOK_S = 0.05


class TargetGroup:
    """One target worker at a time, in the placement group of the replica that this runs in.

    Where the model is divided it is rank 0 of its model, and starts and takes along the other ranks.
    """

    def __init__(self, engine: EngineConfig, cluster: ClusterConfig, peer_id: PeerId, keys: KeyPair) -> None:
        """Serve this engine.

        Raises:
            ConfigError: its output would be made up (`engine.synthetic`).
        """
        require_real(engine)
        self._config = engine
        self._cluster = cluster
        self._peer_id = peer_id
        self._keys = keys
        self._host = bind_host(cluster.channels)
        self._options = channel_options(cluster.channels)
        self._tokenizer: Tokenizer | None = None
        self._incarnations = itertools.count(time.time_ns())
        self._worker: WorkerHandle | None = None
        self._target: RemoteTarget | None = None
        self._proposer: RemoteProposer | None = None
        self._routing: HiddenRouting | None = None
        self._drafters: Sequence[Member] = ()
        self._telling = threading.Lock()
        self._tensors: PeerAddress | None = None
        self._revision: str | None = None
        self._profile: CostProfile | None = None
        self._compile_state: WorkState = "pending"

    @property
    def compile_state(self) -> WorkState:
        """What has become of compiling the target's forward (any thread)."""
        return self._compile_state

    @property
    def tensors(self) -> PeerAddress | None:
        """From where the target worker sends hidden states; None: nobody needs any (any thread)."""
        return self._tensors

    def make_engine(self, meanwhile: Callable[[], None]) -> Engine:
        """Start a target worker, replacing the one before, and return an engine over it.

        The engine calls `meanwhile` in every round while workers are at work.

        Raises:
            UserError: the model cannot be loaded, or is another one than before.
            TransportError: the worker died.
        """
        self.stop()
        self._compile_state = "pending"
        with contextlib.ExitStack() as opened:  # closed here where no engine comes of it, which would do so
            channel = ZmqChannel(self._peer_id, host=self._host, keys=self._keys, options=self._options)
            opened.callback(channel.close)
            target = self._make_target(channel)
            self._target = target
            self._require_same_model(target.description)
            proposer = self._make_proposer(target, meanwhile)
            opened.callback(proposer.close)
            engine = self._engine_of(target, proposer, meanwhile)
            opened.pop_all()
        return engine

    def check_idle(self) -> None:
        """Raise TransportError when the target of an idle engine is gone."""
        if self._target is not None:
            self._target.check()
        if self._compile_state == "pending" and self._worker is not None:
            self._compile_state = self._worker.poll_compile_state() or "pending"

    def set_drafters(self, drafters: Sequence[Member]) -> None:
        """Use exactly these draft workers (any thread)."""
        self._drafters = drafters
        self._tell_drafters()

    def metrics(self) -> dict[str, float]:
        """Counters of the links to the workers."""
        target, proposer = self._target, self._proposer
        dropped = {} if target is None else dict(target.messages_dropped)
        if proposer is None:
            return {**dropped}
        return {
            **dropped,
            "draft_workers": float(proposer.num_workers),
            "draft_pool_usage_perc": proposer.pool_usage,
            "draft_utilization": proposer.utilization,
            **proposer.counters,
        }

    def draft_links(self) -> tuple[DraftLinkStatus, ...]:
        """The draft workers as the proposer sees them; nobody where it drafts in this process."""
        return () if self._proposer is None else self._proposer.links

    def stop(self) -> None:
        """End the target worker. The engine over it is closed by whoever has it."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _make_target(self, channel: ZmqChannel) -> RemoteTarget:
        """Start a worker and return the target that it holds, reached by this channel."""
        loading = self._start_worker(channel.address)
        if self._tokenizer is None:  # while it loads: importing transformers takes seconds
            self._tokenizer = build_tokenizer(self._config)
        worker = loading.await_address(self._cluster.target_groups.load_timeout_s)
        self._compile_state = loading.compile_state()
        self._tensors = loading.tensor_address()
        return RemoteTarget(
            channel,
            worker,
            incarnation=next(self._incarnations),
            times=RemoteTargetTimes(step_timeout_s=self._cluster.target_groups.step_timeout_s),
        )

    def _engine_of(self, target: RemoteTarget, proposer: Proposer, meanwhile: Callable[[], None]) -> Engine:
        assert self._tokenizer is not None, "the target was made first"
        speculative = self._config.speculative_config
        return Engine.from_parts(
            target=target,
            proposer=with_fallback(proposer, speculative),
            meanwhile=meanwhile,
            tokenizer=self._tokenizer,
            scheduler=self._config.scheduler,
            controller=controller_for(
                self._config,
                self._costs(target, proposer),
                modes_of(proposer.capabilities),
                is_target_elsewhere=target.is_elsewhere,
            ),
            max_branches=speculative.max_branches,
            prefix_caching=self._config.cache.enable_prefix_caching,
            grammar=self._config.grammar,
            kv_budgets=kv_budgets_of(speculative),
            drafters=drafters_of(speculative),
        )

    def _start_worker(self, owner: PeerAddress) -> WorkerHandle:
        group = self._cluster.target_groups
        worker_id = new_peer_id("target")
        options = worker_options(group.bundle, worker_id, self._cluster.namespace)
        actor = TargetWorker.options(**options).remote(
            self._config,
            worker_id,
            self._host,
            owner,
            self._options,
            StartReporter(self._cluster.namespace, worker_id),
            rank_options("target", group.bundle, ModelRanks.of_target(self._config), self._cluster.namespace),
            self._cluster.channels.tensors,
            group.rank_silence_s,
        )
        self._worker = WorkerHandle(actor, "target worker")
        return self._worker

    def _costs(self, target: RemoteTarget, proposer: Proposer) -> CostProfile:
        """Return what rounds cost; measured with the first worker only: streams wait for those that
        follow.
        """
        if self._profile is None:
            speculative = self._config.speculative_config
            is_needed = speculative.method != "none" and speculative.controller != "fixed"
            self._profile = (
                cost_profile_of(
                    self._config,
                    target,
                    proposer,
                    draft_devices=lambda: {one.device for one in self._drafters},
                    await_drafters=self._await_drafters,
                )
                if is_needed
                else assumed_profile()
            )
        return self._profile

    def _await_drafters(self) -> None:
        """Give draft workers that start with this group some time to be there.

        Without them what drafts cost is not known until the next start.
        """
        proposer = self._proposer
        if proposer is None or self._cluster.draft_pool.may_be_none:
            return
        give_up_s = time.monotonic() + _DRAFTERS_S
        while not proposer.num_workers and time.monotonic() < give_up_s:
            time.sleep(_LOOK_S)

    def _require_same_model(self, description: TargetDescription) -> None:
        """Streams may only be replayed onto the model that began them."""
        if self._revision is not None and description.revision != self._revision:
            raise TransportError(
                f"the target's checkpoint has changed: revision {description.revision} "
                f"instead of {self._revision}"
            )
        self._revision = description.revision

    def _tell_drafters(self) -> None:
        """Tell the proposer of the draft workers that there are; who is told last is told the latest."""
        with self._telling:
            drafters, proposer, routing = self._drafters, self._proposer, self._routing
            if routing is not None:
                routing.set_inboxes({one.peer_id: one.tensors for one in drafters if one.tensors is not None})
            if proposer is not None:
                proposer.set_workers([one.address for one in drafters])

    def _make_proposer(self, target: RemoteTarget, meanwhile: Callable[[], None]) -> Proposer:
        speculative = self._config.speculative_config
        if speculative.method != "several":
            return self._make_drafter(speculative, target, meanwhile)
        return create_each(speculative, lambda one: self._make_drafter(one, target, meanwhile))

    def _make_drafter(
        self, speculative: SpeculativeConfig, target: RemoteTarget, meanwhile: Callable[[], None]
    ) -> Proposer:
        description = target.description
        if not speculative.drafts_in_pool:
            facts = TargetFacts(
                vocab_size=description.vocab_size,
                dtype=description.dtype,
                max_num_seqs=self._config.scheduler.max_num_seqs,
                model=self._config.target.model,
            )
            return create_proposer(speculative, facts)
        channel: Channel = ZmqChannel(self._peer_id, host=self._host, keys=self._keys, options=self._options)
        if speculative.has_remote_heads:
            channel = self._routing = HiddenRouting(channel, target.send_hidden)
        proposer = RemoteProposer(
            channel,
            capabilities=capabilities_in_pool(speculative),
            vocab_size=description.vocab_size,
            deadlines=self._cluster.draft_pool.deadlines,
            placement=self._cluster.draft_pool.placement,
            # Draft workers know attempts of the engine before this one, of this process: nobody else has
            # its name. A clock that may be set back would have them take new attempts for old ones.
            first_epoch=time.monotonic_ns(),
            max_message_bytes=min(
                self._options.max_message_bytes,
                longest_message_bytes(
                    max_model_len=description.max_model_len,
                    vocab_size=description.vocab_size,
                    grammar_bytes=self._config.grammar.max_bytes,
                ),
            ),
            meanwhile=meanwhile,
        )
        self._proposer = proposer
        self._tell_drafters()
        return proposer
