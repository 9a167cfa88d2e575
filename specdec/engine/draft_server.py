"""Serves a proposer in this process to any number of coordinators."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.errors import ChannelTimeout
from specdec.core.ids import RequestId
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import TokenConstraint
from specdec.engine.draft_grammar import DraftGrammars
from specdec.proposers.base import Proposer, counters_of
from specdec.transport.base import Channel, Envelope, PeerId
from specdec.transport.messages import (
    DraftOpening,
    ProposeAnswer,
    ProposeEntry,
    ProposeReply,
    ProposeRequest,
    Release,
)

logger = logging.getLogger(__name__)

_PREFILL_TOKENS = 64
"""An entry with more unseen tokens than this is served after, not with, those that are quick."""

_FORGET_AFTER_S = 600.0
"""A sequence that nobody has asked about for so long is forgotten: its release was lost."""


class _Mirror:
    """A coordinator's sequence as it is known here. Satisfies `SequenceView`."""

    def __init__(
        self, request_id: RequestId, epoch: int, opening: DraftOpening, grammars: DraftGrammars | None
    ) -> None:
        self.request_id = request_id
        self.epoch = epoch
        self.params: SamplingParams = opening.params
        self.seed = opening.seed
        self.cache_salt = opening.cache_salt
        self.num_prompt_tokens = opening.num_prompt_tokens
        self.token_ids: list[int] = []
        self.prefix_hash = EMPTY_PREFIX
        self.constraint: TokenConstraint | None = None
        if grammars is not None:
            self.constraint = grammars.follow(opening.grammar, self.token_ids, opening.num_prompt_tokens)
        self.last_used_s = 0.0

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.prefix_hash = extend_prefix_hash(self.prefix_hash, token_ids)


@dataclass(frozen=True, slots=True)
class _Wish:
    coordinator: PeerId
    entry: ProposeEntry
    mirror: _Mirror
    num_new_tokens: int


class DraftServer:
    """Answers rounds; requests that are there together, of whatever coordinator, are drafted together.

    Coordinators live in name spaces of their own: neither ids nor tokens of one are seen by another.
    """

    def __init__(
        self,
        channel: Channel,
        proposer: Proposer,
        *,
        grammars: DraftGrammars | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Serve `proposer`; with `grammars`, its drafts keep to the grammars of requests."""
        self._channel = channel
        self._proposer = proposer
        self._grammars = grammars
        self._told: Counter[str] = Counter()
        self._clock = clock or MonotonicClock()
        self._mirrors: dict[tuple[PeerId, RequestId], _Mirror] = {}
        self._members: frozenset[PeerId] | None = None
        self._next_sweep_s = 0.0
        self.counters: Counter[str] = Counter()
        """rounds, entries, stale_entries, restarts_asked; and by metric name what coordinators are told:
        `draft_grammar_failures` and what the proposer counts (`proposers.base.HasCounters`)."""

    @property
    def num_sequences(self) -> int:
        """Sequences known here."""
        return len(self._mirrors)

    def retain(self, coordinators: Iterable[PeerId]) -> None:
        """Forget, soon, the sequences of all other coordinators (any thread)."""
        self._members = frozenset(coordinators)

    def step(self, timeout_s: float | None) -> bool:
        """Wait for a message, serve all that are there; return whether one came within `timeout_s`."""
        self._sweep()
        try:
            arrived = [self._channel.receive(timeout_s)]
        except ChannelTimeout:
            return False
        while True:
            try:
                arrived.append(self._channel.receive(0))
            except ChannelTimeout:
                break
        self._serve(arrived)
        return True

    def _serve(self, arrived: Sequence[Envelope]) -> None:
        wishes: dict[tuple[PeerId, RequestId], _Wish] = {}
        rounds: dict[PeerId, int] = {}
        restarts: dict[PeerId, list[ProposeAnswer]] = defaultdict(list)
        for envelope in arrived:
            match envelope.message:
                case Release(sequences=released):
                    self._release(envelope.sender, released)
                    for request_id, _ in released:
                        wishes.pop((envelope.sender, request_id), None)
                case ProposeRequest(round_id=round_id, entries=entries):
                    rounds[envelope.sender] = max(round_id, rounds.get(envelope.sender, round_id))
                    for entry in entries:
                        self._take(envelope.sender, entry, wishes, restarts)
        for coordinator, answers in restarts.items():
            self.counters["restarts_asked"] += len(answers)
            self._channel.send(coordinator, ProposeReply(rounds[coordinator], tuple(answers)))
        quick = [wish for wish in wishes.values() if wish.num_new_tokens <= _PREFILL_TOKENS]
        slow = [wish for wish in wishes.values() if wish.num_new_tokens > _PREFILL_TOKENS]
        for batch in (quick, slow):
            if batch:
                self._draft(batch, rounds)

    def _take(
        self,
        coordinator: PeerId,
        entry: ProposeEntry,
        wishes: dict[tuple[PeerId, RequestId], _Wish],
        restarts: dict[PeerId, list[ProposeAnswer]],
    ) -> None:
        """Bring the mirror up to date and note the wish; only the newest wish of a sequence is served."""
        name = (coordinator, entry.request_id)
        mirror = self._mirrors.get(name)
        if mirror is not None and (
            entry.epoch < mirror.epoch
            or (entry.epoch == mirror.epoch and entry.committed_len < mirror.committed_len)
        ):
            self.counters["stale_entries"] += 1
            return
        if (mirror is None or entry.epoch > mirror.epoch) and entry.opening is not None:
            self._forget(name)
            inner_id = sequence_name(coordinator, entry.request_id, entry.epoch)
            mirror = _Mirror(inner_id, entry.epoch, entry.opening, self._grammars)
            self._mirrors[name] = mirror
        if mirror is None or mirror.epoch != entry.epoch or not _catch_up(mirror, entry):
            self._forget(name)
            wishes.pop(name, None)
            restarts[coordinator].append(_answer(entry, needs_start=True))
            return
        mirror.last_used_s = self._clock.now_s()
        earlier = wishes.get(name)
        num_new = len(entry.token_ids) + (earlier.num_new_tokens if earlier is not None else 0)
        wishes[name] = _Wish(coordinator, entry, mirror, num_new)

    def _draft(self, wishes: Sequence[_Wish], rounds: dict[PeerId, int]) -> None:
        started_s = self._clock.now_s()
        proposals = self._proposer.propose(
            [wish.mirror for wish in wishes],
            {wish.mirror.request_id: wish.entry.num_draft_tokens for wish in wishes},
        )
        draft_s = self._clock.now_s() - started_s
        self.counters["rounds"] += 1
        self.counters["entries"] += len(wishes)
        answers: dict[PeerId, list[ProposeAnswer]] = defaultdict(list)
        for wish in wishes:
            answers[wish.coordinator].append(_answer(wish.entry, proposals.get(wish.mirror.request_id)))
        counts = self._new_counts()
        for coordinator, its_answers in answers.items():
            reply = ProposeReply(rounds[coordinator], tuple(its_answers), draft_s, counts)
            self._channel.send(coordinator, reply)
            counts = None

    def _new_counts(self) -> dict[str, int] | None:
        """What was counted since the last call: for one coordinator, since all of them are added up."""
        present = Counter({name: int(count) for name, count in counters_of(self._proposer).items()})
        if self._grammars is not None:
            present["draft_grammar_failures"] = self._grammars.counters["grammar_failures"]
        if present == self._told:
            return None
        new, self._told = present - self._told, present
        self.counters.update(new)
        return dict(new)

    def _release(self, coordinator: PeerId, released: Iterable[tuple[RequestId, int]]) -> None:
        for request_id, epoch in released:
            mirror = self._mirrors.get((coordinator, request_id))
            if mirror is not None and mirror.epoch <= epoch:
                self._forget((coordinator, request_id))

    def _forget(self, name: tuple[PeerId, RequestId]) -> None:
        mirror = self._mirrors.pop(name, None)
        if mirror is not None:
            self._proposer.release([mirror.request_id])

    def _sweep(self) -> None:
        now_s = self._clock.now_s()
        members, self._members = self._members, None
        if members is None and now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + _FORGET_AFTER_S / 10
        for name, mirror in list(self._mirrors.items()):
            if now_s - mirror.last_used_s > _FORGET_AFTER_S or (
                members is not None and name[0] not in members
            ):
                self._forget(name)


def sequence_name(coordinator: PeerId, request_id: RequestId, epoch: int) -> RequestId:
    """Return the id by which a draft worker's proposer knows a coordinator's sequence."""
    return RequestId(f"{coordinator}/{request_id}/{epoch}")


def _catch_up(mirror: _Mirror, entry: ProposeEntry) -> bool:
    """Append the entry's unseen tokens; return whether the mirror now is the prefix that it names."""
    known = mirror.committed_len - entry.base_len
    if known < 0 or entry.base_len + len(entry.token_ids) != entry.committed_len:
        return False
    mirror.extend(entry.token_ids[known:])
    return mirror.prefix_hash == entry.prefix_hash


def _answer(
    entry: ProposeEntry, proposal: Proposal | None = None, *, needs_start: bool = False
) -> ProposeAnswer:
    return ProposeAnswer(
        request_id=entry.request_id,
        epoch=entry.epoch,
        committed_len=entry.committed_len,
        prefix_hash=entry.prefix_hash,
        token_ids=proposal.token_ids if proposal is not None else (),
        noise_stream=proposal.noise_stream if proposal is not None else None,
        parents=proposal.parents if proposal is not None else None,
        needs_start=needs_start,
        q_rows=proposal.q_rows if proposal is not None else None,
    )
