"""Guessing the token that the target adds to the pending tokens that it lets stand.

A draft model that shares the target's noise knows most of what decides it: behind every pending token its own
noisy scores, log q / T + g, rank the target's choices (`benchmarks/hit_rates.py`: given that its first guess
is wrong, the right token is the more often among the next few). The pending token itself is not among the
guesses: that would be an acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import TokenConstraint
from specdec.model.batch import PositionShift, Runner, SequenceSlice
from specdec.proposers.base import AheadWish
from specdec.proposers.branches import Branch
from specdec.proposers.draft_loop import shape_rows
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import TokenChooser
from specdec.sampling.shaping import LogitShaper

BonusBy = Literal["noise", "probability"]
"""What ranks the guesses: the drafter's noisy scores, or its probabilities alone (to compare with)."""
_MAX_ENDS = 32
"""A request that names more tokens that end it may get fewer guesses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The verdicts on one sequence's pending tokens that are worth guessing behind: first <= a <= last."""

    wish: AheadWish
    first: int
    last: int
    most_len: int
    """Tokens that the draft model can read, draft included."""
    ends: frozenset[int]
    """Tokens that end the text."""

    @staticmethod
    def of(
        wish: AheadWish, *, vocab_size: int, most_len: int, most_new: int | None, ends: frozenset[int]
    ) -> Outlook | None:
        """Return what is worth guessing behind; None when nothing is.

        Args:
            wish: one with a fan-out.
            vocab_size: tokens that the draft model can read.
            most_len: tokens that it can read, draft included.
            most_new: tokens that may be committed before all K/V change (`model.rotary`); None: any number.
            ends: tokens that end the text: nothing comes behind them.
        """
        assert wish.fan_out is not None
        assert len(wish.fan_out) == len(wish.pending) + 1, "one number per verdict"
        if wish.num_draft_tokens <= 0:
            return None
        view, params = wish.view, wish.view.params
        num_verdicts = len(wish.fan_out)
        for index, token_id in enumerate(wish.pending):
            if token_id >= vocab_size or token_id in ends:
                num_verdicts = index + 1
                break
        num_verdicts = min(num_verdicts, most_len - 1 - view.committed_len)
        if most_new is not None:
            num_verdicts = min(num_verdicts, most_new)
        if params.max_tokens is not None:  # its last token has nothing behind it
            num_generated = view.committed_len - view.num_prompt_tokens
            num_verdicts = min(num_verdicts, params.max_tokens - 1 - num_generated)
        wanted = [a for a in range(num_verdicts) if wish.fan_out[a] > 0]
        if not wanted:
            return None
        return Outlook(wish=wish, first=wanted[0], last=wanted[-1], most_len=most_len, ends=ends)

    @property
    def pending(self) -> tuple[int, ...]:
        """Pending tokens to read."""
        return self.wish.pending[: self.last]

    @property
    def num_draft_tokens(self) -> int:
        """Tokens to draft behind the guess that comes after all pending tokens: what there is room for."""
        committed_len = self.wish.view.committed_len
        return min(self.wish.num_draft_tokens, self.most_len - (committed_len + len(self.wish.pending) + 1))

    @property
    def num_rows(self) -> int:
        """Verdicts."""
        return self.last - self.first + 1

    @property
    def goes_straight_on(self) -> bool:
        """Whether there is one guess: all pending tokens stand, and the drafter's first choice follows."""
        assert self.wish.fan_out is not None
        return self.first == self.last == len(self.wish.pending) and self.wish.fan_out[self.last] == 1

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Tokens between the last committed one and each guess."""
        return [self.wish.pending[:a] for a in range(self.first, self.last + 1)]

    def num_ranked(self) -> int:
        """Tokens to rank, so that enough are left without those that are no guesses."""
        assert self.wish.fan_out is not None
        most = max(self.wish.fan_out[self.first : self.last + 1])
        return most + 1 + min(len(self.ends), _MAX_ENDS)

    def branches(self, ranked: Sequence[Sequence[int]]) -> list[Branch]:
        """Return what to prepare for, given the ranked tokens of each row."""
        assert self.wish.fan_out is not None
        view, pending, fan_out = self.wish.view, self.wish.pending, self.wish.fan_out
        branches: list[Branch] = []
        for a, token_ids in enumerate(ranked, self.first):
            not_guessed = {*self.ends, *pending[a : a + 1]}
            guesses = [token_id for token_id in token_ids if token_id not in not_guessed][: fan_out[a]]
            budget = min(self.wish.num_draft_tokens, self.most_len - (view.committed_len + a + 1))
            # Where more guesses are wanted, a verdict is thought to be more likely; and guesses are better
            # behind a chain that stands as a whole.
            of_verdict = (-fan_out[a], int(a < len(pending)), a)
            branches += [
                Branch(a, token_id, (*pending[:a], token_id), budget, rank, (rank, *of_verdict))
                for rank, token_id in enumerate(guesses)
            ]
        return branches


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlookRead:
    """An outlook, and where its tokens are read."""

    outlook: Outlook
    token_ids: Sequence[int]
    """Tokens to read: committed ones, and then pending ones."""
    start: int
    """Position from which tokens are read: K/V of those before are there."""
    block_table: Sequence[int]
    shift: PositionShift | None
    num_dropped: int
    """As in `SequenceSlice`."""
    shaper: LogitShaper | None
    """It has been told of all committed tokens."""

    @property
    def params(self) -> SamplingParams:
        """The request's."""
        return self.outlook.wish.view.params

    @property
    def constraint(self) -> TokenConstraint | None:
        """What the request's grammar allows."""
        return self.outlook.wish.view.constraint

    def slice(self) -> SequenceSlice:
        """Return the tokens to read; rows with logits are those behind which there are guesses."""
        shift = self.shift
        return SequenceSlice(
            token_ids=self.token_ids,
            start=self.start - self.num_dropped,
            block_table=self.block_table,
            num_logit_rows=self.outlook.num_rows,
            shift=None if shift is None or self.start >= shift.end else shift,
            num_dropped=self.num_dropped,
        )

    def row_spec(self) -> RowSpec:
        """Return what decides the target's tokens at these rows, beside logits."""
        view = self.outlook.wish.view
        return RowSpec(view.params, view.seed, view.committed_len + self.outlook.first, self.outlook.num_rows)


class BonusGuesser:
    """Reads pending tokens and ranks what the target may choose behind each, for a whole batch at once."""

    def __init__(
        self, runner: Runner, sampler: TokenChooser, vocab_size: int, *, shares_noise: bool, by: BonusBy
    ) -> None:
        """Guess with `runner` among the first `vocab_size` tokens; noise is of use where it is shared."""
        self._runner = runner
        self._sampler = sampler
        self._vocab_size = min(vocab_size, runner.vocab_size)
        self._has_noise = shares_noise and by == "noise"

    def guess(self, reads: Sequence[OutlookRead]) -> list[list[Branch]]:
        """Read what is to be read and return the branches of each, by verdict and rank."""
        if not reads:
            return []
        logits_RV = self._runner.forward([read.slice() for read in reads])[:, : self._vocab_size]
        rows = SamplingRows.build([read.row_spec() for read in reads], logits_RV.device)
        if any(read.shaper is not None or read.constraint is not None for read in reads):
            logits_RV = logits_RV.clone()
            end = 0
            for read in reads:
                first, end = end, end + read.outlook.num_rows
                shape_rows(
                    logits_RV[first:end],
                    read.shaper,
                    read.constraint,
                    read.outlook.paths,
                    self._sampler.first_token_id,
                )
        most = max(read.outlook.num_ranked() for read in reads)
        ranked = iter(self._sampler.ranked(logits_RV, rows, most, "target" if self._has_noise else None))
        return [read.outlook.branches([next(ranked) for _ in range(read.outlook.num_rows)]) for read in reads]
