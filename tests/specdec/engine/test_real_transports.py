"""An engine over real transports, with faults put on top: it writes what the model alone would write.

The schedules of `test_remote_schedules` run on a simulated network; here channels, threads, clocks are real.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.engine.draft_patience import DraftDeadlineConfig
from specdec.engine.draft_server import DraftServer
from specdec.engine.engine import Engine
from specdec.engine.remote_proposer import RemoteProposer
from specdec.engine.remote_target import RemoteTarget, RemoteTargetTimes
from specdec.engine.target_server import TargetServer
from specdec.engine.toy_target import ToyTarget, ToyTokenizer
from specdec.scheduling.config import SchedulerConfig
from specdec.transport.base import Channel, PeerAddress, PeerId
from specdec.transport.memory import Faults
from specdec.transport.torch_dist import TorchDistChannel
from specdec.transport.zmq import ZmqChannel, ZmqOptions
from tests.specdec.engine.remote_cluster import CAPABILITIES, MODEL, VOCAB, ToyDrafter, a_request, expected
from tests.specdec.transport.faulty import FaultyChannel

TRANSPORTS: dict[str, Callable[[PeerId], Channel]] = {
    "zmq": ZmqChannel,
    "zmq_tcp": lambda name: ZmqChannel(name, options=ZmqOptions(local_lanes=False)),
    "torch_dist": TorchDistChannel,
}
_TIMES = RemoteTargetTimes(
    attach_timeout_s=60.0, step_timeout_s=60.0, lost_link_grace_s=60.0, resend_after_s=0.03
)
_DEADLINES = DraftDeadlineConfig(
    min_deadline_s=0.02, max_deadline_s=0.2, first_retry_s=0.02, max_retry_s=0.1, reassign_after_s=0.05
)


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


class RealCluster:
    """An engine in this thread, a target worker and draft workers in others, linked by one transport."""

    def __init__(self, transport: str, rng: random.Random) -> None:
        self._open, self._rng = TRANSPORTS[transport], rng
        self.channels: list[FaultyChannel] = []
        self.drafters: dict[PeerId, tuple[Worker, PeerAddress]] = {}
        self._num_started = 0
        self._draft_channel = self._channel("coordinator-draft")
        coordinator, worker = self._channel("coordinator"), self._channel("target")
        worker.admit([coordinator.address])
        server = TargetServer(worker, ToyTarget(MODEL, num_blocks=rng.choice([14, 24, 64])))
        self._target = Worker(worker, server.step)
        self._proposer = RemoteProposer(
            self._draft_channel, capabilities=CAPABILITIES, vocab_size=VOCAB, deadlines=_DEADLINES
        )
        self.engine = Engine.from_parts(
            target=RemoteTarget(coordinator, worker.address, incarnation=1, times=_TIMES),
            proposer=self._proposer,
            tokenizer=ToyTokenizer.of_letters(VOCAB),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        )

    def start_drafter(self) -> None:
        self._num_started += 1
        name = PeerId(f"draft-{self._num_started}")
        channel = self._channel(name)
        channel.admit([self._draft_channel.address])
        server = DraftServer(channel, ToyDrafter(ManualClock()))
        self.drafters[name] = Worker(channel, server.step), channel.address
        self._proposer.set_workers([address for _, address in self.drafters.values()])

    def end_drafter(self, *, told: bool) -> None:
        worker, _ = self.drafters.pop(self._rng.choice(list(self.drafters)))
        worker.end()
        if told:
            self._proposer.set_workers([address for _, address in self.drafters.values()])

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


def run_random_schedule(transport: str, seed: int) -> tuple[int, int]:
    """Run four requests; return how many drafts were accepted, and how many messages lost."""
    rng = random.Random(seed)
    cluster = RealCluster(transport, rng)
    try:
        for _ in range(rng.randint(1, 3)):
            cluster.start_drafter()
        requests = [a_request(f"r{index}", rng) for index in range(4)]
        tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
        waiting = list(requests)
        while waiting or cluster.engine.has_work:
            if waiting and (rng.random() < 0.3 or not cluster.engine.has_work):
                cluster.engine.add_request(waiting.pop())
            fate = rng.random()
            if fate < 0.05 and cluster.drafters:
                cluster.end_drafter(told=rng.random() < 0.5)
            elif fate < 0.1 and len(cluster.drafters) < 3:
                cluster.start_drafter()
            for output in cluster.engine.step():
                assert output.error is None, output.error
                assert output.first_index == len(tokens[output.request_id])
                tokens[output.request_id].extend(output.token_ids)
            cluster.engine.check_integrity()
        for request in requests:
            assert tokens[request.request_id] == expected(request), (transport, seed, request)
        num_lost = sum(channel.num_lost for channel in cluster.channels)
        return cluster.engine.metrics().num_accepted_tokens, num_lost
    finally:
        cluster.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_schedules_never_change_a_token(transport: str) -> None:
    runs = [run_random_schedule(transport, seed) for seed in range(4)]
    num_accepted, num_lost = (sum(column) for column in zip(*runs, strict=True))
    assert num_accepted > 5, "the drafters hardly ever helped: these schedules prove nothing"
    assert num_lost > 0


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("block", range(20))
def test_many_more_random_schedules(transport: str, block: int) -> None:
    for seed in range(100 + 10 * block, 110 + 10 * block):
        run_random_schedule(transport, seed)
