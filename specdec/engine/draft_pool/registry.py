"""Which draft worker has which of a coordinator's sequences, and what it knows of them. No messages."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from specdec.core.ids import RequestId
from specdec.engine.draft_pool.patience import DraftDeadlineConfig, DraftPatience
from specdec.engine.draft_pool.placement import (
    DraftPlacementConfig,
    DraftWorkerView,
    MemoryShortage,
    Move,
    Vacancy,
    place,
    rebalance,
)
from specdec.transport.base import PeerId

logger = logging.getLogger(__name__)

_MOST_DEATHS = 3
"""A sequence about which so many workers had been asked one after the other, and had not answered when they
were gone, is taken for what ended them. A worker that ends by chance, or because it is to, leaves many
unanswered: once or twice says nothing, and whom another worker has answered for in between is innocent."""
_FEW_TOKENS = 16
"""What one round may bring a sequence: nobody asks how long they take to read."""
_MOST_WAITED_FOR = 256
"""Tokens. A sequence that has more to catch up on does so while its request goes on without drafts."""


class Placed(Protocol):
    """A sequence, as far as it matters who drafts for it."""

    @property
    def request_id(self) -> RequestId: ...
    @property
    def committed_len(self) -> int: ...


S = TypeVar("S", bound=Placed)
Homelessness = Literal["none", "too_long", "deadly", "memory", "place"]
"""Why no worker has a sequence: there is none, it is too long for any, several have died of it, none has
memory left for it, or no place for another one."""


@dataclass(slots=True)
class Registration:
    """A sequence as one draft worker knows it."""

    worker: PeerId
    epoch: int
    sent_len: int = 0
    """Leading tokens that were sent to it."""
    confirmed_len: int = 0
    """Leading tokens that it has answered for."""
    read_len: int = 0
    """Leading tokens behind which it can draft at once."""

    @property
    def is_unanswered(self) -> bool:
        """Whether the worker was told something that it has not answered for."""
        return self.sent_len > self.confirmed_len

    def note_answer(self, committed_len: int, num_unread: int) -> None:
        """The worker has answered for so many tokens, and has yet to read some of them."""
        if committed_len >= self.confirmed_len:
            self.read_len = max(0, committed_len - max(0, num_unread))
        self.confirmed_len = max(self.confirmed_len, committed_len)

    def start_again(self) -> None:
        """The worker knows nothing of it any more."""
        self.sent_len = self.confirmed_len = self.read_len = 0


@dataclass(slots=True)
class DraftLink:
    """What a coordinator knows of one draft worker."""

    worker: PeerId
    patience: DraftPatience
    vacancy: Vacancy
    memory: MemoryShortage
    num_registered: int = 0
    num_others: int = 0
    """Other coordinators' sequences there, when it answered last."""
    capacity: int | None = None
    """Sequences that it takes; None: it has not said."""
    max_length: int | None = None
    """Longest prefix (tokens) that it continues; None: it has not said, or has no limit."""

    def continues(self, sequence: Placed) -> bool:
        """Whether it drafts behind so many tokens, as far as is known."""
        return self.max_length is None or sequence.committed_len < self.max_length

    def may_be_tried(self, now_s: float) -> bool:
        """Whether one sequence would tell whether it is back."""
        return self.num_registered == 0 and self.patience.may_ask(now_s)

    def view(self, now_s: float) -> DraftWorkerView:
        """What placement looks at."""
        return DraftWorkerView(
            worker=self.worker,
            num_own=self.num_registered,
            num_others=self.num_others,
            capacity=self.capacity,
            is_ready=self.patience.is_waited_for(now_s),
            has_place=self.vacancy.has_place(now_s),
            is_short_of_memory=self.memory.is_recent(now_s),
        )


class DraftRegistry:
    """Gives sequences to draft workers, and takes them away again."""

    def __init__(
        self,
        name: str,
        *,
        deadlines: DraftDeadlineConfig,
        placement: DraftPlacementConfig,
        max_context: int | None = None,
        first_epoch: int = 0,
        on_leave: Callable[[RequestId, Registration, bool], None],
    ) -> None:
        """Begin without workers.

        Args:
            name: the coordinator's, of which its chance is made.
            deadlines: when a silent worker loses its sequences, and how often a full one is tried again.
            placement: how sequences are spread.
            max_context: longest prefix (tokens) that any worker continues; None: no limit.
            first_epoch: greater than all that workers have heard of from somebody of this name.
            on_leave: called when a worker that is still there loses a sequence, for it to be told; with
                whether nothing more will come of it.
        """
        self._deadlines = deadlines
        self._placement = placement
        self._max_context = max_context
        self._on_leave = on_leave
        self._max_length = max_context
        self._chance = random.Random(name)
        self._next_rebalance_s = 0.0
        self._moves_left: list[Move] = []
        """Of the last look at the balance."""
        self._next_epoch = first_epoch
        self._too_long: set[RequestId] = set()
        self._set_aside: set[RequestId] = set()
        self._outgrown: dict[RequestId, dict[PeerId, float]] = {}
        """Sequences that are too long for what is left of workers' memory, and when to ask those that refused
        one again."""
        self._left_silent: dict[PeerId, set[RequestId]] = defaultdict(set)
        """Sequences that were taken from a silent worker, which may be dead, without an answer."""
        self._num_deaths: dict[RequestId, int] = {}
        """Workers that were lost while they had been asked about a sequence."""
        self.links: dict[PeerId, DraftLink] = {}
        self.registrations: dict[RequestId, Registration] = {}
        self.num_moved = 0
        """Sequences given from a busy worker to one that was less so."""
        self.num_too_long = 0
        """Sequences that got longer than what any worker continues, or can be told of."""

    def add(self, worker: PeerId) -> None:
        """Give sequences to this worker too."""
        config = self._deadlines
        self.links[worker] = DraftLink(worker, DraftPatience(config), Vacancy(config), MemoryShortage(config))
        self._changed()

    def remove(self, worker: PeerId) -> None:
        """This worker is gone, and what it had with it."""
        del self.links[worker]
        unanswered = self._left_silent.pop(worker, set())
        for request_id, its in [item for item in self.registrations.items() if item[1].worker == worker]:
            del self.registrations[request_id]
            if its.is_unanswered:
                unanswered.add(request_id)
        for request_id in unanswered:
            self._note_death(request_id, worker)
        self._changed()

    def forget(self, request_id: RequestId) -> None:
        """A sequence has ended."""
        self._outgrown.pop(request_id, None)
        self._too_long.discard(request_id)
        self._set_aside.discard(request_id)
        self._num_deaths.pop(request_id, None)
        for unanswered in self._left_silent.values():
            unanswered.discard(request_id)
        self._leave(request_id, has_ended=True)

    def set_aside(self, request_id: RequestId) -> None:
        """No worker can be told of a sequence: nobody is asked for it any more."""
        self._set_aside.add(request_id)
        self.num_too_long += 1
        self._leave(request_id)

    def by_worker(self, sequences: Sequence[S], now_s: float) -> dict[PeerId, list[S]]:
        """Group the sequences by the worker to ask now; those that none can be asked for are left out."""
        if len(self.links) > 1:
            self._rebalance(sequences, now_s)
        patience = {worker: link.patience for worker, link in self.links.items()}
        silent = {
            w for w, its in patience.items() if its.late_for_s(now_s) > self._deadlines.reassign_after_s
        }
        for worker in self._left_silent.keys() - silent:  # it lives: it has been heard
            del self._left_silent[worker]
        has_other = bool(silent) and any(its.is_waited_for(now_s) for its in patience.values())
        avoided = frozenset(silent) if has_other else frozenset()
        groups: dict[PeerId, list[S]] = defaultdict(list)
        for sequence in self._in_order(sequences, avoided, now_s):
            if sequence.request_id in self._set_aside or self._is_deadly(sequence.request_id):
                continue
            if self._max_length is not None and sequence.committed_len >= self._max_length:
                self._leave(sequence.request_id, has_ended=True)
                self.num_too_long += sequence.request_id not in self._too_long
                self._too_long.add(sequence.request_id)
                continue
            registration = self.registrations.get(sequence.request_id)
            if registration is not None and not self.links[registration.worker].continues(sequence):
                self._leave(sequence.request_id)
                registration = None
            if registration is None or registration.worker in avoided:
                before, registration = registration, self._register(sequence, avoided, now_s)
                if before is not None and before is not registration and before.is_unanswered:
                    self._left_silent[before.worker].add(sequence.request_id)
            if registration is not None:
                groups[registration.worker].append(sequence)
        return {worker: group for worker, group in groups.items() if patience[worker].may_ask(now_s)}

    def behind(self, worker: PeerId, sequences: Sequence[Placed]) -> frozenset[RequestId]:
        """Return the sequences that have too much to catch up on for a round to wait for it.

        The draft KV of a request that went without drafts for a while can be gone on with, but what was
        committed meanwhile has to be read. Those that have least to read are waited for.
        """
        unread = [
            (num_unread, sequence.request_id)
            for sequence in sequences
            if (num_unread := sequence.committed_len - self.registrations[sequence.request_id].read_len)
            > _FEW_TOKENS
        ]
        if not unread:
            return frozenset()
        patience = self.links[worker].patience
        behind: list[RequestId] = []
        num_waited_for = 0
        for num_unread, request_id in sorted(unread):
            num_waited_for += num_unread
            if num_unread > _MOST_WAITED_FOR or not patience.is_worth_waiting_for(num_waited_for):
                behind.append(request_id)
        return frozenset(behind)

    def refused(self, request_id: RequestId) -> None:
        """Look for another place when the sequence is asked for again: its worker had none for it."""
        registration = self.registrations.pop(request_id)
        self.links[registration.worker].num_registered -= 1

    def outgrown(self, request_id: RequestId, num_tokens: int, now_s: float) -> None:
        """Look for another place, too: its worker has no memory for so many tokens of it, or none any more.

        That says nothing of places for others, if they are shorter.
        """
        registration = self.registrations[request_id]
        worker = registration.worker
        self.refused(request_id)
        self.links[worker].memory.refused(num_tokens, now_s, had_it=registration.confirmed_len > 0)
        self._outgrown.setdefault(request_id, {})[worker] = now_s + self._deadlines.max_retry_s

    def answered(self, request_id: RequestId, committed_len: int, num_unread: int, now_s: float) -> None:
        """The worker that has a sequence has answered for so many tokens, and has yet to read some."""
        registration = self.registrations[request_id]
        if registration.confirmed_len == 0:
            link = self.links[registration.worker]
            link.vacancy.accepted()
            link.memory.accepted(committed_len, now_s)
        registration.note_answer(committed_len, num_unread)
        if num_unread <= 0:
            self._num_deaths.pop(request_id, None)

    def told_length(self, worker: PeerId, max_length: int) -> None:
        """A worker says how long prefixes may be that it continues."""
        link = self.links[worker]
        if max_length != link.max_length:
            link.max_length = max_length
            self._note_lengths()

    def why_nowhere(self, request_id: RequestId) -> Homelessness | None:
        """Return why no worker has a sequence; None: one has it."""
        if request_id in self.registrations:
            return None
        if request_id in self._set_aside or request_id in self._too_long:
            return "too_long"
        if self._is_deadly(request_id):
            return "deadly"
        if not self.links:
            return "none"
        return "memory" if request_id in self._outgrown else "place"

    def give(self, sequence: Placed, worker: PeerId, now_s: float) -> Registration:
        """Give a sequence to a worker, taking it from the one that has it."""
        self._withdraw(sequence.request_id)
        registration = self.registrations[sequence.request_id] = Registration(worker, self._next_epoch)
        self._next_epoch += 1
        link = self.links[worker]
        link.num_registered += 1
        link.vacancy.placed(now_s)
        link.memory.placed(sequence.committed_len, now_s)
        return registration

    def _in_order(self, sequences: Sequence[S], avoided: Set[PeerId], now_s: float) -> Sequence[S]:
        """Let those without a worker of which one may have no memory for but one come last, shortest first.

        Whoever is longer would find none either, and the next attempt is some time away. Those that a worker
        has keep their place: the last of a round are the first to lose their memory there. But for those that
        an avoided worker has: they look for a place, too.
        """
        shortages = [link.memory for link in self.links.values() if link.memory.is_recent(now_s)]
        if not shortages:
            return sequences

        def doubtful_len(sequence: S) -> int:
            registration = self.registrations.get(sequence.request_id)
            if registration is not None and registration.worker not in avoided:
                return 0
            num_tokens = sequence.committed_len
            return num_tokens if any(its.is_doubtful(num_tokens) for its in shortages) else 0

        return sorted(sequences, key=doubtful_len)

    def _register(self, sequence: Placed, avoided: Set[PeerId], now_s: float) -> Registration | None:
        """Give a sequence to whoever has a place for it, or leave it where it is; None: it is nowhere.

        Avoided are silent workers while another one answers: what they are given would not be drafted for.
        But one that has no sequence may get one: if it is not asked, it is not heard again either.
        """
        present = self.registrations.get(sequence.request_id)
        links = [
            link
            for link in self.links.values()
            if link.continues(sequence)
            and (link.worker not in avoided or (present is None and link.may_be_tried(now_s)))
        ]
        with_memory = [link for link in links if self._may_have_memory(link, sequence, now_s)]
        worker = place([link.view(now_s) for link in with_memory], self._placement)
        if worker is not None:
            return self.give(sequence, worker, now_s)
        if len(with_memory) < len(links):
            self._outgrown.setdefault(sequence.request_id, {})
        else:
            self._outgrown.pop(sequence.request_id, None)
        return present

    def _may_have_memory(self, link: DraftLink, sequence: Placed, now_s: float) -> bool:
        """Whether a worker may be asked for memory for a sequence."""
        resting_until_s = self._outgrown.get(sequence.request_id, {}).get(link.worker, now_s)
        return now_s >= resting_until_s and link.memory.may_try(sequence.committed_len, now_s)

    def _is_deadly(self, request_id: RequestId) -> bool:
        return self._num_deaths.get(request_id, 0) >= _MOST_DEATHS

    def _note_death(self, request_id: RequestId, worker: PeerId) -> None:
        number = self._num_deaths[request_id] = self._num_deaths.get(request_id, 0) + 1
        if number == _MOST_DEATHS:
            logger.warning(
                "request %s goes on without drafts: %d draft workers, last %s, were lost while they had been "
                "asked about it",
                request_id,
                number,
                worker,
            )
            self._leave(request_id)

    def _leave(self, request_id: RequestId, *, has_ended: bool = False) -> None:
        """A sequence is nowhere any more: those that wait for memory where it was may try at once.

        They may not where it has only been moved: there is another worker with more to spare.
        """
        registration = self._withdraw(request_id, has_ended=has_ended)
        if registration is not None and registration.confirmed_len > 0:
            self.links[registration.worker].memory.freed()
            for resting_until_s in self._outgrown.values():
                resting_until_s.pop(registration.worker, None)

    def _withdraw(self, request_id: RequestId, *, has_ended: bool = False) -> Registration | None:
        """Take a sequence from the worker that has it, which is told; None: no worker has it."""
        registration = self.registrations.pop(request_id, None)
        if registration is None or registration.worker not in self.links:
            return None
        self.links[registration.worker].num_registered -= 1
        self._on_leave(request_id, registration, has_ended)
        return registration

    def _changed(self) -> None:
        self._next_rebalance_s = 0.0
        self._moves_left = []
        self._note_lengths()

    def _note_lengths(self) -> None:
        """Know which sequences nobody can go on with."""
        told = [link.max_length for link in self.links.values()]
        longest = max([length for length in told if length is not None], default=None)
        if longest is None or None in told:
            self._max_length = self._max_context
        else:
            self._max_length = min(longest, self._max_context or longest)

    def _rebalance(self, sequences: Sequence[Placed], now_s: float) -> None:
        """Now and then, see which workers are busier than others; move sequences of whom nothing is awaited.

        A call may be about none of those that can be moved: in draft_ahead a round asks for next to nothing,
        and a moment later for what is drafted ahead. So what is to move stays to be done until the next look.
        """
        if now_s >= self._next_rebalance_s:
            self._next_rebalance_s = now_s + self._placement.rebalance_every_s
            views = [link.view(now_s) for link in self.links.values()]
            self._moves_left = rebalance(views, self._placement, self._chance.random())
        if self._moves_left:
            left = [self._move(sequences, move, now_s) for move in self._moves_left]
            self._moves_left = [move for move in left if move.num_sequences > 0]

    def _move(self, sequences: Iterable[Placed], move: Move, now_s: float) -> Move:
        """Move what can be moved of these, the shortest first: they are soonest read. Return what is left."""
        link = self.links[move.destination]
        destination = link.view(now_s)
        if not (destination.is_ready and destination.has_place) or destination.is_short_of_memory:
            return move
        num_moved = 0
        for sequence in self._movable(sequences, move):
            if num_moved < move.num_sequences and self._may_have_memory(link, sequence, now_s):
                self.give(sequence, move.destination, now_s)
                num_moved += 1
        self.num_moved += num_moved
        return move._replace(num_sequences=move.num_sequences - num_moved)

    def _movable(self, sequences: Iterable[Placed], move: Move) -> list[Placed]:
        settled = [
            sequence
            for sequence in sequences
            if (registration := self.registrations.get(sequence.request_id)) is not None
            and registration.worker == move.source
            and registration.sent_len == registration.confirmed_len
            and self.links[move.destination].continues(sequence)
        ]
        settled.sort(key=lambda sequence: sequence.committed_len)
        return settled
