"""Serves a proposer in this process to any number of coordinators."""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.errors import ChannelTimeout
from specdec.core.ids import RequestId, owned_id, owner_of
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.proposal import MAX_DRAFT_TOKENS, Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.engine.draft_pool.entries import answer_to, are_token_ids, is_valid
from specdec.engine.draft_pool.grammar import DraftGrammars, FollowedGrammar
from specdec.engine.draft_pool.message_lengths import divided_answers
from specdec.engine.draft_pool.shares import DraftShareConfig, equal_share, fair_batch
from specdec.engine.draft_pool.text_tap import TextTap
from specdec.proposers.base import (
    AheadWish,
    HasRoom,
    LooksAhead,
    Proposer,
    ReadsAlong,
    ReadsStates,
    counters_of,
)
from specdec.transport.base import MAX_MESSAGE_BYTES, Channel, Envelope, PeerId, dropped_series
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

_MAX_LENGTH = 1 << 20
"""Tokens of a sequence, where the proposer has no limit of its own."""

_MAX_TOKENS_READ = 1 << 16
"""Tokens that are taken in for one coordinator before the others have their turn; about 40 ms of hashing."""
_MAX_MESSAGES = 4096
_MAX_BYTES_HEARD = 3 * _MAX_TOKENS_READ
_MAX_HEARING_S = 0.05
"""What is taken from the channel before drafts are made of what has come. Bytes: about as many tokens as are
then read; what comes faster waits there, where it is not understood yet and coordinators take turns."""
_MAX_UNREAD = 4096
_MAX_UNREAD_BYTES = 2 << 20
"""Entries and releases of one coordinator that wait to be looked at, and in how many bytes they came; in
memory they take up to thirty times as many. The oldest give way: a coordinator that waits for its answers
never has as many."""

_IDLE_S = 5.0
"""A coordinator that has all that it may have gives up its own sequence not asked about for longest, if that
is so long: one that is being generated is asked about in every round."""


_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 8.0
"""Between two calls for hidden states that were lost: these may be on their way, or be lost again."""

_DROPPED_AS = (
    ("stale_entries", "stale"),
    ("invalid_entries", "malformed"),
    ("unread_dropped", "full"),
    ("unexpected_messages", "unexpected_kind"),
)
"""Counters of what came to nothing, and for what reason it is exported."""


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
        self.owner = opening.owner
        self.num_prompt_tokens = opening.num_prompt_tokens
        self.token_ids: list[int] = []
        self.prefix_hash = EMPTY_PREFIX
        self.kv_budget = 0
        self.constraint: FollowedGrammar | None = None
        if grammars is not None:
            self.constraint = grammars.follow(
                opening.grammar, self.token_ids, opening.num_prompt_tokens, owner_of(request_id)
            )
        self.last_used_s = 0.0
        self.ask_again_s = 0.0
        self.pause_s = _FIRST_PAUSE_S

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.prefix_hash = extend_prefix_hash(self.prefix_hash, token_ids)


class _Wish(NamedTuple):
    coordinator: PeerId
    round_id: int
    entry: ProposeEntry
    mirror: _Mirror
    num_new_tokens: int
    read_s: float = 0.0
    """What was spent on reading a part of it."""

    def part_of_batch(self, shares: DraftShareConfig) -> float:
        """By about how many tokens the draft model evaluates for it, and how many branches it makes."""
        entry = self.entry
        num_rows = self.num_new_tokens + entry.num_draft_tokens
        if entry.fan_out is None:
            return shares.part_of_batch(num_rows, 0)
        num_branches = sum(entry.fan_out)
        return shares.part_of_batch(
            num_rows + len(entry.pending) + num_branches * entry.num_draft_tokens, num_branches
        )


class _Released(NamedTuple):
    request_id: RequestId
    epoch: int
    """The last of those that are released."""
    has_ended: bool


_Said: TypeAlias = ProposeEntry | _Released
"""What a message says of one sequence."""


class _Unread(NamedTuple):
    said: _Said
    round_id: int
    """That a wish belongs to."""
    num_bytes: int
    """Of its message, if it is the last that came with that: until then, all of it may be in memory."""


class _Client:
    """One coordinator: its name space, what it has said, and what it waits for."""

    def __init__(self) -> None:
        self.unread: deque[_Unread] = deque()
        self.num_unread_bytes = 0
        self.round_id = 0
        self.mirrors: OrderedDict[RequestId, _Mirror] = OrderedDict()
        """Those asked about last come last."""
        self.wishes: dict[RequestId, _Wish] = {}
        """The newest of each sequence, in the order in which they began to wait."""
        self.refusals: list[ProposeAnswer] = []
        """To wishes whose sequences gave way to others, not sent yet."""
        self.was_first = [0, 0]
        """The last batch that it was the first of, among those for what is quick, and for what is not."""

    def hear(self, said: Sequence[_Said], round_id: int, num_bytes: int) -> int:
        """Keep what a message of so many bytes says to be read; return how much, the oldest, gave way."""
        kept = said[-_MAX_UNREAD:]
        num_dropped = len(said) - len(kept)
        if kept:
            self.unread.extend([_Unread(one, round_id, 0) for one in kept[:-1]])
            self.unread.append(_Unread(kept[-1], round_id, num_bytes))
            self.num_unread_bytes += num_bytes
        while len(self.unread) > _MAX_UNREAD or (
            self.num_unread_bytes > _MAX_UNREAD_BYTES and len(self.unread) > 1
        ):
            self.read_next()
            num_dropped += 1
        return num_dropped

    def read_next(self) -> _Unread:
        """Return the oldest of what it has said."""
        unread = self.unread.popleft()
        self.num_unread_bytes -= unread.num_bytes
        return unread


class HasDropped(Protocol):
    """What counts messages that it has dropped."""

    @property
    def dropped(self) -> Mapping[str, int]:
        """Since the start, by reason."""
        ...


class DraftServer:
    """Answers rounds; requests that are there together, of whatever coordinator, are drafted together.

    Coordinators live in name spaces of their own: neither ids nor tokens of one are seen by another. What
    they say is heard (by channels that give it out in turns: `transport.inbox`), taken in, and drafted, in
    turn and within bounds, so that none waits for longer than the others have had their turn
    (`draft_shares.fair_batch`); what does not fit waits for the next batch. Each has an equal share of the
    places for certain; what the others leave is for whoever comes first. A batch takes as long as its longest
    draft, which is nobody's to choose: those that are wished longer than what is configured are made shorter.
    """

    def __init__(
        self,
        channel: Channel,
        proposer: Proposer,
        *,
        grammars: DraftGrammars | None = None,
        shares: DraftShareConfig | None = None,
        tap: TextTap | None = None,
        hidden: HasDropped | None = None,
        clock: Clock | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_draft_tokens: int = MAX_DRAFT_TOKENS,
    ) -> None:
        """Serve `proposer`; with `grammars`, its drafts keep to the grammars of requests.

        `tap` hears of every sequence that ends, `hidden` is where hidden states arrive. `max_message_bytes`
        is the longest message that `channel` sends, `max_draft_tokens` the longest draft (or largest tree),
        whatever is wished.
        """
        self._max_draft_tokens = max_draft_tokens
        self._max_message_bytes = max_message_bytes
        self._channel = channel
        self._proposer = proposer
        self._ahead: LooksAhead | None = None
        if proposer.capabilities.looks_ahead and isinstance(proposer, LooksAhead):
            self._ahead = proposer
        self._memory = proposer if isinstance(proposer, HasRoom) else None
        self._reader = proposer if isinstance(proposer, ReadsAlong) else None
        self._of_states = proposer if isinstance(proposer, ReadsStates) else None
        self._max_length = proposer.capabilities.max_context or _MAX_LENGTH
        self._told_length = proposer.capabilities.max_context or 0
        self._grammars = grammars
        self._shares = shares or DraftShareConfig()
        self._told: Counter[str] = Counter()
        self._tap = tap
        self._hidden = hidden
        self._before_next: deque[Callable[[], object]] = deque()
        self._counted_elsewhere: Counter[str] = Counter()
        self._clock = clock or MonotonicClock()
        self._clients: dict[PeerId, _Client] = {}
        self._num_sequences = 0
        self._memory_held = 0.0
        self._num_batches = 0
        self._at_work_since_s: float | None = None
        self._members: frozenset[PeerId] | None = None
        self._is_sweep_due = False
        self._next_sweep_s = 0.0
        self.counters: Counter[str] = Counter()
        """rounds (batches), entries, ahead_entries (of these, with a fan-out), stale_entries,
        invalid_entries, shortened_entries (that wished for more draft tokens than there may be),
        unsupported_entries (with a fan-out, for a proposer that cannot look ahead: it reads the tokens, no
        more), restarts_asked, refused_entries (no place, or no memory), displaced_sequences (gave way to
        another), outgrown_sequences (their coordinator's share of the memory is too small for them now),
        unread_dropped (their coordinator said too much at a time), states_asked_again (sequences whose
        hidden states were lost), unexpected_messages (not for a draft worker, or of a coordinator that is
        none any more); and by metric name what coordinators are told: `draft_grammar_failures`, what the
        proposer (`proposers.base.HasCounters`) and the tap count, what was counted elsewhere (`count`), and
        what was dropped: here, by the channel, and of hidden states."""

    @property
    def num_sequences(self) -> int:
        """Sequences known here (any thread)."""
        return self._num_sequences

    @property
    def memory_held(self) -> float:
        """Share of the drafter's memory that they held lately, 0 to 1 (any thread)."""
        return self._memory_held

    @property
    def at_work_s(self) -> float:
        """For how long it has been at what it does now, but for waiting (any thread)."""
        since_s = self._at_work_since_s
        return 0.0 if since_s is None else self._clock.now_s() - since_s

    @property
    def has_waiting(self) -> bool:
        """Whether something was asked that has not been answered."""
        return any(client.unread or client.wishes for client in self._clients.values())

    def retain(self, coordinators: Iterable[PeerId]) -> None:
        """Hear no other coordinators from now on, and forget, soon, their sequences (any thread)."""
        self._members = frozenset(coordinators)
        self._is_sweep_due = True
        self._channel.wake()  # nobody may be left who says anything

    def before_next(self, act: Callable[[], object]) -> None:
        """Have something done before the next batch, by the thread that serves (any thread).

        It does not wait for one to come.
        """
        self._before_next.append(act)
        self._channel.wake()

    def count(self, counts: Mapping[str, int]) -> None:
        """Tell coordinators what was counted elsewhere since the last call (any thread)."""
        self.before_next(lambda: self._counted_elsewhere.update(counts))

    def step(self, timeout_s: float | None) -> bool:
        """Wait for a message, make a batch of drafts; return whether one came within `timeout_s`, or waited.

        What has waited since the last call is not kept waiting for a message.
        """
        self._sweep()
        self._do_between_batches()
        if not self._hear(self._until_sweep_s(timeout_s)):
            return False
        now_s = self._at_work_since_s = self._clock.now_s()
        for coordinator, client in self._clients.items():
            if client.unread:
                self._read(coordinator, client, now_s)
        self._refuse_displaced()
        self._do_between_batches()
        self._serve()
        self._at_work_since_s = None
        return True

    def _until_sweep_s(self, timeout_s: float | None) -> float | None:
        """Return how long to wait for a message, where leases are to end though none comes."""
        if self._num_sequences == 0:
            return timeout_s
        patience_s = max(0.0, self._next_sweep_s - self._clock.now_s())
        return patience_s if timeout_s is None else min(timeout_s, patience_s)

    def _do_between_batches(self) -> None:
        while self._before_next:
            self._before_next.popleft()()

    def _hear(self, timeout_s: float | None) -> bool:
        """Take what has come from the channel, as far as one turn goes; return whether there is work."""
        has_work = self.has_waiting
        num_bytes = 0
        until_s = self._clock.now_s() + _MAX_HEARING_S if has_work else math.inf
        for _ in range(_MAX_MESSAGES):
            try:
                envelope = self._channel.receive(0 if has_work else timeout_s)
            except ChannelTimeout:
                break
            self._note(envelope)
            num_bytes += envelope.num_bytes
            now_s = self._clock.now_s()
            if not has_work:  # it was waited for
                has_work, until_s = True, now_s + _MAX_HEARING_S
            if num_bytes >= _MAX_BYTES_HEARD or now_s >= until_s:
                break
        return has_work

    def _note(self, envelope: Envelope) -> None:
        sender, message = envelope.sender, envelope.message
        if self._members is not None and sender not in self._members:
            # It was let in when it said this. To remember it would be for good: nobody forgets it again.
            self.counters["unexpected_messages"] += 1
            return
        said: Sequence[_Said]
        round_id = 0
        if isinstance(message, ProposeRequest):
            said, round_id = message.entries, message.round_id
        elif isinstance(message, Release):
            said = [_Released(name, epoch, message.have_ended) for name, epoch in message.sequences]
        else:
            self.counters["unexpected_messages"] += 1
            return
        client = self._clients.get(sender)
        if client is None:
            client = self._clients[sender] = _Client()
        num_dropped = client.hear(said, round_id, envelope.num_bytes)
        if num_dropped:
            self.counters["unread_dropped"] += num_dropped

    def _read(self, coordinator: PeerId, client: _Client, now_s: float) -> None:
        """Take in what one coordinator said, as far as its turn goes; refuse at once what has no place."""
        unanswered: list[ProposeAnswer] = []
        num_tokens = 0
        while client.unread and num_tokens <= _MAX_TOKENS_READ:
            said, round_id, _ = client.read_next()
            if isinstance(said, ProposeEntry):
                client.round_id = round_id
                num_tokens += len(said.token_ids)
                answer = self._take(coordinator, client, said, now_s)
                if answer is not None:
                    unanswered.append(answer)
            else:
                self._release(client, said)
        if unanswered:
            self._send(coordinator, client.round_id, unanswered)

    def _serve(self) -> None:
        """Make one batch of what is quick, and one of what is not."""
        shares = self._shares
        for is_slow in (False, True):
            waiting = [client for client in self._clients.values() if client.wishes]
            if len(waiting) > 1:
                waiting.sort(key=lambda client: client.was_first[is_slow])
            batch = fair_batch(
                [
                    [
                        (wish, wish.part_of_batch(shares))
                        for wish in client.wishes.values()
                        if (wish.num_new_tokens > _PREFILL_TOKENS) == is_slow
                    ]
                    for client in waiting
                ]
            )
            if batch:
                self._num_batches += 1
                self._clients[batch[0].coordinator].was_first[is_slow] = self._num_batches
                for wish in batch:
                    del self._clients[wish.coordinator].wishes[wish.entry.request_id]
                self._draft(batch)

    def _take(
        self, coordinator: PeerId, client: _Client, entry: ProposeEntry, now_s: float
    ) -> ProposeAnswer | None:
        """Bring the mirror up to date and note the wish; only the newest wish of a sequence is served.

        Return what is to be answered at once, if there is nothing to draft.
        """
        if not is_valid(entry):
            self.counters["invalid_entries"] += 1
            return None
        if entry.num_draft_tokens > self._max_draft_tokens:
            self.counters["shortened_entries"] += 1
            entry = msgspec.structs.replace(entry, num_draft_tokens=self._max_draft_tokens)
        name = entry.request_id
        mirror = client.mirrors.get(name)
        if mirror is not None and (
            entry.epoch < mirror.epoch
            or (entry.epoch == mirror.epoch and entry.committed_len < len(mirror.token_ids))
        ):
            self.counters["stale_entries"] += 1
            return None
        if entry.committed_len > self._max_length:
            # Nothing can be drafted behind it: there is no reason to keep it, or to look at its tokens.
            self._forget(client, name, is_last=True)
            return answer_to(entry)
        opening = None if mirror is not None and entry.epoch == mirror.epoch else entry.opening
        if opening is not None:
            # What finds no place may be as long as a text can be: nobody looks at its tokens.
            self._forget(client, name)
            lacking = self._make_place(coordinator, client, entry)
            if lacking is not None:
                self.counters["refused_entries"] += 1
                return answer_to(entry, is_full=True, lacks_memory=lacking == "memory")
        if not are_token_ids(entry.token_ids):
            self.counters["invalid_entries"] += 1
            return None
        if opening is not None:
            self._displace_most()
            inner_id = sequence_name(coordinator, name, entry.epoch)
            mirror = client.mirrors[name] = _Mirror(inner_id, entry.epoch, opening, self._grammars)
            self._num_sequences += 1
        if mirror is None or mirror.epoch != entry.epoch or not _catch_up(mirror, entry):
            self._forget(client, name)
            self.counters["restarts_asked"] += 1
            return answer_to(entry, needs_start=True)
        mirror.last_used_s = now_s
        client.mirrors.move_to_end(name)
        earlier = client.wishes.get(name)
        num_new = len(entry.token_ids) + (earlier.num_new_tokens if earlier is not None else 0)
        if self._reader is not None:
            num_new = self._reader.num_unread(mirror)
        read_s = earlier.read_s if earlier is not None else 0.0
        client.wishes[name] = _Wish(coordinator, client.round_id, entry, mirror, num_new, read_s)
        return None

    def _make_place(
        self, coordinator: PeerId, client: _Client, entry: ProposeEntry
    ) -> Literal["place", "memory"] | None:
        """Return what one more sequence of a coordinator lacks, though idle ones of its own have given way.

        None: nothing, or a place that somebody has beyond a fair share.
        """
        num_tokens = min(entry.committed_len + entry.num_draft_tokens, self._max_length)
        while True:
            lacking: Literal["place", "memory"]
            if self._num_places(coordinator) <= 0:
                lacking = "place"
            elif self._memory is not None and not self._memory.has_room(coordinator, num_tokens):
                lacking = "memory"
            else:
                return None
            if not self._forget_idle(client):
                return lacking

    def _displace_most(self) -> None:
        """Have a sequence of whoever has most of them give way, where all places are taken."""
        if self.num_sequences >= self._max_sequences:
            self._displace(max(self._clients.values(), key=lambda other: len(other.mirrors)))

    @property
    def _max_sequences(self) -> int:
        return self._shares.max_sequences or 1 << 30

    def _num_places(self, coordinator: PeerId) -> int:
        """Return how many more sequences a coordinator may have: what is free, or what is left of its share.

        Places of its share that others have, beyond their own share, are for it.
        """
        if len(self._clients) == 1:
            return self._max_sequences - self.num_sequences
        num_held = {name: len(client.mirrors) for name, client in self._clients.items() if client.mirrors}
        share = equal_share(self._max_sequences, num_held, coordinator)
        num_free = self._max_sequences - sum(num_held.values())
        return max(num_free, share - num_held.get(coordinator, 0))

    def _forget_idle(self, client: _Client) -> bool:
        """Have a coordinator's sequence not asked about for longest give way, if that is long."""
        oldest = next(iter(client.mirrors.values()), None)
        if oldest is None or self._clock.now_s() - oldest.last_used_s <= _IDLE_S:
            return False
        self._displace(client)
        return True

    def _displace(self, client: _Client) -> None:
        """Have a coordinator's sequence not asked about for longest give way."""
        self.counters["displaced_sequences"] += 1
        name = next(iter(client.mirrors))
        wish = client.wishes.get(name)
        if wish is not None:
            client.refusals.append(answer_to(wish.entry, is_full=True))
        self._forget(client, name)

    def _refuse_displaced(self) -> None:
        """Answer what was asked of sequences that gave way: whole rounds wait for it.

        It comes after all openings, since answers say how many places are left.
        """
        for coordinator, client in self._clients.items():
            if client.refusals:
                self._send(coordinator, client.round_id, client.refusals)
                client.refusals = []

    def _draft(self, wishes: Sequence[_Wish]) -> None:
        started_s = self._clock.now_s()
        proposals = self._propose(wishes)
        draft_s = self._clock.now_s() - started_s
        self.counters["rounds"] += 1
        self.counters["entries"] += len(wishes)
        crowded_out = () if self._memory is None else self._memory.crowded_out
        answers: dict[PeerId, list[ProposeAnswer]] = defaultdict(list)
        spent_s: dict[PeerId, float] = defaultdict(float)
        rounds: dict[PeerId, int] = {}
        for wish in wishes:
            inner_id = wish.mirror.request_id
            its_proposals, num_unread = proposals.get(inner_id, ()), 0
            if is_full := inner_id in crowded_out:
                self.counters["outgrown_sequences"] += 1
                self._forget(self._clients[wish.coordinator], wish.entry.request_id)
            elif not its_proposals:
                num_unread = self._num_unread(wish)
                if num_unread and self._reads_on(wish, num_unread, draft_s):
                    continue
            spent_s[wish.coordinator] = max(draft_s + wish.read_s, spent_s[wish.coordinator])
            answer = answer_to(
                wish.entry, its_proposals, is_full=is_full, lacks_memory=is_full, num_unread=num_unread
            )
            if not is_full and (rows_from := self._lost_rows(wish.mirror)) >= 0:
                answer = msgspec.structs.replace(answer, rows_from=rows_from)
            answers[wish.coordinator].append(answer)
            rounds[wish.coordinator] = max(wish.round_id, rounds.get(wish.coordinator, wish.round_id))
        counts = self._new_counts() if answers else None
        for coordinator, its_answers in answers.items():
            self._send(coordinator, rounds[coordinator], its_answers, spent_s[coordinator], counts)
            counts = None

    def _lost_rows(self, mirror: _Mirror) -> int:
        """Return from which row on a coordinator is to have hidden states sent again; -1: not now."""
        lost = None if self._of_states is None else self._of_states.missing_states.get(mirror.request_id)
        now_s = self._clock.now_s()
        if lost is None:  # none are, or no more
            mirror.ask_again_s, mirror.pause_s = 0.0, _FIRST_PAUSE_S
            return -1
        if now_s < mirror.ask_again_s:
            return -1
        mirror.ask_again_s = now_s + mirror.pause_s
        mirror.pause_s = min(2.0 * mirror.pause_s, _LONGEST_PAUSE_S)
        self.counters["states_asked_again"] += 1
        return lost

    def _num_unread(self, wish: _Wish) -> int:
        return 0 if self._reader is None else self._reader.num_unread(wish.mirror)

    def _reads_on(self, wish: _Wish, num_unread: int, spent_s: float) -> bool:
        """Put a wish to read what is committed back where it has not been read as a whole.

        Nobody waits for its answer, which is to say that all was read. One that has got no further gets it
        now: there is no room.
        """
        if wish.entry.num_draft_tokens > 0 or num_unread >= wish.num_new_tokens:
            return False
        wishes = self._clients[wish.coordinator].wishes
        wishes.setdefault(
            wish.entry.request_id, wish._replace(num_new_tokens=num_unread, read_s=wish.read_s + spent_s)
        )
        return True

    def _send(
        self,
        coordinator: PeerId,
        round_id: int,
        answers: Sequence[ProposeAnswer],
        draft_s: float = 0.0,
        counts: dict[str, int] | None = None,
    ) -> None:
        """Answer, in as many messages as it takes; say how busy it is here.

        The first one tells what was spent and counted: of a round that nobody waits for any more, that is the
        one that is looked at.
        """
        busy = (0, 0, 0)
        if self._shares.max_sequences is not None:
            busy = self.num_sequences, self._shares.max_sequences, max(0, self._num_places(coordinator))
        now_s = self._clock.now_s()
        for part in divided_answers(answers, self._max_message_bytes):
            reply = ProposeReply(round_id, part, draft_s, counts, *busy, now_s, self._told_length)
            self._channel.send(coordinator, reply)
            draft_s, counts = 0.0, None

    def _propose(self, wishes: Sequence[_Wish]) -> Mapping[RequestId, Sequence[Proposal]]:
        """Ask for everything at once. Entries with a fan-out have several answers, others one at most."""
        num_ahead = sum(wish.entry.fan_out is not None for wish in wishes)
        if num_ahead and self._ahead is not None:
            self.counters["ahead_entries"] += num_ahead
            return self._ahead.propose_ahead(
                [
                    AheadWish(
                        view=wish.mirror,
                        pending=wish.entry.pending,
                        num_draft_tokens=wish.entry.num_draft_tokens,
                        fan_out=wish.entry.fan_out,
                    )
                    for wish in wishes
                ]
            )
        if num_ahead:
            self.counters["unsupported_entries"] += num_ahead
        proposals = self._proposer.propose(
            [wish.mirror for wish in wishes],
            {
                wish.mirror.request_id: wish.entry.num_draft_tokens if wish.entry.fan_out is None else 0
                for wish in wishes
            },
        )
        return {request_id: (proposal,) for request_id, proposal in proposals.items()}

    def _new_counts(self) -> dict[str, int] | None:
        """What was counted since the last call: for one coordinator, since all of them are added up."""
        present = Counter({name: int(count) for name, count in counters_of(self._proposer).items()})
        if self._grammars is not None:
            present["draft_grammar_failures"] = self._grammars.counters["grammar_failures"]
        if self._tap is not None:
            present.update(self._tap.counters)
        present.update(self._counted_elsewhere)
        dropped = Counter(self._channel.counters.dropped)
        for name, reason in _DROPPED_AS:
            dropped[reason] += self.counters[name]
        present.update(dropped_series("draft", "draft_worker", +dropped))
        if self._hidden is not None:
            present.update(dropped_series("hidden", "draft_worker", self._hidden.dropped))
        if present == self._told:
            return None
        new, self._told = present - self._told, present
        self.counters.update(new)
        return dict(new)

    def _release(self, client: _Client, released: _Released) -> None:
        mirror = client.mirrors.get(released.request_id)
        if mirror is not None and mirror.epoch <= released.epoch:
            self._forget(client, released.request_id, is_last=released.has_ended)

    def _forget(self, client: _Client, request_id: RequestId, *, is_last: bool = False) -> None:
        """Forget a sequence. Unless `is_last` it may come back, longer, or its tokens may not be what was
        committed: it is no text to learn from then.
        """
        client.wishes.pop(request_id, None)
        mirror = client.mirrors.pop(request_id, None)
        if mirror is not None:
            self._num_sequences -= 1
            if mirror.constraint is not None:
                mirror.constraint.close()
            if self._tap is not None and is_last:
                self._tap.note(mirror)
            self._proposer.release([mirror.request_id])

    def _sweep(self) -> None:
        """End leases that are over, and coordinators that are gone."""
        now_s = self._clock.now_s()
        is_due, self._is_sweep_due = self._is_sweep_due, False
        if not is_due and now_s < self._next_sweep_s:
            return
        members = self._members
        lease_s = self._shares.lease_s
        self._next_sweep_s = now_s + lease_s / 10
        self._memory_held = 0.0 if self._memory is None else self._memory.memory_held
        for coordinator, client in list(self._clients.items()):
            is_gone = members is not None and coordinator not in members
            for request_id, mirror in list(client.mirrors.items()):
                if is_gone or now_s - mirror.last_used_s > lease_s:
                    self._forget(client, request_id)
            if is_gone:
                del self._clients[coordinator]


def sequence_name(coordinator: PeerId, request_id: RequestId, epoch: int) -> RequestId:
    """Return the id by which a draft worker's proposer knows a coordinator's sequence."""
    return owned_id(coordinator, f"{request_id}/{epoch}")


def _catch_up(mirror: _Mirror, entry: ProposeEntry) -> bool:
    """Append the entry's unseen tokens; return whether the mirror now is the prefix that it names."""
    known = len(mirror.token_ids) - entry.base_len
    if known < 0 or entry.base_len + len(entry.token_ids) != entry.committed_len:
        return False
    mirror.extend(entry.token_ids[known:])
    mirror.kv_budget = entry.kv_budget
    return mirror.prefix_hash == entry.prefix_hash
