"""Ingresses and coordinators over a simulated network, under a clock that the test moves."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.affinity import RoutingConfig
from cluster.desk import RequestDesk
from cluster.directory import Member
from cluster.stream_book import StreamBook
from specdec.core.clock import ManualClock
from specdec.core.error_codes import COORDINATOR_CRASHED, COORDINATOR_FAILED
from specdec.core.errors import ChannelTimeout, DrafthouseError, TransportError
from specdec.core.ids import RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyModel, ToyTarget, ToyTokenizer
from specdec.proposers.ngram import NgramProposer
from specdec.scheduling.config import SchedulerConfig
from specdec.transport.base import PeerId
from specdec.transport.memory import Faults, MemoryNetwork

VOCAB = 9
MODEL = ToyModel(VOCAB, seed=3)
LEASE_S = 3.0
ROUND_S = 0.05


class Unforeseen(Exception):
    """What a bug raises."""


@dataclass
class Bug:
    """Raises when an engine begins with a request (`add_request`), or works on it (`step`)."""

    request_id: RequestId
    place: Literal["add_request", "step"]

    def lie_in(self, engine: Engine) -> None:
        add_request, step = Engine.add_request, Engine.step

        def adding(request: Request) -> None:
            if self.place == "add_request" and request.request_id == self.request_id:
                raise Unforeseen
            add_request(engine, request)

        def stepping(*, reads_text: bool = True) -> list[RequestOutput]:
            if self.place == "step" and any(live.request_id == self.request_id for live in engine._roster):
                raise Unforeseen
            return step(engine, reads_text=reads_text)

        engine.add_request, engine.step = adding, stepping  # type: ignore[method-assign]


class SimCoordinator:
    """A coordinator whose rounds take simulated time."""

    def __init__(self, sim: Simulation, name: str, revision: str = "toy", max_num_waiting: int = 100) -> None:
        self.sim = sim
        self.channel = sim.network.open(PeerId(name))
        self.max_num_waiting = max_num_waiting
        self.desk = RequestDesk(
            self.channel.send, sim.clock, lease_s=LEASE_S, most_without_target=4 + max_num_waiting
        )
        self.member = Member(
            address=self.channel.address, role="coordinator", capacity=4, model_revision=revision
        )
        self.is_alive = True
        self.load_s = 1.0
        """How long the next target takes to load."""
        self.num_losses = 0
        self.lose_after: int | None = None
        self.poison: RequestId | None = None
        """Kills the target as soon as that works on it."""
        self.is_hopeless = False
        """Whether the next target cannot be loaded."""
        self.fatal = ""
        """Kills the coordinator: the name of the request that does."""
        self.bug: Bug | None = None
        self.engine = self.new_engine()
        sim.network.serve(PeerId(name), lambda: self.desk.hear(self.channel.receive(0)))
        self.round()

    def new_engine(self) -> Engine:
        self.toy = ToyTarget(MODEL, num_blocks=48)
        self.toy.num_steps_until_lost = self.lose_after
        return Engine.from_parts(
            target=self.toy,
            proposer=NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3),
            tokenizer=ToyTokenizer.of_letters(VOCAB),
            scheduler=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=16, max_num_waiting=self.max_num_waiting
            ),
            clock=self.sim.clock,
        )

    def lose_target(self, num_steps: int = 0) -> None:
        self.toy.num_steps_until_lost = num_steps

    def round(self) -> None:
        if not self.is_alive:
            return
        self.desk.tick()
        if self.desk.description is None:
            self.desk.set_target(self.engine.description)
        try:
            if self.bug is not None:
                self.bug.lie_in(self.engine)
            self.desk.serve(self.engine)
            if self.sim.killer is not None:
                self.sim.killer(self)
            if self.poison is not None and self.poison in self.toy.known_requests:
                self.lose_target()
            if self.fatal in self.toy.known_requests:
                self.fatal, name = "", self.fatal
                self.sim.network.schedule(ROUND_S / 2, lambda: self.die_of(name))
            self.desk.note_begun(self.engine.about_to_begin())
            is_lost = self.engine.has_work and self.desk.deliver(self.engine.step())
        except TransportError:
            is_lost = True
        except Unforeseen:
            self.desk.end_all("the coordinator failed", COORDINATOR_CRASHED)
            self.sim.network.schedule(2.0, self.be_replaced)
            return
        pause_s = ROUND_S
        if is_lost:
            self.num_losses += 1
            self.desk.set_target(None)
            if self.is_hopeless:
                self.desk.end_all("the target cannot be brought back", COORDINATOR_FAILED)
                self.sim.network.schedule(2.0, self.be_replaced)
                return
            self.engine = self.new_engine()
            self.desk.begin_replay()
            pause_s = self.load_s
        self.engine.check_integrity()
        self.sim.network.schedule(pause_s, self.round)

    def die_of(self, name: str) -> None:
        self.sim.crash(self, told_after_s=1.0)
        self.sim.start_coordinator().fatal = name

    def be_replaced(self) -> None:
        """What Serve does when it has found the loop ended."""
        self.sim.crash(self, told_after_s=1.0)
        self.sim.start_coordinator().bug = self.bug

    def crash(self) -> None:
        self.is_alive = False
        self.sim.network.kill(self.member.peer_id)


class SimIngress:
    """An ingress that collects what its streams bring."""

    def __init__(self, sim: Simulation, name: str = "ingress", routing: RoutingConfig | None = None) -> None:
        self.sim = sim
        self.channel = sim.network.open(PeerId(name))
        self.book = StreamBook(
            self.channel.send, sim.clock, lease_s=LEASE_S, failover_timeout_s=60.0, routing=routing
        )
        self.tokens: dict[RequestId, list[int]] = {}
        self.text: dict[RequestId, str] = {}
        self.last: dict[RequestId, RequestOutput | DrafthouseError] = {}
        self.is_alive = True
        sim.network.serve(PeerId(name), self.hear)
        self.tick()

    def hear(self) -> None:
        """Take in all that has arrived: that a link broke is put beside it without a call."""
        with contextlib.suppress(ChannelTimeout):
            while True:
                self.book.hear(self.channel.receive(0))

    def tick(self) -> None:
        if self.is_alive:
            self.book.tick(directory_silent_s=self.sim.clock.now_s() - self.sim.directory_answered_s)
            self.sim.network.schedule(0.5, self.tick)

    def open(self, request: Request) -> None:
        self.tokens[request.request_id] = []
        self.text[request.request_id] = ""

        def sink(event: RequestOutput | DrafthouseError) -> None:
            assert request.request_id not in self.last, "something after the end"
            if isinstance(event, DrafthouseError):
                assert not self.tokens[request.request_id]
                self.last[request.request_id] = event
                return
            assert event.first_index == len(self.tokens[request.request_id])
            self.tokens[request.request_id].extend(event.token_ids)
            self.text[request.request_id] += event.text
            if event.finish_reason is not None:
                self.last[request.request_id] = event

        self.book.open(request, sink)


class Simulation:
    def __init__(self, faults: Faults | None = None, seed: int = 0) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(faults=faults, seed=seed, clock=self.clock)
        self.coordinators: list[SimCoordinator] = []
        self.ingresses: list[SimIngress] = []
        self.num_started = 0
        self.killer: Callable[[SimCoordinator], None] | None = None
        """Called before each step with whose it is."""
        self.directory_lost_s: float | None = None
        """Since when nobody reaches the directory; None: everybody does."""

    @property
    def directory_answered_s(self) -> float:
        return self.clock.now_s() if self.directory_lost_s is None else self.directory_lost_s

    def lose_directory(self) -> None:
        self.directory_lost_s = self.clock.now_s()

    def start_coordinator(self, **options: object) -> SimCoordinator:
        self.num_started += 1
        coordinator = SimCoordinator(self, f"coordinator-{self.num_started}", **options)  # type: ignore[arg-type]
        self.coordinators.append(coordinator)
        self.tell()
        return coordinator

    def start_ingress(self, name: str = "ingress", routing: RoutingConfig | None = None) -> SimIngress:
        ingress = SimIngress(self, name, routing)
        self.ingresses.append(ingress)
        self.tell()
        return ingress

    def crash(self, coordinator: SimCoordinator, *, told_after_s: float = 5.0) -> None:
        coordinator.crash()
        self.coordinators.remove(coordinator)
        self.network.schedule(told_after_s, self.tell)

    def tell(self) -> None:
        """What the directory does: everybody hears who is there."""
        if self.directory_lost_s is not None:
            return
        for coordinator in self.coordinators:
            coordinator.channel.admit([ingress.channel.address for ingress in self.ingresses])
        members = [coordinator.member for coordinator in self.coordinators]
        for ingress in self.ingresses:
            for member in members:
                ingress.channel.connect(member.address)
            ingress.book.set_coordinators(members)

    def run_until_done(self, limit_s: float = 2000.0) -> None:
        until_s = self.clock.now_s() + limit_s
        while any(ingress.book.num_streams for ingress in self.ingresses):
            assert self.clock.now_s() < until_s, "a stream never ended"
            self.network.run_for(0.5)


def a_request(name: str, rng: random.Random, max_tokens: int = 30) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=tuple(rng.choices(range(VOCAB), k=rng.randint(1, 20))),
        params=SamplingParams(temperature=rng.choice([0.0, 1.0]), max_tokens=max_tokens),
        seed=rng.getrandbits(64),
    )


def expected(request: Request) -> list[int]:
    assert request.params.max_tokens is not None
    return MODEL.continuation(
        request.prompt_token_ids, request.params, request.seed, request.params.max_tokens
    )


def assert_right(ingress: SimIngress, requests: Sequence[Request], *, may_be_blamed: bool = False) -> None:
    """Every stream is whole; `may_be_blamed`: or was ended as the cause of too many losses of the target."""
    tokenizer = ToyTokenizer.of_letters(VOCAB)
    for request in requests:
        last = ingress.last[request.request_id]
        assert isinstance(last, RequestOutput)
        if may_be_blamed and last.error_code == "request_failed_repeatedly":
            tokens = ingress.tokens[request.request_id]
            assert tokens == expected(request)[: len(tokens)]
            continue
        assert last.finish_reason == "length", last.error
        assert ingress.tokens[request.request_id] == expected(request), request
        assert ingress.text[request.request_id] == tokenizer.decode(expected(request))
        assert last.num_generated_tokens == request.params.max_tokens


def simple(num_coordinators: int = 1, **options: object) -> tuple[Simulation, SimIngress]:
    sim = Simulation()
    for _ in range(num_coordinators):
        sim.start_coordinator(**options)
    ingress = sim.start_ingress()
    sim.network.run_for(1.0)
    assert ingress.book.description is not None
    return sim, ingress
