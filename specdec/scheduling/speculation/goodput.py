"""Which draft tokens are worth their time: k of every request, in every mode, by expected tokens per second.

The expected tokens of a round are 1 for each sequence, and for each draft token the probability that it is
there and accepted with all before it. The best set of draft tokens of any size takes those with the highest
probabilities (a token never comes before the one that it follows: its probability is not higher). So all
that has to be looked at is how many of them, in that order, and how deep proposals may be at most, because
each further step of the drafter costs time however few take part. Where contexts differ, tokens do not cost
the same: the order is then by what they bring for what they cost, a draft attending to what its budget leaves
(`kv.selection`), and its verification to the whole context. Time is that of a round:

    lockstep     T_draft + T_verify + overhead
    ping_pong    twice max(T_verify + overhead, T_draft), each of half the batch; where the target is
                 elsewhere, what is done between steps goes on beside one, as the way of an answer does:
                 twice max(T_verify - way, T_draft + overhead)
    draft_ahead  max(T_draft, T_verify) + overhead, where T_draft is that of all prepared continuations

The maximum is the expected one of times that vary (`TimeSpread`): around the point where both take as long,
shorter drafts are better than the means would have it. In rounds that read prompts, too, T_verify is longer,
and more drafting is hidden behind it (`PromptLoad`); reading prompts itself is not counted, for it costs the
same whatever is done.

In draft_ahead only hits have drafts in the next round: with h_k the chance that a verdict on k tokens was
prepared for, the share of requests with drafts settles at h_0 / (1 - h_k + h_0).

A latency target bounds rounds: of all `itl_ms` of the batch, the least that a round as such, without any
drafts, is not longer than. Rounds with drafts must not be longer either (in ping_pong a stream waits for both
cohorts), given how much longer than expected rounds of their kind were lately; nor those that read prompts,
too, than what such rounds keep without drafts. That holds for drafts that requests ask for, too: nobody's
wish makes another one's target void, so the least likely of them are left out. Targets that even a round
without drafts is longer than no k can keep: they bound nothing, and where there are no others goodput alone
counts, which is what brings every stream's mean time per token down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.scheduling.speculation.acceptance import AcceptanceEstimate
from specdec.scheduling.speculation.cost import CostModel, DraftCost
from specdec.scheduling.speculation.guesses import hit_table
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.speculation.time_spread import NO_PROMPTS, PromptLoad, mean_longer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

Kind = Literal["plain"] | OverlapMode
"""plain: without drafts, but for requests that ask for them themselves."""
_LEAST_PROBABILITY = 0.005
"""Draft tokens less likely than this to be accepted are not looked at."""
_ALIKE_SHARE = 0.01
"""Contexts are alike where one draft token more of everyone costs as much, within this share of a step."""
_LEAST_ROW_SHARE = 0.02
"""Of a step of the target for one sequence, what a row is thought to cost at least, beside its context."""
_NUM_FINE_SIZES = 32
"""Up to so many draft tokens of all requests together, every number of them is looked at."""
_LEAST_PROMPT_ROUNDS = 0.01
"""Rounds that read prompts are bounded by targets where they are this share of all or more: what was read
once makes no drafts shorter for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of a round, N of them, as far as the choice of k goes. At most K tokens may be drafted."""

    estimate: AcceptanceEstimate
    """[N, K] each."""
    caps: Ints
    """[N]: most draft tokens of use."""
    requested: Ints
    """[N]: draft tokens that a request asks for itself, within what it may have; -1: none."""
    context_tokens: float
    """Committed tokens of all together."""
    contexts: Floats | None = None
    """[N]: committed tokens of each; None: all have as many."""
    draft_contexts: Floats | None = None
    """[N]: tokens that a draft of each attends to; None: all that are committed."""
    itl_s: tuple[float, ...] = ()
    """Longest rounds that somebody wants, in seconds: each once, the shortest first."""
    drafters: Ints | None = None
    """[N]: who drafts for each, by its place in `CostModel.drafts`; None: the first for all."""

    @property
    def num_sequences(self) -> int:
        """N, at least 1."""
        return len(self.caps)

    def part(self, start: int, end: int) -> Batch:
        """Return some of the sequences; without `contexts`, as if all had as much."""
        estimate = self.estimate
        contexts, drafting = self.contexts, self.draft_contexts
        share = (end - start) / self.num_sequences
        return Batch(
            estimate=AcceptanceEstimate(estimate.accepted[start:end], estimate.present[start:end]),
            caps=self.caps[start:end],
            requested=self.requested[start:end],
            context_tokens=self.context_tokens * share
            if contexts is None
            else float(contexts[start:end].sum()),
            contexts=None if contexts is None else contexts[start:end],
            draft_contexts=None if drafting is None else drafting[start:end],
            itl_s=self.itl_s,
            drafters=None if self.drafters is None else self.drafters[start:end],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadOutlook:
    """What is known of drafting ahead."""

    rates: Floats
    """Hit rates of guesses (`GuessRanks.rates`)."""
    max_branches: int
    """Most continuations per request."""
    in_time: float = 1.0
    """Share of prepared continuations that come in time."""
    stand_in_gain: float = 0.0
    """Accepted tokens of what stands in for a proposal that is missing, 0 where nothing does."""
    stand_in_rows: float = 0.0
    """Rows of it."""


class Option(NamedTuple):
    """The best choice of one kind."""

    kind: Kind
    num_draft_tokens: Ints
    """[N]"""
    tokens: float
    """Expected tokens of a round."""
    round_s: float
    """Expected seconds of a round; in ping_pong, of both cohorts together."""
    draft_s: float
    verify_s: float
    num_branches: int = 1
    """draft_ahead: continuations per request."""
    alone_s: float | None = None
    """Expected seconds of a round that reads no prompts; None: as all others."""
    beside_prompts_s: float | None = None
    """Expected seconds, but for those of the prompts, of a round that reads some; None: as all others."""
    unbounded_rate: float | None = None
    """Expected tokens per second of what would be best if nobody had a latency target; None: this is."""

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.round_s

    def shortened(self, factor: float) -> Option:
        """Return the same in so much of the time."""
        alone_s, beside_s, unbounded_rate = self.alone_s, self.beside_prompts_s, self.unbounded_rate
        return self._replace(
            round_s=factor * self.round_s,
            alone_s=None if alone_s is None else factor * alone_s,
            beside_prompts_s=None if beside_s is None else factor * beside_s,
            unbounded_rate=None if unbounded_rate is None else unbounded_rate / factor,
        )


class _RoundTimes(NamedTuple):
    """Expected seconds of rounds, but for those of prompts: [S, K] each."""

    mean: Floats
    """Of all rounds."""
    alone: Floats
    """Of those that read no prompts."""
    beside_prompts: Floats
    """Of those that do."""

    @classmethod
    def alike(cls, seconds: Floats) -> _RoundTimes:
        return cls(seconds, seconds, seconds)

    def times(self, factor: float) -> _RoundTimes:
        return _RoundTimes(*(factor * each for each in self))

    def plus(self, seconds: float) -> _RoundTimes:
        return _RoundTimes(*(each + seconds for each in self))


class _DrafterPart(NamedTuple):
    """What one drafter has to do."""

    costs: DraftCost
    taking_part: Floats
    """[S, K]: how many sequences take part in each of its steps."""
    context: Floats | float
    """Mean tokens that these attend to: [S, K], or of all its sequences."""


class Evaluation:
    """Everything that can be chosen for one batch."""

    def __init__(
        self,
        batch: Batch,
        costs: CostModel,
        overheads: Mapping[Kind, float],
        *,
        max_rows: int,
        num_rows_beside: int = 0,
        prompts: PromptLoad = NO_PROMPTS,
        time_factors: Mapping[Kind, float] = MappingProxyType({}),
        plain_s: float | None = None,
        way_s: float | None = None,
    ) -> None:
        """Look at a batch.

        Args:
            batch: at least one sequence.
            costs: of both sides.
            overheads: seconds of a round that are neither drafting nor verifying; of ping_pong, per cohort.
            max_rows: most rows of a step.
            num_rows_beside: rows that a sequence has beside those of its drafts, if it has a budget for any.
            prompts: what is read of them in the same rounds.
            time_factors: how many times as long as expected rounds take, by kind; 1 where nothing is said.
                They bound rounds; what they mean for rates is for others to say.
            plain_s: seconds of a round without drafts, of all whom a stream waits for; None: of this batch.
            way_s: of T_verify, what the target is at work on other steps in, if there are any: seconds; None:
                its steps do not go on beside what is done between them.
        """
        self._batch = batch
        self._costs = costs
        self._overheads = overheads
        self._max_rows = max_rows
        self._num_rows_beside = num_rows_beside
        self._prompts = prompts
        self._time_factors = time_factors
        self._plain_s = plain_s
        self._way_s = way_s
        self._mean_context = batch.context_tokens / batch.num_sequences
        self._own_context_s: Floats | None = None
        """[S, K]: what draft rows cost the target more than those of a sequence of mean context; None: they
        do not."""
        self._rank_tokens()
        self._cuts_wishes = False
        if batch.itl_s and self._num_asked > 0:
            kept = self._wishes_within_targets()
            if kept is not None:
                self._batch = replace(batch, requested=kept)
                self._cuts_wishes = True
                self._rank_tokens()

    @property
    def batch(self) -> Batch:
        """What is looked at: as it was given, but that requests ask for no more drafts than all targets leave
        room for.
        """
        return self._batch

    @property
    def cuts_wishes(self) -> bool:
        """Whether requests ask for more drafts than all targets leave room for."""
        return self._cuts_wishes

    def _rank_tokens(self) -> None:
        """Order draft tokens by how likely they are accepted, and add up over the first ones, no deeper than
        K.

        Tokens that requests ask for come first. Arrays are [S, K] (number of tokens taken, of `_sizes`;
        largest depth).
        """
        batch = self._batch
        reached, filled = batch.estimate.reached, batch.estimate.filled
        num_sequences, depth = reached.shape
        positions = np.arange(depth)
        is_asked = positions < batch.requested[:, None]
        is_open = (positions < batch.caps[:, None]) & (batch.requested < 0)[:, None]
        # First tokens stay: what nobody ever asks for again is not learnt of again.
        is_open &= (reached > _LEAST_PROBABILITY) | (positions == 0)
        own_s = self._token_own_s
        worth = reached if own_s is None else reached * self._cheapness(own_s)[:, None]
        order_by = np.where(is_asked, 2.0 + reached, np.where(is_open, worth, -1.0)).ravel()
        order = np.argsort(-order_by, kind="stable")
        num_tokens = min(int((order_by > 0.0).sum()), max(0, self._max_rows - num_sequences))
        order = order[:num_tokens]
        self._requests, self._depths = np.divmod(order, depth)
        self._num_asked = min(int(is_asked.sum()), num_tokens)
        self._least_depth = max(0, int(batch.requested.max(initial=0)) - 1)
        index = np.arange(1, num_tokens + 1)
        shape = (num_tokens + 1, depth)
        taking_part, gains, rows = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        taking_part[index, self._depths] = 1.0
        gains[index, self._depths] = reached.ravel()[order]
        rows[index, self._depths] = filled.ravel()[order]
        self._sizes = _sizes(num_tokens, self._num_asked)
        self._asked_at = int(np.searchsorted(self._sizes, self._num_asked))
        self._taking_part = taking_part.cumsum(0)[self._sizes]
        self._by_drafter = self._part_by_drafter(taking_part, are_alike=own_s is None)
        self._gains = gains.cumsum(0)[self._sizes].cumsum(1)
        self._draft_rows = rows.cumsum(0)[self._sizes].cumsum(1)
        self._asked_rows = self._taking_part.cumsum(1)
        if own_s is not None:
            self._weigh_contexts(index, rows)

    def _part_by_drafter(self, taking_part: Floats, *, are_alike: bool) -> list[_DrafterPart]:
        """Return, of every drafter that somebody has, who takes part in its steps, attending to what."""
        drafters, contexts = self._batch.drafters, self._draft_contexts
        if drafters is None:
            drafters = np.zeros(self._batch.num_sequences, dtype=np.int64)
        parts = []
        for place in np.unique(drafters).tolist():
            is_its = drafters == place
            own = taking_part
            number = self._taking_part
            if not is_its.all():
                own = taking_part.copy()
                own[1:][~is_its[self._requests]] = 0.0
                number = own.cumsum(0)[self._sizes]
            context: Floats | float = float(contexts[is_its].mean())
            if not are_alike:
                attended = own.copy()
                attended[1:] *= contexts[self._requests][:, None]
                context = attended.cumsum(0)[self._sizes] / np.maximum(number, 1.0)
            parts.append(_DrafterPart(self._costs.drafts[place], number, context))
        return parts

    def _of_drafters(self, cost: Callable[[DraftCost], float]) -> Floats:
        """Return, for every sequence, something of the costs of its drafter: [N]."""
        each = np.array([cost(one) for one in self._costs.drafts])
        drafters = self._batch.drafters
        return np.full(self._batch.num_sequences, each[0]) if drafters is None else each[drafters]

    @cached_property
    def _token_own_s(self) -> Floats | None:
        """[N]: what a draft token costs beside a row of the target: a place in a step of its drafter, and
        reading its context, by the drafter and by the target; None: it is about the same for all.
        """
        batch, costs = self._batch, self._costs
        if batch.contexts is None and batch.draft_contexts is None:
            return None
        number = batch.num_sequences
        own_s = costs.verify.own_context_s * self._contexts
        own_s += self._of_drafters(lambda one: one.per_token) * self._draft_contexts
        own_s += self._of_drafters(lambda one: one.per_sequence_s(number))
        spread_s = batch.num_sequences * float(own_s.max() - own_s.min())
        return own_s if spread_s > _ALIKE_SHARE * float(self._verify_table[0]) else None

    def _cheapness(self, own_s: Floats) -> Floats:
        """Return how cheap a draft token of each sequence is, beside the cheapest: [N].

        The best set of any cost takes tokens by what they bring for what they cost. That is a row, the same
        for all, and what else a draft token of the sequence costs.
        """
        number, table = self._batch.num_sequences, self._verify_table
        last = len(table) - 1
        row_s = float(table[min(2 * number, last)] - table[min(number, last)]) / number
        row_s -= self._costs.verify.own_context_s * self._mean_context
        cost_s = max(row_s, _LEAST_ROW_SHARE * float(table[0]) / number) + own_s
        cheapness: Floats = cost_s.min() / cost_s
        return cheapness

    @cached_property
    def _contexts(self) -> Floats:
        batch = self._batch
        return np.full(batch.num_sequences, self._mean_context) if batch.contexts is None else batch.contexts

    @cached_property
    def _draft_contexts(self) -> Floats:
        return self._contexts if self._batch.draft_contexts is None else self._batch.draft_contexts

    def _weigh_contexts(self, index: Ints, rows: Floats) -> None:
        """Add up the contexts of those who draft, as `_rank_tokens` does rows."""
        longer = np.zeros_like(rows)
        longer[index, self._depths] = (self._contexts - self._mean_context)[self._requests]
        longer *= rows
        own = longer.cumsum(0)[self._sizes].cumsum(1)
        self._own_context_s = self._costs.verify.own_context_s * own

    @cached_property
    def _verify_table(self) -> Floats:
        return self._costs.verify.table(self._batch.num_sequences, self._batch.context_tokens)

    @cached_property
    def _overlapped_table(self) -> Floats:
        batch = self._batch
        return self._costs.verify.table(batch.num_sequences, batch.context_tokens, is_overlapped=True)

    @cached_property
    def _draft_s(self) -> Floats:
        return self._drafting_s(lambda taking_part: taking_part)

    def _drafting_s(self, taking_part: Callable[[Floats], Floats], *, is_overlapped: bool = False) -> Floats:
        """Return the seconds of all drafters, one after the other: [S, K].

        `taking_part` turns who takes part in the steps of one into who does at a time.
        """
        each = [
            costs.by_steps(taking_part(own), context, is_overlapped=is_overlapped)
            for costs, own, context in self._by_drafter
        ]
        total: Floats = np.sum(each, axis=0) if len(each) > 1 else each[0]
        return total

    @cached_property
    def _draft_spread(self) -> Floats:
        """[F]: equally likely seconds after which drafts are there, beyond what drafting usually takes."""
        each = [part.costs.spread.factors for part in self._by_drafter]
        return each[0] if len(each) == 1 else np.mean(each, axis=0)

    @cached_property
    def _undrafted_s(self) -> float:
        """Expected seconds of a round without any drafts, those that requests ask for left out."""
        return float(at_rows(self._verify_table, self._batch.num_sequences)) + self._overhead("plain")

    @cached_property
    def plain_s(self) -> float:
        """Seconds of a round without any drafts, given how long plain rounds lately took."""
        if self._plain_s is not None:
            return self._plain_s
        return self._undrafted_s * self._time_factor("plain")

    @cached_property
    def bound_s(self) -> float:
        """The bound on rounds that read no prompts; inf: nobody has a target that can be kept."""
        return self._least_target_s(self.plain_s)

    def _least_target_s(self, plain_s: float) -> float:
        """Return the least target that a round of so many seconds keeps; inf: it keeps none."""
        return min((one for one in self._batch.itl_s if one >= plain_s), default=math.inf)

    @cached_property
    def _reads_prompts(self) -> bool:
        return self._prompts.rounds_per_token * self._batch.num_sequences >= _LEAST_PROMPT_ROUNDS

    @cached_property
    def undrafted_rate(self) -> float:
        """Expected tokens per second without any drafts, those that requests ask for left out."""
        return self._batch.num_sequences / self._undrafted_s

    @cached_property
    def plain(self) -> Option:
        """No drafts, but for those that are asked for."""
        taken, depth = self._asked_at, self._least_depth
        draft_s = float(self._draft_s[taken, depth])
        verify_s = float(self._verify_asked_s(taken, depth))
        return Option(
            kind="plain",
            num_draft_tokens=np.maximum(self._batch.requested, 0),
            tokens=self._batch.num_sequences + float(self._gains[taken, depth]),
            round_s=draft_s + verify_s + self._overhead("plain"),
            draft_s=draft_s,
            verify_s=verify_s,
        )

    def _verify_asked_s(self, taken: Ints | int, depth: Ints | int) -> Floats:
        """Return the expected time of steps with those draft tokens, by places in `_sizes` and by depth: [A]
        of [A], or of one each.
        """
        number, table = self._batch.num_sequences, self._verify_table
        rows = number + self._draft_rows[taken, depth] + self._num_rows_beside * self._taking_part[taken, 0]
        seconds = at_rows(table, rows)
        if self._own_context_s is not None:
            longer_s = self._own_contexts_s(table, number, rows, self._own_context_s[taken, depth])
            seconds = np.maximum(seconds + longer_s, at_rows(table, number))
        return seconds

    def _wishes_within_targets(self) -> Ints | None:
        """Return how many of the draft tokens that requests ask for rounds without others may have, [N], so
        that no target is broken that they would keep without any; None: all of them.
        """
        taken = np.arange(1, self._asked_at + 1)
        depth = np.maximum.accumulate(self._depths)[self._sizes[taken] - 1]
        draft_s = self._drafting_s(lambda taking_part: taking_part)[taken, depth]
        round_s = draft_s + self._verify_asked_s(taken, depth) + self._overhead("plain")
        within = taken[~self._is_too_long("plain", _RoundTimes.alike(round_s))]
        num_kept = int(self._sizes[within[-1]]) if len(within) else 0
        if num_kept == self._num_asked:
            return None
        kept = np.bincount(self._requests[:num_kept], minlength=self._batch.num_sequences)
        return np.where(self._batch.requested < 0, -1, kept)

    def lockstep(self, least_draft_tokens: int = 1) -> Option | None:
        """Return the best choice; None where there is none with drafts.

        With `least_draft_tokens`, here and below, of those where the half of all who draft, or more, have
        at least as many.
        """
        num_sequences = self._batch.num_sequences
        verify_s = self._verify_s(self._verify_table, num_sequences)
        draft_s = self._draft_s * float(self._draft_spread.mean())
        round_s = _RoundTimes.alike(draft_s + verify_s + self._overhead("lockstep"))
        return self._best(
            "lockstep", num_sequences + self._gains, round_s, draft_s, verify_s, least_draft_tokens
        )

    def ping_pong(self, least_draft_tokens: int = 1) -> Option | None:
        """Return the best choice; None for a single sequence."""
        num_sequences = self._batch.num_sequences
        if num_sequences < 2:
            return None
        cohort = (num_sequences + 1) // 2
        table = self._costs.verify.table(cohort, cohort * self._mean_context, is_overlapped=True)
        draft_s = self._drafting_s(lambda taking_part: np.ceil(taking_part / 2), is_overlapped=True)
        verify_s = self._verify_s(table, cohort)
        tokens = num_sequences + self._gains
        half_s = self._of_cohort(draft_s, verify_s, self._overhead("ping_pong"), 0.5 * tokens)
        return self._best("ping_pong", tokens, half_s.times(2.0), draft_s, verify_s, least_draft_tokens)

    def cohort(self) -> Option | None:
        """Return the best choice where this batch is one cohort of ping_pong, and another is like it.

        Tokens are those of this cohort, times those of both.
        """
        verify_s = self._verify_s(self._overlapped_table, self._batch.num_sequences)
        tokens = self._batch.num_sequences + self._gains
        draft_s = self._drafting_s(lambda part: part, is_overlapped=True)
        half_s = self._of_cohort(draft_s, verify_s, self._overhead("lockstep"), tokens)
        return self._best("ping_pong", tokens, half_s.times(2.0), draft_s, verify_s)

    def _of_cohort(self, draft_s: Floats, verify_s: Floats, overhead_s: float, tokens: Floats) -> _RoundTimes:
        """Return how long rounds of a cohort of so many tokens are, another one's being under way."""
        if self._way_s is None:
            return self._overlapping(draft_s, verify_s + overhead_s, tokens)
        return self._overlapping(draft_s, verify_s - self._way_s - overhead_s, tokens).plus(overhead_s)

    def draft_ahead(self, outlook: AheadOutlook, least_draft_tokens: int = 1) -> Option | None:
        """Return the best choice, of the number of continuations too."""
        accepted = self._batch.estimate.accepted.mean(0)
        hits = hit_table(np.append(accepted, accepted[-1]), outlook.rates, outlook.max_branches)
        hits *= outlook.in_time
        num_sequences = self._batch.num_sequences
        best: Option | None = None
        for num_branches in _branch_counts(min(outlook.max_branches, hits.shape[1])):
            hit_rates = hits[:, num_branches - 1]
            has_drafts = hit_rates[0] / (1.0 - hit_rates[1:] + hit_rates[0])
            tokens = num_sequences + has_drafts * self._gains
            other_rows: Floats | float = 0.0
            if outlook.stand_in_rows > 0.0:
                missing = (1.0 - has_drafts) * self._taking_part[:, :1]
                tokens += missing * outlook.stand_in_gain
                other_rows = missing * outlook.stand_in_rows
            verify_s = self._verify_s(self._overlapped_table, num_sequences, has_drafts, other_rows)
            draft_s = self._drafting_s(partial(np.multiply, num_branches), is_overlapped=True)
            round_s = self._overlapping(draft_s, verify_s, tokens).plus(self._overhead("draft_ahead"))
            found = self._best(
                "draft_ahead", tokens, round_s, draft_s, verify_s, least_draft_tokens, num_branches
            )
            if found is not None and (best is None or found.rate > best.rate):
                best = found
        return best

    def _overlapping(self, draft_s: Floats, busy_s: Floats, tokens: Floats) -> _RoundTimes:
        """Return how long rounds of so many tokens are in which the target is busy while others draft.

        Where it reads prompts, too, there is more time to draft in.
        """
        prompts, spread = self._prompts, self._draft_spread
        alone_s = mean_longer(draft_s, busy_s, spread)
        if prompts.rounds_per_token <= 0.0:
            return _RoundTimes.alike(alone_s)
        beside_s = mean_longer(draft_s, busy_s + prompts.seconds, spread) - prompts.seconds
        share = np.minimum(prompts.rounds_per_token * tokens, 1.0)
        return _RoundTimes(alone_s + share * (beside_s - alone_s), alone_s, beside_s)

    def _verify_s(
        self,
        table: Floats,
        num_sequences: int,
        has_drafts: Floats | float = 1.0,
        other_rows: Floats | float = 0.0,
    ) -> Floats:
        """Return the expected time of steps of some of the sequences, of which so many have drafts.

        There are `other_rows` for those that have none.

        How many rows there are is a matter of chance where not everyone has a whole proposal, and time is not
        linear in rows: the mean is taken over two numbers of rows, a standard deviation to both sides.
        """
        share = num_sequences / self._batch.num_sequences
        asked = self._asked_rows * share
        rows = self._draft_rows * (share * has_drafts)
        drafting = np.maximum(self._taking_part[:, :1] * share, 1.0)
        spread = np.sqrt(np.maximum(rows * (asked - rows), 0.0) / drafting)
        fewer = np.maximum(rows - spread, 0.0)
        more = np.minimum(rows + spread, asked)
        plain = num_sequences + other_rows + self._num_rows_beside * share * self._taking_part[:, :1]
        seconds: Floats = 0.5 * (at_rows(table, plain + fewer) + at_rows(table, plain + more))
        if self._own_context_s is not None:
            own_s = self._own_context_s * (share * has_drafts)
            longer_s = self._own_contexts_s(table, num_sequences, plain + rows, own_s)
            # However short the contexts of those who draft, their rows do not make a step shorter.
            seconds = np.maximum(seconds + longer_s, at_rows(table, num_sequences))
        return seconds

    def _own_contexts_s(
        self, table: Floats, num_sequences: int, rows: Floats | float, own_s: Floats
    ) -> Floats:
        """Return what draft rows cost more than those of a sequence of mean context, `own_s` at first, in
        steps of so many rows: more or less than that, as all that `table` says.
        """
        mean_context = num_sequences * self._mean_context
        corrections = self._costs.verify.corrections_of(table, num_sequences, mean_context)
        return at_rows(corrections, rows) * own_s

    def _best(
        self,
        kind: Kind,
        tokens: Floats,
        round_s: _RoundTimes,
        draft_s: Floats,
        verify_s: Floats,
        least_draft_tokens: int = 1,
        num_branches: int = 1,
    ) -> Option | None:
        rates = tokens / round_s.mean
        if least_draft_tokens > 1:
            if least_draft_tokens > rates.shape[1]:
                return None
            rates[:, : least_draft_tokens - 1] = 0.0
            rates[self._taking_part[:, least_draft_tokens - 1] < 0.5 * self._taking_part[:, 0]] = 0.0
        rates[: self._asked_at] = 0.0
        rates[:, : self._least_depth] = 0.0
        rates[0] = 0.0
        highest = float(rates.max())
        if self._batch.itl_s:
            rates[self._is_too_long(kind, round_s)] = 0.0
        at, depth = divmod(int(rates.argmax()), rates.shape[1])
        if rates[at, depth] <= 0.0:
            return None
        taken = int(self._sizes[at])
        is_taken = self._depths[:taken] <= depth
        chosen = np.bincount(self._requests[:taken][is_taken], minlength=self._batch.num_sequences)
        if not chosen.any():
            return None
        return Option(
            kind=kind,
            num_draft_tokens=chosen,
            tokens=float(tokens[at, depth]),
            round_s=float(round_s.mean[at, depth]),
            draft_s=float(draft_s[at, depth]),
            verify_s=float(verify_s[at, depth]),
            num_branches=num_branches,
            alone_s=float(round_s.alone[at, depth]),
            beside_prompts_s=float(round_s.beside_prompts[at, depth]),
            unbounded_rate=highest if highest > rates[at, depth] else None,
        )

    def _is_too_long(self, kind: Kind, round_s: _RoundTimes) -> NDArray[np.bool_]:
        """Return which rounds break a target that they would keep without drafts, for each of `round_s`."""
        factor = self._time_factor(kind)
        too_long: NDArray[np.bool_] = factor * round_s.alone > self.bound_s
        if self._reads_prompts:
            prompts_s = self._prompts.seconds
            # A stream waits for both cohorts of ping_pong, and each may read some.
            own_prompts_s = prompts_s * (2.0 if kind == "ping_pong" else 1.0)
            beside_s = factor * round_s.beside_prompts + own_prompts_s
            too_long |= beside_s > self._least_target_s(self.plain_s + prompts_s)
        return too_long

    def options(self, modes: Sequence[OverlapMode], outlook: AheadOutlook) -> dict[Kind, Option]:
        """Return the best choice of every kind that is possible: plain always, and these modes."""
        found = [self.plain, *(self.option(mode, outlook) for mode in modes)]
        return {option.kind: option for option in found if option is not None}

    def option(self, mode: OverlapMode, outlook: AheadOutlook, least_draft_tokens: int = 1) -> Option | None:
        """Return the best choice of one mode."""
        if mode == "lockstep":
            return self.lockstep(least_draft_tokens)
        if mode == "ping_pong":
            return self.ping_pong(least_draft_tokens)
        return self.draft_ahead(outlook, least_draft_tokens)

    def _overhead(self, kind: Kind) -> float:
        return self._overheads.get(kind, 0.0)

    def _time_factor(self, kind: Kind) -> float:
        return self._time_factors.get(kind, 1.0)


def _sizes(num_tokens: int, num_asked: int) -> Ints:
    """Return the numbers of draft tokens to look at: all the small ones, every fourth of many, and the
    last.
    """
    fine = np.arange(min(num_tokens, _NUM_FINE_SIZES) + 1)
    coarse = np.arange(_NUM_FINE_SIZES + 4, num_tokens, 4)
    sizes: Ints = np.concatenate((fine, coarse))
    return np.union1d(sizes, (num_asked, num_tokens)) if num_tokens > _NUM_FINE_SIZES else sizes


def _branch_counts(max_branches: int) -> list[int]:
    """1, 2, 4, ..., and the largest itself."""
    counts = [1 << power for power in range(max_branches.bit_length()) if 1 << power < max_branches]
    return [*counts, max_branches]


def at_rows(table: Floats, rows: Floats | float) -> Floats:
    """Return the expected time of a step whose expected number of rows need not be whole."""
    last = len(table) - 1
    below = np.minimum(np.floor(np.asarray(rows) + 1e-9).astype(np.int64), last)
    above = np.minimum(below + 1, last)
    share = np.clip(rows - below, 0.0, 1.0)
    seconds: Floats = table[below] + share * (table[above] - table[below])
    return seconds
