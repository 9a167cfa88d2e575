"""A coordinator's relations with draft workers: the policy of `RemoteProposer`, without messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.simulation.drafter import DraftWorker
from benchmarks.simulation.traffic import SimulatedRequest
from specdec.core.ids import RequestId
from specdec.engine.draft_choice import choose_draft_worker, is_given_up
from specdec.engine.draft_patience import DraftDeadlineConfig, DraftPatience


@dataclass(slots=True)
class Registration:
    """A sequence as one draft worker knows it."""

    worker: str
    sent_len: int = 0


@dataclass(slots=True)
class Link:
    """One draft worker."""

    worker: DraftWorker
    patience: DraftPatience
    num_registered: int = 0


class DraftLinks:
    """Who drafts for whom. Patience, choice and giving up are those of the engine."""

    def __init__(self, deadlines: DraftDeadlineConfig) -> None:
        self._deadlines = deadlines
        self._registrations: dict[RequestId, Registration] = {}
        self.links: dict[str, Link] = {}

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

    def by_worker(
        self, requests: Sequence[SimulatedRequest], now_s: float
    ) -> Mapping[str, list[SimulatedRequest]]:
        """Group sequences by the worker to ask now, as `RemoteProposer` does."""
        patience = {name: link.patience for name, link in self.links.items()}
        ready = [name for name, its in patience.items() if its.is_waited_for(now_s)]
        after_s = self._deadlines.reassign_after_s
        silent = {name for name, its in patience.items() if is_given_up(its, now_s, after_s)}
        groups: dict[str, list[SimulatedRequest]] = {}
        for request in requests:
            its = self._registrations.get(request.request_id)
            if its is None or (its.worker in silent and ready):
                its = self._register(request.request_id, ready or list(self.links))
            if its is not None:
                groups.setdefault(its.worker, []).append(request)
        return {name: group for name, group in groups.items() if patience[name].may_ask(now_s)}

    def send(self, request: SimulatedRequest) -> int:
        """Note that a worker is told all committed tokens; return how many it had not seen."""
        its = self._registrations[request.request_id]
        num_new = request.committed_len - its.sent_len
        its.sent_len = request.committed_len
        return num_new

    def assume_read(self, request: SimulatedRequest) -> None:
        """Give a sequence to a worker that has read it long ago."""
        if self._register(request.request_id, list(self.links)) is not None:
            self.send(request)

    def release(self, request_id: RequestId) -> None:
        """Forget a sequence."""
        its = self._registrations.pop(request_id, None)
        if its is not None and its.worker in self.links:
            self.links[its.worker].num_registered -= 1

    def worker_of(self, request_id: RequestId) -> str | None:
        """Return who drafts for a sequence."""
        its = self._registrations.get(request_id)
        return None if its is None else its.worker

    def _register(self, request_id: RequestId, candidates: Sequence[str]) -> Registration | None:
        self.release(request_id)
        name = choose_draft_worker(candidates, lambda one: self.links[one].num_registered)
        if name is None:
            return None
        its = self._registrations[request_id] = Registration(name)
        self.links[name].num_registered += 1
        return its
