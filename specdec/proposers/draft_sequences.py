"""What a draft model has read of which sequences, and the blocks that hold it."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from specdec.core.distributions import TokenDistribution
from specdec.core.ids import BlockId, RequestId, owner_of
from specdec.core.plan import SlotMove
from specdec.core.sequence import SequenceView
from specdec.kv.block_allocator import BlockAllocator
from specdec.kv.block_table import BlockTable, num_blocks_for
from specdec.kv.moves import moves_of_path
from specdec.kv.prefix_cache import PrefixCache, PrefixTrail
from specdec.model.batch import PagedModel, PositionShift
from specdec.proposers.bonus import Outlook
from specdec.proposers.branches import BranchStore
from specdec.proposers.draft_window import AT_THE_BEGINNING, DraftWindow, Origin
from specdec.proposers.prefix import SeenPrefix
from specdec.proposers.tree_loop import DraftedTree
from specdec.sampling.shaping import LogitShaper
from specdec.tree.topology import longest_path, tree

if TYPE_CHECKING:
    from specdec.model.rotary import RotaryRule


_KV_VARIANT_BITS = 40
"""More than any text's length has: variants of K/V are by that."""


class DraftSequence:
    """What the draft model has read of one sequence."""

    __slots__ = (
        "assumed",
        "drafted",
        "drafted_parents",
        "is_foreign",
        "kv_variant",
        "num_read",
        "origin",
        "owner",
        "seen",
        "shaper",
        "shift",
        "standing",
        "table",
        "trail",
        "weights",
    )

    def __init__(self, owner: str, table: BlockTable, salt: str | None) -> None:
        self.owner = owner
        self.table = table
        self.shaper: LogitShaper | None = None
        self.trail = PrefixTrail(salt)
        """Names of the blocks of the prefix `seen`."""
        self.kv_variant = 0
        self.weights = 0
        """Which weights the K/V of its first tokens are of, where others may find them."""
        self.shift: PositionShift | None = None
        self.seen = SeenPrefix()
        self.is_foreign = False
        """Whether that prefix holds a token that the draft model does not have."""
        self.num_read = 0
        """Tokens of the prefix `seen` whose K/V are in the cache, or were left out."""
        self.origin = AT_THE_BEGINNING
        """Where the positions begin that the draft model is given."""
        self.drafted: tuple[int, ...] = ()
        """Tokens read behind that prefix (only when all of it was read)."""
        self.drafted_parents: tuple[int, ...] | None = None
        """Of these tokens, as `Proposal.parents`; None where they are a chain."""
        self.assumed: tuple[int, ...] = ()
        """The first of these, where they are taken to be what the next verdict says."""
        self.standing: tuple[int, ...] | None = None
        """Of these, tokens behind what has now been committed whose K/V, as those of all that is committed,
        are still there; None: K/V of the last committed token are not."""

    def follow(self, sequence: SequenceView, vocab_size: int) -> Sequence[SlotMove]:
        """Keep the K/V of what was read and has since been committed, and no more.

        Return where those of a tree have to be moved to.
        """
        moves: Sequence[SlotMove] = ()
        if not self.seen.continues_in(sequence):
            self.forget()
            self.seen = SeenPrefix()
            self.trail = PrefixTrail(sequence.cache_salt, self.kv_name)
            self.is_foreign = False
            self.shaper = None
        committed = sequence.token_ids[self.seen.length :]
        self.is_foreign = self.is_foreign or max(committed, default=0) >= vocab_size
        self.standing = None
        if self.num_read == self.seen.length and self.drafted_parents is not None:
            nodes = longest_path(tree(self.drafted_parents), self.drafted, committed)
            moves = moves_of_path(self.table, self.num_read, nodes)
            self.num_read += len(nodes)
        elif self.num_read == self.seen.length:
            for drafted, token_id in zip(self.drafted, committed, strict=False):
                if drafted != token_id:
                    break
                self.num_read += 1
            if self.num_read == sequence.committed_len:
                self.standing = self.drafted[len(committed) :]
        # The last committed token is always read again: its row gives the first draft token.
        self.num_read = min(self.num_read, sequence.committed_len - 1)
        self.drafted, self.drafted_parents = (), None
        self.seen.update(sequence)
        return moves

    @property
    def kv_name(self) -> int:
        """Tells K/V of the same tokens apart: by the text's length, and by the weights that it began with."""
        return self.weights << _KV_VARIANT_BITS | self.kv_variant

    def forget(self) -> None:
        """Give all blocks back. They are never written again: others may have them by now."""
        self.table.release()
        self.trail.reset(self.kv_name)
        self.num_read = 0
        self.drafted, self.drafted_parents = (), None
        self.assumed = ()
        self.standing = None
        if self.origin.position:
            self.origin, self.shift = AT_THE_BEGINNING, None

    def begin_at(self, origin: Origin) -> None:
        """Read the sequence anew, with positions from `origin` on."""
        self.forget()
        self.origin = origin
        self.num_read = origin.position
        self.table.skip(origin.position)
        self.shift = PositionShift(-origin.position, sys.maxsize)


@dataclass(slots=True)
class Drafting:
    """One sequence during one call."""

    view: SequenceView
    state: DraftSequence
    budget: int
    room: int
    """Tokens behind the committed ones that there are to be blocks for."""
    token_ids: list[int] = field(default_factory=list)
    q_rows: list[TokenDistribution] = field(default_factory=list)
    tree: DraftedTree | None = None
    """Where trees are drafted."""
    outlook: Outlook | None = None
    """What is guessed about the verdict that is waited for; the budget is of each branch then."""


class Chunk(NamedTuple):
    """Committed tokens to read first; `completes` when none are left after them."""

    drafting: Drafting
    num_tokens: int
    completes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftReading:
    """What a draft model reads of sequences, and what it keeps of that."""

    max_read_tokens: int = 512
    """Most committed tokens that one call reads. A sequence that has more to catch up on than is left of it
    gets no proposal in that call."""
    max_context: int | None = None
    """Longest prefix plus draft, in tokens; None: the runner's limit, or none where the window gives
    positions of its own."""
    prefix_caching: bool = True
    """Keep what was read of sequences, for others that begin with the same tokens."""
    rotary: RotaryRule | None = None
    """How the draft model's rotary embedding depends on the length of a sequence."""
    window: DraftWindow | None = None
    """What of a sequence is kept and attended to; None: everything."""


EVERYTHING = DraftReading()


class DraftSequences:
    """The sequences that share one draft model's KV pool."""

    def __init__(self, model: PagedModel, reading: DraftReading, *, max_context: int) -> None:
        """Hold nothing yet. `max_context` is what the model and its pool make of that of `reading`."""
        self._rotary = reading.rotary
        self._window = reading.window
        self._most_budgets: dict[int, int] = {}
        """By number of sequences: the largest budget (tokens) with which all of them have room."""
        self._vocab_size = model.vocab_size
        self._block_size = model.block_size
        self._max_read_tokens = reading.max_read_tokens
        self._max_context = max_context
        self._cache = PrefixCache(model.num_blocks, model.block_size) if reading.prefix_caching else None
        self._allocator = BlockAllocator(model.num_blocks) if self._cache is None else self._cache.allocator
        self._states: OrderedDict[RequestId, DraftSequence] = OrderedDict()
        self._opened: set[RequestId] = set()
        """In the last call."""
        self._crowded_out: list[RequestId] = []
        """In the last call."""
        self._moves: list[SlotMove] = []
        self.branches = BranchStore(self._allocator, model.block_size)
        self._num_queried_tokens = 0
        self._num_cached_tokens = 0
        self._num_new_origins = 0
        self._too_long: set[RequestId] = set()
        self._weights = 0
        self._num_too_long = 0
        self._num_true_branches = 0

    @property
    def known(self) -> frozenset[RequestId]:
        """Sequences that something is known of."""
        return frozenset(self._states)

    @property
    def num_held_blocks(self) -> int:
        """Blocks of the pool that somebody holds."""
        return self._allocator.num_used

    @property
    def counters(self) -> Mapping[str, int]:
        """By metric name: tokens of sequences that were opened, those of them that were found in the cache
        and so not read; branches whose assumed tokens were committed; how often a sequence was given
        positions anew, because it had got too long for those that there are; and sequences that are too long
        to be read at all.
        """
        return {
            "draft_prefix_cache_queries": self._num_queried_tokens,
            "draft_prefix_cache_hits": self._num_cached_tokens,
            "draft_ahead_branches_true": self._num_true_branches,
            "draft_windows_reread": self._num_new_origins,
            "draft_sequences_too_long": self._num_too_long,
        }

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Free the blocks of these sequences."""
        for request_id in request_ids:
            self._too_long.discard(request_id)
            state = self._states.pop(request_id, None)
            if state is not None:
                self.branches.drop(request_id)
                state.table.release()

    def renew(self) -> None:
        """The model has other weights from now on.

        What was read of sequences stays theirs, though it is of the former weights: reading all of it again
        would leave everybody without drafts meanwhile, for the sake of a few more that stand. Nobody who
        begins from now on finds any of it.
        """
        self._weights += 1

    def check_integrity(self) -> None:
        """Assert that all blocks held are held by a sequence known here, or by a branch of one."""
        self._allocator.check_integrity()
        self.branches.check_integrity(self._states)
        holders: Counter[BlockId] = Counter()
        for state in self._states.values():
            state.table.check_integrity()
            assert state.num_read + len(state.drafted) <= state.table.capacity
            assert state.trail.num_offered * self._block_size <= state.num_read
            holders.update(state.table.block_ids)
        for held in self.branches:
            holders.update(held.table.block_ids)
        assert len(holders) == self._allocator.num_used
        for block, num_holders in holders.items():
            assert self._allocator.reference_count(block) == num_holders

    def in_turns(self, sequences: Sequence[SequenceView]) -> Sequence[SequenceView]:
        """Begin a call; return its sequences in the order to open them: of owners who hold least first.

        So whoever has less than a share finds room before those who have more hold on to theirs.
        """
        self._opened.clear()
        self._crowded_out.clear()
        owners = {owner_of(sequence.request_id) for sequence in sequences}
        if len(owners) <= 1:
            return sequences
        held = self._held_by_owner(owners.pop())
        return sorted(sequences, key=lambda one: held.get(owner_of(one.request_id), 0))

    @property
    def memory_held(self) -> float:
        """See `proposers.base.HasRoom`; what branches hold beside that is given up for others."""
        num_blocks = sum(state.table.num_blocks for state in self._states.values())
        return min(1.0, num_blocks / self._allocator.num_usable)

    @property
    def crowded_out(self) -> Sequence[RequestId]:
        """See `proposers.base.HasRoom`."""
        return self._crowded_out

    def take_moves(self) -> Sequence[SlotMove]:
        """Return, once, what has to be moved in the pool before anything of this call is read."""
        moves, self._moves = self._moves, []
        return moves

    def open(
        self, sequence: SequenceView, budget: int, in_use: set[RequestId], *, num_behind: int | None = None
    ) -> Drafting | None:
        """Hold blocks for a sequence and its draft; None when it has no room or cannot be read.

        `num_behind` is how many places behind the committed tokens the draft takes, if not its `budget`.

        Models of one tokenizer may be padded to different vocabularies: a token id beyond the draft model's
        can come in a prompt of token ids, and a target that was not trained well can sample one.
        """
        committed_len = sequence.committed_len
        most_behind = self.most_len(committed_len) - committed_len
        room = min(budget if num_behind is None else num_behind, most_behind)
        budget = min(budget, most_behind)
        state = self._states.get(sequence.request_id)
        if committed_len >= self._max_context:
            self._note_too_long(sequence)
            return None
        if state is None:
            state = self._states[sequence.request_id] = DraftSequence(
                owner_of(sequence.request_id),
                BlockTable(self._allocator, self._block_size),
                sequence.cache_salt,
            )
        elif sequence.request_id in self.branches or state.assumed:
            self._settle(state, sequence)
        self._states.move_to_end(sequence.request_id)
        self._opened.add(sequence.request_id)
        self._moves.extend(state.follow(sequence, self._vocab_size))
        if self._rotary is not None:
            self._rotate(state, sequence, self._rotary)
        if state.is_foreign:
            state.forget()
            return None
        if self._window is not None:
            self._place(state, sequence, self._window)
        if self._cache is not None and state.table.num_blocks == 0 and not state.origin.position:
            self._borrow(self._cache, state, sequence)
        num_tokens = committed_len + max(0, room)
        if self._window is not None:
            self._slide(self._window, state, sequence)
            num_tokens = self._window.reach(num_tokens, committed_len, state.num_read)
        if not self._make_room(state, num_tokens, in_use):
            if not self._is_entitled(state, num_tokens):
                # What it holds is worth nothing if it can never be completed, but blocks others.
                self.release((sequence.request_id,))
                self._crowded_out.append(sequence.request_id)
            return None
        state.table.grow(num_tokens)
        return Drafting(sequence, state, budget, room)

    def num_unread(self, view: SequenceView) -> int:
        """See `proposers.base.ReadsAlong`."""
        state, committed_len = self._states.get(view.request_id), view.committed_len
        num_read = 0 if state is None else state.num_read
        if self._window is not None:
            present = AT_THE_BEGINNING if state is None else state.origin
            origin = self._window.origin(present, committed_len, self._block_size, self._budget(view))
            num_read = num_read if origin == present else origin.position
        return max(0, committed_len - 1 - num_read)

    def first_unread(self, view: SequenceView) -> int:
        """Return how many tokens of a sequence need not be read again when it is opened next."""
        state = self._states.get(view.request_id)
        if state is None or not state.seen.continues_in(view):
            return 0
        return min(state.num_read, view.committed_len - 1)

    def most_len(self, committed_len: int) -> int:
        """Return how long a prefix of so many tokens and its draft can be together.

        Behind a window a draft is never longer than the pool was planned for, whatever a request asks for.
        """
        if self._window is None:
            return self._max_context
        return min(self._max_context, committed_len + self._window.num_draft_tokens)

    def num_left_in_variant(self, committed_len: int) -> int | None:
        """Return how many tokens may be committed before all K/V change; None: any number."""
        return None if self._rotary is None else self._rotary.variants.num_tokens_left(committed_len)

    def chunks(self, draftings: list[Drafting]) -> list[Chunk]:
        """Share out what may be read: evenly to owners, there first to who has least to catch up on."""
        draftings = sorted(draftings, key=lambda one: one.view.committed_len - one.state.num_read)
        missing = [
            # The last token is read when there is something to draft behind it.
            one.view.committed_len - one.state.num_read - (one.budget <= 0)
            for one in draftings
        ]
        granted = missing
        if sum(missing) > self._max_read_tokens:
            granted = self._granted([one.state.owner for one in draftings], missing)
        return [
            Chunk(drafting, num_tokens, num_tokens == wanted)
            for drafting, num_tokens, wanted in zip(draftings, granted, missing, strict=True)
            if num_tokens > 0
        ]

    def pieces(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the first pieces of chunks that are longer than what is read beside the window at once."""
        if self._window is None:
            return []
        most = self._window.num_piece_tokens
        return [Chunk(one.drafting, most, False) for one in chunks if one.num_tokens > most]

    def behind(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return what is left of chunks whose `pieces` have been read, as far as there is room for more.

        What the window has left behind makes room, unless others hold it as well.
        """
        window = self._window
        assert window is not None
        rest: list[Chunk] = []
        for chunk in chunks:
            drafting, num_tokens, completes = chunk
            if num_tokens <= window.num_piece_tokens:
                rest.append(chunk)
                continue
            state, committed_len = drafting.state, drafting.view.committed_len
            self._slide(window, state, drafting.view)
            reach = window.reach(committed_len + drafting.room, committed_len, state.num_read)
            if state.table.num_missing(reach) <= self._allocator.num_free:
                state.table.grow(reach)
                rest.append(Chunk(drafting, num_tokens - window.num_piece_tokens, completes))
        return rest

    def _slide(self, window: DraftWindow, state: DraftSequence, view: SequenceView) -> None:
        """Free what the window has left behind, by the sequence's own budget."""
        window.slide(state.table, state.num_read, self._budget(view))

    def _budget(self, view: SequenceView) -> int:
        """Return the budget of a sequence as far as its share of the pool allows; 0: as configured.

        Whoever asks for more than that would have others go on without drafts.
        """
        if self._window is None or view.kv_budget == 0:
            return 0
        num_sharing = max(1, len(self._states))
        most = self._most_budgets.get(num_sharing)
        if most is None:
            num_blocks = self._allocator.num_usable // num_sharing
            most = self._window.most_budget(self._max_context, num_blocks, self._block_size)
            self._most_budgets[num_sharing] = most
        return min(view.kv_budget, most)

    def _granted(self, owners: list[str], wanted: list[int]) -> list[int]:
        """Return how many tokens of each sequence are read: of its owner's share, of what that leaves."""
        granted = [0] * len(wanted)
        left = self._max_read_tokens
        share = left // len(set(owners))
        for most_of_owner in (share, left):
            left_of_owner = dict.fromkeys(owners, most_of_owner)
            for index, owner in enumerate(owners):
                num_tokens = min(wanted[index] - granted[index], left_of_owner[owner], left)
                granted[index] += num_tokens
                left_of_owner[owner] -= num_tokens
                left -= num_tokens
        return granted

    def note_read(
        self,
        drafting: Drafting,
        num_tokens: int,
        behind: tuple[int, ...],
        parents: tuple[int, ...] | None = None,
    ) -> None:
        """Note that so many more committed tokens were read, and `behind` if that is all of them.

        With `parents`, what is behind them is a tree.

        Others may find them from now on, but for the last committed one: it is read again. What was read
        behind a window is nobody else's: its K/V depend on where the window was.
        """
        state, view = drafting.state, drafting.view
        state.num_read += num_tokens
        state.drafted, state.drafted_parents = behind, parents
        if self._cache is not None and not state.table.num_dropped:
            num_read = min(state.num_read, view.committed_len - 1)
            self._cache.offer(state.trail, state.table, view.token_ids, num_read)

    def _settle(self, state: DraftSequence, sequence: SequenceView) -> None:
        """Keep of a sequence's branches the one that turned out true, if any, as the sequence's own."""
        goes_on = state.seen.continues_in(sequence)
        committed = sequence.token_ids[state.seen.length :] if goes_on else None
        true = self.branches.take(sequence.request_id, committed)
        if true is not None:
            self._num_true_branches += 1
            state.table.release()
            state.table, state.drafted, state.drafted_parents = true.table, true.read, None
        elif state.assumed and committed is not None:
            self._num_true_branches += tuple(committed[: len(state.assumed)]) == state.assumed
        state.assumed = ()

    def _borrow(self, cache: PrefixCache, state: DraftSequence, sequence: SequenceView) -> None:
        """Begin with what has been read of other sequences."""
        if state.weights != self._weights:
            state.weights = self._weights
            state.trail.reset(state.kv_name)
        blocks = cache.find(state.trail, sequence.token_ids)
        cache.lend(blocks, state.trail, state.table)
        state.num_read = len(blocks) * self._block_size
        self._num_queried_tokens += sequence.committed_len
        self._num_cached_tokens += state.num_read

    def _note_too_long(self, sequence: SequenceView) -> None:
        """Count a sequence behind which nothing can be drafted any more, and give back what it has."""
        self._num_too_long += sequence.request_id not in self._too_long
        self.release((sequence.request_id,))
        self._too_long.add(sequence.request_id)

    def _place(self, state: DraftSequence, view: SequenceView, window: DraftWindow) -> None:
        """Give a sequence positions anew when those that it has run out."""
        origin = window.origin(state.origin, view.committed_len, self._block_size, self._budget(view))
        if origin != state.origin:
            self._num_new_origins += 1
            state.begin_at(origin)

    def _rotate(self, state: DraftSequence, sequence: SequenceView, rotary: RotaryRule) -> None:
        """Read everything again when the sequence has got a length with other K/V."""
        num_prompt_tokens = sequence.num_prompt_tokens
        variant = rotary.variants.of(num_prompt_tokens=num_prompt_tokens, num_tokens=sequence.committed_len)
        if variant != state.kv_variant:
            state.kv_variant = variant
            state.shift = rotary.shift(variant, num_prompt_tokens)
            state.forget()

    def has_room(self, owner: str, num_tokens: int) -> bool:
        """Whether a new sequence finds room and need not take it from who has no more than a fair share."""
        num_blocks = num_blocks_for(num_tokens, self._block_size)
        if self._window is not None:
            num_blocks = min(num_blocks, self._window.max_blocks(num_tokens, self._block_size))
        if num_blocks <= self._allocator.num_free:
            return True
        held = self._held_by_owner(owner)
        return held[owner] + num_blocks <= self._allocator.num_usable // len(held)

    def _held_by_owner(self, asking: str) -> dict[str, int]:
        """Return how many blocks each owner holds, by however many sequences; with the one who asks."""
        held = {asking: 0}
        for state in self._states.values():
            held[state.owner] = held.get(state.owner, 0) + state.table.num_blocks
        return held

    def _make_room(self, asking: DraftSequence, num_tokens: int, in_use: set[RequestId]) -> bool:
        """Free what a sequence misses: at the cost of branches, then of who was not asked for for longest."""
        num_blocks = asking.table.num_missing(num_tokens)
        while self._allocator.num_free < num_blocks:
            if self._drop_branches(asking.owner, in_use):
                continue
            victim = self._victim(asking.owner, in_use)
            if victim is None and self._is_entitled(asking, num_tokens):
                victim = self._victim(asking.owner, self._opened)
            if victim is None:
                return False
            self.release((victim,))
        return True

    def _is_entitled(self, asking: DraftSequence, num_tokens: int) -> bool:
        """Whether the owner of a sequence of so many tokens has, with it, no more than an equal share."""
        held = self._held_by_owner(asking.owner)
        wanted = held[asking.owner] + asking.table.num_missing(num_tokens)
        return len(held) > 1 and wanted <= self._allocator.num_usable // len(held)

    def _drop_branches(self, asking: str, in_use: set[RequestId]) -> bool:
        """Have branches give way: of the owner who asks, or of one with more than its share, with them."""
        if len(self.branches) == 0:
            return False
        held = self._held_by_owner(asking)
        for owner, number in self.branches.num_own_blocks.items():
            held[owner] = held.get(owner, 0) + number
        share = self._allocator.num_usable // len(held)

        def may_go(owner: str) -> bool:
            return owner == asking or held[owner] > share

        return self.branches.drop_oldest(in_use, may_go) or self.branches.drop_oldest((), may_go)

    def _victim(self, asking: str, in_use: set[RequestId]) -> RequestId | None:
        """Return the sequence that gives way: of the owner who asks, or of one with more than its share.

        None of `in_use`: of the call, or, for those entitled to it, of what has been opened in the call.
        """
        held = self._held_by_owner(asking)
        share = self._allocator.num_usable // len(held)
        for request_id, state in self._states.items():
            if request_id not in in_use and (state.owner == asking or held[state.owner] > share):
                return request_id
        return None
