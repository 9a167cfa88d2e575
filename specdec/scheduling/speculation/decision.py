"""One choice of the goodput controller, with what was expected of it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.acceptance import Floats
from specdec.scheduling.speculation.batch_sizes import size_class
from specdec.scheduling.speculation.controller import RoundObservation
from specdec.scheduling.speculation.explanation import Bound, Reason
from specdec.scheduling.speculation.goodput import Batch, Kind, Option
from specdec.scheduling.speculation.modes import OverlapMode

_MUCH_THE_SAME = 0.1
"""By how much budgets may differ from what was decided, as a share: some are cut where a request ends."""
NUM_LEVELS = 24
"""Levels of acceptance that continuations are shared out by: shares that were worked out are used again."""


class Region(NamedTuple):
    """Batches that are alike: powers of two of sequences, of eight of context per sequence."""

    sequences: int
    context: int


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One choice, with what was expected of it."""

    batch: Batch
    index: Mapping[RequestId, int]
    region: Region
    options: Mapping[Kind, Option]
    rates: Mapping[Kind, float]
    """Tokens per second of each option, measured rounds taken into account."""
    undrafted_rate: float
    """The same without any drafts, those that requests ask for left out: `plain` has these."""
    option: Option
    """What is done."""
    reason: Reason
    bounded_by: Bound
    num_draft_tokens: Sequence[int]
    """By request."""
    is_partial: bool
    """Whether these are those of the option for some requests only (a probe)."""
    gains: Sequence[float]
    """By request: accepted tokens that are expected of the draft tokens chosen."""
    gains_if_drafted: Sequence[Sequence[float]]
    """By request, by length: accepted tokens that are expected of a proposal."""
    acceptance_levels: Sequence[bytes]
    """By request, acceptance by position in `NUM_LEVELS` levels."""
    prices: Mapping[Kind, float]
    """Seconds of a round of each option by the costs that it was chosen by (`Foresight.price_s`)."""

    def expected_s(self, *, beside_prompts: bool = False) -> float:
        """Return the seconds of a round as decided, without those of prompts; in ping_pong, of a cohort."""
        option = self.option
        seconds = option.beside_prompts_s if beside_prompts else option.alone_s
        return (option.round_s if seconds is None else seconds) * (0.5 if option.kind == "ping_pong" else 1.0)

    @cached_property
    def usual_levels(self) -> bytes:
        """Acceptance by position, the mean over all, in `NUM_LEVELS` levels."""
        by_request = np.array([np.frombuffer(levels, np.uint8) for levels in self.acceptance_levels])
        mean: bytes = by_request.mean(axis=0).round().astype(np.uint8).tobytes()
        return mean

    @cached_property
    def compares_as(self) -> Hashable:
        """Equal for decisions whose rounds compare."""
        return self.option.kind, self.region

    def is_of_all(self, observation: RoundObservation) -> bool:
        """Whether as many sequences were in a round, and elsewhere meanwhile, as were decided for."""
        return observation.num_elsewhere + num_decoding_of(observation) == len(self.index)

    def is_followed(self, observation: RoundObservation) -> bool:
        """Whether a round asked for about as many draft tokens as were decided for those who are in it.

        In ping_pong one was under way when something else was decided: what it took and brought says nothing
        of that.
        """
        index, chosen = self.index, self.num_draft_tokens
        known = [(budget, chosen[index[one]]) for one, budget in observation.budgets.items() if one in index]
        asked, decided = sum(budget for budget, _ in known), sum(wanted for _, wanted in known)
        return abs(asked - decided) <= _MUCH_THE_SAME * decided

    @property
    def drafts_as_asked(self) -> bool:
        """Whether rounds of `plain` have drafts, since requests ask for them."""
        return bool(self.options["plain"].num_draft_tokens.any())

    @cached_property
    def rates_by_mode(self) -> Mapping[OverlapMode, float]:
        """Tokens per second of the best choice with drafts in each mode; rounds of `plain` that have some,
        since requests ask for them, are in lockstep.
        """
        rates: dict[OverlapMode, float] = {kind: rate for kind, rate in self.rates.items() if kind != "plain"}
        if self.drafts_as_asked:
            rates["lockstep"] = max(rates.get("lockstep", 0.0), self.rates["plain"])
        return rates

    @property
    def best_drafting(self) -> Option | None:
        """The best option with drafts; None when there is none."""
        kinds = [kind for kind in self.options if kind != "plain"]
        return self.options[max(kinds, key=lambda kind: self.rates[kind])] if kinds else None


def num_decoding_of(observation: RoundObservation) -> int:
    """Return how many sequences got new tokens."""
    number = observation.num_decoding
    return observation.num_sequences if number is None else number


def region_of(batch: Batch) -> Region:
    """Return the region that a batch is in."""
    per_sequence = batch.context_tokens / batch.num_sequences
    return Region(size_class(batch.num_sequences), max(0, math.ceil(math.log2(per_sequence / 512.0) / 3.0)))


def expected_gain(decision: Decision, observation: RoundObservation) -> float:
    """Return the draft tokens that were expected to be accepted in a round, given who was in it."""
    option, index = decision.option, decision.index
    drafted = observation.budgets or [one.request_id for one in observation.outcomes]
    gains = decision.gains
    foreseen = sum(gains)
    if not drafted or foreseen <= 0.0:
        return 0.0
    share = (option.tokens - len(gains)) / foreseen  # below 1 where not everyone has drafts (draft_ahead)
    return share * sum(gains[index[one]] for one in drafted if one in index)


def drafted_gain(decision: Decision, observation: RoundObservation) -> float:
    """Return the draft tokens that were to be accepted, given the proposals that there were."""
    index, gains = decision.index, decision.gains_if_drafted
    return sum(
        gains[index[one.request_id]][min(one.num_drafted, len(gains[0]) - 1)]
        for one in observation.outcomes
        if one.request_id in index
    )


def mean_draft_context(
    decision: Decision, budgets: Mapping[RequestId, int], usual: float | None
) -> float | None:
    """Return how many tokens a draft token attends to: the mean over all that were asked for; `usual` where
    nobody was there at the decision.
    """
    index, contexts = decision.index, decision.batch.draft_contexts
    known = [(budget, index[one]) for one, budget in budgets.items() if one in index and budget > 0]
    if contexts is None or not known:
        return usual
    return sum(budget * float(contexts[at]) for budget, at in known) / sum(budget for budget, _ in known)


def levels_of(accepted: Floats) -> list[bytes]:
    """Return acceptance by request and position, [N, K], in `NUM_LEVELS` levels."""
    return [row.tobytes() for row in (accepted * NUM_LEVELS).astype(np.uint8)]


def added_up(probabilities: Floats) -> Floats:
    """Return the sums of the first 0 to K of each row: [N, K + 1]."""
    sums = np.zeros((probabilities.shape[0], probabilities.shape[1] + 1))
    np.cumsum(probabilities, axis=1, out=sums[:, 1:])
    return sums
