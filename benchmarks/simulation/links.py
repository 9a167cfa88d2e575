"""A coordinator's relations with draft workers: the policy of `RemoteProposer`, without messages."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.simulation.clock import EventQueue
from benchmarks.simulation.drafter import DraftReply, DraftWorker
from benchmarks.simulation.traffic import SimulatedRequest
from specdec.core.ids import RequestId
from specdec.engine.draft_patience import DraftDeadlineConfig, DraftPatience
from specdec.engine.draft_placement import DraftPlacementConfig, DraftWorkerView, Move, place, rebalance
from specdec.transport.base import PeerId


@dataclass(slots=True)
class Registration:
    """A sequence as one draft worker knows it."""

    worker: PeerId
    sent_len: int = 0
    confirmed_len: int = 0
    """Leading tokens that it has answered for."""


@dataclass(slots=True)
class Link:
    """One draft worker."""

    worker: DraftWorker
    patience: DraftPatience
    num_registered: int = 0
    num_others: int = 0
    """Other coordinators' sequences there, when it answered last."""

    def view(self, now_s: float) -> DraftWorkerView:
        """What placement looks at. All workers take equally many, and are never full."""
        return DraftWorkerView(
            worker=self.worker.name,
            num_own=self.num_registered,
            num_others=self.num_others,
            is_ready=self.patience.is_waited_for(now_s),
        )


class DraftLinks:
    """Who drafts for whom. Patience, placement and rebalancing are those of the engine."""

    def __init__(
        self,
        owner: str,
        events: EventQueue,
        wire_s: float,
        deadlines: DraftDeadlineConfig,
        placement: DraftPlacementConfig,
    ) -> None:
        self.num_moved = 0
        self._owner = owner
        self._events = events
        self._wire_s = wire_s
        self._deadlines = deadlines
        self._placement = placement
        self._chance = random.Random(owner)
        self._next_rebalance_s = 0.0
        self._registrations: dict[RequestId, Registration] = {}
        self.links: dict[PeerId, Link] = {}

    def set_workers(self, workers: Iterable[DraftWorker]) -> None:
        """Use exactly these; sequences of those that are gone are given away anew."""
        wanted = {worker.name: worker for worker in workers}
        for name in [name for name in self.links if name not in wanted]:
            del self.links[name]
            lost = [one for one, its in self._registrations.items() if its.worker == name]
            for request_id in lost:
                del self._registrations[request_id]
        for name, worker in wanted.items():
            if name not in self.links:
                self.links[name] = Link(worker, DraftPatience(self._deadlines))
        self._next_rebalance_s = 0.0

    def by_worker(
        self, requests: Sequence[SimulatedRequest], now_s: float
    ) -> Mapping[PeerId, list[SimulatedRequest]]:
        """Group sequences by the worker to ask now, as `RemoteProposer` does."""
        if len(self.links) > 1:
            self._rebalance(requests, now_s)
        patience = {name: link.patience for name, link in self.links.items()}
        ready = [name for name, its in patience.items() if its.is_waited_for(now_s)]
        after_s = self._deadlines.reassign_after_s
        silent = {name for name, its in patience.items() if its.late_for_s(now_s) > after_s}
        groups: dict[PeerId, list[SimulatedRequest]] = {}
        for request in requests:
            its = self._registrations.get(request.request_id)
            if its is None or (its.worker in silent and ready):
                its = self._register(request.request_id, now_s)
            if its is not None:
                groups.setdefault(its.worker, []).append(request)
        return {name: group for name, group in groups.items() if patience[name].may_ask(now_s)}

    def send(self, request: SimulatedRequest) -> int:
        """Note that a worker is told all committed tokens; return how many it has not answered for."""
        its = self._registrations[request.request_id]
        num_new = request.committed_len - its.sent_len
        its.sent_len = request.committed_len
        return num_new

    def hear(self, name: PeerId, reply: DraftReply) -> None:
        """Take note of what a worker tells of itself and of sequences."""
        link = self.links[name]
        link.num_others = max(0, reply.num_sequences - link.num_registered)
        for wish in reply.wishes:
            its = self._registrations.get(wish.request_id)
            if its is not None and its.worker == name:
                its.confirmed_len = max(its.confirmed_len, wish.context_tokens)

    def assume_read(self, request: SimulatedRequest) -> None:
        """Give a sequence to a worker that has read it long ago."""
        its = self._register(request.request_id, self._events.now_s)
        if its is not None:
            its.sent_len = its.confirmed_len = request.committed_len
            self.links[its.worker].worker.assume_read(self._owner, request.request_id)

    def release(self, request_id: RequestId) -> None:
        """Forget a sequence, here and at its worker."""
        its = self._registrations.pop(request_id, None)
        if its is not None and its.worker in self.links:
            link = self.links[its.worker]
            link.num_registered -= 1
            forget = partial(link.worker.release, self._owner, (request_id,))
            self._events.at(self._events.now_s + self._wire_s, forget)

    def worker_of(self, request_id: RequestId) -> PeerId | None:
        """Return who drafts for a sequence."""
        its = self._registrations.get(request_id)
        return None if its is None else its.worker

    def _register(self, request_id: RequestId, now_s: float) -> Registration | None:
        name = place([link.view(now_s) for link in self.links.values()], self._placement)
        return None if name is None else self._register_at(request_id, name)

    def _register_at(self, request_id: RequestId, name: PeerId) -> Registration:
        self.release(request_id)
        its = self._registrations[request_id] = Registration(name)
        self.links[name].num_registered += 1
        return its

    def _rebalance(self, requests: Sequence[SimulatedRequest], now_s: float) -> None:
        """As `RemoteProposer`: now and then the shortest of those of whom nothing is awaited move."""
        if now_s < self._next_rebalance_s:
            return
        self._next_rebalance_s = now_s + self._placement.rebalance_every_s
        views = [link.view(now_s) for link in self.links.values()]
        for move in rebalance(views, self._placement, self._chance.random()):
            for request_id in self._movable(requests, move):
                self._register_at(request_id, move.destination)
                self.num_moved += 1

    def _movable(self, requests: Sequence[SimulatedRequest], move: Move) -> list[RequestId]:
        settled = [
            request
            for request in requests
            if (its := self._registrations.get(request.request_id)) is not None
            and its.worker == move.source
            and its.sent_len == its.confirmed_len
        ]
        settled.sort(key=lambda request: request.committed_len)
        return [request.request_id for request in settled[: move.num_sequences]]
