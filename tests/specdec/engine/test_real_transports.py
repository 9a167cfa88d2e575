"""An engine over real transports, with faults put on top: it writes what the model alone would write.

The schedules of `test_remote_schedules` run on a simulated network; here channels, threads, clocks are real.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.engine.draft_pool.patience import DraftDeadlineConfig
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.engine.engine import Engine
from specdec.engine.targets.remote_target import RemoteTarget, RemoteTargetTimes
from specdec.engine.targets.target_server import TargetServer
from specdec.engine.targets.toy_target import ToyTarget, ToyTokenizer
from specdec.proposers.base import Proposer
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController, SpeculationController
from specdec.scheduling.speculation.cost import assumed_profile
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.speculation.settings import ControllerSettings
from specdec.transport.base import Channel, PeerAddress, PeerId
from specdec.transport.memory import Faults, MemoryNetwork
from specdec.transport.torch_dist import TorchDistChannel
from specdec.transport.zmq import ZmqChannel, ZmqOptions
from tests.specdec.engine.remote_cluster import CAPABILITIES, MODEL, VOCAB, ToyDrafter, a_request, expected
from tests.specdec.engine.tree_drafters import Bushy
from tests.specdec.transport.faulty import FaultyChannel

TRANSPORTS: dict[str, Callable[[], Callable[[PeerId], Channel]]] = {
    "memory": lambda: MemoryNetwork().open,
    "zmq": lambda: ZmqChannel,
    "zmq_tcp": lambda: lambda name: ZmqChannel(name, options=ZmqOptions(local_lanes=False)),
    "torch_dist": lambda: TorchDistChannel,
}
"""What opens the channels of one cluster."""
OTHERS = [name for name in TRANSPORTS if name != "zmq"]
MODES: tuple[OverlapMode, ...] = ("lockstep", "ping_pong", "draft_ahead")
_TIMES = RemoteTargetTimes(
    attach_timeout_s=60.0, step_timeout_s=60.0, lost_link_grace_s=0.1, resend_after_s=0.03
)
_DEADLINES = DraftDeadlineConfig(
    min_deadline_s=0.02, max_deadline_s=0.2, first_retry_s=0.02, max_retry_s=0.1, reassign_after_s=0.05
)
_SHARES = DraftShareConfig(lease_s=0.5)
_AT_ONCE = 8
"""Schedules that run beside each other: they wait most of the time."""


def random_faults(rng: random.Random) -> Faults:
    return Faults(
        delay_s=(0.0, rng.choice([0.0, 0.001, 0.01])),
        loss=rng.choice([0.0, 0.05, 0.15]),
        duplication=rng.choice([0.0, 0.05, 0.3]),
        in_order=rng.random() < 0.5,
    )


class Worker:
    """A server in a thread of its own, until it dies."""

    def __init__(self, channel: FaultyChannel, step: Callable[[float], bool]) -> None:
        self.channel = channel
        self._step = step
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self.channel.wake()
        self._thread.join()
        self.channel.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._step(0.05)


class Brought(NamedTuple):
    """What schedules have brought together."""

    num_accepted: int
    num_lost: int
    """Messages."""
    num_deaths: int
    """Of target workers."""


class RealCluster:
    """An engine in this thread, a target worker and draft workers in others, linked by one transport.

    A target worker that dies has a successor, and the engine with it, as in a coordinator.
    """

    def __init__(self, transport: str, rng: random.Random, *, has_trees: bool = False) -> None:
        self._open, self._rng = TRANSPORTS[transport](), rng
        self._has_trees = has_trees
        self._num_blocks = rng.choice([14, 24, 64])
        self._mode = rng.choice(MODES)
        self._chooses_k = rng.random() < 0.3
        """Whether k and the mode are up to the goodput controller, which sees what faults do to rounds."""
        self.channels: list[FaultyChannel] = []
        self.drafters: dict[PeerId, tuple[Worker, PeerAddress]] = {}
        self.servers: dict[PeerId, DraftServer] = {}
        self.num_accepted = self.num_deaths = 0
        self._num_started = 0
        self._begin()

    def _begin(self) -> None:
        """Begin a target worker, and an engine over it and the draft workers that there are."""
        number = self.num_deaths
        capabilities = CAPABILITIES
        if self._has_trees:
            capabilities = replace(CAPABILITIES, shape="tree", looks_ahead=False)
        self._draft_channel = self._channel(f"coordinator-draft-{number}")
        coordinator, worker = self._channel(f"coordinator-{number}"), self._channel(f"target-{number}")
        worker.admit([coordinator.address])
        self.target = ToyTarget(MODEL, num_blocks=self._num_blocks)
        self._target = Worker(worker, TargetServer(worker, self.target).step)
        self.proposer = RemoteProposer(
            self._draft_channel, capabilities=capabilities, vocab_size=VOCAB, deadlines=_DEADLINES
        )
        self.engine = Engine.from_parts(
            target=RemoteTarget(coordinator, worker.address, incarnation=1, times=_TIMES),
            proposer=self.proposer,
            tokenizer=ToyTokenizer.of_letters(VOCAB),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
            controller=self._controller(),
        )
        for drafter, _ in self.drafters.values():
            drafter.channel.admit([self._draft_channel.address])
        self.proposer.set_workers([address for _, address in self.drafters.values()])

    def _controller(self) -> SpeculationController:
        most = 9 if self._has_trees else 4
        if not self._chooses_k:
            return FixedController(most, mode=self._mode)
        modes = MODES[:2] if self._has_trees else MODES
        settings = ControllerSettings(max_draft_tokens=most, modes=modes, max_rows=16, max_sequences=4)
        return GoodputController(settings, assumed_profile())

    def end_target(self) -> None:
        """The target worker dies; the engine finds out by itself."""
        self._target.end()

    def begin_again(self) -> None:
        """Replace an engine whose target was lost."""
        self.num_accepted += self.engine.metrics().num_accepted_tokens
        self.num_deaths += 1
        self.engine.close()
        self._target.end()
        self._begin()

    def start_drafter(self) -> None:
        self._num_started += 1
        name = PeerId(f"draft-{self._num_started}")
        channel = self._channel(name)
        channel.admit([self._draft_channel.address])
        drafter: Proposer = ToyDrafter(ManualClock())
        if self._has_trees:
            drafter = Bushy(drafter, vocab_size=VOCAB)
        server = self.servers[name] = DraftServer(channel, drafter, shares=_SHARES)
        self.drafters[name] = Worker(channel, server.step), channel.address
        self.proposer.set_workers([address for _, address in self.drafters.values()])

    def end_drafter(self, *, told: bool) -> None:
        name = self._rng.choice(list(self.drafters))
        worker, _ = self.drafters.pop(name)
        worker.end()
        del self.servers[name]
        if told:
            self.proposer.set_workers([address for _, address in self.drafters.values()])

    def close(self) -> None:
        for worker, _ in self.drafters.values():
            worker.end()
        self._target.end()
        for channel in self.channels:
            channel.close()

    def _channel(self, name: str) -> FaultyChannel:
        channel = FaultyChannel(self._open(PeerId(name)), random_faults(self._rng), self._rng.getrandbits(32))
        self.channels.append(channel)
        return channel


class Streams:
    """What became of requests, in whichever engine."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
        self._unfinished: dict[RequestId, Request] = {}

    def begin(self, engine: Engine, request: Request) -> None:
        self._unfinished[request.request_id] = request
        engine.add_request(request)

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.first_index == len(self.tokens[output.request_id])
            self.tokens[output.request_id].extend(output.token_ids)
            if output.error_code != "target_lost":
                assert output.error is None, output.error
                if output.finish_reason is not None:
                    del self._unfinished[output.request_id]

    def go_on(self, engine: Engine) -> None:
        """Submit what is left of them to another engine."""
        for name, request in self._unfinished.items():
            engine.add_request(request.continued(delivered_token_ids=tuple(self.tokens[name]), elapsed_s=0.0))


def run_random_schedule(transport: str, seed: int, *, has_trees: bool = False) -> Brought:
    """Run four requests; in half of the schedules the target worker dies amid them."""
    rng = random.Random(seed)
    cluster = RealCluster(transport, rng, has_trees=has_trees)
    try:
        for _ in range(rng.randint(1, 3)):
            cluster.start_drafter()
        requests = [a_request(f"r{index}", rng) for index in range(4)]
        waiting, streams = list(requests), Streams(requests)
        deadly_step = rng.randint(2, 12) if rng.random() < 0.5 else 0
        num_steps = 0
        while waiting or cluster.engine.has_work:
            if waiting and (rng.random() < 0.3 or not cluster.engine.has_work):
                streams.begin(cluster.engine, waiting.pop())
            fate = rng.random()
            if fate < 0.05 and cluster.drafters:
                cluster.end_drafter(told=rng.random() < 0.5)
            elif fate < 0.1 and len(cluster.drafters) < 3:
                cluster.start_drafter()
            num_steps += 1
            if num_steps == deadly_step:
                cluster.end_target()
            streams.take(cluster.engine.step())
            cluster.engine.check_integrity()
            if cluster.engine.is_lost:
                cluster.begin_again()
                streams.go_on(cluster.engine)
        for request in requests:
            assert streams.tokens[request.request_id] == expected(request), (transport, seed, request)
        assert_nothing_is_left(cluster)
        metrics = cluster.engine.metrics()
        assert metrics.proposals_dropped["malformed"] == 0
        assert (metrics.num_moved_kv > 0) <= has_trees
        assert cluster.num_deaths <= (deadly_step > 0), "nobody has died"
        return Brought(
            num_accepted=cluster.num_accepted + metrics.num_accepted_tokens,
            num_lost=sum(channel.num_lost for channel in cluster.channels),
            num_deaths=cluster.num_deaths,
        )
    finally:
        cluster.close()


def assert_nothing_is_left(cluster: RealCluster) -> None:
    """All that is known of requests is given up; a release that was lost is made up for by the lease."""
    assert not cluster.proposer._registry.registrations
    assert not cluster.proposer._prepared
    assert not any(link.num_registered for link in cluster.proposer._registry.links.values())
    assert len(cluster.target._sequences) <= 4, "the target is told of the last ones with its next step"
    until_s = time.monotonic() + 30
    while any(server.num_sequences for server in cluster.servers.values()):
        assert time.monotonic() < until_s, "a draft worker keeps what nobody asks about"
        time.sleep(0.01)


def resources() -> tuple[int, int]:
    """Threads and open files of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


def run_schedules(transport: str, seeds: Sequence[int], *, has_trees: bool = False) -> Brought:
    """Run schedules beside each other; return what they brought together. Nothing is left open."""
    run_random_schedule(transport, seeds[0])  # what is opened once for good is open now
    before = resources()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        runs = list(pool.map(partial(run_random_schedule, transport, has_trees=has_trees), seeds))
    until_s = time.monotonic() + 30
    while any(now > then for now, then in zip(resources(), before, strict=True)):
        assert time.monotonic() < until_s, f"threads and files: {before}, now {resources()}"
        time.sleep(0.05)
    return Brought(*map(sum, zip(*runs, strict=True)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_schedules_never_change_a_token(transport: str) -> None:
    # Linking by Gloo takes its time.
    brought = run_schedules(transport, range(6 if transport == "torch_dist" else 12))
    assert brought.num_accepted > 30, "the drafters hardly ever helped: these schedules prove nothing"
    assert brought.num_lost > 0
    assert brought.num_deaths > 0


@pytest.mark.parametrize(
    "transport", ["zmq", *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
)
def test_trees_travel_whole(transport: str) -> None:
    """Parents with tokens from draft workers, and to the target; moves of K/V with its steps."""
    assert run_schedules(transport, range(8), has_trees=True).num_accepted > 10


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("block", range(40))
def test_thousands_of_random_schedules(transport: str, block: int) -> None:
    run_schedules(transport, range(100 + 50 * block, 150 + 50 * block))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_left_open_would_be_seen(transport: str) -> None:
    """Negative control: a cluster that is not closed yet."""
    run_random_schedule(transport, 0)
    cluster = RealCluster(transport, random.Random(0))
    num_threads, num_files = resources()
    cluster.close()
    # Compared with afterwards: threads of the one before may still have been ending.
    until_s = time.monotonic() + 30
    while (now := resources())[0] >= num_threads or (now[1] >= num_files and transport != "memory"):
        assert time.monotonic() < until_s, f"threads and files: {num_threads}, {num_files}, now {now}"
        time.sleep(0.05)
