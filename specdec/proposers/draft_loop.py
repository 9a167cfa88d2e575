"""From committed prefixes to chains of draft tokens: forward, choose, go on with what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from specdec.core.distributions import TokenDistribution
from specdec.core.proposal import NoiseStream
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import TokenConstraint
from specdec.model.batch import NO_TOKEN, GeneratingRunner, PositionShift, Runner, SequenceSlice
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import TokenChooser
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.sampling.shaping import LogitShaper, apply_masks
from specdec.verification.draft_rows import pack_rows

if TYPE_CHECKING:
    import torch

QRows = Sequence[list[TokenDistribution]]
"""By chain, by token."""


class ChainStart(NamedTuple):
    """Committed tokens of one sequence to read, and how many to draft behind them."""

    token_ids: Sequence[int]
    start: int
    """Absolute position of the first one."""
    block_table: Sequence[int]
    """Has room for these tokens and the draft but its last token."""
    budget: int
    """0: only read."""
    params: SamplingParams
    seed: int
    shaper: LogitShaper | None = None
    """What the request does to logits; it has been told of all committed tokens."""
    shift: PositionShift | None = None
    """As in `SequenceSlice`."""
    constraint: TokenConstraint | None = None
    """What the request's grammar allows."""
    assumed: Sequence[int] = ()
    """Tokens before the first draft token of which `shaper` and `constraint` have not been told."""
    num_dropped: int = 0
    """As in `SequenceSlice`."""
    states: torch.Tensor | None = None
    """As in `SequenceSlice`."""

    @property
    def changes_logits(self) -> bool:
        """Whether something has to be done between the forward and the choice of a token."""
        return self.shaper is not None or self.constraint is not None

    @property
    def end(self) -> int:
        """Absolute position of the first draft token."""
        return self.start + len(self.token_ids)

    def first_slice(self) -> SequenceSlice:
        """Return the committed tokens as a slice."""
        return SequenceSlice(
            token_ids=self.token_ids,
            start=self.start - self.num_dropped,
            block_table=self.block_table,
            num_logit_rows=int(self.budget > 0),
            shift=None if self.shift is None or self.start >= self.shift.end else self.shift,
            num_dropped=self.num_dropped,
            states=self.states,
        )


class FusedDraftLoop(Protocol):
    """Drafts chains of several sequences without coming back to the interpreter between tokens.

    Its chains are those of `StepwiseDraftLoop`. That one remains in charge of whatever has to happen between
    two tokens outside the fused code (a penalty, say): for such a batch the answer here is None.
    """

    def try_draft(self, starts: Sequence[ChainStart]) -> list[list[int]] | None:
        """Return the chain of each start; None when it cannot be done here: then it is for the other one.

        K/V that were written all the same are those that the other one writes.
        """
        ...


class StepwiseDraftLoop:
    """One forward and one choice at a time, on any runner and device: the definition of what is drafted.

    A chain is what the token function chooses on the model's logits, token by token, up to the budget or to
    logits that are not finite. It does not depend on the company.
    """

    def __init__(
        self, runner: Runner, sampler: TokenChooser, vocab_size: int, stream: NoiseStream = "target"
    ) -> None:
        """Draft with `runner` and noise of `stream`; tokens from `vocab_size` on are never chosen."""
        self._runner = runner
        self._sampler = sampler
        self._vocab_size = min(vocab_size, runner.vocab_size)
        self._stream = stream

    def draft(self, starts: Sequence[ChainStart], q_rows: QRows | None = None) -> list[list[int]]:
        """Return the chain of each start; add what each of its tokens was drawn from to its `q_rows`."""
        chains: list[list[int]] = [[] for _ in starts]
        slices = [start.first_slice() for start in starts]
        active = [number for number, start in enumerate(starts) if start.budget > 0]
        while slices:
            ends = [(starts[number], chains[number]) for number in active]
            chosen = self._choose(slices, ends, None if q_rows is None else [q_rows[n] for n in active])
            for number, token_id in zip(active, chosen, strict=True):
                if token_id != NO_TOKEN:
                    chains[number].append(token_id)
            active = [
                number
                for number, token_id in zip(active, chosen, strict=True)
                if token_id != NO_TOKEN and len(chains[number]) < starts[number].budget
            ]
            slices = [
                SequenceSlice(
                    token_ids=chains[number][-1:],
                    start=starts[number].end - starts[number].num_dropped + len(chains[number]) - 1,
                    block_table=starts[number].block_table,
                    num_logit_rows=1,
                    shift=starts[number].shift,
                    num_dropped=starts[number].num_dropped,
                    depth=len(chains[number]),
                )
                for number in active
            ]
        return chains

    def _choose(
        self,
        slices: Sequence[SequenceSlice],
        ends: Sequence[tuple[ChainStart, list[int]]],
        q_rows: QRows | None,
    ) -> list[int]:
        """Run one forward; return the next token of each chain, given by its start and its tokens so far."""
        logits_RV = self._runner.forward(slices)
        if not ends:
            return []
        rows = SamplingRows.build(
            [RowSpec(start.params, start.seed, start.end + len(chain), 1) for start, chain in ends],
            logits_RV.device,
        )
        logits_RV = self._shape(logits_RV[:, : self._vocab_size], ends)
        sampled = self._sampler.sample(logits_RV, rows, self._stream)
        token_ids: list[int] = sampled.token_ids.masked_fill(~sampled.finite, NO_TOKEN).tolist()
        if q_rows is not None:
            packed = pack_rows(self._sampler.distributions(logits_RV, rows))
            for token_id, row, its_rows in zip(token_ids, packed, q_rows, strict=True):
                if token_id != NO_TOKEN:
                    its_rows.append(row)
        return token_ids

    def _shape(self, logits_RV: torch.Tensor, ends: Sequence[tuple[ChainStart, list[int]]]) -> torch.Tensor:
        """Return the logits as their requests want them changed, as the target does with its own."""
        if not any(start.changes_logits for start, _ in ends):
            return logits_RV
        logits_RV = logits_RV.clone()
        first_token_id = self._sampler.first_token_id
        for row, (start, chain) in enumerate(ends):
            path = [*start.assumed, *chain] if start.assumed else chain
            shape_rows(logits_RV[row : row + 1], start.shaper, start.constraint, [path], first_token_id)
        return logits_RV


def shape_rows(
    logits_RV: torch.Tensor,
    shaper: LogitShaper | None,
    constraint: TokenConstraint | None,
    paths: Sequence[Sequence[int]],
    first_token_id: int,
) -> None:
    """Change, in place, the logits of one sequence as its request wants it.

    Args:
        logits_RV: its rows, fp32.
        shaper: what the request does to logits, if anything.
        constraint: what its grammar allows, if it has one.
        paths: tokens between the last committed one and each row's position.
        first_token_id: token id of the first column.
    """
    if shaper is not None:
        shaper.shape(logits_RV, paths, first_token_id=first_token_id)
    if constraint is None:
        return
    for row, path in enumerate(paths):
        mask = constraint.allowed_after(path)
        if mask is not None:
            apply_masks(logits_RV[row : row + 1], [mask], first_token_id=first_token_id)


class NativeDraftLoop:
    """Implements `FusedDraftLoop` where both the forward and the token function are compiled for the CPU."""

    def __init__(
        self,
        runner: GeneratingRunner,
        sampler: TokenChooser,
        vocab_size: int,
        stream: NoiseStream = "target",
    ) -> None:
        """Draft with `runner` and noise of `stream`; tokens from `vocab_size` on are never chosen."""
        self._runner = runner
        self._sampler = sampler
        self._vocab_size = min(vocab_size, runner.vocab_size)
        self._stream = stream

    def try_draft(self, starts: Sequence[ChainStart]) -> list[list[int]] | None:
        """See `FusedDraftLoop`; None while anything of it is not compiled."""
        if any(start.changes_logits for start in starts):
            return None
        sequences = [SequenceSampling(start.params, start.seed) for start in starts]
        chooser = self._sampler.chooser(sequences, self._vocab_size, self._stream)
        if chooser is None:
            return None
        num_more = [max(0, start.budget - 1) for start in starts]
        generated = self._runner.try_generate([start.first_slice() for start in starts], num_more, chooser)
        if generated is None:
            return None
        chains: list[list[int]] = []
        first = 0
        for start in starts:
            chain = generated.token_ids[first : first + start.budget]
            first += start.budget
            chains.append(chain[: chain.index(NO_TOKEN)] if NO_TOKEN in chain else chain)
        return chains
