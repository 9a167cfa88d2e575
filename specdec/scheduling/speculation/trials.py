"""When to try what is thought worse, for a few rounds, and how much that may cost.

While speculation is off nothing is learnt of acceptance: probes draft for a few rounds. While it is on
nothing is learnt of rounds without: audits leave drafts out for a few rounds. And nothing is learnt of longer
drafts than those that are thought best: stretches make them longer for a few rounds. Nor of other modes, for
what steps take beside one another says little of what they take in turn: comparisons run another mode for a
few rounds, where little has been seen of it. All may lose time, so there is an allowance: a small share of
all time that passes; audits and comparisons have each one of their own, so that nothing that the others have
cost keeps them from asking. A trial begins when the allowance covers what it is expected to lose, and pays
what it has really lost; where that is much, it is put aside for as long as it takes. After each one that
changed nothing, the next one of its kind waits twice as long.

A probe pays for all its rounds together, and so does a comparison: with few requests, whose drafts are rarely
accepted, most rounds lose and some gain much. And a probe of what is about as good either way waits no longer
than until its share of the time since the last one covers it: only many verdicts tell that apart.

What the last one really lost counts there, too: by the model such rounds may gain. Audits of what is hardly
better than nothing are as frequent as that costs little, for the same reason.

An audit asks whether nobody is worse off than without speculation. What it is expected to lose is just what
is in doubt, so that the last one's real loss has a say in it; and while it loses nothing, beside what rounds
have brought just before it, it goes on, because then what is believed is wrong. A comparison goes on until
enough is known of the other mode; one of what is thought to be better waits for none before it, only until
its purse covers what it may lose. The first rounds of both, which are those of a change, are paid for but say
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal, NamedTuple

from specdec.scheduling.speculation.goodput import Kind

Trial = Literal["probing", "auditing", "stretching", "comparing"]

_LARGEST_ALLOWANCE = 64.0
"""Rounds whose time the allowance may come to, where no trial asks for more."""
_JUST_ENOUGH = 1.01
"""What it may come to, over what a trial has asked for."""
_PURSES: Mapping[Trial, str] = {"auditing": "audits", "comparing": "comparisons"}
"""Who pays for a trial; all others share one."""
_OTHERS = "others"
_SHARES: Mapping[str, float] = {"audits": 0.5, "comparisons": 0.5, _OTHERS: 1.0}
"""What each purse may lose, as a share of what the last one may."""
_FIRST_ALLOWANCES: Mapping[str, float] = {"audits": 2.0, "comparisons": 4.0, _OTHERS: 2.0}
"""Rounds whose time may be lost in a new situation before any time has passed. Next to nothing is known of
modes that have never been run."""
_PAID_TOGETHER: tuple[Trial, ...] = ("probing", "comparing")
"""Trials whose rounds are paid for together: what the lucky ones gain the unlucky ones need not pay."""
_LARGEST_DEBT = 2.0
"""Rounds whose time may be owed: what a trial loses beyond is not its own doing (the machine was busy)."""
_FEWEST_ROUNDS_BETWEEN: Mapping[Trial, int] = {
    "probing": 48,
    "auditing": 48,
    "stretching": 96,
    "comparing": 96,
}
_FEWEST_ROUNDS_BEFORE_FIRST: Mapping[Trial, int] = {"auditing": 12, "comparing": 24}
"""Before the first one: what rounds without drafts take is known from the start's measurements alone."""
_LEAST_LOSS = 0.03
"""What a round of a comparison is thought to lose at least, as a share."""
_FEWEST_ROUNDS_BEFORE_GAIN, _FEWEST_ROUNDS_BEFORE_NEXT_GAIN = 16, 48
"""Between the beginning of any trial and a comparison with what is thought to be better: the first one, and
those after it."""
_MOST_DOUBLINGS: Mapping[Trial, int] = {"probing": 6, "auditing": 4, "stretching": 6, "comparing": 6}
_MOST_DOUBLINGS_UNANSWERED = 3
"""Of probes in which there was not one draft: they say nothing of drafts, only that whoever makes them was
away, and may be back at any time."""
ABOUT_AS_GOOD = 0.06
_FAR_FROM_AS_GOOD = 0.2
"""What a round of a probe may be expected to lose, as a share, where it is about as good either way; and what
those of the last one may have lost, for it to be believed."""
_CLEAR_GAIN = 0.02
"""An audit that has gained so much, as a share of its time, is soon followed by another one."""


class TrialLength(NamedTuple):
    """How many rounds a trial takes, if the allowance lasts: an audit as many as lose nothing, a comparison
    as many as tell enough, all others as many as there may be.
    """

    fewest: int
    """Those that count, at least."""
    most: int
    """In all."""
    num_before: int = 0
    """Those of the change, about, which cost something and do not count."""
    is_of_close_call: bool = False
    """Of an audit: whether what it leaves out is hardly better than nothing."""


class Trials:
    """Which trial is on, and when the next one may begin."""

    def __init__(self, share: float) -> None:
        """Let audits lose up to half of `share` of the time, comparisons as much, all other trials up
        to `share` together.
        """
        self._share = share
        self._allowances: dict[str, float] = {}
        """In seconds, by purse; none before the first round."""
        self._needed_s: dict[str, float] = {}
        """What the last trial that could not begin would have needed, by purse. It is put aside, however long
        that takes: what is thought much worse is never tried otherwise, and what made it so may be over."""
        self._is_new = True
        """Whether the next round is the first of a situation that nothing is known of."""
        self._first = set(_FEWEST_ROUNDS_BEFORE_FIRST)
        """Trials that have not been made yet in it."""
        self._rounds_left = self._fewest = 0
        self._num_counted = 0
        self._num_spent = 0
        self._has_drafts = False
        """Whether there were drafts in the trial that is on."""
        self._has_caught_up = False
        """Whether the trial that is on has paid for rounds that it did not have."""
        self._lost_s = self._spent_s = 0.0
        """By the trial that is on, as the number of its rounds: of those that count."""
        self._to_pay_s = 0.0
        """What all rounds of the trial that is on have lost, less what others of them have gained."""
        self._audit_loss_s: float | None = None
        """What a round of the last audit has lost."""
        self._probe_loss_s = 0.0
        """What a round of the last probe has lost."""
        self._round_s = 0.0
        """What the last round has taken."""
        self._num_rounds_since = 0
        self._seconds_since = 0.0
        self._num_ended: Counter[Trial] = Counter()
        """Trials that have changed nothing."""
        self.current: Trial | None = None
        self.other_mode: Kind | None = None
        """The mode that a comparison looks at: until it ends, however soon something is known of it."""
        self.num_rounds: Counter[Trial] = Counter()

    def is_due(self, trial: Trial) -> bool:
        """Whether enough rounds have passed since the last trial."""
        if self.current is not None:
            return False
        if trial in self._first:
            return self._num_rounds_since >= _FEWEST_ROUNDS_BEFORE_FIRST[trial]
        num_doublings = min(self._num_ended[trial], _MOST_DOUBLINGS[trial])
        return self._num_rounds_since >= _FEWEST_ROUNDS_BETWEEN[trial] << num_doublings

    def _is_close_call(self, trial: Trial, length: TrialLength, loss_s: float) -> bool:
        """Whether a probe may begin, or an audit of what is hardly better, however little the last ones have
        changed.
        """
        if self.current is not None or not (trial == "probing" or length.is_of_close_call):
            return False
        last_s = self._probe_loss_s if trial == "probing" else self._audit_loss_s or 0.0
        usual_s = self._seconds_since / max(1, self._num_rounds_since)
        is_close = loss_s <= ABOUT_AS_GOOD * usual_s and last_s <= _FAR_FROM_AS_GOOD * usual_s
        num_rounds = length.most if trial == "probing" else length.num_before + length.fewest
        share = self._share * _SHARES[_purse(trial)]
        is_paid = max(loss_s, last_s) * num_rounds <= share * self._seconds_since
        return is_close and is_paid and self._num_rounds_since >= _FEWEST_ROUNDS_BETWEEN[trial]

    def _promises_gain(self, trial: Trial, loss_s: float) -> bool:
        """Whether a comparison may begin, however little the last ones have changed, since it should gain."""
        if self.current is not None or trial != "comparing" or loss_s >= 0.0:
            return False
        is_first = trial in self._first
        fewest = _FEWEST_ROUNDS_BEFORE_GAIN if is_first else _FEWEST_ROUNDS_BEFORE_NEXT_GAIN
        return self._num_rounds_since >= fewest

    def begin(self, trial: Trial, length: TrialLength, loss_s: float, other_mode: Kind | None = None) -> None:
        """Begin a trial for some rounds, if it is time for it, given what each is expected to lose.

        A comparison looks at `other_mode`.
        """
        allowance_s = self._allowances.get(_purse(trial))
        may_begin = self.is_due(trial) or self._is_close_call(trial, length, loss_s)
        if allowance_s is None or not (may_begin or self._promises_gain(trial, loss_s)):
            return
        if trial == "auditing" and self._audit_loss_s is not None:
            loss_s = min(loss_s, self._audit_loss_s)
        needed_s = loss_s * (length.num_before + length.fewest)
        usual_s = _LARGEST_ALLOWANCE * self._round_s
        if trial == "comparing":  # what it promises was promised before, maybe, and not kept
            needed_s = max(needed_s, _LEAST_LOSS * self._round_s * (length.num_before + length.fewest))
        if needed_s > usual_s:  # fewer rounds say something, too, and most of those that are wrongly feared
            needed_s = max(usual_s, loss_s * (length.num_before + 1))
        if allowance_s <= needed_s:
            self._needed_s[_purse(trial)] = needed_s
            return
        self._needed_s.pop(_purse(trial), None)
        # What these are expected to lose is what is in doubt: they go on until too much is really lost.
        is_in_doubt = loss_s <= 0.0 or trial != "probing"
        affordable = length.most if is_in_doubt else int(allowance_s / loss_s)
        self.current, self.other_mode = trial, other_mode
        self._first.discard(trial)
        self._rounds_left = min(length.most, affordable)
        self._fewest = length.fewest
        self._num_counted = self._num_spent = 0
        self._has_drafts = self._has_caught_up = False
        self._lost_s = self._spent_s = self._to_pay_s = 0.0
        self._num_rounds_since = 0
        self._seconds_since = 0.0

    def note_round(
        self,
        round_s: float,
        lost_s: float,
        *,
        counts: bool = True,
        is_spent: bool = True,
        has_drafts: bool = True,
        num_passed: int = 0,
        passed_s: float = 0.0,
    ) -> bool:
        """Count a round that has passed.

        Args:
            round_s: how long it took.
            lost_s: in a trial, how much longer than its tokens would have taken as usual; of a probe, also in
                rounds behind its end, which was not known then.
            counts: whether a trial's round is one as many would be, not one of a change; of a comparison,
                whether it tells of the other mode.
            is_spent: whether it is one of the rounds that a trial has. It is paid for in any case; but what
                was paid for one that is not should not be in vain.
            has_drafts: whether there was a draft in it.
            num_passed: rounds before it that were not looked at.
            passed_s: what those took.

        Returns:
            whether a trial has ended with it.
        """
        allowances = self._allowances
        for purse, share in _SHARES.items():
            before_s = allowances.get(purse, 0.0)
            if self._is_new:
                before_s = max(before_s, _FIRST_ALLOWANCES[purse] * round_s)
            after_s = before_s + self._share * share * (passed_s + round_s)
            most_s = max(_LARGEST_ALLOWANCE * round_s, _JUST_ENOUGH * self._needed_s.get(purse, 0.0))
            allowances[purse] = min(after_s, most_s)
        self._is_new = False
        self._round_s = round_s
        self._num_rounds_since += num_passed + 1
        self._seconds_since += passed_s + round_s
        if self.current is None:
            if lost_s > 0.0:
                allowances[_OTHERS] = max(allowances[_OTHERS] - lost_s, -_LARGEST_DEBT * round_s)
            return False
        purse = _purse(self.current)
        to_pay_s = max(lost_s, 0.0)
        if self.current in _PAID_TOGETHER:
            paid_s, self._to_pay_s = max(0.0, self._to_pay_s), self._to_pay_s + lost_s
            to_pay_s = max(0.0, self._to_pay_s) - paid_s
        allowances[purse] = max(allowances[purse] - to_pay_s, -_LARGEST_DEBT * round_s)
        self.num_rounds[self.current] += 1
        self._rounds_left -= is_spent
        self._num_spent += is_spent
        self._has_drafts |= has_drafts
        self._has_caught_up |= not is_spent
        if counts:
            self._num_counted += 1
            self._lost_s += lost_s
            self._spent_s += round_s
        is_affordable = allowances[purse] > 0.0 or self._is_owed(allowances[purse], round_s)
        if self._rounds_left > 0 and is_affordable and not self._has_answer():
            return False
        self._end(self.current)
        return True

    def _is_owed(self, allowance_s: float, round_s: float) -> bool:
        """Whether a trial goes on though there is nothing left for it: it would have been in vain."""
        if self.current == "comparing":
            return self._num_counted < self._fewest and allowance_s > -_LARGEST_DEBT * round_s
        return self._has_caught_up and self._num_spent < self._fewest

    def _has_answer(self) -> bool:
        """Whether the trial that is on need not go on."""
        if self._num_counted < self._fewest:
            return False
        return self.current == "comparing" or (self.current == "auditing" and self._lost_s > 0.0)

    def _end(self, trial: Trial) -> None:
        self.current = None
        if trial == "auditing":
            self._audit_loss_s = self._lost_s / max(1, self._num_counted)
            if self._lost_s < -_CLEAR_GAIN * self._spent_s:
                return
        if trial == "probing":
            self._probe_loss_s = self._to_pay_s / max(1, self._num_rounds_since)
            if not self._has_drafts and self._num_ended[trial] >= _MOST_DOUBLINGS_UNANSWERED:
                return
        self._num_ended[trial] += 1

    @property
    def num_rounds_left(self) -> int:
        """How many rounds the trial that is on may still take."""
        return self._rounds_left

    def num_ended(self, trial: Trial) -> int:
        """Return how many of them have changed nothing since something else did."""
        return self._num_ended[trial]

    def cancel(self) -> None:
        """End a trial: the batch has changed too much."""
        self.current = None

    def note_change(self) -> None:
        """Something else is done: what changed nothing before may do so now.

        But for comparisons: of the modes that are there, one more has just been looked at.
        """
        for trial in ("probing", "auditing", "stretching"):
            self._num_ended.pop(trial, None)

    def note_new_situation(self) -> None:
        """Batches are of a size, or of a context, that has not been there before: what was found says little.

        What was put aside in short rounds does not pay for a long one: there is a first allowance again.
        """
        self._is_new = True
        self._first = set(_FEWEST_ROUNDS_BEFORE_FIRST)
        self._probe_loss_s = 0.0
        self._num_ended.clear()
        self._needed_s.clear()

    def note_alarm(self) -> None:
        """Rounds take more or less than they did: whether drafts still pay is to be asked soon."""
        del self._num_ended["auditing"], self._num_ended["comparing"]


def _purse(trial: Trial) -> str:
    return _PURSES.get(trial, _OTHERS)
