"""Which of several drafters each request gets: a bandit by goodput.

A drafter is worth the tokens that it is expected to add, less those that its time would bring elsewhere: the
rate of all, times what its steps, and the rows of the target that its drafts take, cost. How far its drafts
are accepted is learnt for every class of requests and for every request, apart from what other drafters'
are. Much of a step costs the same however many take part in it, so that drafters are weighed as sets: each
request gets what is best for it of a set, those of one drafter share its fixed costs, and the best set is
taken. A request keeps its drafter unless that is better by a margin.

What is learnt needs trying. Drafters of which next to nothing is known are tried soon; later a trial may cost
a small share of what all requests bring (`_TRIAL_SHARE`), so that the more is expected to be lost by it, the
longer it waits. While drafting does not seem to pay, the probes of the controller (`Trials`) look at every
drafter before that is believed.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.acceptance import AcceptanceEstimate, AcceptanceTracker, Floats
from specdec.scheduling.speculation.controller import DraftOutcome
from specdec.scheduling.speculation.cost import CostModel
from specdec.scheduling.state import Schedulable

Ints = NDArray[np.int64]

_MARGIN = 0.03
"""How much more another drafter has to bring to be changed to, in tokens, as a share of a round's."""
_TRIAL_ROUNDS = 12
_TRIAL_SHARE = 0.01
"""Share of all tokens that trials of known drafters may cost."""
_EARLY_ROUNDS_BETWEEN, _ROUNDS_BETWEEN = 16, 96
"""Rounds from the end of a trial to the next: of a drafter that is hardly known, and of others, at least."""
_ROUNDS_BETWEEN_REVIEWS = 8
"""However often requests come and go: it takes about a millisecond."""
_ENOUGH_WISHES = 24.0
"""Proposals asked for from which on it is known whether a drafter may pay at all."""
_TRIED_SHARE = 16
"""One in so many requests tries another drafter, in a trial."""
_FADING_ROUNDS = 2048
"""After so many rounds what was asked for counts half: what was bad once need not be so for ever."""
_ROWS_AHEAD = 4
"""A draft row is thought to cost what rows up to so many for each sequence do."""
_LEAST_LOSS = 0.02
"""Of a round's tokens, what a round of a trial is thought to lose at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCosts:
    """What drafters are weighed by. D drafters, K draft tokens at most."""

    rate: float
    """Tokens per second of all requests together."""
    row_s: float
    """What a draft row costs the target, seconds."""
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
    alone = np.ones((1, num_positions))
    sequence_s = np.array([one.per_sequence_s(num_sequences) for one in costs.drafts])
    first_s = np.concatenate([one.by_steps(alone, 0.0) for one in costs.drafts])
    return DrafterCosts(
        rate=num_sequences / float(table[first]) if rate is None else rate,
        row_s=float(table[behind] - table[first]) / max(1, behind - first),
        fixed_s=np.maximum(first_s - sequence_s[:, None] * steps, 0.0),
        sequence_s=sequence_s,
        token_s=np.array([one.per_token for one in costs.drafts]),
        is_drafting=is_drafting,
    )


class DrafterPicks:
    """Picks a drafter for every request without one of its own. Decides with `review`, answers with `of`."""

    def __init__(
        self, most_draft_tokens: Sequence[int], acceptance: AcceptanceTracker, budgeted: int | None = None
    ) -> None:
        """Choose among drafters of which each drafts so many tokens at most, the first where nothing is
        known. All but `budgeted` attend to the whole of a text.
        """
        self._caps = np.array(most_draft_tokens, dtype=np.int64)
        self._budgeted = budgeted
        self._acceptance = acceptance
        self._picks: dict[RequestId, int] = {}
        self._best_of_class: dict[str, int] = {}
        self._best = 0
        self._classes: dict[RequestId, str] = {}
        """Of what acceptance is learnt of, by its name there."""
        self._wishes: defaultdict[str, float] = defaultdict(float)
        """Proposals asked for, by class and drafter."""
        self._faded_round = 0
        self._trying: dict[RequestId, int] = {}
        """Who tries another drafter, and which it had before."""
        self._reviewed_round = -_ROUNDS_BETWEEN_REVIEWS
        self._trial_end = 0
        self._next_trial = _EARLY_ROUNDS_BETWEEN

    def of(self, request_id: RequestId, class_name: str) -> int:
        """Return what a request gets that has no drafter of its own. New ones begin as their class does."""
        pick = self._picks.get(request_id)
        if pick is None:
            pick = self._picks[request_id] = self._best_of_class.get(class_name, self._best)
        return pick

    def drafter(self, one: Schedulable) -> int:
        """Return the drafter that a request has."""
        return self.of(one.request_id, one.class_name) if one.own_drafter is None else one.own_drafter

    def draft_context(self, one: Schedulable) -> int:
        """Return how many committed tokens a request's drafter attends to."""
        return self._attended(one, self.drafter(one))

    @property
    def has_trial(self) -> bool:
        """Whether somebody has another drafter for a while."""
        return bool(self._trying)

    def is_due(self, now: int) -> bool:
        """Whether a trial is over, and there is something to review."""
        return bool(self._trying) and now >= self._trial_end

    def is_trying(self, request_id: RequestId) -> bool:
        """Whether a request has another drafter for a while, to see what that is worth."""
        return request_id in self._trying

    def estimate(self, sequences: Sequence[Schedulable]) -> AcceptanceEstimate:
        """Return what to expect of each request's next proposal, by the drafter that it has."""
        return self._estimate(sequences, list(map(self.drafter, sequences)))

    def welcome(self, one: Schedulable) -> int:
        """Take in a request that has come since the last review; return the most that its drafter drafts."""
        self._classes.update(self._classes_of(one))
        return int(self._caps[self.drafter(one)])

    def note(
        self,
        outcomes: Sequence[DraftOutcome],
        budgets: Mapping[RequestId, int],
        drafters: Mapping[RequestId, int],
    ) -> None:
        """Learn from the verdicts of one round; `drafters` made the proposals, or had none to make.

        Otherwise as `AcceptanceTracker.note`.
        """
        for one in budgets:
            name = self._classes.get(_key(one, drafters.get(one, 0)))
            if name is not None:
                self._wishes[name] += 1.0
        keys = {one: _key(one, place) for one, place in drafters.items()}
        self._acceptance.note(
            [replace(one, request_id=keys[one.request_id]) for one in outcomes if one.request_id in keys],
            {keys[one]: budget for one, budget in budgets.items() if one in keys},
            self._classes,
        )

    def review(self, now: int, sequences: Sequence[Schedulable], costs: DrafterCosts) -> None:
        """Think over who gets what; `now` counts rounds."""
        self._forget({one.request_id for one in sequences})
        if now - self._faded_round >= _FADING_ROUNDS:
            self._faded_round = now
            self._wishes = defaultdict(float, {name: 0.5 * count for name, count in self._wishes.items()})
        self._classes = {}
        for one in sequences:
            self._classes.update(self._classes_of(one))
        free = [one for one in sequences if one.own_drafter is None]
        if self._trying and not any(one.request_id in self._trying for one in free):
            self._end_trial()  # those who tried are gone; while a trial is on nothing else changes
        if not free or (not costs.is_drafting and self._ask_unknown(free)):
            return
        if now < (self._trial_end if self._trying else self._reviewed_round + _ROUNDS_BETWEEN_REVIEWS):
            return  # those who are new begin as their class does
        self._reviewed_round = now
        self._end_trial()
        present = np.array(list(map(self.drafter, sequences)), dtype=np.int64)
        is_free = np.array([one.own_drafter is None for one in sequences])
        values = self._values(sequences, costs)
        tokens = len(sequences) + float(np.maximum(values.max((1, 2)), 0.0).sum())
        steady = values.copy()
        steady[np.arange(len(present)), present] += _MARGIN * tokens / len(sequences)
        best = best_assignment(steady, costs.rate * costs.fixed_s, present, is_free)
        for one, place in zip(sequences, best.tolist(), strict=True):
            if one.own_drafter is None:
                self._picks[one.request_id] = place
        self._note_best(free)
        if costs.is_drafting and now >= self._next_trial:
            self._begin_trial(now, sequences, values, tokens, costs)

    def _estimate(self, sequences: Sequence[Schedulable], drafters: Sequence[int]) -> AcceptanceEstimate:
        return self._acceptance.estimate(
            [_key(one.request_id, place) for one, place in zip(sequences, drafters, strict=True)],
            [_class_name(one.class_name, place) for one, place in zip(sequences, drafters, strict=True)],
        )

    def _values(self, sequences: Sequence[Schedulable], costs: DrafterCosts) -> Floats:
        """Return what drafts of up to 1 to K tokens are worth, but for fixed costs: tokens, [N, D, K]."""
        num_positions = self._acceptance.num_positions
        steps = np.arange(1, num_positions + 1)
        caps = np.array([one.max_draft_tokens for one in sequences])
        columns = []
        for place, most in enumerate(self._caps.tolist()):
            attended = np.array([self._attended(one, place) for one in sequences], dtype=np.float64)
            estimate = self._estimate(sequences, [place] * len(sequences))
            own_s = costs.sequence_s[place] + costs.token_s[place] * attended
            seconds = costs.row_s * estimate.filled.cumsum(1) + own_s[:, None] * steps
            value = estimate.reached.cumsum(1) - costs.rate * seconds
            value[steps > np.minimum(most, np.maximum(caps, 1))[:, None]] = -np.inf
            columns.append(np.maximum.accumulate(value, axis=1))
        return np.stack(columns, axis=1)

    def _attended(self, one: Schedulable, place: int) -> int:
        return one.draft_context if place == self._budgeted else one.committed_len

    def _note_best(self, free: Sequence[Schedulable]) -> None:
        """Remember what most of each class have: what those begin with that come."""
        by_class: dict[str, Counter[int]] = {}
        for one in free:
            by_class.setdefault(one.class_name, Counter())[self._picks[one.request_id]] += 1
        for name, counts in by_class.items():
            self._best_of_class[name] = counts.most_common(1)[0][0]
        self._best = Counter(self._picks[one.request_id] for one in free).most_common(1)[0][0]

    def _classes_of(self, one: Schedulable) -> dict[RequestId, str]:
        return {
            _key(one.request_id, place): _class_name(one.class_name, place)
            for place in range(len(self._caps))
        }

    def _num_wishes(self, names: set[str]) -> list[float]:
        return [
            sum(self._wishes.get(_class_name(name, place), 0.0) for name in names)
            for place in range(len(self._caps))
        ]

    def _ask_unknown(self, free: Sequence[Schedulable]) -> bool:
        """While nothing is drafted, have probes ask who is hardly known; return whether there is such."""
        known = self._num_wishes({one.class_name for one in free})
        place = int(np.argmin(known))
        if known[place] >= _ENOUGH_WISHES:
            return False
        self._trying.clear()
        for one in free:
            self._picks[one.request_id] = place
        return True

    def _begin_trial(
        self, now: int, sequences: Sequence[Schedulable], values: Floats, tokens: float, costs: DrafterCosts
    ) -> None:
        """Let a few requests try the drafter that least is known of, and say when the next ones may."""
        free = [one for one in sequences if one.own_drafter is None]
        known = self._num_wishes({one.class_name for one in free})
        place = int(np.argmin(known))
        those = [one for one in free if self._picks[one.request_id] != place and one.max_draft_tokens > 0]
        if not those:
            self._next_trial = now + _ROUNDS_BETWEEN
            return
        fixed = costs.rate * costs.fixed_s
        before = self._worth(sequences, values, fixed)
        for one in those[-max(1, len(free) // _TRIED_SHARE) :]:
            self._trying[one.request_id] = self._picks[one.request_id]
            self._picks[one.request_id] = place
        after = self._worth(sequences, values, fixed)
        self._trial_end = now + _TRIAL_ROUNDS
        wait: float = _EARLY_ROUNDS_BETWEEN
        if known[place] >= _ENOUGH_WISHES:
            # It is asked for a token at least, though it costs more than that brings.
            asked = float(fixed[place, 0]) if len(those) == len(free) else 0.0
            loss = _TRIAL_ROUNDS * max(before.tokens - after.tokens + asked, _LEAST_LOSS * tokens)
            wait = max(_ROUNDS_BETWEEN, loss / (_TRIAL_SHARE * tokens))
        self._next_trial = self._trial_end + int(wait)

    def _worth(self, sequences: Sequence[Schedulable], values: Floats, fixed: Floats) -> Worth:
        """Return what the present picks bring."""
        return worth_of(values, fixed, np.array(list(map(self.drafter, sequences)), dtype=np.int64))

    def _end_trial(self) -> None:
        for request_id, before in self._trying.items():
            if request_id in self._picks:
                self._picks[request_id] = before
        self._trying.clear()

    def _forget(self, present: set[RequestId]) -> None:
        if len(self._picks) > 4 * len(present) + 64:
            # Who asks for metrics, in another thread, may be the first to ask what a request gets.
            picks = list(self._picks.items())
            self._picks = {one: pick for one, pick in picks if one in present}


class Worth(NamedTuple):
    """What an assignment of drafters brings beside a token for each request, in tokens. Larger is better."""

    tokens: float
    """A drafter that costs more than it brings is not asked, and brings nothing."""
    if_asked: float
    """As if every drafter were asked for everyone: says how far one is from bringing something."""


def worth_of(values: Floats, fixed: Floats, drafters: Ints) -> Worth:
    """Return what requests with these drafters bring: of each drafter's, the best length.

    Args:
        values: [N, D, K], see `DrafterPicks`.
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


def _key(request_id: RequestId, drafter: int) -> RequestId:
    """Return what acceptance of a request's drafts by one drafter is learnt under."""
    return RequestId(f"{request_id}\x00{drafter}")


def _class_name(name: str, drafter: int) -> str:
    return f"{name}\x00{drafter}"
