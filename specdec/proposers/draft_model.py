"""A smaller model that drafts, by default with the target's own noise.

It evaluates the same token function as the target, on its own q: same transforms, same seed, same absolute
position, noise stream "target". Where q and p agree well enough it picks the very token that the target
will pick, so that nothing but token ids has to be compared (docs/architecture.md). That is right only with
the rule `sample_and_match`; for the others it draws with noise of its own, and says from what, where the rule
asks (`DraftSampling`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from specdec.core.distributions import TokenDistribution
from specdec.core.idle_work import IdleWork
from specdec.core.ids import RequestId
from specdec.core.prefix_hash import extend_prefix_hash
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.model.batch import Runner
from specdec.model.renewal import StagedWeights, stage, take
from specdec.model.runner import ModelRunner
from specdec.proposers.base import AheadWish, ProposerCapabilities
from specdec.proposers.bonus import BonusGuesser, Outlook, OutlookRead
from specdec.proposers.branches import BlockCopy, Branch, HeldBranch
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_loop import ChainStart, FusedDraftLoop, QRows, StepwiseDraftLoop
from specdec.proposers.draft_sequences import EVERYTHING, Chunk, Drafting, DraftReading, DraftSequences
from specdec.proposers.draft_window import ANY_LENGTH
from specdec.proposers.hidden import PrefixStates
from specdec.sampling.shaping import LogitShaper, shaper_for

if TYPE_CHECKING:
    import torch


class DraftModelProposer:
    """Drafts chains with a model of its own, all sequences of a call together."""

    def __init__(
        self,
        runner: Runner,
        choice: DraftChoice,
        *,
        reading: DraftReading = EVERYTHING,
        fused_loop: FusedDraftLoop | None = None,
        idle_work: Sequence[IdleWork] = (),
        name: str = "draft_model",
        states: PrefixStates | None = None,
    ) -> None:
        """Draft with `runner`, whose KV pool is this proposer's alone.

        Args:
            runner: the draft model.
            choice: how tokens are chosen from what it says.
            reading: what it reads of sequences, and keeps.
            fused_loop: asked first to draft, with the same runner, sampler, vocabulary and noise stream.
            idle_work: what makes the runner faster (see `HasIdleWork`).
            name: of the method.
            states: of the target, for a model that reads them. It does not look ahead then, and reads what
                it has drafted again once it has been committed, since only then it knows them.
        """
        assert states is None or not reading.prefix_caching, "what a token's row reads lies one before it"
        self._states = states
        max_context = _longest(runner, reading)
        self._sequences = DraftSequences(runner, reading, max_context=max_context)
        self.idle_work: Sequence[IdleWork] = idle_work
        self._runner = runner
        self._fused_loop = fused_loop
        sampler, vocab_size = choice.sampler, choice.vocab_size
        sampling = self._sampling = choice.sampling
        self._stepwise_loop = StepwiseDraftLoop(runner, sampler, vocab_size, sampling.noise_stream)
        self._guesser = BonusGuesser(
            runner, sampler, vocab_size, shares_noise=sampling.shares_noise, by=choice.bonus_by
        )
        self._eos_token_ids = tuple(choice.eos_token_ids)
        self._num_branches = 0
        self._num_branches_left_out = 0
        self.capabilities = ProposerCapabilities(
            name=name,
            sampled=True,
            noise_stream=sampling.noise_stream,
            gives_q_rows=sampling.gives_q_rows,
            kv="own",
            max_context=None if max_context == ANY_LENGTH else max_context,
            looks_ahead=states is None,
            hidden_layers=() if states is None else states.layers,
        )

    @property
    def runner(self) -> Runner:
        """What runs the draft model, for measurements of the bare forward."""
        return self._runner

    @property
    def sequences(self) -> DraftSequences:
        """What has been read."""
        return self._sequences

    @property
    def counters(self) -> Mapping[str, int]:
        """See `proposers.base.HasCounters`."""
        return {
            **self._sequences.counters,
            "draft_ahead_branches": self._num_branches,
            "draft_ahead_branches_left_out": self._num_branches_left_out,
        }

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Catch up with the committed tokens, then draft; see the contract."""
        if self._states is not None:
            awaited = [name for name, budget in num_draft_tokens.items() if budget > 0]
            sequences = self._states.begin(sequences, awaited, self._sequences.first_unread)
        in_use = {sequence.request_id for sequence in sequences}
        draftings = [
            drafting
            for sequence in self._sequences.in_turns(sequences)
            if (
                drafting := self._sequences.open(
                    sequence,
                    budget := num_draft_tokens.get(sequence.request_id, 0),
                    in_use,
                    num_behind=self._num_read_behind(budget),
                )
            )
            and self._has_states(drafting)
        ]
        if moves := self._sequences.take_moves():
            self._runner.move_slots(moves)
        self._draft(self._read_pieces(self._sequences.chunks(draftings)))
        return {
            drafting.view.request_id: self._proposal(drafting) for drafting in draftings if drafting.token_ids
        }

    def propose_ahead(self, wishes: Sequence[AheadWish]) -> dict[RequestId, list[Proposal]]:
        """Catch up, read what is pending, and draft behind every verdict prepared for; see `LooksAhead`.

        Two steps, each for all sequences at once: a forward whose logits tell what the target may choose
        behind each pending token, then the draft loop, in which branches and ordinary wishes are alike.
        """
        assert self._states is None, "the states of tokens that are pending are not known"
        wish_of = {wish.view.request_id: wish for wish in wishes}
        in_use = set(wish_of)
        assert len(in_use) == len(wishes), "one wish per sequence"
        draftings = [
            drafting
            for view in self._sequences.in_turns([wish.view for wish in wishes])
            if (drafting := self._open_ahead(wish_of[view.request_id], in_use))
        ]
        plain: list[Chunk] = []
        guessed: list[Drafting] = []
        for chunk in self._read_pieces(self._sequences.chunks(draftings)):
            outlook = chunk.drafting.outlook
            if chunk.completes and outlook is not None and not self._goes_straight_on(outlook):
                guessed.append(chunk.drafting)
            else:
                plain.append(chunk)
        self._draft(plain, self._branch_out(guessed, in_use))
        answers = {one.view.request_id: [self._answer(one)] for one in draftings if one.token_ids}
        for drafting in guessed:
            if kept := self._sequences.branches.drop_empty(drafting.view.request_id):
                self._num_branches += len(kept)
                answers[drafting.view.request_id] = [self._branch_proposal(drafting, one) for one in kept]
        return answers

    @property
    def missing_states(self) -> Mapping[RequestId, int]:
        """See `proposers.base.ReadsStates`."""
        return {} if self._states is None else self._states.missing

    def num_unread(self, view: SequenceView) -> int:
        """See `proposers.base.ReadsAlong`."""
        return self._sequences.num_unread(view)

    def has_room(self, owner: str, num_tokens: int) -> bool:
        """See `proposers.base.HasRoom`."""
        return self._sequences.has_room(owner, num_tokens)

    @property
    def memory_held(self) -> float:
        """See `proposers.base.HasRoom`."""
        return self._sequences.memory_held

    @property
    def crowded_out(self) -> Sequence[RequestId]:
        """See `proposers.base.HasRoom`."""
        return self._sequences.crowded_out

    def stage_weights(self, weights: Mapping[str, torch.Tensor]) -> StagedWeights:
        """See `model.renewal.TakesWeights`."""
        return stage(self._model_runner(), weights)

    def take_weights(self, staged: StagedWeights) -> bool:
        """See `model.renewal.TakesWeights`. Sequences keep what was read of them with the former weights."""
        is_taken = take(self._model_runner(), staged)
        if is_taken:
            self._sequences.renew()
        return is_taken

    def _model_runner(self) -> ModelRunner:
        assert isinstance(self._runner, ModelRunner), "whoever learns has a model of its own"
        return self._runner

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Free the blocks of these sequences."""
        ids = tuple(request_ids)
        self._sequences.release(ids)
        if self._states is not None:
            self._states.release(ids)

    def close(self) -> None:
        """Forget all sequences."""
        self.release(self._sequences.known)

    def check_integrity(self) -> None:
        """Assert that all blocks held are held by a sequence known here."""
        self._sequences.check_integrity()

    def _has_states(self, drafting: Drafting) -> bool:
        """Return whether the states of all that is to be read of a sequence are there, if any are needed."""
        if self._states is None:
            return True
        return self._states.reach_back_to(drafting.view.request_id, drafting.state.num_read)

    def _num_read_behind(self, budget: int) -> int:
        """Return how many places behind the committed tokens a draft of `budget` tokens takes."""
        return budget

    def _read_pieces(self, chunks: list[Chunk]) -> list[Chunk]:
        """Read what does not fit beside the window at once, but for the last piece of each; return these."""
        while pieces := self._sequences.pieces(chunks):
            self._draft(pieces)
            chunks = self._sequences.behind(chunks)
        return chunks

    def _draft(self, chunks: Sequence[Chunk], branched: Sequence[tuple[Drafting, HeldBranch]] = ()) -> None:
        """Read committed tokens, and draft behind those of every sequence that is up to date then.

        With them, draft behind branches.
        """
        starts = [self._start(chunk) for chunk in chunks]
        q_rows = [chunk.drafting.q_rows for chunk in chunks]
        if branched:
            starts += [self._branch_start(drafting, held) for drafting, held in branched]
            q_rows += [held.q_rows for _, held in branched]
        if not starts:
            return
        chains = self._chains(starts, q_rows)
        for chunk, chain in zip(chunks, chains, strict=False):
            drafting = chunk.drafting
            # The last token was not read.
            behind = tuple(chain[:-1])
            if chunk.completes and drafting.outlook is not None:
                pending, ends = drafting.outlook.pending, drafting.outlook.ends
                behind = (*pending, *behind)
                if len(chain) < 2 or chain[0] in ends:
                    chain = []  # nothing comes behind the guess
                drafting.state.assumed = (*pending, *chain[:1])
                self._num_branches += bool(chain)
            drafting.token_ids = chain
            self._sequences.note_read(drafting, chunk.num_tokens, () if self._states is not None else behind)
        for (_, held), chain in zip(branched, chains[len(chunks) :], strict=True):
            held.chain = chain

    def _goes_straight_on(self, outlook: Outlook) -> bool:
        """Whether the guess and what comes behind it are one chain: no row has to be ranked before.

        What a request does to logits counts committed tokens, and draws of its own follow them: neither is
        known of tokens that are pending.
        """
        view = outlook.wish.view
        return (
            outlook.goes_straight_on
            and outlook.num_draft_tokens > 0
            and self._sampling.shares_noise
            and not view.params.shapes_logits
            and view.constraint is None
        )

    def _start(self, chunk: Chunk) -> ChainStart:
        drafting, num_tokens, completes = chunk
        view, state = drafting.view, drafting.state
        params, seed = self._sampling.of(view)
        if completes and drafting.outlook is not None:
            read = self._outlook_read(drafting)
            return ChainStart(
                token_ids=read.token_ids,
                start=read.start,
                block_table=state.table.block_ids,
                budget=1 + drafting.outlook.num_draft_tokens,
                params=params,
                seed=seed,
                shift=state.shift,
                num_dropped=state.table.num_dropped,
            )
        return ChainStart(
            token_ids=state.origin.tokens(view.token_ids, state.num_read, state.num_read + num_tokens),
            start=state.num_read,
            block_table=state.table.block_ids,
            budget=max(0, drafting.budget) if completes else 0,
            params=params,
            seed=seed,
            shaper=self._shaper(drafting) if completes and params.shapes_logits else None,
            shift=state.shift,
            constraint=view.constraint if completes else None,
            num_dropped=state.table.num_dropped,
            states=self._states_of(chunk),
        )

    def _states_of(self, chunk: Chunk) -> torch.Tensor | None:
        if self._states is None:
            return None
        start = chunk.drafting.state.num_read
        return self._states.before(chunk.drafting.view.request_id, start, start + chunk.num_tokens)

    def _chains(self, starts: Sequence[ChainStart], q_rows: QRows) -> list[list[int]]:
        if self._sampling.gives_q_rows and not all(start.params.is_greedy for start in starts):
            return self._stepwise_loop.draft(starts, q_rows)
        chains = None if self._fused_loop is None else self._fused_loop.try_draft(starts)
        return self._stepwise_loop.draft(starts) if chains is None else chains

    def _open_ahead(self, wish: AheadWish, in_use: set[RequestId]) -> Drafting | None:
        """As `DraftSequences.open`, with room for what is pending."""
        if wish.is_ordinary:
            return self._sequences.open(wish.view, wish.num_draft_tokens, in_use)
        outlook = Outlook.of(
            wish,
            vocab_size=self._runner.vocab_size,
            most_len=self._sequences.most_len(wish.view.committed_len),
            most_new=self._sequences.num_left_in_variant(wish.view.committed_len),
            ends=wish.view.params.stop_ids(self._eos_token_ids),
        )
        num_tokens = 0 if outlook is None else len(outlook.pending)
        if outlook is not None and self._goes_straight_on(outlook):
            num_tokens += outlook.num_draft_tokens
        drafting = self._sequences.open(wish.view, num_tokens, in_use)
        if drafting is not None:
            drafting.outlook = outlook
            drafting.budget = 0 if outlook is None else wish.num_draft_tokens
        return drafting

    def _branch_out(
        self, draftings: Sequence[Drafting], in_use: set[RequestId]
    ) -> list[tuple[Drafting, HeldBranch]]:
        """Read what is pending; return the branches that there is room for, the most promising first."""
        if not draftings:
            return []
        guessed = self._guesser.guess([self._outlook_read(drafting) for drafting in draftings])
        wanted: dict[str, list[tuple[Drafting, Branch]]] = {}
        for drafting, branches in zip(draftings, guessed, strict=True):
            wanted.setdefault(drafting.state.owner, []).extend([(drafting, branch) for branch in branches])
        for of_owner in wanted.values():
            of_owner.sort(key=lambda one: one[1].promise)
        branched: list[tuple[Drafting, HeldBranch]] = []
        copies: list[BlockCopy] = []
        for drafting in draftings:
            assert drafting.outlook is not None
            num_tokens = drafting.view.committed_len - drafting.state.num_read
            self._sequences.note_read(drafting, num_tokens, drafting.outlook.pending)
        for drafting, branch in self._sequences.branches.in_turns(wanted):
            view, state = drafting.view, drafting.state
            held = self._sequences.branches.try_hold(
                view.request_id, state.owner, state.table, view.committed_len, branch, in_use
            )
            if held is None:
                self._num_branches_left_out += 1
                continue
            branched.append((drafting, held))
            if held.copy is not None:
                copies.append(held.copy)
        if copies:
            self._runner.copy_blocks([one.source for one in copies], [one.destination for one in copies])
        return branched

    def _outlook_read(self, drafting: Drafting) -> OutlookRead:
        """Begin to read where there are no K/V, or at the first row behind which a token is to be guessed."""
        outlook, state, view = drafting.outlook, drafting.state, drafting.view
        assert outlook is not None
        start, committed_len = state.num_read, view.committed_len
        if state.standing is not None:
            pairs = zip(state.standing, outlook.pending, strict=False)
            there = takewhile(lambda pair: pair[0] == pair[1], pairs)
            start = min(start + outlook.first, committed_len + sum(1 for _ in there))
        committed = state.origin.tokens(view.token_ids, start, committed_len)
        return OutlookRead(
            outlook=outlook,
            token_ids=[*committed, *outlook.pending[max(0, start - committed_len) :]],
            start=start,
            block_table=drafting.state.table.block_ids,
            shift=drafting.state.shift,
            num_dropped=drafting.state.table.num_dropped,
            shaper=self._shaper(drafting) if drafting.view.params.shapes_logits else None,
        )

    def _branch_start(self, drafting: Drafting, held: HeldBranch) -> ChainStart:
        """Go on behind the token that the target is assumed to choose."""
        view, branch = drafting.view, held.branch
        params, seed = self._sampling.of(view, len(branch.assumed))
        return ChainStart(
            token_ids=branch.assumed[-1:],
            start=view.committed_len + branch.num_kept,
            block_table=held.table.block_ids,
            budget=branch.budget,
            params=params,
            seed=seed,
            shaper=self._shaper(drafting) if params.shapes_logits else None,
            shift=drafting.state.shift,
            constraint=view.constraint,
            assumed=branch.assumed,
            num_dropped=held.table.num_dropped,
        )

    def _shaper(self, drafting: Drafting) -> LogitShaper | None:
        """Return what the request does to logits behind its committed tokens."""
        view, state = drafting.view, drafting.state
        if state.shaper is None:
            state.shaper = shaper_for(
                view.params, eos_token_ids=self._eos_token_ids, num_prompt_tokens=view.num_prompt_tokens
            )
        assert state.shaper is not None
        state.shaper.commit(view.token_ids[state.shaper.num_committed :])
        return state.shaper

    def _proposal(self, drafting: Drafting) -> Proposal:
        return self._as_proposal(drafting.view, (), drafting.token_ids, drafting.q_rows)

    def _answer(self, drafting: Drafting) -> Proposal:
        """Return what was drafted for a wish: behind the committed tokens, or behind the one guess."""
        if drafting.outlook is None:
            return self._proposal(drafting)
        guess, *chain = drafting.token_ids
        return self._as_proposal(drafting.view, (*drafting.outlook.pending, guess), chain, [])

    def _branch_proposal(self, drafting: Drafting, held: HeldBranch) -> Proposal:
        return self._as_proposal(drafting.view, held.branch.assumed, held.chain, held.q_rows)

    def _as_proposal(
        self,
        view: SequenceView,
        assumed: tuple[int, ...],
        chain: Sequence[int],
        q_rows: Sequence[TokenDistribution],
    ) -> Proposal:
        """Return a chain behind the committed and the assumed tokens."""
        stream = self._sampling.stream_of(view.params)
        return Proposal(
            request_id=view.request_id,
            committed_len=view.committed_len + len(assumed),
            prefix_hash=extend_prefix_hash(view.prefix_hash, assumed),
            token_ids=tuple(chain),
            noise_stream=stream,
            q_rows=tuple(q_rows) if self._sampling.gives_q_rows and stream is not None else None,
            method=self.capabilities.name,
        )


def _longest(runner: Runner, reading: DraftReading) -> int:
    """Return how many tokens a prefix and its draft can have together."""
    window, max_context = reading.window, reading.max_context
    limit = ANY_LENGTH if window is not None and window.num_positions is not None else runner.max_model_len
    if window is None or window.max_blocks(limit, runner.block_size) > runner.num_blocks - 1:
        limit = min(limit, (runner.num_blocks - 1) * runner.block_size)
    return limit if max_context is None else min(limit, max_context)
