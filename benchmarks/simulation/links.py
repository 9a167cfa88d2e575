"""A coordinator's relations with draft workers: those of `RemoteProposer`, without messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from benchmarks.simulation.clock import EventQueue
from benchmarks.simulation.drafter import DraftReply, DraftWorker
from benchmarks.simulation.traffic import SimulatedRequest
from specdec.core.ids import RequestId
from specdec.engine.draft_pool.patience import DraftDeadlineConfig
from specdec.engine.draft_pool.placement import DraftPlacementConfig
from specdec.engine.draft_pool.registry import DraftLink, DraftRegistry, Registration
from specdec.transport.base import PeerId


class DraftLinks:
    """Who drafts for whom. Patience, placement and rebalancing are those of the engine.

    All workers take equally many sequences of any length, and are never full.
    """

    def __init__(
        self,
        owner: str,
        events: EventQueue,
        wire_s: float,
        deadlines: DraftDeadlineConfig,
        placement: DraftPlacementConfig,
    ) -> None:
        self._owner = owner
        self._events = events
        self._wire_s = wire_s
        self._workers: dict[PeerId, DraftWorker] = {}
        self._registry = DraftRegistry(
            owner, deadlines=deadlines, placement=placement, on_leave=self._tell_to_forget
        )

    @property
    def links(self) -> Mapping[PeerId, DraftLink]:
        """By worker."""
        return self._registry.links

    @property
    def workers(self) -> Mapping[PeerId, DraftWorker]:
        """By name."""
        return self._workers

    @property
    def num_moved(self) -> int:
        """Sequences given from a busy worker to one that was less so."""
        return self._registry.num_moved

    def set_workers(self, workers: Iterable[DraftWorker]) -> None:
        """Use exactly these; sequences of those that are gone are given away anew."""
        wanted = {worker.name: worker for worker in workers}
        for name in [name for name in self._workers if name not in wanted]:
            del self._workers[name]
            self._registry.remove(name)
        for name, worker in wanted.items():
            if name not in self._workers:
                self._workers[name] = worker
                self._registry.add(name)

    def by_worker(
        self, requests: Sequence[SimulatedRequest], now_s: float
    ) -> Mapping[PeerId, list[SimulatedRequest]]:
        """Group sequences by the worker to ask now."""
        return self._registry.by_worker(requests, now_s)

    def send(self, request: SimulatedRequest) -> int:
        """Note that a worker is told all committed tokens; return how many it has not answered for."""
        its = self._registry.registrations[request.request_id]
        num_new = request.committed_len - its.sent_len
        its.sent_len = request.committed_len
        return num_new

    def hear(self, name: PeerId, reply: DraftReply) -> None:
        """Take note of what a worker tells of itself and of sequences."""
        link = self.links[name]
        link.num_others = max(0, reply.num_sequences - link.num_registered)
        for wish in reply.wishes:
            its = self._registry.registrations.get(wish.request_id)
            if its is not None and its.worker == name:
                its.note_answer(wish.context_tokens, 0)

    def assume_read(self, request: SimulatedRequest) -> None:
        """Give a sequence to a worker that has read it long ago."""
        now_s = self._events.now_s
        self._registry.by_worker([request], now_s)
        its = self._registry.registrations.get(request.request_id)
        if its is not None:
            its.sent_len = request.committed_len
            its.note_answer(request.committed_len, 0)
            self._workers[its.worker].assume_read(self._owner, request.request_id)

    def release(self, request_id: RequestId) -> None:
        """Forget a sequence, here and at its worker."""
        self._registry.forget(request_id)

    def worker_of(self, request_id: RequestId) -> PeerId | None:
        """Return who drafts for a sequence."""
        its = self._registry.registrations.get(request_id)
        return None if its is None else its.worker

    def _tell_to_forget(self, request_id: RequestId, registration: Registration, has_ended: bool) -> None:
        worker = self._workers[registration.worker]
        forget = partial(worker.release, self._owner, (request_id,))
        self._events.at(self._events.now_s + self._wire_s, forget)
