"""A target worker on a simulated network, and two coordinators that would own it."""

from __future__ import annotations

from collections.abc import Callable

from specdec.core.clock import ManualClock
from specdec.core.errors import TransportError
from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetStep, TargetWork
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.remote_target import RemoteTarget, RemoteTargetTimes
from specdec.engine.targets.target_server import TargetServer
from specdec.engine.targets.toy_target import ToyModel, ToyTarget
from specdec.transport.base import MAX_MESSAGE_BYTES, PeerId
from specdec.transport.memory import MemoryNetwork

WORKER = PeerId("worker")
A = RequestId("a")
TIMES = RemoteTargetTimes(
    attach_timeout_s=5.0, step_timeout_s=20.0, resend_after_s=1.0, lost_link_grace_s=2.0
)


class World:
    def __init__(
        self, max_message_bytes: int = MAX_MESSAGE_BYTES, make_toy: Callable[[], ToyTarget] | None = None
    ) -> None:
        self.clock = ManualClock()
        self.network = MemoryNetwork(clock=self.clock)
        self.worker = self.network.open(WORKER, max_message_bytes=max_message_bytes)
        self.toy = ToyTarget(ToyModel(7)) if make_toy is None else make_toy()
        self.server = TargetServer(self.worker, self.toy)
        self.error: BaseException | None = None
        self.network.serve(WORKER, self.serve)
        self.owners = [
            self.network.open(PeerId(name), max_message_bytes=max_message_bytes)
            for name in ("first", "second")
        ]
        self.worker.admit([owner.address for owner in self.owners])

    def serve(self) -> None:
        try:
            self.server.step(0)
        except TransportError as error:
            self.error = error
            self.network.kill(WORKER)

    def attach(self, owner: int, incarnation: int) -> RemoteTarget:
        return RemoteTarget(
            self.owners[owner], self.worker.address, incarnation=incarnation, times=TIMES, clock=self.clock
        )


def step(step_id: int, *, admit: bool = False, tokens: tuple[int, ...] = (1, 2, 3)) -> TargetStep:
    work = TargetWork(A, tokens, 0, 1, 0, (1, 2))
    admitted = (AdmittedSequence(A, 5, SamplingParams(temperature=0.0)),) if admit else ()
    return TargetStep(step_id, (work,), admitted)
