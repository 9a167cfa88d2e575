"""Which draft worker a sequence goes to, and which sequences change to another: pure decisions.

Every coordinator decides for its own sequences. What it knows of the others' it has from the workers: each
reply tells how many sequences a worker has and how many it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pydantic import Field

from specdec.core.config import StrictConfig
from specdec.engine.draft_pool.patience import DraftDeadlineConfig
from specdec.transport.base import PeerId

_MOST_STEPS = 1024
"""Of one thought about how sequences should be spread: a round waits for it. The next one goes on there."""
_PARTS = 64
"""Sequences of a worker are thought to move in so many parts, one at a time where there are few."""


class DraftPlacementConfig(StrictConfig):
    """When sequences change to another draft worker. Each that does is read there from its beginning."""

    rebalance_every_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at how evenly the sequences are spread."""
    max_moves: int = Field(default=4, ge=0)
    """Sequences of one coordinator that change between two looks; 0: none ever does without need."""
    imbalance: float = Field(default=0.25, ge=0)
    """A sequence changes only if the worker that it leaves is, still with it, busier by this part than the
    other one will be with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWorkerView:
    """What one coordinator knows of one draft worker."""

    worker: PeerId
    num_own: int
    """Sequences of this coordinator there."""
    num_others: int = 0
    """Other coordinators' sequences there, as told last."""
    capacity: int | None = None
    """Sequences that it takes; None: not told yet."""
    is_ready: bool = True
    """Whether it answers in time."""
    has_place: bool = True
    """Whether it may be given a sequence now."""
    is_short_of_memory: bool = False
    """Whether it has refused a sequence lately for want of memory: nothing is moved there without need."""

    @property
    def load(self) -> float:
        """Sequences there, for each that it takes; workers that have not told are taken for the smallest."""
        return (self.num_own + self.num_others) / (self.capacity or 1)

    def with_more(self, num_sequences: int) -> DraftWorkerView:
        """Return the view once so many more sequences of this coordinator are there."""
        return replace(self, num_own=self.num_own + num_sequences)


class Move(NamedTuple):
    """Sequences of this coordinator that shall change to another worker."""

    source: PeerId
    destination: PeerId
    num_sequences: int


def place(workers: Sequence[DraftWorkerView], config: DraftPlacementConfig) -> PeerId | None:
    """Return the worker that a sequence goes to: one of the least busy of those that answer in time.

    Of workers that are about equally busy (so that nothing would change from one to the other) it is the one
    with the fewest sequences of this coordinator: a round waits for the worker with the most of them. Where
    none answers in time it is one of the others; where none has a place there is none.

    Args:
        workers: those that are there.
        config: what is about equal.
    """
    if len(workers) == 1:
        return workers[0].worker if workers[0].has_place else None
    open_now = [view for view in _comparable(workers) if view.has_place]
    candidates = [view for view in open_now if view.is_ready] or open_now
    if not candidates:
        return None
    most = (1 + config.imbalance) * min(view.with_more(1).load for view in candidates)
    least_busy = [view for view in candidates if view.with_more(1).load <= most]
    return min(least_busy, key=lambda view: (view.num_own / (view.capacity or 1), view.load)).worker


def rebalance(workers: Sequence[DraftWorkerView], config: DraftPlacementConfig, draw: float) -> list[Move]:
    """Return the fewest moves that leave no two workers apart by more than `imbalance`, `max_moves` at most.

    Coordinators do not consult each other, and all see the same workers. Each does its part of what is
    needed, as large as its part of the busy worker's sequences, by chance where that is no whole number.

    Args:
        workers: those that are there. Only among those that answer in time is anything moved.
        config: the limits.
        draw: chance: uniform in [0, 1), another one each time.
    """
    views = {view.worker: view for view in _comparable(workers) if view.is_ready}
    wanted: dict[tuple[PeerId, PeerId], int] = {}
    own = {worker: view.num_own for worker, view in views.items()}
    for _ in range(_MOST_STEPS):
        sources = [view for view in views.values() if own[view.worker] and view.num_own + view.num_others > 0]
        destinations = [view for view in views.values() if view.has_place and not view.is_short_of_memory]
        if not sources or not destinations:
            break
        source = max(sources, key=lambda view: view.load)
        destination = min(destinations, key=lambda view: view.with_more(1).load)
        if source.load <= (1 + config.imbalance) * destination.with_more(1).load:
            break
        route = (source.worker, destination.worker)
        num_moved = max(1, min(source.num_own + source.num_others, destination.capacity or 1) // _PARTS)
        wanted[route] = wanted.get(route, 0) + num_moved
        views[source.worker] = source.with_more(-num_moved)
        views[destination.worker] = destination.with_more(num_moved)
    before = {view.worker: view for view in workers}
    moves = []
    left = config.max_moves
    for (source_id, destination_id), num_needed in wanted.items():
        view = before[source_id]
        part = num_needed * view.num_own / (view.num_own + view.num_others)
        num_moved = min(int(part + draw), own[source_id], left)
        if num_moved > 0:
            own[source_id] -= num_moved
            left -= num_moved
            moves.append(Move(source_id, destination_id, num_moved))
    return moves


class Vacancy:
    """Whether one draft worker may be given sequences: as it told, and seldomer the oftener it refused."""

    def __init__(self, config: DraftDeadlineConfig) -> None:
        self._config = config
        self._num_places: int | None = None
        self._num_refusals = 0
        self._retry_at_s = 0.0

    def has_place(self, now_s: float) -> bool:
        """Whether to give it a sequence now. A full one is tried with one at a time.

        Who has told nothing takes any number.
        """
        is_open = self._num_refusals == 0 and (self._num_places is None or self._num_places > 0)
        return is_open or now_s >= self._retry_at_s

    def placed(self, now_s: float) -> None:
        """It was given a sequence."""
        if self._num_places:
            self._num_places -= 1
        self._retry_at_s = now_s + self._interval_s()

    def told(self, num_places: int) -> None:
        """It said how many more it takes."""
        if num_places > 0 and self._num_places == 0:
            self._num_refusals = 0
        self._num_places = num_places

    def refused(self, now_s: float) -> None:
        """It had no place for some of what it was given."""
        self._num_refusals += 1
        self._retry_at_s = now_s + self._interval_s()

    def accepted(self) -> None:
        """It had a place."""
        self._num_refusals = max(0, self._num_refusals - 1)

    def _interval_s(self) -> float:
        return self._config.retry_interval_s(self._num_refusals)


class MemoryShortage:
    """For which sequences one draft worker has no memory, by their length and as far as it has refused some.

    One that is shorter than all that it has refused may come at once. Others are tried one at a time: right
    behind one that it had memory for, or one that left, else seldomer the oftener one was tried in vain.
    """

    def __init__(self, config: DraftDeadlineConfig) -> None:
        self._config = config
        self._shortest: int | None = None
        """Tokens, of what it had no memory for."""
        self._refused_s = 0.0
        self._num_attempts = 0
        """Since it had memory for one."""
        self._retry_at_s = 0.0

    def is_recent(self, now_s: float) -> bool:
        """Whether it has refused any so lately that the next attempt may still be due."""
        return self._shortest is not None and now_s - self._refused_s < 2.0 * self._config.max_retry_s

    def is_doubtful(self, num_tokens: int) -> bool:
        """Whether it has refused a sequence that was no longer than one of so many tokens."""
        return self._shortest is not None and num_tokens >= self._shortest

    def may_try(self, num_tokens: int, now_s: float) -> bool:
        """Whether to give it a sequence of so many tokens now."""
        return not self.is_doubtful(num_tokens) or now_s >= self._retry_at_s

    def placed(self, num_tokens: int, now_s: float) -> None:
        """It was given a sequence of so many tokens."""
        if self.is_doubtful(num_tokens):
            self._num_attempts += 1
            self._retry_at_s = now_s + self._config.retry_interval_s(self._num_attempts)

    def refused(self, num_tokens: int, now_s: float, *, had_it: bool = False) -> None:
        """It had no memory for one of so many tokens, or has none any more for one that it `had`.

        What that one had is free now: no attempt in vain.
        """
        if self._shortest is not None and self.is_recent(now_s):
            self._shortest = min(num_tokens, self._shortest)
        else:  # what was refused long ago says nothing of now
            self._shortest, self._num_attempts = num_tokens, 0
        # From the answer, as what is refused rests: else longer ones would be tried while the shortest does.
        num_attempts = 0 if had_it else self._num_attempts
        self._retry_at_s = max(self._retry_at_s, now_s + self._config.retry_interval_s(num_attempts))
        self._refused_s = now_s

    def accepted(self, num_tokens: int, now_s: float) -> None:
        """It had memory for one of so many tokens.

        That says little of the others that wait, as long as some are refused: all at once, they would be.
        """
        if self.is_doubtful(num_tokens):
            self._num_attempts = 0
            self._retry_at_s = now_s
            if not self.is_recent(now_s):
                self._shortest = None

    def freed(self) -> None:
        """A sequence that it had memory for has left: whether that is enough for another is tried at once."""
        self._retry_at_s = 0.0


def _comparable(workers: Sequence[DraftWorkerView]) -> list[DraftWorkerView]:
    """Fill in capacities that have not been told: the smallest of those that have."""
    known = min((view.capacity for view in workers if view.capacity), default=1)
    return [view if view.capacity else replace(view, capacity=known) for view in workers]
