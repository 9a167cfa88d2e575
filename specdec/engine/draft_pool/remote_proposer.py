"""Proposals from draft workers behind a channel.

Only tokens that a worker has not seen travel to it. Whatever comes back is keyed by the prefix that it
continues; what does not fit the present prefix is dropped and counted. No worker, dead or slow, holds up a
round for longer than its deadline once: until it is heard again its requests go on without drafts.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from msgspec.structs import replace

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.errors import ChannelTimeout
from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome, NoiseStream, Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.draft_pool.arrivals import ArrivalClock
from specdec.engine.draft_pool.message_lengths import SizedEntry, divided
from specdec.engine.draft_pool.patience import DraftDeadlineConfig
from specdec.engine.draft_pool.placement import DraftPlacementConfig
from specdec.engine.draft_pool.registry import DraftLink, DraftRegistry, Homelessness, Registration
from specdec.engine.metrics.recent_share import RecentShare
from specdec.proposers.base import AheadWish, ProposerCapabilities
from specdec.transport.base import (
    MAX_MESSAGE_BYTES,
    Channel,
    Envelope,
    PeerAddress,
    PeerFound,
    PeerId,
    PeerLost,
    dropped_series,
)
from specdec.transport.messages import (
    DraftBranch,
    DraftOpening,
    ProposeAnswer,
    ProposeEntry,
    ProposeReply,
    ProposeRequest,
    Release,
)
from specdec.transport.status import DraftLinkStatus

FallbackReason = Literal[Homelessness, "behind", "late", "miss", "forgotten", "nothing", "invalid"]
"""Why a round goes on without drafts for a sequence: no worker has it; it has too much to catch up on; its
worker has not answered in time, or is not waited for; nothing was drafted for what came true; its worker has
to begin anew; its answer holds no token; it made no sense."""

_LONGEST_S = 1e12
"""No clock shows more seconds."""
_MOST_ARRIVALS = 4096
"""Heard between two rounds: a draft worker that talks on and on keeps nobody from the next one."""


class _PrefixKey(NamedTuple):
    request_id: RequestId
    epoch: int
    committed_len: int
    prefix_hash: int


class _Awaited(NamedTuple):
    """An answer that is due."""

    key: _PrefixKey
    budget: int
    prepared: _Prepared | None = None
    """Where its branches go; None: a proposal is due."""
    most_branches: int = 0


@dataclass(slots=True)
class _Prepared:
    """What has been drafted for the verdicts that one round may bring a sequence."""

    committed_len: int
    """Before that round."""
    num_pending: int
    is_foreign: bool = False
    """Whether what is pending is not the draft workers' own."""
    is_answered: bool = False
    noise_stream: NoiseStream | None = None
    branches: dict[tuple[int, int], DraftBranch] = field(default_factory=dict)
    """By committed_len and prefix_hash after it."""

    def is_of_verdict(self, committed_len: int) -> bool:
        """Whether a sequence of so many tokens may be what that round alone has made of it."""
        return self.committed_len < committed_len <= self.committed_len + self.num_pending + 1


@dataclass(slots=True)
class _Asked:
    """The latest round sent to one worker."""

    round_id: int
    asked_s: float
    num_entries: int
    num_new_tokens: int
    is_ahead: bool
    """Whether the coordinator did something else than wait for the answer."""
    is_reading: bool
    """Whether nothing but that tokens be read: there is an answer for each sequence, once that is done."""


@dataclass(slots=True)
class _Talk:
    """How things stand with one draft worker."""

    address: PeerAddress
    link: DraftLink
    drafting_share: RecentShare
    drafting_s: float = 0.0
    """It has drafted for so long, as it measures it."""
    arrivals: ArrivalClock = field(default_factory=ArrivalClock)
    asked: _Asked | None = None


class _Round:
    """What one call of `propose` still waits for, and what it has got."""

    def __init__(self) -> None:
        self.pending: dict[PeerId, dict[RequestId, _Awaited]] = defaultdict(dict)
        self.give_up_s: dict[PeerId, float] = {}
        self.proposals: dict[RequestId, Proposal] = {}
        self.missed: dict[RequestId, FallbackReason] = {}
        """Why some will have no proposal; whoever else has none was late, or is nowhere."""
        self.answered_after_s: float | None = None
        """From asking to the last of the answers that have come."""
        self.is_complete = True
        """Whether everybody has answered that is not waited for any more."""

    @property
    def ready_s(self) -> float | None:
        """See `proposers.base.AsksAhead`."""
        return self.answered_after_s if self.is_complete else None

    def answered(self, elapsed_s: float) -> None:
        """One worker has answered, so long after it was asked."""
        self.answered_after_s = max(elapsed_s, self.answered_after_s or 0.0)

    def forget(self, request_id: RequestId, worker: PeerId) -> None:
        """Wait no longer for what one sequence would have got."""
        its = self.pending.get(worker)
        if its is not None and its.pop(request_id, None) is not None and not its:
            self.abandon(worker)

    def abandon(self, worker: PeerId) -> None:
        """Wait no longer for one worker."""
        if self.pending.pop(worker, None):
            self.is_complete = False
        self.give_up_s.pop(worker, None)


class RemoteProposer:
    """Implements `proposers.base.Proposer` over a channel that it owns."""

    def __init__(
        self,
        channel: Channel,
        *,
        capabilities: ProposerCapabilities,
        vocab_size: int,
        deadlines: DraftDeadlineConfig | None = None,
        placement: DraftPlacementConfig | None = None,
        first_epoch: int = 0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        clock: Clock | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Draft by whoever `set_workers` names.

        Args:
            channel: owned from now on.
            capabilities: of the method that the workers draft by.
            vocab_size: the target's; a proposal with any other token id is dropped.
            deadlines: how long to wait, and how often a worker that is full is asked again.
            placement: how sequences are spread over the workers.
            first_epoch: where attempts are counted from: beyond those of whoever spoke by the channel's name
                before, or the workers take them for old ones.
            max_message_bytes: longest message that the workers take. Who has more to be told goes without
                drafts.
            clock: of deadlines and counters.
            meanwhile: called while workers draft, if there is anything to wait for. Quick.
        """
        self._channel = channel
        self._capabilities = capabilities
        self._vocab_size = vocab_size
        self._max_message_bytes = max_message_bytes
        self._registry = DraftRegistry(
            channel.address.peer_id,
            deadlines=deadlines or DraftDeadlineConfig(),
            placement=placement or DraftPlacementConfig(),
            max_context=capabilities.max_context,
            first_epoch=first_epoch,
            on_leave=self._tell_to_forget,
        )
        self._talks: dict[PeerId, _Talk] = {}
        self._clock = clock or MonotonicClock()
        self._meanwhile = meanwhile
        self._prepared: dict[RequestId, _Prepared] = {}
        self._ahead = _Round()
        """Answers to the last `look_ahead` that have not come yet."""
        self._reading: set[RequestId] = set()
        """Sequences that are only read: their answers are due, but nobody waits for them."""
        self._ahead_outcomes: list[AheadOutcome] = []
        self._ready_s: float | None = None
        self._waited_s = self._asking_s = 0.0
        """Of the last `propose`."""
        self._sent_s: float | None = None
        """When the last question was on its way that it has asked."""
        self._drafting_s = 0.0
        """The longest of the answers heard since the last `propose` began."""
        self._next_round = 0
        self._wanted: Sequence[PeerAddress] | None = None
        self._wanted_lock = threading.Lock()
        self._counters: Counter[str] = Counter()
        self._drafting_share = RecentShare(self._clock)

    @property
    def capabilities(self) -> ProposerCapabilities:
        """As given at construction."""
        return self._capabilities

    @property
    def counters(self) -> Mapping[str, float]:
        """Counters since the start: `draft_wait_seconds`, `draft_deadline_misses`, `stale_drafts_dropped`,
        `invalid_drafts_dropped`, `fallback_requests` (sequences that went without drafts, per round),
        `fallback_requests_by_reason`,
        `draft_compute_seconds` (as the workers measure it), `speculation_cache_hits` and
        `speculation_cache_misses` (verdicts that continuations had, or had not, been prepared for),
        `speculation_cache_late` (of the misses, those whose continuations had not come in time),
        `draft_sequences_refused` (by workers that had no place for them), `draft_sequences_outgrown` (given
        up, or refused, by a worker whose memory they were too long for), `draft_sequences_moved`
        (from a busy worker to one that was less so), `draft_sequences_too_long` (for any worker), what the
        draft workers count themselves (`DraftServer.counters`), and `worker_messages_dropped` at both ends.
        """
        counters = Counter(self._counters)
        counters.update({_fallback_series(reason): 0 for reason in get_args(FallbackReason)})
        counters.update(dropped_series("draft", "coordinator", self._channel.counters.dropped))
        return {
            **counters,
            "draft_sequences_moved": self._registry.num_moved,
            "draft_sequences_too_long": self._counters["draft_sequences_too_long"]
            + self._registry.num_too_long,
        }

    @property
    def num_workers(self) -> int:
        """Draft workers that would be waited for now (any thread)."""
        with self._wanted_lock:
            if self._wanted is not None:  # not looked at yet
                return len(self._wanted)
            now_s = self._clock.now_s()
            return sum(link.patience.is_waited_for(now_s) for link in self._registry.links.values())

    @property
    def pool_usage(self) -> float:
        """Sequences in the draft pool, of all coordinators, over those that it takes, as told last (any
        thread); 0 before anything was told.
        """
        with self._wanted_lock:
            told = [link for link in self._registry.links.values() if link.capacity]
            num_sequences = sum(link.num_others + link.num_registered for link in told)
            return num_sequences / max(1, sum(link.capacity or 0 for link in told))

    @property
    def utilization(self) -> float:
        """Share of the last seconds in which draft workers drafted for this proposer, mean over those that
        are waited for (any thread); 0 without any.

        Shares of all proposers add up to how busy they are; a batch made for several counts for each.
        """
        num_workers = self.num_workers
        share = self._drafting_share.take(self._counters["draft_compute_seconds"], max(1, num_workers))
        return share if num_workers else 0.0

    @property
    def links(self) -> tuple[DraftLinkStatus, ...]:
        """The draft workers as they are seen here (any thread)."""
        now_s = self._clock.now_s()
        with self._wanted_lock:
            return tuple(
                DraftLinkStatus(
                    worker=worker,
                    num_requests=talk.link.num_registered,
                    is_waited_for=talk.link.patience.is_waited_for(now_s),
                    utilization=talk.drafting_share.take(talk.drafting_s),
                )
                for worker, talk in self._talks.items()
            )

    def set_workers(self, workers: Sequence[PeerAddress]) -> None:
        """Use exactly these draft workers from the next round on (any thread)."""
        with self._wanted_lock:
            self._wanted = tuple(workers)

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Ask the draft workers and wait for them, each at most for its deadline.

        Sequences without a budget are sent as well, for the workers to read ahead, but not waited for; nor
        are those that have much to catch up on. For those that `look_ahead` has named, only what it asked
        for is waited for.
        """
        began_s = self._clock.now_s()
        self._drafting_s = self._waited_s = 0.0
        self._sent_s = None
        this_round, self._ahead = self._ahead, _Round()
        self._take_arrivals(this_round)  # those who leave now may have answered
        self._follow_membership()
        for worker in this_round.pending.keys() - self._talks.keys():
            this_round.abandon(worker)
        prepared = {
            sequence.request_id: its
            for sequence in sequences
            if (its := self._prepared.pop(sequence.request_id, None)) is not None
            and its.is_of_verdict(sequence.committed_len)
        }
        unprepared = [sequence for sequence in sequences if sequence.request_id not in prepared]
        for worker, group in self._registry.by_worker(unprepared, self._clock.now_s()).items():
            behind = self._registry.behind(worker, group)
            this_round.missed.update(dict.fromkeys(behind, "behind"))
            self._ask(this_round, self._talks[worker], self._wishes(group, num_draft_tokens, behind))
        sent_s: float | None = self._sent_s
        asked_s = self._clock.now_s() if sent_s is None else sent_s
        if this_round.pending:
            if self._meanwhile is not None:
                self._meanwhile()
            self._waited_s += self._clock.now_s() - asked_s
        self._wait(this_round)
        self._ready_s = this_round.ready_s
        self._count("draft_wait_seconds", self._waited_s)
        self._look_up(sequences, num_draft_tokens, prepared, this_round)
        for request_id, budget in num_draft_tokens.items():
            if budget > 0 and request_id not in this_round.proposals:
                self._count_fallback(request_id, this_round.missed.get(request_id, "late"))
        self._asking_s = self._clock.now_s() - began_s - self._waited_s
        return this_round.proposals

    def _count_fallback(self, request_id: RequestId, missed: FallbackReason) -> None:
        reason = self._registry.why_nowhere(request_id) or missed
        self._counters["fallback_requests"] += 1
        self._counters[_fallback_series(reason)] += 1

    def look_ahead(self, wishes: Sequence[AheadWish]) -> None:
        """Send the wishes to those who draft for these sequences; see `proposers.base.AsksAhead`."""
        self._follow_membership()
        by_id = {wish.view.request_id: wish for wish in wishes}
        views = [wish.view for wish in wishes]
        for worker, group in self._registry.by_worker(views, self._clock.now_s()).items():
            behind = self._registry.behind(worker, group)
            in_reach = [by_id[view.request_id] for view in group if view.request_id not in behind]
            others = [view for view in group if view.request_id in behind]
            self._ask(self._ahead, self._talks[worker], [*in_reach, *self._wishes(others, {}, behind)])

    def take_ahead_outcomes(self) -> Sequence[AheadOutcome]:
        """See `AsksAhead`."""
        outcomes, self._ahead_outcomes = self._ahead_outcomes, []
        return outcomes

    @property
    def ready_s(self) -> float | None:
        """See `AsksAhead`."""
        return self._ready_s

    def take_drafting_s(self) -> float:
        """See `AsksAhead`."""
        drafting_s, self._drafting_s = self._drafting_s, 0.0
        return drafting_s

    def take_asking_s(self) -> float:
        """See `proposers.base.AsksOthers`."""
        asking_s, self._asking_s = self._asking_s, 0.0
        return asking_s

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget sequences here and at their draft workers."""
        for request_id in request_ids:
            self._prepared.pop(request_id, None)
            self._reading.discard(request_id)
            self._registry.forget(request_id)

    def close(self) -> None:
        """Close the channel. Idempotent."""
        self._channel.close()

    def _tell_to_forget(self, request_id: RequestId, registration: Registration, has_ended: bool) -> None:
        self._prepared.pop(request_id, None)
        self._reading.discard(request_id)
        self._ahead.forget(request_id, registration.worker)
        self._channel.send(registration.worker, Release(((request_id, registration.epoch),), has_ended))

    def _follow_membership(self) -> None:
        if self._wanted is None:  # as nearly always: not worth the lock
            return
        with self._wanted_lock:
            wanted, self._wanted = self._wanted, None
            if wanted is not None:
                self._change_links({address.peer_id: address for address in wanted})

    def _change_links(self, wanted: Mapping[PeerId, PeerAddress]) -> None:
        for worker in [w for w, talk in self._talks.items() if wanted.get(w) != talk.address]:
            del self._talks[worker]
            self._channel.disconnect(worker)
            self._registry.remove(worker)
        for worker, address in wanted.items():
            if worker not in self._talks:
                self._channel.connect(address)
                self._registry.add(worker)
                link = self._registry.links[worker]
                self._talks[worker] = _Talk(address, link, RecentShare(self._clock))

    def _wishes(
        self,
        sequences: Sequence[SequenceView],
        num_draft_tokens: Mapping[RequestId, int],
        behind: Container[RequestId],
    ) -> list[_Wish]:
        """Return what to ask for behind committed tokens, leaving out what would tell nobody anything.

        What is `behind` is only to be read.
        """
        return [
            _Wish(sequence, budget)
            for sequence in sequences
            if (budget := 0 if (name := sequence.request_id) in behind else num_draft_tokens.get(name, 0)) > 0
            or self._registry.registrations[name].sent_len < sequence.committed_len
        ]

    def _ask(self, this_round: _Round, talk: _Talk, wishes: Sequence[_Wish | AheadWish]) -> None:
        worker, patience = talk.link.worker, talk.link.patience
        entries: list[SizedEntry] = []
        told: list[tuple[_Wish | AheadWish, Registration]] = []
        for wish in wishes:
            registration = self._registry.registrations[wish.view.request_id]
            entry = SizedEntry.of(_entry(wish, registration))
            if entry.fits(self._max_message_bytes):
                entries.append(entry)
                told.append((wish, registration))
            else:
                self._registry.set_aside(wish.view.request_id)
        if not entries:
            return
        asked_s = self._clock.now_s()
        for part in divided(entries, self._max_message_bytes):
            self._channel.send(worker, ProposeRequest(self._next_round, part))
        self._sent_s = self._clock.now_s()
        # It is at work now.
        num_new = num_awaited_new = 0
        for wish, registration in told:
            sequence, budget = wish.view, wish.num_draft_tokens
            registration.sent_len = sequence.committed_len
            num_unread = sequence.committed_len - registration.read_len
            num_new += num_unread
            if budget > 0:
                num_awaited_new += num_unread
                this_round.pending[worker][sequence.request_id] = self._awaited(wish, registration)
            else:
                self._reading.add(sequence.request_id)
        is_awaited = worker in this_round.pending
        if is_awaited:
            num_new = num_awaited_new
        talk.asked = _Asked(
            self._next_round, asked_s, len(entries), num_new, this_round is self._ahead, not is_awaited
        )
        self._next_round += 1
        if is_awaited and patience.is_waited_for(asked_s):
            this_round.give_up_s[worker] = asked_s + patience.deadline_s(len(entries), num_new)
        else:
            # Reading ahead, or an attempt to reach a silent worker: the answer is heard in a later round.
            this_round.abandon(worker)
        patience.asked(asked_s)

    def _awaited(self, wish: _Wish | AheadWish, registration: Registration) -> _Awaited:
        """Return what is due behind the committed tokens of a sequence; make room for its continuations."""
        sequence, budget = wish.view, wish.num_draft_tokens
        key = _PrefixKey(
            sequence.request_id, registration.epoch, sequence.committed_len, sequence.prefix_hash
        )
        if not isinstance(wish, AheadWish):
            return _Awaited(key, budget)
        prepared = _Prepared(sequence.committed_len, len(wish.pending), wish.is_foreign)
        self._prepared[sequence.request_id] = prepared
        return _Awaited(key, budget, prepared, sum(wish.fan_out or ()))

    def _look_up(
        self,
        sequences: Sequence[SequenceView],
        num_draft_tokens: Mapping[RequestId, int],
        prepared: Mapping[RequestId, _Prepared],
        this_round: _Round,
    ) -> None:
        """Find the continuations of what has become of the sequences that were looked ahead for."""
        for sequence in sequences:
            its = prepared.get(sequence.request_id)
            budget = num_draft_tokens.get(sequence.request_id, 0)
            if its is None or budget <= 0:
                continue
            branch = its.branches.get((sequence.committed_len, sequence.prefix_hash))
            self._counters["speculation_cache_misses" if branch is None else "speculation_cache_hits"] += 1
            outcome = _outcome(sequence, its)
            self._ahead_outcomes.append(outcome)
            self._counters["speculation_cache_late"] += outcome.is_late
            if branch is None and not outcome.is_late:
                this_round.missed.setdefault(sequence.request_id, "miss")
            if branch is not None:
                this_round.proposals[sequence.request_id] = Proposal(
                    request_id=sequence.request_id,
                    committed_len=sequence.committed_len,
                    prefix_hash=sequence.prefix_hash,
                    token_ids=branch.token_ids[:budget],
                    noise_stream=its.noise_stream,
                    q_rows=None if branch.q_rows is None else branch.q_rows[:budget],
                    method=self._capabilities.name,
                )

    def _wait(self, this_round: _Round) -> None:
        while this_round.pending:
            now_s = self._clock.now_s()
            for worker in [w for w, until_s in this_round.give_up_s.items() if now_s >= until_s]:
                this_round.abandon(worker)
                self._talks[worker].link.patience.missed(now_s)
                self._counters["draft_deadline_misses"] += 1
            if not this_round.pending:
                return
            try:
                envelope = self._channel.receive(min(this_round.give_up_s.values()) - now_s)
            except ChannelTimeout:
                continue
            finally:
                self._waited_s += self._clock.now_s() - now_s
            self._take(envelope, this_round)

    def _take_arrivals(self, this_round: _Round) -> None:
        """Hear what arrived since the last call, if one was due: even a stale one tells of its sender."""
        if not self._reading and all(talk.asked is None for talk in self._talks.values()):
            return
        for _ in range(_MOST_ARRIVALS):
            try:
                self._take(self._channel.receive(0), this_round)
            except ChannelTimeout:
                return

    def _take(self, envelope: Envelope, this_round: _Round) -> None:
        talk = self._talks.get(envelope.sender)
        if talk is None:
            self._counters["stale_drafts_dropped"] += 1
        elif isinstance(envelope.message, PeerLost):
            talk.link.patience.missed(self._clock.now_s())
            this_round.abandon(envelope.sender)
        elif isinstance(envelope.message, PeerFound):
            # Its process is there. Where all its sequences have gone elsewhere it would not be asked again,
            # and so never heard; one that does not work after all costs a round its deadline.
            talk.link.patience.heard()
        elif isinstance(envelope.message, ProposeReply) and _makes_sense(envelope.message):
            self._take_reply(envelope.message, talk, this_round)
        else:
            self._counters["invalid_drafts_dropped"] += 1

    def _take_reply(self, reply: ProposeReply, talk: _Talk, this_round: _Round) -> None:
        link, read_s = talk.link, self._clock.now_s()
        arrived_s = read_s if reply.sent_s is None else talk.arrivals.arrival_s(reply.sent_s, read_s)
        link.patience.heard()
        if reply.counts is not None:
            self._counters.update(reply.counts)
        self._count("draft_compute_seconds", reply.draft_s)
        talk.drafting_s += reply.draft_s
        self._drafting_s = max(self._drafting_s, reply.draft_s)
        if reply.max_sequences > 0:
            link.capacity = reply.max_sequences
            link.num_others = max(0, reply.num_sequences - link.num_registered)
            link.vacancy.told(reply.num_places)
        if reply.max_length > 0:
            self._registry.told_length(link.worker, reply.max_length)
        pending = this_round.pending.get(link.worker)
        num_refused = self._counters["draft_sequences_refused"]
        num_read = -self._num_read(reply.answers)
        for answer in reply.answers:
            self._take_answer(answer, pending, this_round)
        if not any(answer.token_ids or answer.branches for answer in reply.answers):
            link.patience.has_read(reply.draft_s, num_read + self._num_read(reply.answers))
        if self._counters["draft_sequences_refused"] > num_refused:
            link.vacancy.refused(self._clock.now_s())
        asked = talk.asked
        if asked is not None and asked.round_id == reply.round_id and not pending:
            # Answers to what was asked ahead may have lain here for a while; others are waited for.
            elapsed_s = max(0.0, (arrived_s if asked.is_ahead else read_s) - asked.asked_s)
            if pending is None:  # it came too late, or was not waited for
                elapsed_s = reply.draft_s
            else:
                this_round.answered(elapsed_s)
            if not asked.is_reading:
                link.patience.measured(elapsed_s, asked.num_entries, asked.num_new_tokens)
            talk.asked = None
        if pending is not None and not pending:
            link.patience.answered_in_time()
            this_round.abandon(link.worker)

    def _take_answer(
        self,
        answer: ProposeAnswer,
        pending: dict[RequestId, _Awaited] | None,
        this_round: _Round,
    ) -> None:
        registration = self._registry.registrations.get(answer.request_id)
        if registration is not None and registration.epoch == answer.epoch:
            self._reading.discard(answer.request_id)
            now_s = self._clock.now_s()
            if answer.is_full and answer.lacks_memory:
                self._registry.outgrown(answer.request_id, answer.committed_len, now_s)
                self._counters["draft_sequences_outgrown"] += 1
            elif answer.is_full:
                self._registry.refused(answer.request_id)
                self._counters["draft_sequences_refused"] += 1
            elif answer.needs_start:
                registration.start_again()
            else:
                self._registry.answered(answer.request_id, answer.committed_len, answer.num_unread, now_s)
        key = _PrefixKey(answer.request_id, answer.epoch, answer.committed_len, answer.prefix_hash)
        expected = pending.get(answer.request_id) if pending is not None else None
        if expected is None or expected.key != key:
            self._counters["stale_drafts_dropped"] += bool(answer.token_ids or answer.branches)
            return
        assert pending is not None
        del pending[answer.request_id]
        if answer.needs_start or answer.is_full:
            this_round.missed[answer.request_id] = "forgotten" if answer.needs_start else "place"
            return
        if expected.prepared is not None:
            self._take_branches(answer, expected, expected.prepared)
        elif not answer.token_ids:
            this_round.missed[answer.request_id] = "behind" if answer.num_unread > 0 else "nothing"
        elif self._is_valid(answer.token_ids, expected.budget):
            this_round.proposals[answer.request_id] = Proposal(
                request_id=answer.request_id,
                committed_len=answer.committed_len,
                prefix_hash=answer.prefix_hash,
                token_ids=answer.token_ids,
                parents=answer.parents,
                noise_stream=answer.noise_stream,
                q_rows=answer.q_rows,
                method=self._capabilities.name,
            )
        else:
            this_round.missed[answer.request_id] = "invalid"

    def _num_read(self, answers: Sequence[ProposeAnswer]) -> int:
        """Return how many tokens of these sequences have been read, as far as is known."""
        known = (self._registry.registrations.get(answer.request_id) for answer in answers)
        return sum(registration.read_len for registration in known if registration is not None)

    def _take_branches(self, answer: ProposeAnswer, expected: _Awaited, prepared: _Prepared) -> None:
        prepared.is_answered = True
        prepared.noise_stream = answer.noise_stream
        for branch in answer.branches[: expected.most_branches]:
            if branch.token_ids and self._is_valid(branch.token_ids, expected.budget):
                prepared.branches[branch.committed_len, branch.prefix_hash] = branch

    def _is_valid(self, token_ids: Sequence[int], budget: int) -> bool:
        has_room = len(token_ids) <= budget
        if has_room and (not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size)):
            return True
        self._counters["invalid_drafts_dropped"] += 1
        return False

    def _count(self, name: str, seconds: float) -> None:
        self._counters[name] += seconds  # type: ignore[assignment]


def _fallback_series(reason: FallbackReason) -> str:
    return f'fallback_requests_by_reason{{reason="{reason}"}}'


def _makes_sense(reply: ProposeReply) -> bool:
    """Whether its numbers are numbers, of a size that can be: what is not one would spread."""
    return (
        0.0 <= reply.draft_s <= _LONGEST_S
        and (reply.sent_s is None or abs(reply.sent_s) <= _LONGEST_S)
        and min(reply.num_sequences, reply.max_sequences, reply.num_places, reply.max_length) >= 0
        and (reply.counts is None or min(reply.counts.values(), default=0) >= 0)
    )


class _Wish(NamedTuple):
    """A proposal behind the committed tokens of a sequence, or, with no budget, that it be read."""

    view: SequenceView
    num_draft_tokens: int


def _outcome(sequence: SequenceView, prepared: _Prepared) -> AheadOutcome:
    """Say which of the tokens prepared for has come true, among those behind as many accepted ones."""
    alike = [key for key in prepared.branches if key[0] == sequence.committed_len]
    true = (sequence.committed_len, sequence.prefix_hash)
    return AheadOutcome(
        request_id=sequence.request_id,
        num_pending=prepared.num_pending,
        num_accepted=sequence.committed_len - prepared.committed_len - 1,
        num_prepared=len(alike),
        rank=alike.index(true) if true in prepared.branches else None,
        is_late=not prepared.is_answered,
        is_foreign=prepared.is_foreign,
    )


def _entry(wish: _Wish | AheadWish, registration: Registration) -> ProposeEntry:
    sequence = wish.view
    base_len = registration.sent_len
    opening = None
    if base_len == 0:
        opening = DraftOpening(
            # Where the text ends is for the engine to say; these strings may be as long as a body.
            replace(sequence.params, stop=()) if sequence.params.stop else sequence.params,
            sequence.seed,
            sequence.num_prompt_tokens,
            sequence.cache_salt,
            None if sequence.constraint is None else sequence.constraint.grammar,
            sequence.owner,
        )
    return ProposeEntry(
        request_id=sequence.request_id,
        epoch=registration.epoch,
        committed_len=sequence.committed_len,
        prefix_hash=sequence.prefix_hash,
        num_draft_tokens=wish.num_draft_tokens,
        base_len=base_len,
        token_ids=tuple(sequence.token_ids[base_len:]),
        opening=opening,
        pending=wish.pending if isinstance(wish, AheadWish) else (),
        fan_out=wish.fan_out if isinstance(wish, AheadWish) else None,
        kv_budget=sequence.kv_budget,
    )
