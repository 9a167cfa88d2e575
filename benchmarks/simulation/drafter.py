"""A draft worker: wishes of any coordinator that are there together are drafted together, in fair batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.simulation.clock import EventQueue
from benchmarks.simulation.hardware import Hardware
from specdec.core.ids import RequestId
from specdec.engine.draft_pool.shares import DraftShareConfig, fair_batch
from specdec.transport.base import PeerId

_LONG_UNSEEN = 64
"""As `DraftServer`: with more unseen tokens an entry is served after those that are quick."""


@dataclass(slots=True, kw_only=True, eq=False)
class DraftWish:
    """One entry of a coordinator's message."""

    request_id: RequestId
    num_draft_tokens: int
    context_tokens: int
    num_unseen: int
    """Committed tokens that the worker has not read."""
    num_branches: float | None = None
    """Continuations of assumed verdicts; None: what is wanted is a proposal, or that tokens be read."""

    @property
    def is_slow(self) -> bool:
        """Whether it is served after those that are quick."""
        return self.num_unseen > _LONG_UNSEEN

    def part_of_batch(self, shares: DraftShareConfig) -> float:
        """As `DraftServer` counts it."""
        num_rows, branches = self.num_unseen + self.num_draft_tokens, self.num_branches
        if branches is None:
            return shares.part_of_batch(num_rows, 0)
        number = round(branches)
        return shares.part_of_batch(num_rows + self.num_draft_tokens * (1 + number), number)


class DraftReply(NamedTuple):
    """Answers to some or all wishes of one message."""

    wishes: Sequence[DraftWish]
    num_sequences: int
    """Of all coordinators, at this worker."""
    draft_s: float
    """What drafting them has taken."""


class DraftMessage(NamedTuple):
    """What one coordinator asks of one worker at a time."""

    coordinator: str
    wishes: Sequence[DraftWish]
    answer: Callable[[DraftReply], None]


@dataclass(slots=True)
class _Client:
    known: set[RequestId] = field(default_factory=set)
    waiting: list[tuple[DraftWish, DraftMessage]] = field(default_factory=list)
    was_first: list[int] = field(default_factory=lambda: [0, 0])


class DraftWorker:
    """Serves as `DraftServer.step` does: a fair batch of what is quick, then one of what is not.

    It takes as many sequences as all its coordinators may have, as is the default: it refuses none.
    """

    def __init__(
        self, name: str, hardware: Hardware, events: EventQueue, shares: DraftShareConfig | None = None
    ) -> None:
        self.name = PeerId(name)
        self._hardware = hardware
        self._events = events
        self._shares = shares or DraftShareConfig()
        self._clients: dict[str, _Client] = {}
        self._is_serving = False
        self._life = 0
        self.is_alive = True
        self.busy_s = 0.0
        self.num_batches = 0
        self.num_jobs = 0

    @property
    def num_sequences(self) -> int:
        """Sequences known here, of all coordinators."""
        return sum(len(client.known) for client in self._clients.values())

    def submit(self, message: DraftMessage) -> None:
        """Take wishes in; lost where the worker is dead."""
        if not self.is_alive:
            return
        client = self._client(message.coordinator)
        client.known.update([wish.request_id for wish in message.wishes])
        client.waiting += [(wish, message) for wish in message.wishes]
        if not self._is_serving:
            self._serve()

    def release(self, coordinator: str, request_ids: Iterable[RequestId]) -> None:
        """Forget sequences; what has been asked for them is drafted all the same."""
        self._client(coordinator).known.difference_update(request_ids)

    def assume_read(self, coordinator: str, request_id: RequestId) -> None:
        """Know a sequence from long ago."""
        self._client(coordinator).known.add(request_id)

    def die(self) -> None:
        """Lose everything."""
        self.is_alive = self._is_serving = False
        self._life += 1
        self._clients.clear()

    def revive(self) -> None:
        """Begin anew, empty."""
        self.is_alive = True

    def _client(self, name: str) -> _Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client()
        return client

    def _serve(self) -> None:
        self._is_serving = True
        done_s = self._events.now_s
        for is_slow in (False, True):
            batch = self._take_batch(is_slow)
            if batch:
                batch_s = self._batch_s([wish for wish, _ in batch], is_slow=is_slow)
                done_s += batch_s
                self.num_batches += 1
                self._events.at(done_s, partial(self._answer, batch, batch_s, self._life))
        self.busy_s += done_s - self._events.now_s
        self._events.at(done_s, partial(self._go_on, self._life))

    def _take_batch(self, is_slow: bool) -> list[tuple[DraftWish, DraftMessage]]:
        shares = self._shares
        clients = [client for client in self._clients.values() if client.waiting]
        clients.sort(key=lambda client: client.was_first[is_slow])
        queues = [
            [
                ((wish, message), wish.part_of_batch(shares))
                for wish, message in client.waiting
                if wish.is_slow == is_slow
            ]
            for client in clients
        ]
        batch = fair_batch(queues)
        if batch:
            self._clients[batch[0][1].coordinator].was_first[is_slow] = self.num_batches + 1
            served = {id(wish) for wish, _ in batch}
            for client in clients:
                client.waiting = [one for one in client.waiting if id(one[0]) not in served]
            self.num_jobs += len({id(message) for _, message in batch})
        return batch

    def _batch_s(self, wishes: Sequence[DraftWish], *, is_slow: bool) -> float:
        drafting = [wish for wish in wishes if wish.num_draft_tokens > 0]
        lengths = np.array([wish.num_draft_tokens for wish in drafting], dtype=np.int64)
        shares = np.array([1.0 if wish.num_branches is None else wish.num_branches for wish in drafting])
        steps = np.arange(int(lengths.max(initial=0)))
        taking_part = ((lengths[:, None] > steps) * shares[:, None]).sum(0)
        contexts = np.array([wish.context_tokens for wish in drafting])
        mean_context = float((contexts * shares).sum()) / max(float(shares.sum()), 1e-9)
        num_unseen = sum(wish.num_unseen for wish in wishes) if is_slow else 0
        return self._hardware.draft_s(taking_part, mean_context, num_unseen)

    def _answer(self, batch: Sequence[tuple[DraftWish, DraftMessage]], batch_s: float, life: int) -> None:
        if life != self._life:
            return
        answered: dict[int, tuple[DraftMessage, list[DraftWish]]] = {}
        for wish, message in batch:
            answered.setdefault(id(message), (message, []))[1].append(wish)
        arrives_s = self._events.now_s + self._hardware.wire_s
        for message, wishes in answered.values():
            self._events.at(
                arrives_s, partial(message.answer, DraftReply(wishes, self.num_sequences, batch_s))
            )

    def _go_on(self, life: int) -> None:
        if life != self._life:
            return
        self._is_serving = False
        if any(client.waiting for client in self._clients.values()):
            self._serve()
