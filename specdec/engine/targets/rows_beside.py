"""What the target says at rows beside drafts: told apart from what it says to the drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from specdec.core.plan import TargetWork, WorkResult
from specdec.core.proposal import NoiseStream
from specdec.engine.targets.work_rows import all_rows
from specdec.model.batch import NO_TOKEN
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import TokenChooser
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.tree.topology import topology_of


class PartedLogits(NamedTuple):
    """The logits of a step."""

    own: torch.Tensor
    """Rows that give tokens of the works."""
    beside: torch.Tensor
    """Rows beside that are answered."""


def part_logits(works: Sequence[TargetWork], num_own: Sequence[int], logits: torch.Tensor) -> PartedLogits:
    """Tell rows apart, given how many of each work are its own: those beside come behind them."""
    own, beside = _places(works, num_own)
    return PartedLogits(_joined([logits[rows] for rows in own]), _joined([logits[rows] for rows in beside]))


def part_tokens(
    works: Sequence[TargetWork], num_own: Sequence[int], token_ids: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Tell tokens that were chosen at all rows apart, as `part_logits` does with their logits."""
    own, beside = _places(works, num_own)
    return [one for rows in own for one in token_ids[rows]], [
        one for rows in beside for one in token_ids[rows]
    ]


def _places(works: Sequence[TargetWork], num_own: Sequence[int]) -> tuple[list[slice], list[slice]]:
    """Return where the own rows of each work are, and the answered ones beside them."""
    own: list[slice] = []
    beside: list[slice] = []
    first = 0
    for work, number in zip(works, num_own, strict=True):
        own.append(slice(first, first + number))
        first += number
        if work.beside is not None:
            first += work.beside.num_rows
            beside.append(slice(first - work.beside.num_answered, first))
    return own, beside


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def with_answers_beside(
    results: Sequence[WorkResult],
    works: Sequence[TargetWork],
    sequences: Sequence[SequenceSampling],
    logits: torch.Tensor,
    sampler: TokenChooser,
    stream: NoiseStream,
) -> tuple[WorkResult, ...]:
    """Return results that tell the token function's choices at the answered rows, `logits` those of all.

    Penalties and grammars have no say in them. `stream` is the one that the rule lets drafts be drawn with:
    what is said here ends up in drafts, where a rule that draws tokens itself must not meet its own noise.
    """
    specs = [
        _spec(work, sampling, number)
        for work, sampling, number in zip(works, sequences, map(_num_answered, works), strict=True)
        if number
    ]
    if not specs:
        return tuple(results)
    chosen = sampler.sample(logits, SamplingRows.build(specs, logits.device), stream)
    return with_told_beside(results, works, chosen.token_ids.masked_fill(~chosen.finite, NO_TOKEN).tolist())


def with_told_beside(
    results: Sequence[WorkResult], works: Sequence[TargetWork], token_ids: Sequence[int]
) -> tuple[WorkResult, ...]:
    """Return results that tell the tokens chosen at the answered rows beside, those of all works."""
    telling: list[WorkResult] = []
    first = 0
    for result, number in zip(results, map(_num_answered, works), strict=True):
        answers = tuple(token_ids[first : first + number])
        first += number
        if answers and NO_TOKEN not in answers:
            result = msgspec.structs.replace(result, beside=answers)
        telling.append(result)
    return tuple(telling)


def _num_answered(work: TargetWork) -> int:
    return 0 if work.beside is None else work.beside.num_answered


def _spec(work: TargetWork, sampling: SequenceSampling, number: int) -> RowSpec:
    token_ids, parents = all_rows(work)
    depths = topology_of(len(token_ids), parents).depths  # 1 for the first row of the work
    return RowSpec(*sampling, work.start, number, depths[-number:])
