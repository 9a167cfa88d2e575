"""Which of several drafters each request gets, and how much of its text that attends to: a bandit by goodput.

A drafter is worth the tokens that it is expected to add, less those that its time would bring elsewhere: the
rate of all, times what its steps, and the rows of the target that its drafts take, cost. How far its drafts
are accepted is learnt for every class of requests and for every request, apart from what other drafters'
are. Much of a step costs the same however many take part in it, so that drafters are weighed as sets: each
request gets what is best for it of a set, those of one drafter share its fixed costs, and the best set is
taken. A request keeps its drafter unless that is better by a margin.

Where a drafter has several KV budgets to choose from, it is worth to a request what it is with the one that
is best for that request: the tokens that it adds with it, for what reading so much costs. A class is learnt
of apart for each budget; what is known of a request itself, as a factor to its class, goes with it from one
budget to another (`AcceptanceTracker`).

What is learnt needs trying: a drafter, or a budget of one (an arm). Arms of which next to nothing is known
are tried soon; later a trial may cost a small share of what all requests bring (`_TRIAL_SHARE`), so that the
more is expected to be lost by it, the longer it waits. While drafting does not seem to pay, the probes of the
controller (`Trials`) look at every arm before that is believed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from specdec.core.ids import RequestId
from specdec.kv.selection import KvBudget
from specdec.scheduling.speculation.acceptance import AcceptanceEstimate, AcceptanceTracker, Floats
from specdec.scheduling.speculation.controller import DraftOutcome
from specdec.scheduling.speculation.drafter_budgets import (
    TRIED_SHARE,
    BudgetedDrafter,
    DrafterBudgets,
)
from specdec.scheduling.speculation.drafter_worth import (
    DrafterCosts,
    Ints,
    Worth,
    best_assignment,
    worth_of,
)
from specdec.scheduling.speculation.picks import remember, without_gone
from specdec.scheduling.state import Schedulable

_MARGIN = 0.03
"""How much more another drafter has to bring to be changed to, in tokens, as a share of a round's."""
_TRIAL_ROUNDS = 12
_TRIAL_SHARE = 0.01
"""Share of all tokens that trials of known arms may cost."""
_EARLY_ROUNDS_BETWEEN, _ROUNDS_BETWEEN = 16, 96
"""Rounds from the end of a trial to the next: of an arm that is hardly known, and of others, at least."""
_ROUNDS_BETWEEN_REVIEWS = 8
"""However often requests come and go: it takes a few milliseconds."""
_ENOUGH_WISHES = 24.0
"""Proposals asked for from which on it is known whether an arm may pay at all."""
_ASKING_ROUNDS = 256
"""While drafting does not seem to pay, an arm that is hardly known has the probes for so many rounds, then
whoever seems best has them: one whose drafts are dear is probed so seldom that it would keep others from
being asked for ever."""
_FADING_ROUNDS = 2048
"""After so many rounds what was asked for counts half: what was bad once need not be so for ever."""
_LEAST_LOSS = 0.02
"""Of a round's tokens, what a round of a trial is thought to lose at least."""


class Arm(NamedTuple):
    """What a request may have."""

    drafter: int
    budget: int | None = None
    """The place of its KV budget among those of the drafter; None: there is nothing to choose."""


class _Tried(NamedTuple):
    """Who tries an arm, and what it gets back."""

    one: Schedulable
    before: Arm
    of_drafter: Arm
    """What it would have had of the drafter that it tries."""


class DrafterPicks:
    """Picks a drafter for every request without one of its own, and a budget where that drafter has several.

    Decides with `review`, answers with `of` and `budget`.
    """

    def __init__(
        self,
        most_draft_tokens: Sequence[int],
        acceptance: AcceptanceTracker,
        budgeted: BudgetedDrafter | None = None,
    ) -> None:
        """Choose among drafters of which each drafts so many tokens at most, the first where nothing is
        known. All but `budgeted` attend to the whole of a text.
        """
        self._caps = np.array(most_draft_tokens, dtype=np.int64)
        self._budgeted = None if budgeted is None else budgeted.place
        self._budgets: DrafterBudgets | None = None
        """Of that drafter, where it has several."""
        self._arms = [Arm(place) for place in range(len(self._caps))]
        if budgeted is not None and len(budgeted.budgets) > 1:
            self._budgets = DrafterBudgets(budgeted)
            self._arms += [Arm(budgeted.place, place) for place in self._budgets.places]
        self._acceptance = acceptance
        self._picks: dict[RequestId, int] = {}
        self._best_of_class: dict[str, int] = {}
        self._best = 0
        self._classes: dict[RequestId, str] = {}
        """Of what acceptance is learnt of, by its name there."""
        self._wishes: defaultdict[str, float] = defaultdict(float)
        """Proposals asked for, by class and arm."""
        self._faded_round = 0
        self._trying: dict[RequestId, _Tried] = {}
        """Who tries another arm."""
        self._reviewed_round = -_ROUNDS_BETWEEN_REVIEWS
        self._trial_end = 0
        self._next_trial = _EARLY_ROUNDS_BETWEEN
        self._known: set[Arm] = set()
        """Arms of which enough has been seen at some time to say what a trial loses."""

    def of(self, request_id: RequestId, class_name: str) -> int:
        """Return what a request gets that has no drafter of its own. New ones begin as their class does."""
        pick = self._picks.get(request_id)
        if pick is None:
            pick = self._best_of_class.get(class_name, self._best)
            remember(self._picks, request_id, pick)
        return pick

    @property
    def picks_budgets(self) -> bool:
        """Whether a drafter has several budgets."""
        return self._budgets is not None

    def budget(self, request_id: RequestId, class_name: str) -> KvBudget:
        """Return what a request without a budget of its own has for the drafter with several, whichever
        drafter it has at the moment.
        """
        assert self._budgets is not None, "there are not several"
        return self._budgets.budget(request_id, class_name)

    def drafter(self, one: Schedulable) -> int:
        """Return the drafter that a request has."""
        return self.of(one.request_id, one.class_name) if one.own_drafter is None else one.own_drafter

    def draft_context(self, one: Schedulable) -> int:
        """Return how many committed tokens a request's drafter attends to."""
        return self._attended(one, self._arm(one, self.drafter(one)))

    @property
    def has_trial(self) -> bool:
        """Whether somebody has another arm for a while."""
        return bool(self._trying)

    def is_due(self, now: int) -> bool:
        """Whether a trial is over, and there is something to review."""
        return bool(self._trying) and now >= self._trial_end

    def is_trying(self, request_id: RequestId) -> bool:
        """Whether a request has another arm for a while, to see what that is worth."""
        return request_id in self._trying

    def estimate(self, sequences: Sequence[Schedulable]) -> AcceptanceEstimate:
        """Return what to expect of each request's next proposal, by the drafter that it has."""
        return self._estimate(sequences, [self._arm(one, self.drafter(one)) for one in sequences])

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
        before, self._classes = self._classes, {}
        for one in sequences:
            self._classes.update(self._classes_of(one))
        self._acceptance.reclass_changed(before, self._classes)
        free = [one for one in sequences if one.own_drafter is None or self._has_choice(one, one.own_drafter)]
        if self._trying and not any(one.request_id in self._trying for one in free):
            self._end_trial()  # those who tried are gone; while a trial is on nothing else changes
        is_asked_for = not costs.is_drafting and now // _ASKING_ROUNDS % 2 == 0
        if not free or (is_asked_for and self._ask_unknown(free)):
            return
        if now < (self._trial_end if self._trying else self._reviewed_round + _ROUNDS_BETWEEN_REVIEWS):
            return  # those who are new begin as their class does
        self._reviewed_round = now
        self._end_trial()
        values = self._values(sequences, costs)
        of_drafters = self._with_budgets(sequences, values)
        tokens = len(sequences) + float(np.maximum(of_drafters.max((1, 2)), 0.0).sum())
        margin = _MARGIN * tokens / len(sequences)
        if self._budgets is not None:
            self._review_budgets(self._budgets, sequences, values, margin)
        present = self._drafters_of(sequences)
        is_free = np.array([one.own_drafter is None for one in sequences])
        steady = self._with_budgets(sequences, values)
        steady[np.arange(len(present)), present] += margin
        best = best_assignment(steady, costs.rate * costs.fixed_s, present, is_free)
        for one, place in zip(sequences, best.tolist(), strict=True):
            if one.own_drafter is None:
                self._picks[one.request_id] = place
        self._note_best(sequences)
        if costs.is_drafting and now >= self._next_trial:
            self._begin_trial(now, sequences, free, values, tokens, costs)

    def _estimate(self, sequences: Sequence[Schedulable], arms: Sequence[Arm]) -> AcceptanceEstimate:
        return self._acceptance.estimate(
            [_key(one.request_id, arm.drafter) for one, arm in zip(sequences, arms, strict=True)],
            [_class_name(one.class_name, arm) for one, arm in zip(sequences, arms, strict=True)],
        )

    def _values(self, sequences: Sequence[Schedulable], costs: DrafterCosts) -> Floats:
        """Return what drafts of up to 1 to K tokens are worth, but for fixed costs: tokens, [N, arms, K]."""
        num_positions = self._acceptance.num_positions
        steps = np.arange(1, num_positions + 1)
        caps = np.array([one.max_draft_tokens for one in sequences])
        contexts = np.array([one.committed_len for one in sequences], dtype=np.float64)
        row_s = np.maximum(costs.row_s + costs.row_token_s * (contexts - contexts.mean()), 0.0)
        columns = []
        for arm in self._arms:
            if not any(self._is_for(one, arm) for one in sequences):
                columns.append(np.full((len(sequences), num_positions), -np.inf))
                continue
            place, most = arm.drafter, int(self._caps[arm.drafter])
            attended = np.array([self._attended(one, arm) for one in sequences], dtype=np.float64)
            estimate = self._estimate(sequences, [arm] * len(sequences))
            own_s = costs.sequence_s[place] + costs.token_s[place] * attended
            seconds = row_s[:, None] * estimate.filled.cumsum(1) + own_s[:, None] * steps
            value = estimate.reached.cumsum(1) - costs.rate * seconds
            value[steps > np.minimum(most, np.maximum(caps, 1))[:, None]] = -np.inf
            columns.append(np.maximum.accumulate(value, axis=1))
        return np.stack(columns, axis=1)

    def _attended(self, one: Schedulable, arm: Arm) -> int:
        if arm.drafter != self._budgeted:
            return one.committed_len
        if arm.budget is None or self._budgets is None:
            return one.draft_context
        return self._budgets.attended(one, arm.budget)

    def _has_choice(self, one: Schedulable, drafter: int) -> bool:
        """Whether a drafter has several budgets, of which one is picked for a request."""
        return self._budgets is not None and drafter == self._budgeted and not one.has_own_kv_budget

    def _arm(self, one: Schedulable, drafter: int) -> Arm:
        """Return what a request has if it has this drafter."""
        if self._budgets is None or not self._has_choice(one, drafter):
            return Arm(drafter)
        return Arm(drafter, self._budgets.of(one.request_id, one.class_name))

    def _is_for(self, one: Schedulable, arm: Arm) -> bool:
        """Whether an arm is one of those that requests such as this one have."""
        return (arm.budget is not None) == self._has_choice(one, arm.drafter)

    def _may_have(self, one: Schedulable, arm: Arm) -> bool:
        if one.own_drafter not in (None, arm.drafter) or not self._is_for(one, arm):
            return False
        is_kept = self._budgets is not None and self._budgets.is_kept
        return not is_kept or arm == self._arm(one, arm.drafter)

    def _with_budgets(self, sequences: Sequence[Schedulable], values: Floats) -> Floats:
        """Return what each drafter is worth with the budgets that requests have, of `_values`: [N, D, K]."""
        if self._budgets is None:
            return values.copy()
        places = range(len(self._caps))
        at = np.array([[self._column(self._arm(one, place)) for place in places] for one in sequences])
        with_budgets: Floats = np.take_along_axis(values, at[:, :, None], axis=1)
        return with_budgets

    def _column(self, arm: Arm) -> int:
        """Return the place of an arm among all: budgets come behind the drafters."""
        return arm.drafter if arm.budget is None else len(self._caps) + arm.budget

    def _review_budgets(
        self, budgets: DrafterBudgets, sequences: Sequence[Schedulable], values: Floats, margin: float
    ) -> None:
        """Give each request the budget that is best for it, whichever drafter it has, and its class the one
        that is best for the mean of it.
        """
        worth = values[:, len(self._caps) :, -1]
        by_class: dict[str, list[Floats]] = {}
        for one, its in zip(sequences, worth, strict=True):
            if one.has_own_kv_budget:
                continue
            by_class.setdefault(one.class_name, []).append(its)
            present, best = budgets.of(one.request_id, one.class_name), int(its.argmax())
            if not budgets.is_kept and its[best] > its[present] + margin:
                self._give_budget(budgets, one, best)
        for name, each in by_class.items():
            known = self._num_wishes({name})[len(self._caps) :]
            best, least_known = int(np.mean(each, axis=0).argmax()), int(np.argmin(known))
            budgets.note_class(name, best=best, least_known=least_known)

    def _note_best(self, sequences: Sequence[Schedulable]) -> None:
        """Remember what most of each class have: what those begin with that come."""
        picks: defaultdict[str, Counter[int]] = defaultdict(Counter)
        for one in sequences:
            if one.own_drafter is None:
                picks[one.class_name][self._picks[one.request_id]] += 1
        for name, its in picks.items():
            self._best_of_class[name] = its.most_common(1)[0][0]
        if picks:
            self._best = sum(picks.values(), Counter()).most_common(1)[0][0]

    def _classes_of(self, one: Schedulable) -> dict[RequestId, str]:
        return {
            _key(one.request_id, place): _class_name(one.class_name, self._arm(one, place))
            for place in range(len(self._caps))
        }

    def _num_wishes(self, names: set[str]) -> list[float]:
        """Return how many proposals were asked for, in these classes together, by arm."""
        return [sum(self._wishes.get(_class_name(name, arm), 0.0) for name in names) for arm in self._arms]

    def _least_known(self, free: Sequence[Schedulable]) -> tuple[Arm, float]:
        """Return the arm that least is known of, of those that somebody may have, and how much that is."""
        known = self._num_wishes({one.class_name for one in free})
        those = [one for one in free if _may_get_drafts(one)] or free
        there = [at for at, arm in enumerate(self._arms) if any(self._may_have(one, arm) for one in those)]
        least = min(there, key=known.__getitem__)
        return self._arms[least], known[least]

    def _ask_unknown(self, free: Sequence[Schedulable]) -> bool:
        """While nothing is drafted, have probes ask who is hardly known; return whether there is such."""
        arm, num_wishes = self._least_known(free)
        those = [one for one in free if self._may_have(one, arm) and _may_get_drafts(one)]
        if num_wishes >= _ENOUGH_WISHES or not those:
            return False
        self._end_trial()
        for one in those:
            self._give(one, arm)
        return True

    def _begin_trial(
        self,
        now: int,
        sequences: Sequence[Schedulable],
        free: Sequence[Schedulable],
        values: Floats,
        tokens: float,
        costs: DrafterCosts,
    ) -> None:
        """Let a few requests try the arm that least is known of, and say when the next ones may."""
        arm, num_wishes = self._least_known(free)
        had = {one.request_id: self._arm(one, self.drafter(one)) for one in free}
        those = [
            one
            for one in free
            if had[one.request_id] != arm and self._may_have(one, arm) and _may_get_drafts(one)
        ]
        if not those:
            self._next_trial = now + _ROUNDS_BETWEEN
            return
        fixed = costs.rate * costs.fixed_s
        is_asked = any(self.drafter(one) == arm.drafter for one in sequences)
        before = self._worth(sequences, values, fixed)
        for one in those[-max(1, len(free) // TRIED_SHARE) :]:
            self._trying[one.request_id] = _Tried(one, had[one.request_id], self._arm(one, arm.drafter))
            self._give(one, arm)
        after = self._worth(sequences, values, fixed)
        self._trial_end = now + _TRIAL_ROUNDS
        wait: float = _EARLY_ROUNDS_BETWEEN
        if num_wishes >= _ENOUGH_WISHES:
            self._known.add(arm)
        if arm in self._known:
            # A drafter that nobody has is asked for a token at least, though it costs more than that brings.
            asked = 0.0 if is_asked else float(fixed[arm.drafter, 0])
            loss = _TRIAL_ROUNDS * max(before.tokens - after.tokens + asked, _LEAST_LOSS * tokens)
            wait = max(_ROUNDS_BETWEEN, loss / (_TRIAL_SHARE * tokens))
        self._next_trial = self._trial_end + int(wait)

    def _worth(self, sequences: Sequence[Schedulable], values: Floats, fixed: Floats) -> Worth:
        """Return what the present picks bring."""
        return worth_of(self._with_budgets(sequences, values), fixed, self._drafters_of(sequences))

    def _drafters_of(self, sequences: Sequence[Schedulable]) -> Ints:
        return np.array([self.drafter(one) for one in sequences], dtype=np.int64)

    def _end_trial(self) -> None:
        for tried in self._trying.values():
            self._give(tried.one, tried.of_drafter)
            self._give(tried.one, tried.before)
        self._trying.clear()

    def _give(self, one: Schedulable, arm: Arm) -> None:
        if one.own_drafter is None:
            self._picks[one.request_id] = arm.drafter
        # It may have got a budget of its own since.
        if arm.budget is not None and self._budgets is not None and self._has_choice(one, arm.drafter):
            self._give_budget(self._budgets, one, arm.budget)

    def _give_budget(self, budgets: DrafterBudgets, one: Schedulable, place: int) -> None:
        assert self._budgeted is not None
        budgets.give(one.request_id, place)
        key, name = (
            _key(one.request_id, self._budgeted),
            _class_name(one.class_name, Arm(self._budgeted, place)),
        )
        self._acceptance.reclass(key, name)  # reads what lies unread, by the classes that there were
        self._classes[key] = name

    def _forget(self, present: set[RequestId]) -> None:
        self._picks = without_gone(self._picks, present)
        if self._budgets is not None:
            self._budgets.forget_gone(present)


def _may_get_drafts(one: Schedulable) -> bool:
    return one.max_draft_tokens > 0 and one.requested_draft_tokens != 0


def _key(request_id: RequestId, drafter: int) -> RequestId:
    """Return what acceptance of a request's drafts by one drafter is learnt under."""
    return RequestId(f"{request_id}\x00{drafter}")


def _class_name(name: str, arm: Arm) -> str:
    return f"{name}\x00{arm.drafter}" if arm.budget is None else f"{name}\x00{arm.drafter}\x00{arm.budget}"
