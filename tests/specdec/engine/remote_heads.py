"""Real (tiny) models on a simulated network: heads draft in draft workers, a target worker sends states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from specdec.core.clock import ManualClock
from specdec.engine.build_drafter import build_remote_heads
from specdec.engine.build_target import build_target
from specdec.engine.config import EngineConfig
from specdec.engine.draft_pool.hidden_inbox import HiddenInbox
from specdec.engine.draft_pool.hidden_routing import HiddenRouting
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.engine import Engine
from specdec.engine.targets.hidden_sender import HiddenSender
from specdec.engine.targets.remote_target import RemoteTarget
from specdec.engine.targets.target_server import TargetServer
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.registry import with_fallback
from specdec.scheduling.speculation.controller import FixedController
from specdec.transport.base import ChannelCounters, Envelope, PeerAddress, PeerId, TensorChannel
from specdec.transport.memory import Faults, MemoryNetwork
from specdec.transport.messages import Message
from tests.architectures import VOCAB_SIZE, make_tokenizer
from tests.specdec.engine.remote_cluster import PATIENT, TARGET

COORDINATOR = PeerId("coordinator")


class LosingChannel:
    """Implements `TensorChannel` by another; loses some of the messages with tensors, counted from 0."""

    def __init__(self, inner: TensorChannel, lost: Iterable[int]) -> None:
        self._inner = inner
        self._lost = frozenset(lost)
        self.num_sent = 0

    @property
    def address(self) -> PeerAddress:
        return self._inner.address

    @property
    def counters(self) -> ChannelCounters:
        return self._inner.counters

    def connect(self, peer: PeerAddress) -> None:
        self._inner.connect(peer)

    def disconnect(self, peer_id: PeerId) -> None:
        self._inner.disconnect(peer_id)

    def admit(self, peers: Iterable[PeerAddress]) -> None:
        self._inner.admit(peers)

    def send(self, peer_id: PeerId, message: Message) -> None:
        self._inner.send(peer_id, message)

    def send_tensors(self, peer_id: PeerId, message: Message, tensors: Mapping[str, torch.Tensor]) -> None:
        self.num_sent += 1
        if self.num_sent - 1 not in self._lost:
            self._inner.send_tensors(peer_id, message, tensors)

    def receive(self, timeout_s: float | None) -> Envelope:
        return self._inner.receive(timeout_s)

    def wake(self) -> None:
        self._inner.wake()

    def close(self, flush_s: float = 0.0) -> None:
        self._inner.close(flush_s)


class RemoteHeads:
    """One coordinator's engine, a target worker, and draft workers with the heads of a configuration."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        faults: Faults | None = None,
        seed: int = 0,
        num_drafters: int = 1,
        lost: Iterable[int] = (),
    ) -> None:
        speculative = config.speculative_config
        assert speculative.has_remote_heads
        self.config = config
        self.network = MemoryNetwork(seed=seed, clock=ManualClock())
        self.inboxes: dict[PeerId, HiddenInbox] = {}
        self.servers: dict[PeerId, DraftServer] = {}
        self._addresses: dict[PeerId, PeerAddress] = {}
        self._num_started = 0
        worker, owner = self.network.open(TARGET), self.network.open(PeerId("owner"))
        worker.admit([owner.address])
        self._tensors = LosingChannel(self.network.open(PeerId("target-tensors")), lost)
        self.target = build_target(config)
        assert self.target.hidden is not None
        self.sender = HiddenSender(self._tensors, self.target.hidden)
        self._serve(TARGET, TargetServer(worker, self.target, hidden=self.sender).step)
        target = RemoteTarget(owner, worker.address, incarnation=1, times=PATIENT, clock=self.network.clock)
        self._routing = HiddenRouting(self.network.open(COORDINATOR), target.send_hidden)
        self.proposer = RemoteProposer(
            self._routing,
            capabilities=ProposerCapabilities(
                name=speculative.method,
                shape="chain" if speculative.tree.shape == "chain" else "tree",
                sampled=True,
                hidden_layers=(-1,),
                remote=True,
            ),
            vocab_size=VOCAB_SIZE,
            clock=self.network.clock,
        )
        for _ in range(num_drafters):
            self.start_drafter()
        self.network.faults = faults or Faults()
        self.engine = Engine.from_parts(
            target=target,
            proposer=with_fallback(self.proposer, speculative),
            tokenizer=HuggingFaceTokenizer(make_tokenizer()),
            scheduler=config.scheduler,
            controller=FixedController(speculative.num_speculative_tokens),
            clock=self.network.clock,
        )

    @property
    def acceptance(self) -> tuple[int, int]:
        """Tokens drafted, and those of them that were accepted."""
        metrics = self.engine.metrics()
        return metrics.num_draft_tokens, metrics.num_accepted_tokens

    def start_drafter(self) -> PeerId:
        self._num_started += 1
        name = PeerId(f"draft-{self._num_started}")
        channel = self.network.open(name)
        channel.admit([self._routing.address])
        heads = build_remote_heads(self.config)
        inbox = self.inboxes[name] = HiddenInbox(
            self.network.open(PeerId(f"{name}-tensors")),
            layers=heads.hidden_layers,
            width=heads.state_width,
            clock=self.network.clock,
        )
        inbox.admit([(self._tensors.address, COORDINATOR)])
        server = DraftServer(channel, heads.proposer(inbox), clock=self.network.clock)
        self.servers[name] = server
        self._serve(name, server.step)
        self._addresses[name] = channel.address
        self._tell_members()
        return name

    def stop_drafter(self, name: PeerId) -> None:
        """It dies, which the coordinator hears of."""
        self.network.kill(name)
        self.network.kill(self.inboxes.pop(name).address.peer_id)
        del self._addresses[name], self.servers[name]
        self._tell_members()

    def check_nothing_is_left(self) -> None:
        """Assert that nobody keeps anything of sequences that have ended, once they have heard of it."""
        self.network.faults = Faults()
        self.network.run_for(60.0)
        assert self.sender.num_waiting == 0
        for server in self.servers.values():
            assert server.num_sequences == 0

    def close(self) -> None:
        self.engine.close()
        self.target.close()

    def _serve(self, name: PeerId, step: Callable[[float], bool]) -> None:
        def serve_all() -> None:
            while step(0):
                pass

        self.network.serve(name, serve_all)

    def _tell_members(self) -> None:
        self.proposer.set_workers(list(self._addresses.values()))
        self._routing.set_inboxes({name: inbox.address for name, inbox in self.inboxes.items()})


def generate_each(engine: Engine, prompts: Sequence[Sequence[int]], params: object) -> list[tuple[int, ...]]:
    """Generate for one prompt after the other."""
    return [engine.generate([one], params)[0].token_ids for one in prompts]  # type: ignore[list-item,arg-type]
