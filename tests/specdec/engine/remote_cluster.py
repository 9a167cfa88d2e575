"""One coordinator's engine, a target worker and draft workers on a simulated network, in one thread."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.prefix_hash import extend_prefix_hash
from specdec.core.proposal import MAX_DRAFT_TOKENS, Proposal
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.engine.engine import Engine
from specdec.engine.targets.judge import Judge
from specdec.engine.targets.remote_target import RemoteTarget, RemoteTargetTimes
from specdec.engine.targets.target_server import TargetServer
from specdec.engine.targets.toy_target import ToyModel, ToyTarget, ToyTokenizer
from specdec.kv.selection import KvBudgets
from specdec.proposers.base import AheadWish, Proposer, ProposerCapabilities
from specdec.proposers.fallback import FallbackProposer
from specdec.proposers.lookup_first import LookupFirst
from specdec.proposers.several.proposer import SeveralProposers
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController, SpeculationController
from specdec.scheduling.speculation.drafter_shares import DrafterSet
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.transport.base import MAX_MESSAGE_BYTES, PeerAddress, PeerId
from specdec.transport.memory import Faults, MemoryChannel, MemoryNetwork

VOCAB = 11
MODEL = ToyModel(VOCAB, seed=1)
OTHER_MODEL = ToyModel(VOCAB, seed=1, perturbation=0.2)
CAPABILITIES = ProposerCapabilities(name="toy", sampled=True, kv="own", remote=True, looks_ahead=True)
TARGET = PeerId("target")
PATIENT = RemoteTargetTimes(step_timeout_s=1e6, lost_link_grace_s=1e6, attach_timeout_s=1e6)


class ToyDrafter:
    """Drafts with a model like the target's, and takes its (simulated) time."""

    capabilities = CAPABILITIES

    def __init__(self, clock: ManualClock, busy_s: float = 0.0) -> None:
        self.clock = clock
        self.busy_s = busy_s
        self.num_calls = 0
        self.known: set[RequestId] = set()

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        self.num_calls += 1
        self.clock.advance(self.busy_s)
        self.known.update(sequence.request_id for sequence in sequences)
        return {
            sequence.request_id: Proposal(
                request_id=sequence.request_id,
                committed_len=sequence.committed_len,
                prefix_hash=sequence.prefix_hash,
                token_ids=tuple(
                    OTHER_MODEL.continuation(sequence.token_ids, sequence.params, sequence.seed, budget)
                ),
                noise_stream="target",
            )
            for sequence in sequences
            if (budget := num_draft_tokens[sequence.request_id])
        }

    def propose_ahead(self, wishes: Sequence[AheadWish]) -> dict[RequestId, list[Proposal]]:
        """Prepare for the tokens that the model like the target's says, and for some others."""
        self.num_calls += 1
        self.clock.advance(self.busy_s)
        self.known.update(wish.view.request_id for wish in wishes)
        return {wish.view.request_id: list(_branches(wish)) for wish in wishes}

    def release(self, request_ids: Iterable[RequestId]) -> None:
        self.known.difference_update(request_ids)

    def close(self) -> None:
        """Nothing to free."""


def _branches(wish: AheadWish) -> Iterator[Proposal]:
    view, k = wish.view, wish.num_draft_tokens
    for num_kept, fan_out in enumerate(wish.fan_out or ()):
        kept = [*view.token_ids, *wish.pending[:num_kept]]
        first = OTHER_MODEL.continuation(kept, view.params, view.seed, 1)
        refused = wish.pending[num_kept : num_kept + 1]
        guesses = [token for token in dict.fromkeys([*first, *range(VOCAB)]) if token not in refused]
        for token in guesses[:fan_out]:
            assumed = (*wish.pending[:num_kept], token)
            chain = OTHER_MODEL.continuation([*view.token_ids, *assumed], view.params, view.seed, k)
            yield Proposal(
                request_id=view.request_id,
                committed_len=view.committed_len + len(assumed),
                prefix_hash=extend_prefix_hash(view.prefix_hash, assumed),
                token_ids=tuple(chain),
                noise_stream="target",
            )


def reasons(proposer: RemoteProposer) -> dict[str, float]:
    """Return how many requests went without drafts, by why; each has one reason."""
    prefix = "fallback_requests_by_reason{"
    counts = {name: count for name, count in proposer.counters.items() if name.startswith(prefix)}
    assert sum(counts.values()) == proposer.counters.get("fallback_requests", 0)
    return {name.split('"')[1]: count for name, count in counts.items() if count}


def serve_all(server: DraftServer) -> None:
    """Take what has arrived, and make batches until nobody waits, as a draft worker's thread does."""
    server.step(0)
    while server.has_waiting:
        server.step(0)


class Cluster:
    """One coordinator's engine, one target worker, any number of draft workers, one simulated network.

    Another one may share draft workers and network: it has an engine and a target of its own.
    """

    def __init__(
        self,
        faults: Faults,
        seed: int = 0,
        *,
        num_drafters: int = 1,
        num_blocks: int = 64,
        capabilities: ProposerCapabilities = CAPABILITIES,
        make_drafter: Callable[[], Proposer] | None = None,
        judge: Judge | None = None,
        mode: OverlapMode = "lockstep",
        shares: DraftShareConfig | None = None,
        make_target: Callable[[ManualClock], ToyTarget] | None = None,
        fallback: Proposer | None = None,
        is_fallback_first: bool = False,
        num_draft_tokens: int = 4,
        around: Callable[[Proposer], Proposer] | None = None,
        controller: SpeculationController | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_draft_tokens: int = MAX_DRAFT_TOKENS,
        beside: Mapping[str, Proposer] | None = None,
        kv_budgets: KvBudgets | None = None,
        first: Cluster | None = None,
    ) -> None:
        """Start it.

        `first` is who starts and stops the draft workers, where they are shared. `make_drafter` (None: a
        `ToyDrafter`) makes proposers of these capabilities, `around` what is put around them; where they
        have nothing, `fallback` stands in, or goes before them. Without a `controller`, `mode` and
        `num_draft_tokens` are always the same. `max_message_bytes` is the longest message to the target and
        back, `max_draft_tokens` the longest draft that draft workers make. With others `beside`, by name,
        each request has one of them or, as `pool`, the draft workers.
        """
        self.max_draft_tokens = max_draft_tokens
        self.around = around
        self.shares = shares
        self.servers: dict[PeerId, DraftServer] = {} if first is None else first.servers
        self.make_drafter = make_drafter
        self.clock = ManualClock() if first is None else first.clock
        self.network = MemoryNetwork(seed=seed, clock=self.clock) if first is None else first.network
        self.drafters: dict[PeerId, ToyDrafter] = {} if first is None else first.drafters
        self.addresses: dict[PeerId, PeerAddress] = {} if first is None else first.addresses
        self.channels: dict[PeerId, MemoryChannel] = {} if first is None else first.channels
        self.proposers: list[RemoteProposer] = [] if first is None else first.proposers
        """Of all who share the draft workers."""
        self.num_started = 0
        suffix = f"-{len(self.proposers)}" if self.proposers else ""
        self.proposer = RemoteProposer(
            self.network.open(PeerId(f"coordinator-draft{suffix}")),
            capabilities=capabilities,
            vocab_size=VOCAB,
            clock=self.clock,
        )
        self.proposers.append(self.proposer)
        self.tell_workers()
        for _ in range(num_drafters):
            self.start_drafter()
        target_id = PeerId(f"{TARGET}{suffix}")
        worker = self.network.open(target_id, max_message_bytes=max_message_bytes)
        coordinator = self.network.open(PeerId(f"coordinator{suffix}"), max_message_bytes=max_message_bytes)
        worker.admit([coordinator.address])
        if make_target is None:
            self.toy = ToyTarget(MODEL, num_blocks=num_blocks, judge=judge)
        else:
            self.toy = make_target(self.clock)
        self.target_server = TargetServer(worker, self.toy)
        self.network.serve(target_id, lambda: self.target_server.step(0))
        self.network.faults = faults
        combine = LookupFirst if is_fallback_first else FallbackProposer
        self.target = RemoteTarget(
            coordinator, worker.address, incarnation=1, times=PATIENT, clock=self.clock
        )
        drafting = self.proposer if fallback is None else combine(self.proposer, fallback)
        names = None if beside is None else (*beside, "pool")
        self.choice = None if names is None else DrafterSet(names=names, shares=(0.0,) * len(names))
        self.engine = Engine.from_parts(
            target=self.target,
            proposer=drafting if beside is None else SeveralProposers([*beside.values(), drafting]),
            tokenizer=ToyTokenizer.of_letters(VOCAB),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
            controller=controller or FixedController(num_draft_tokens, mode=mode),
            clock=self.clock,
            kv_budgets=kv_budgets,
            drafters=self.choice,
        )

    def start_drafter(self, busy_s: float = 0.0) -> PeerId:
        self.num_started += 1
        name = PeerId(f"draft-{self.num_started}")
        channel = self.channels[name] = self.network.open(name)
        self.addresses[name] = channel.address
        drafter = self.drafters[name] = ToyDrafter(self.clock, busy_s)
        proposer = drafter if self.make_drafter is None else self.make_drafter()
        if self.around is not None:
            proposer = self.around(proposer)
        server = DraftServer(
            channel,
            proposer,
            shares=self.shares,
            clock=self.clock,
            max_draft_tokens=self.max_draft_tokens,
        )
        self.servers[name] = server
        self.network.serve(name, partial(serve_all, server))
        self.tell_workers()
        return name

    def tell_workers(self) -> None:
        """Let draft workers and all who share them know of each other."""
        for channel in self.channels.values():
            channel.admit([one._channel.address for one in self.proposers])
        for one in self.proposers:
            one.set_workers(list(self.addresses.values()))

    def stop_drafter(self, name: PeerId, *, told: bool) -> None:
        """Kill a drafter; `told`: the directory notices too."""
        self.network.kill(name)
        del self.servers[name]
        del self.drafters[name]
        del self.channels[name]
        del self.addresses[name]
        if told:
            self.tell_workers()

    def run(self, requests: Sequence[Request]) -> dict[RequestId, list[int]]:
        tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
        for request in requests:
            self.engine.add_request(request)
        while self.engine.has_work:
            self.step(tokens)
        return tokens

    def step(self, tokens: dict[RequestId, list[int]]) -> None:
        for output in self.engine.step():
            assert output.error is None, output.error
            assert output.first_index == len(tokens[output.request_id])
            tokens[output.request_id].extend(output.token_ids)
        self.engine.check_integrity()


def a_request(name: str, rng: random.Random) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=tuple(rng.choices(range(VOCAB), k=rng.randint(1, 24))),
        params=SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0]), max_tokens=rng.randint(1, 24)),
        seed=rng.getrandbits(64),
    )


def expected(request: Request) -> list[int]:
    assert request.params.max_tokens is not None
    return MODEL.continuation(
        request.prompt_token_ids, request.params, request.seed, request.params.max_tokens
    )
