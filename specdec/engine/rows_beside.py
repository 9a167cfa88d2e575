"""What the target says at rows beside drafts: told apart from what it says to the drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from specdec.core.plan import TargetWork, WorkResult
from specdec.engine.work_rows import all_rows
from specdec.model.batch import NO_TOKEN
from specdec.sampling.rows import RowSpec, SamplingRows, SequenceSampling
from specdec.sampling.sampler import TokenChooser
from specdec.tree.topology import topology_of


class PartedLogits(NamedTuple):
    """The logits of a step."""

    own: torch.Tensor
    """Rows that give tokens of the works."""
    beside: torch.Tensor
    """Rows beside that are answered."""


def part_logits(works: Sequence[TargetWork], num_own: Sequence[int], logits: torch.Tensor) -> PartedLogits:
    """Tell rows apart, given how many of each work are its own: those beside come behind them."""
    own: list[torch.Tensor] = []
    beside: list[torch.Tensor] = []
    first = 0
    for work, number in zip(works, num_own, strict=True):
        own.append(logits[first : first + number])
        first += number
        if work.beside is not None:
            first += work.beside.num_rows
            beside.append(logits[first - work.beside.num_answered : first])
    return PartedLogits(_joined(own), _joined(beside))


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def with_answers_beside(
    results: Sequence[WorkResult],
    works: Sequence[TargetWork],
    sequences: Sequence[SequenceSampling],
    logits: torch.Tensor,
    sampler: TokenChooser,
) -> tuple[WorkResult, ...]:
    """Return results that tell the token function's choices at the answered rows, `logits` those of all.

    Penalties and grammars have no say in them.
    """
    numbers = [0 if work.beside is None else work.beside.num_answered for work in works]
    specs = [
        _spec(work, sampling, number)
        for work, sampling, number in zip(works, sequences, numbers, strict=True)
        if number
    ]
    if not specs:
        return tuple(results)
    chosen = sampler.sample(logits, SamplingRows.build(specs, logits.device))
    token_ids: list[int] = chosen.token_ids.masked_fill(~chosen.finite, NO_TOKEN).tolist()
    told: list[WorkResult] = []
    first = 0
    for result, number in zip(results, numbers, strict=True):
        answers = tuple(token_ids[first : first + number])
        first += number
        if answers and NO_TOKEN not in answers:
            result = msgspec.structs.replace(result, beside=answers)
        told.append(result)
    return tuple(told)


def _spec(work: TargetWork, sampling: SequenceSampling, number: int) -> RowSpec:
    token_ids, parents = all_rows(work)
    depths = topology_of(len(token_ids), parents).depths  # 1 for the first row of the work
    return RowSpec(*sampling, work.start, number, depths[-number:])
