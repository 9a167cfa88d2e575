"""When a controller thinks its decision over, and which rounds it learns costs from.

Both take time themselves. What has changed is looked at often, what stays as it was less and less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.core.clock import Clock
from specdec.scheduling.speculation.batch_sizes import is_as_large
from specdec.scheduling.speculation.decision import Decision
from specdec.scheduling.speculation.time_budget import TimeBudget
from specdec.scheduling.state import Schedulable

_EARLY_ROUNDS = 32
_LOOKED_AT_EVERY_S = 0.02
"""Of plain rounds that are as they were, one in so many seconds is looked at: to look at one, and to learn
from it, takes 0.1 ms and more, which is a few hundredths of the shortest ones. Less often while decisions
change nothing (`_CALMER`)."""
LONGEST_PASSED_OVER_S = 0.01
"""Of rounds that usually take longer all are looked at."""
_DECISION_S, _DECISION_S_PER_SEQUENCE = 0.08, 0.004
"""After so many seconds a decision is thought over, if there were enough rounds."""
_HEARD_EVERY_S = 0.03
"""Costs are learnt from one round in so many seconds."""
_SHARE_OF_DECIDING, _SHARE_OF_LEARNING = 0.0025, 0.002
"""Both are done less often where that would take more of the time than this."""
_HASTE = 8.0
"""While much is new they may take so many times as much, out of what they have saved
(`TimeBudget.has_saved`)."""
_CALMER, _CALMEST = 1.3, 4.0
"""While decisions change nothing they are thought over less often, and fewer rounds are learnt from: by this
factor each time, and by no more than that in all."""
_MOST_UNDECIDED_ROUNDS = 128
"""After so many rounds it is, however short they are, if there is time for it."""
_MUCH_THE_SAME = 8
"""While nothing is drafted and no more than one in so many sequences has changed, a decision still holds."""


class Passed(NamedTuple):
    """Rounds that nobody has looked at."""

    num_rounds: int = 0
    seconds: float = 0.0


class Rhythm:
    """Counts rounds (`now`) and their seconds since the last decision."""

    def __init__(self, decide_every: int, clock: Clock | None) -> None:
        """Think over every `decide_every` rounds at most; `clock` tells how long thinking takes."""
        self.deciding = TimeBudget(clock, _SHARE_OF_DECIDING)
        self.learning = TimeBudget(clock, _SHARE_OF_LEARNING)
        self._decide_every = decide_every
        self._alert_until = _EARLY_ROUNDS
        """Up to this round every one is learnt from, and decisions are thought over often."""
        self._decided_round = 0
        self._has_tried = False
        """Whether a trial has ended since: what was tried is not to go on."""
        self.since_decision_s = 0.0
        """What rounds have taken since the last decision."""
        self._unheard_s = 0.0
        self._calm = 1.0
        self._passed_over = Passed()

    def is_start(self, now: int) -> bool:
        """Return whether these are the first rounds, of which every one tells something."""
        return now < _EARLY_ROUNDS

    def is_alert(self, now: int, switched_round: int) -> bool:
        """Return whether much is new: it is the start, something else is done, or rounds have changed."""
        return now < self._alert_until or now - switched_round < _EARLY_ROUNDS

    def is_due(self, now: int, num_sequences: int) -> bool:
        """Return whether it is time to think again: soon after the start, later every few rounds.

        Short rounds are more of them, for thinking takes time too.
        """
        if self._has_tried:
            return True
        num_rounds = now - self._decided_round
        if num_rounds < min(self._decide_every, 1 + now // 4):
            return False
        if now < self._alert_until:
            return self.since_decision_s >= _hasty_interval_s(self.deciding)
        if self.since_decision_s < self.deciding.interval_s:
            return False
        if num_rounds >= self._calm * _MOST_UNDECIDED_ROUNDS:
            return True
        return self.since_decision_s >= self._calm * (_DECISION_S + _DECISION_S_PER_SEQUENCE * num_sequences)

    @property
    def is_too_soon(self) -> bool:
        """Whether deciding again would take too much of the time, if nothing asks for it."""
        return self.since_decision_s < self.deciding.interval_s

    def still_holds(self, decision: Decision, sequences: Sequence[Schedulable]) -> bool:
        """Whether a decision is one for this batch, too, of which some may have gone and some have come."""
        index = decision.index
        newcomers = [one for one in sequences if one.request_id not in index]
        num_gone = len(index) - (len(sequences) - len(newcomers))
        if not newcomers and not num_gone:
            return True
        if not self.is_too_soon:
            is_plain = decision.option.kind == "plain"
            return max(len(newcomers), num_gone) <= (len(index) // _MUCH_THE_SAME if is_plain else 0)
        return is_as_large(len(sequences), len(index)) and not any(
            one.requested_draft_tokens or one.itl_s is not None for one in newcomers
        )

    def note_decision(self, now: int, *, is_known: bool) -> None:
        """A decision is being made; `is_known`: for a batch like the one before."""
        self._decided_round = now
        self._has_tried = False
        self.since_decision_s = 0.0
        self._calm = min(self._calm * _CALMER, _CALMEST) if is_known else 1.0

    def note_change(self) -> None:
        """Something else is done than before."""
        self._calm = 1.0

    def note_alarm(self, now: int) -> None:
        """Rounds take more or less than they did."""
        self._calm = 1.0
        self._alert_until = now + _EARLY_ROUNDS

    def note_trial_end(self) -> None:
        """What was tried is not to go on: it is time to decide."""
        self._has_tried = True

    def passes_over(self, now: int, round_s: float, *, switched_round: int) -> bool:
        """Whether a plain round, like those before, need not be looked at; it is counted all the same."""
        if self.is_alert(now, switched_round):
            return False
        passed = self._passed_over
        # Without this one: long ones must not be looked at more often.
        if passed.seconds >= self._calm * _LOOKED_AT_EVERY_S:
            return False
        self._passed_over = Passed(passed.num_rounds + 1, passed.seconds + round_s)
        return True

    def take_passed_over(self) -> Passed:
        """Return what has passed without being looked at since the last call."""
        passed = self._passed_over
        if passed.num_rounds:
            self._passed_over = Passed()
        return passed

    def note_round(self, round_s: float) -> None:
        """A round has passed, or some of so much time together."""
        self.since_decision_s += round_s
        self.deciding.pass_time(round_s)
        self.learning.pass_time(round_s)

    def hear(self, now: int, round_s: float, *, switched_round: int, is_trial: bool) -> float | None:
        """Return the seconds that a round stands for, if it is to be learnt from; None: it is not.

        Asked before this round's own time counts: long ones must not be heard more often than others.
        """
        is_heard = self._is_to_be_heard(now, switched_round, is_trial)
        self._unheard_s += round_s
        if not is_heard:
            return None
        heard_s, self._unheard_s = self._unheard_s, 0.0
        return heard_s

    def _is_to_be_heard(self, now: int, switched_round: int, is_trial: bool) -> bool:
        if is_trial:
            return True
        if self.is_alert(now, switched_round):
            return self._unheard_s >= _hasty_interval_s(self.learning)
        return self._unheard_s >= max(self._calm * _HEARD_EVERY_S, self.learning.interval_s)


def _hasty_interval_s(budget: TimeBudget) -> float:
    return budget.interval_s / (_HASTE if budget.has_saved else 1.0)
