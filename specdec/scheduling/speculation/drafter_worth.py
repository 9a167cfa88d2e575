"""What drafters are worth to requests, for what they cost, and which of them bring most together."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.scheduling.speculation.cost import CostModel, Floats

Ints = NDArray[np.int64]

_ROWS_AHEAD = 4
"""A draft row is thought to cost what rows up to so many for each sequence do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCosts:
    """What drafters are weighed by. D drafters, K draft tokens at most."""

    rate: float
    """Tokens per second of all requests together."""
    row_s: float
    """What a draft row of a sequence of mean context costs the target, seconds."""
    row_token_s: float = 0.0
    """What each token of context beyond the mean adds to that."""
    fixed_s: Floats
    """[D, K]: what drafts of 1 to K tokens cost, however many sequences take part."""
    sequence_s: Floats
    """[D]: what a sequence adds to each step."""
    token_s: Floats
    """[D]: what each token that it attends to adds to that."""
    is_drafting: bool = True
    """Whether requests are drafted for at present, but for probes."""


def drafter_costs(
    costs: CostModel,
    num_sequences: int,
    context_tokens: float,
    num_positions: int,
    *,
    rate: float | None,
    is_drafting: bool,
) -> DrafterCosts:
    """Return what drafters are weighed by in rounds of so many sequences, for drafts of so many tokens.

    Without a `rate`, that of rounds without drafts.
    """
    table = costs.verify.table(num_sequences, context_tokens)
    last = len(table) - 1
    first, behind = min(num_sequences, last), min(_ROWS_AHEAD * num_sequences, last)
    steps = np.arange(1, num_positions + 1)
    all_take_part = np.full((1, num_positions), num_sequences)
    corrections = np.array([one.correction(num_sequences) for one in costs.drafts])
    sequence_s = corrections * [one.per_sequence_s(num_sequences) for one in costs.drafts]
    of_all_s = np.concatenate([one.by_steps(all_take_part, 0.0) for one in costs.drafts])
    return DrafterCosts(
        rate=num_sequences / float(table[first]) if rate is None else rate,
        row_s=float(table[behind] - table[first]) / max(1, behind - first),
        row_token_s=costs.verify.own_context_s,
        fixed_s=np.maximum(of_all_s - num_sequences * sequence_s[:, None] * steps, 0.0),
        sequence_s=sequence_s,
        token_s=corrections * [one.per_token for one in costs.drafts],
        is_drafting=is_drafting,
    )


class Worth(NamedTuple):
    """What an assignment of drafters brings beside a token for each request, in tokens. Larger is better."""

    tokens: float
    """A drafter that costs more than it brings is not asked, and brings nothing."""
    if_asked: float
    """As if every drafter were asked for everyone: says how far one is from bringing something."""


def worth_of(values: Floats, fixed: Floats, drafters: Ints) -> Worth:
    """Return what requests with these drafters bring: of each drafter's, the best length.

    Args:
        values: [N, D, K]: what drafts of up to 1 to K tokens are worth, but for fixed costs, in tokens.
        fixed: [D, K]: tokens that are lost by drafting so many.
        drafters: [N].
    """
    tokens = if_asked = 0.0
    for place in range(values.shape[1]):
        its = values[drafters == place, place]
        if len(its):
            tokens += max(0.0, float((np.maximum(its, 0.0).sum(0) - fixed[place]).max()))
            if_asked += float((its.sum(0) - fixed[place]).max())
    return Worth(round(tokens, 9), if_asked)


def best_assignment(values: Floats, fixed: Floats, present: Ints, is_free: NDArray[np.bool_]) -> Ints:
    """Return the drafters that bring most together, [N]; only those who are free change.

    Of every set of drafters, each request gets the one that is worth most to it.
    """
    num_drafters = values.shape[1]
    own_best = values.max(2)
    best, best_worth = present, worth_of(values, fixed, present)
    for size in range(1, num_drafters + 1):
        for members in itertools.combinations(range(num_drafters), size):
            places = np.array(members, dtype=np.int64)
            found = np.where(is_free, places[own_best[:, places].argmax(1)], present)
            worth = worth_of(values, fixed, found)
            if worth > best_worth:
                best, best_worth = found, worth
    return best
