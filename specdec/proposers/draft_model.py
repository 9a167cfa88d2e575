"""A smaller model that drafts, by default with the target's own noise.

It evaluates the same token function as the target, on its own q: same transforms, same seed, same absolute
position, noise stream "target". Where q and p agree well enough it picks the very token that the target
will pick, so that nothing but token ids has to be compared (docs/architecture.md). That is right only with
the rule `sample_and_match`; for the others it draws with noise of its own, and says from what, where the rule
asks (`DraftSampling`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from specdec.core.distributions import TokenDistribution
from specdec.core.idle_work import IdleWork
from specdec.core.ids import BlockId, RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.kv.block_allocator import BlockAllocator
from specdec.kv.block_table import BlockTable
from specdec.kv.prefix_cache import PrefixCache, PrefixTrail
from specdec.model.batch import PositionShift, Runner
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.draft_loop import ChainStart, FusedDraftLoop, StepwiseDraftLoop
from specdec.proposers.draft_sampling import SHARED_NOISE, DraftSampling
from specdec.proposers.prefix import SeenPrefix
from specdec.sampling.sampler import TokenChooser
from specdec.sampling.shaping import LogitShaper, shaper_for

if TYPE_CHECKING:
    from specdec.model.rotary import RotaryRule


class _DraftSequence:
    """What the draft model has read of one sequence."""

    __slots__ = (
        "drafted",
        "is_foreign",
        "kv_variant",
        "num_read",
        "seen",
        "shaper",
        "shift",
        "table",
        "trail",
    )

    def __init__(self, table: BlockTable, salt: str | None) -> None:
        self.table = table
        self.shaper: LogitShaper | None = None
        self.trail = PrefixTrail(salt)
        """Names of the blocks of the prefix `seen`."""
        self.kv_variant = 0
        self.shift: PositionShift | None = None
        self.seen = SeenPrefix()
        self.is_foreign = False
        """Whether that prefix holds a token that the draft model does not have."""
        self.num_read = 0
        """Tokens of the prefix `seen` whose K/V are in the cache."""
        self.drafted: tuple[int, ...] = ()
        """Tokens read behind that prefix (only when all of it was read)."""

    def follow(self, sequence: SequenceView, vocab_size: int) -> None:
        """Keep the K/V of what was read and has since been committed, and no more."""
        if not self.seen.continues_in(sequence):
            self.forget()
            self.seen = SeenPrefix()
            self.trail = PrefixTrail(sequence.cache_salt, self.kv_variant)
            self.is_foreign = False
            self.shaper = None
        committed = sequence.token_ids[self.seen.length :]
        self.is_foreign = self.is_foreign or max(committed, default=0) >= vocab_size
        if self.num_read == self.seen.length:
            for drafted, token_id in zip(self.drafted, committed, strict=False):
                if drafted != token_id:
                    break
                self.num_read += 1
        # The last committed token is always read again: its row gives the first draft token.
        self.num_read = min(self.num_read, sequence.committed_len - 1)
        self.drafted = ()
        self.seen.update(sequence)

    def forget(self) -> None:
        """Give all blocks back. They are never written again: others may have them by now."""
        self.table.release()
        self.trail.reset(self.kv_variant)
        self.num_read = 0
        self.drafted = ()


@dataclass(slots=True)
class _Drafting:
    """One sequence during one call."""

    view: SequenceView
    state: _DraftSequence
    budget: int
    token_ids: list[int] = field(default_factory=list)
    q_rows: list[TokenDistribution] = field(default_factory=list)


class _Chunk(NamedTuple):
    """Committed tokens to read first; `completes` when none are left after them."""

    drafting: _Drafting
    num_tokens: int
    completes: bool


class DraftModelProposer:
    """Drafts chains with a model of its own, all sequences of a call together."""

    def __init__(
        self,
        runner: Runner,
        sampler: TokenChooser,
        *,
        vocab_size: int,
        max_read_tokens: int = 512,
        max_context: int | None = None,
        eos_token_ids: Sequence[int] = (),
        sampling: DraftSampling = SHARED_NOISE,
        fused_loop: FusedDraftLoop | None = None,
        idle_work: Sequence[IdleWork] = (),
        prefix_caching: bool = True,
        rotary: RotaryRule | None = None,
    ) -> None:
        """Draft with `runner`, whose KV pool is this proposer's alone.

        Args:
            runner: the draft model.
            sampler: evaluates the token function.
            vocab_size: tokens that the target knows; the draft model's others are never proposed.
            max_read_tokens: most committed tokens that one call reads. A sequence that has more to catch up
                on than is left of it gets no proposal in that call.
            max_context: longest prefix plus draft, in tokens; None: the runner's limit.
            eos_token_ids: tokens that min_tokens keeps from being drafted.
            sampling: how tokens are drawn, as the verification rule needs it.
            fused_loop: asked first to draft, with the same runner, sampler, vocabulary and noise stream.
            idle_work: what makes the runner faster (see `HasIdleWork`).
            prefix_caching: keep what was read of sequences, for others that begin with the same tokens.
            rotary: how the draft model's rotary embedding depends on the length of a sequence.
        """
        self._rotary = rotary
        self.idle_work: Sequence[IdleWork] = idle_work
        self._runner = runner
        self._fused_loop = fused_loop
        self._sampling = sampling
        self._stepwise_loop = StepwiseDraftLoop(runner, sampler, vocab_size, sampling.noise_stream)
        self._max_read_tokens = max_read_tokens
        self._eos_token_ids = tuple(eos_token_ids)
        limit = min(runner.max_model_len, (runner.num_blocks - 1) * runner.block_size)
        self._max_context = limit if max_context is None else min(limit, max_context)
        self._cache = PrefixCache(runner.num_blocks, runner.block_size) if prefix_caching else None
        self._allocator = BlockAllocator(runner.num_blocks) if self._cache is None else self._cache.allocator
        self.num_queried_tokens = 0
        """Committed tokens of sequences that were opened, since the start."""
        self.num_cached_tokens = 0
        """Of these, tokens that were found in the cache and so not read."""
        self._states: OrderedDict[RequestId, _DraftSequence] = OrderedDict()
        self.capabilities = ProposerCapabilities(
            name="draft_model",
            sampled=True,
            noise_stream=sampling.noise_stream,
            gives_q_rows=sampling.gives_q_rows,
            kv="own",
            max_context=self._max_context,
        )

    @property
    def runner(self) -> Runner:
        """What runs the draft model, for measurements of the bare forward."""
        return self._runner

    @property
    def counters(self) -> Mapping[str, int]:
        """See `proposers.base.HasCounters`."""
        return {
            "draft_prefix_cache_queries": self.num_queried_tokens,
            "draft_prefix_cache_hits": self.num_cached_tokens,
        }

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Catch up with the committed tokens, then draft; see the contract."""
        in_use = {sequence.request_id for sequence in sequences}
        draftings = [
            drafting
            for sequence in sequences
            if (drafting := self._open(sequence, num_draft_tokens.get(sequence.request_id, 0), in_use))
        ]
        self._draft(draftings)
        return {
            drafting.view.request_id: self._proposal(drafting) for drafting in draftings if drafting.token_ids
        }

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Free the blocks of these sequences."""
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                state.table.release()

    def close(self) -> None:
        """Forget all sequences."""
        self.release(list(self._states))

    def check_integrity(self) -> None:
        """Assert that all blocks held are held by a sequence known here."""
        self._allocator.check_integrity()
        holders: Counter[BlockId] = Counter()
        for state in self._states.values():
            state.table.check_integrity()
            assert state.num_read + len(state.drafted) <= state.table.capacity
            assert state.trail.num_offered * self._runner.block_size <= state.num_read
            holders.update(state.table.block_ids)
        assert len(holders) == self._allocator.num_used
        for block, num_holders in holders.items():
            assert self._allocator.reference_count(block) == num_holders

    def _open(self, sequence: SequenceView, budget: int, in_use: set[RequestId]) -> _Drafting | None:
        """Hold blocks for a sequence and its draft; None when it has no room or cannot be read.

        Models of one tokenizer may be padded to different vocabularies: a token id beyond the draft model's
        can come in a prompt of token ids, and a target that was not trained well can sample one.
        """
        committed_len = sequence.committed_len
        budget = min(budget, self._max_context - committed_len)
        state = self._states.get(sequence.request_id)
        if committed_len > self._max_context:
            return None
        if state is None:
            state = self._states[sequence.request_id] = _DraftSequence(
                BlockTable(self._allocator, self._runner.block_size), sequence.cache_salt
            )
        self._states.move_to_end(sequence.request_id)
        state.follow(sequence, self._runner.vocab_size)
        if self._rotary is not None:
            self._rotate(state, sequence, self._rotary)
        if state.is_foreign:
            state.forget()
            return None
        if self._cache is not None and state.table.num_blocks == 0:
            self._borrow(self._cache, state, sequence)
        if not self._make_room(state.table.num_missing(committed_len + budget), in_use):
            # What it holds is worth nothing if it can never be completed, but blocks others.
            self.release((sequence.request_id,))
            return None
        state.table.grow(committed_len + budget)
        return _Drafting(sequence, state, budget)

    def _borrow(self, cache: PrefixCache, state: _DraftSequence, sequence: SequenceView) -> None:
        """Begin with what has been read of other sequences."""
        blocks = cache.find(state.trail, sequence.token_ids)
        cache.lend(blocks, state.trail, state.table)
        state.num_read = len(blocks) * self._runner.block_size
        self.num_queried_tokens += sequence.committed_len
        self.num_cached_tokens += state.num_read

    def _offer(self, state: _DraftSequence, sequence: SequenceView) -> None:
        """Let others find what has been read. The last token is read again, and so not among it."""
        if self._cache is not None:
            num_read = min(state.num_read, sequence.committed_len - 1)
            self._cache.offer(state.trail, state.table, sequence.token_ids, num_read)

    def _rotate(self, state: _DraftSequence, sequence: SequenceView, rotary: RotaryRule) -> None:
        """Read everything again when the sequence has got a length with other K/V."""
        num_prompt_tokens = sequence.num_prompt_tokens
        variant = rotary.variants.of(num_prompt_tokens=num_prompt_tokens, num_tokens=sequence.committed_len)
        if variant != state.kv_variant:
            state.kv_variant = variant
            state.shift = rotary.shift(variant, num_prompt_tokens)
            state.forget()

    def _make_room(self, num_blocks: int, in_use: set[RequestId]) -> bool:
        """Free that many blocks, at the cost of sequences that were not asked for the longest time."""
        while self._allocator.num_free < num_blocks:
            victim = next((request_id for request_id in self._states if request_id not in in_use), None)
            if victim is None:
                return False
            self.release((victim,))
        return True

    def _draft(self, draftings: list[_Drafting]) -> None:
        """Read committed tokens, and draft behind those of every sequence that is up to date then."""
        chunks = self._chunks(draftings)
        if not chunks:
            return
        starts = [
            ChainStart(
                token_ids=drafting.view.token_ids[
                    drafting.state.num_read : drafting.state.num_read + num_tokens
                ],
                start=drafting.state.num_read,
                block_table=drafting.state.table.block_ids,
                budget=max(0, drafting.budget) if completes else 0,
                params=params,
                seed=seed,
                shaper=self._shaper(drafting) if completes and params.shapes_logits else None,
                shift=drafting.state.shift,
                constraint=drafting.view.constraint if completes else None,
            )
            for drafting, num_tokens, completes in chunks
            for params, seed in (self._sampling.of(drafting.view),)
        ]
        chains = self._chains(starts, [chunk.drafting for chunk in chunks])
        for (drafting, num_tokens, _), chain in zip(chunks, chains, strict=True):
            drafting.state.num_read += num_tokens
            drafting.state.drafted = tuple(chain[:-1])  # the last token was not read
            drafting.token_ids = chain
            self._offer(drafting.state, drafting.view)

    def _chains(self, starts: Sequence[ChainStart], draftings: Sequence[_Drafting]) -> list[list[int]]:
        if self._sampling.gives_q_rows and not all(start.params.is_greedy for start in starts):
            return self._stepwise_loop.draft(starts, [drafting.q_rows for drafting in draftings])
        chains = None if self._fused_loop is None else self._fused_loop.try_draft(starts)
        return self._stepwise_loop.draft(starts) if chains is None else chains

    def _shaper(self, drafting: _Drafting) -> LogitShaper | None:
        """Return what the request does to logits behind its committed tokens."""
        view, state = drafting.view, drafting.state
        if state.shaper is None:
            state.shaper = shaper_for(
                view.params, eos_token_ids=self._eos_token_ids, num_prompt_tokens=view.num_prompt_tokens
            )
        assert state.shaper is not None
        state.shaper.commit(view.token_ids[state.shaper.num_committed :])
        return state.shaper

    def _chunks(self, draftings: list[_Drafting]) -> list[_Chunk]:
        """Share out what may be read: first to those who have least to catch up on."""
        chunks: list[_Chunk] = []
        left = self._max_read_tokens
        for drafting in sorted(draftings, key=lambda one: one.view.committed_len - one.state.num_read):
            missing = drafting.view.committed_len - drafting.state.num_read
            if drafting.budget <= 0:
                missing -= 1  # the last token is read when there is something to draft behind it
            num_tokens = min(missing, left)
            if num_tokens > 0:
                chunks.append(_Chunk(drafting, num_tokens, num_tokens == missing))
                left -= num_tokens
        return chunks

    def _proposal(self, drafting: _Drafting) -> Proposal:
        stream = self._sampling.stream_of(drafting.view.params)
        return Proposal(
            request_id=drafting.view.request_id,
            committed_len=drafting.view.committed_len,
            prefix_hash=drafting.view.prefix_hash,
            token_ids=tuple(drafting.token_ids),
            noise_stream=stream,
            q_rows=tuple(drafting.q_rows) if self._sampling.gives_q_rows and stream is not None else None,
            method=self.capabilities.name,
        )
