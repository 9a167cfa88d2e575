"""Which KV budget drafts of each request get, where there are several to choose from.

A budget is worth the tokens that it is expected to add, less those that the time of reading it would bring
elsewhere: accepted tokens of a proposal, minus the rate of all times its steps times what its context costs.
How far each budget's drafts are accepted is learnt as that of a class of requests is, for every class and
budget: what is known of a request itself, as a factor to its class, goes with it from one to another
(`AcceptanceTracker`).

What is learnt needs trying: now and then a few requests get the budget that least is known of, for a few
rounds; less and less often while that changes nothing. A draft model's window forgets what a smaller budget
left out, so that a change tells nothing soon: there a request keeps its first budget for good (`is_kept`),
and some of the new ones try another. While drafting does not seem to pay, the probes of the controller
(`Trials`) look at every budget before that is believed.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from specdec.core.ids import RequestId
from specdec.kv.selection import KvBudget
from specdec.scheduling.speculation.acceptance import AcceptanceTracker, Floats
from specdec.scheduling.speculation.picks import remember, without_gone
from specdec.scheduling.state import Schedulable

_MARGIN = 0.03
"""How much more another budget has to bring to be changed to, in tokens, as a share of a round's."""
_TRIAL_ROUNDS = 12
_FEWEST_ROUNDS_BETWEEN = 96
_FIRST_TRIAL = 16
_MOST_DOUBLINGS = 4
_ENOUGH_TRIALS = 24.0
"""Verdicts from which on it is known whether a budget may pay at all."""
_TRIED_SHARE = 16
"""One in so many requests tries another budget, in a trial, or of new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetCosts:
    """What a budget is weighed by."""

    read_s: float
    """What one step of a draft costs for each token that it attends to, seconds."""
    rate: float
    """Tokens per second of all requests together; 0: not known yet."""
    num_draft_tokens: int
    """Draft tokens of a proposal, about."""
    is_drafting: bool = True
    """Whether requests are drafted for at present, but for probes."""


class BudgetPicks:
    """Picks an option for every request. Decides with `review`, answers with `of`."""

    def __init__(self, options: Sequence[KvBudget], acceptance: AcceptanceTracker, *, is_kept: bool) -> None:
        """Choose among `options`, the first of them where nothing is known."""
        assert len(options) > 1, "there is nothing to choose"
        self._options = tuple(options)
        self._acceptance = acceptance
        self._is_kept = is_kept
        self._picks: dict[RequestId, int] = {}
        self._trying: list[tuple[Schedulable, int]] = []
        """Who tries another option, and which it had before."""
        self._best_of_class: dict[str, int] = {}
        self._num_new = 0
        self._trial_round = _FIRST_TRIAL - _FEWEST_ROUNDS_BETWEEN
        self._num_trials = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """How many requests have each option."""
        counts = np.bincount(list(self._picks.values()), minlength=len(self._options))
        return tuple(counts.tolist())

    def of(self, request_id: RequestId, class_name: str) -> KvBudget:
        """Return what a request gets that has no budget of its own. New ones begin as their class does."""
        return self._options[self._pick(request_id, class_name)]

    def draft_context(self, one: Schedulable) -> int:
        """Return how many tokens drafts of a request attend to, by what it gets from now on."""
        if one.has_own_kv_budget:
            return one.draft_context
        return min(one.committed_len, self.of(one.request_id, one.class_name).tokens(one.committed_len))

    def class_of(self, one: Schedulable) -> str:
        """Return the class that its acceptance is learnt in: one for each budget."""
        if one.has_own_kv_budget:
            return one.class_name
        return _class_name(one.class_name, self._pick(one.request_id, one.class_name))

    def review(self, now: int, sequences: Sequence[Schedulable], costs: BudgetCosts) -> None:
        """Think over who gets what; `now` counts the rounds that brought verdicts."""
        free = [one for one in sequences if not one.has_own_kv_budget]
        if not free:
            return
        self._picks = without_gone(self._picks, {one.request_id for one in free})
        values = self._values(free, costs)
        self._note_best(free, values)
        if self._is_kept:
            return
        if not costs.is_drafting and self._ask_unknown(free):
            return
        if self._trying:
            if now - self._trial_round < _TRIAL_ROUNDS:
                return
            self._end_trial()
        margin = _MARGIN * (1.0 + float(values.max()))
        for index, one in enumerate(free):
            present, best = self._picks[one.request_id], int(values[index].argmax())
            if values[index, best] > values[index, present] + margin:
                self._change(one, best)
                self._num_trials = 0
        if now - self._trial_round >= _FEWEST_ROUNDS_BETWEEN << min(self._num_trials, _MOST_DOUBLINGS):
            self._begin_trial(now, free)

    def _values(self, free: Sequence[Schedulable], costs: BudgetCosts) -> Floats:
        """Return what each option is worth for each request, in tokens of a round: [N, options]."""
        names = [one.request_id for one in free]
        for one in free:
            self._pick(one.request_id, one.class_name)
        k = costs.num_draft_tokens
        columns = []
        for option, budget in enumerate(self._options):
            classes = [_class_name(one.class_name, option) for one in free]
            gained = self._acceptance.estimate(names, classes).reached[:, :k].sum(1)
            read = np.array([min(one.committed_len, budget.tokens(one.committed_len)) for one in free])
            columns.append(gained - costs.rate * costs.read_s * k * read)
        return np.stack(columns, axis=1)

    def _pick(self, request_id: RequestId, class_name: str) -> int:
        pick = self._picks.get(request_id)
        if pick is None:
            pick = self._best_of_class.get(class_name, 0)
            self._num_new += 1
            if self._is_kept and self._num_new % _TRIED_SHARE == _TRIED_SHARE // 2:
                pick = self._least_known({class_name})
            remember(self._picks, request_id, pick)
        return pick

    def _note_best(self, free: Sequence[Schedulable], values: Floats) -> None:
        """Remember what is best for the mean of each class: what those begin with that come."""
        names = np.array([one.class_name for one in free])
        for name in set(names.tolist()):
            self._best_of_class[name] = int(values[names == name].mean(0).argmax())

    def _least_known(self, class_names: Set[str]) -> int:
        known = [
            sum(self._acceptance.num_trials(_class_name(name, option)) for name in class_names)
            for option in range(len(self._options))
        ]
        return int(np.argmin(known))

    def _ask_unknown(self, free: Sequence[Schedulable]) -> bool:
        """While nothing is drafted, have probes ask what is hardly known; return whether there is such."""
        names = {one.class_name for one in free}
        option = self._least_known(names)
        if sum(self._acceptance.num_trials(_class_name(name, option)) for name in names) >= _ENOUGH_TRIALS:
            return False
        self._trying.clear()
        for one in free:
            if self._picks[one.request_id] != option:
                self._change(one, option)
        return True

    def _begin_trial(self, now: int, free: Sequence[Schedulable]) -> None:
        option = self._least_known({one.class_name for one in free})
        those = [one for one in free if self._picks[one.request_id] != option]
        for one in those[-max(1, len(free) // _TRIED_SHARE) :]:
            self._trying.append((one, self._picks[one.request_id]))
            self._change(one, option)
        self._trial_round = now
        self._num_trials += 1

    def _end_trial(self) -> None:
        for one, before in self._trying:
            if one.request_id in self._picks:
                self._change(one, before)
        self._trying.clear()

    def _change(self, one: Schedulable, option: int) -> None:
        self._picks[one.request_id] = option
        self._acceptance.reclass(one.request_id, _class_name(one.class_name, option))


def _class_name(name: str, option: int) -> str:
    return f"{name}\x00{option}"
