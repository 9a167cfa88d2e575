"""When to try what is thought worse, for a few rounds, and how much that may cost.

While speculation is off nothing is learnt of acceptance: probes draft for a few rounds. While it is on
nothing is learnt of rounds without: audits leave drafts out for a few rounds. Both may lose time, so there
is an allowance: a small share of all time that passes. A trial begins when the allowance covers what it is
expected to lose, and pays what it has really lost. After each one that changed nothing, the next one waits
twice as long.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Trial = Literal["probing", "auditing"]

_LARGEST_ALLOWANCE = 64.0
"""Rounds whose time the allowance may come to."""
_FIRST_ALLOWANCE = 2.0
"""Rounds whose time may be lost before any time has passed."""
_FEWEST_ROUNDS_BETWEEN = 48
_MOST_DOUBLINGS, _MOST_AUDIT_DOUBLINGS = 6, 4


class TrialLength(NamedTuple):
    """How many rounds a trial takes: as many as the allowance covers, but neither less nor more than
    these.
    """

    fewest: int
    most: int


class Trials:
    """Which trial is on, and when the next one may begin."""

    def __init__(self, share: float) -> None:
        """Let trials lose up to `share` of the time."""
        self._share = share
        self._allowance_s: float | None = None
        self._rounds_left = 0
        self._num_failures = 0
        self._num_audits = 0
        self._num_rounds_since = 0
        self.current: Trial | None = None
        self.num_probe_rounds = 0
        self.num_audit_rounds = 0

    def begin_probe(self, length: TrialLength, loss_s: float) -> None:
        """Begin drafting for some rounds, if it is time for it, given what each is expected to lose."""
        wait = _FEWEST_ROUNDS_BETWEEN << min(self._num_failures, _MOST_DOUBLINGS)
        self._begin("probing", wait, length, loss_s)

    def begin_audit(self, length: TrialLength, loss_s: float) -> None:
        """Begin leaving drafts out for some rounds, as `begin_probe`."""
        wait = _FEWEST_ROUNDS_BETWEEN << min(self._num_audits, _MOST_AUDIT_DOUBLINGS)
        self._begin("auditing", wait, length, loss_s)

    def note_round(self, round_s: float, lost_s: float) -> bool:
        """Count a round that has passed.

        Args:
            round_s: how long it took.
            lost_s: in a trial, how much longer than its tokens would have taken as usual.

        Returns:
            whether a trial has ended with it.
        """
        if self._allowance_s is None:
            self._allowance_s = _FIRST_ALLOWANCE * round_s
        self._allowance_s += self._share * round_s
        self._num_rounds_since += 1
        if self.current is None:
            self._allowance_s = min(self._allowance_s, _LARGEST_ALLOWANCE * round_s)
            return False
        self._allowance_s -= max(lost_s, 0.0)
        if self.current == "probing":
            self.num_probe_rounds += 1
        else:
            self.num_audit_rounds += 1
        self._rounds_left -= 1
        if self._rounds_left > 0 and self._allowance_s > 0.0:
            return False
        self._num_failures += self.current == "probing"
        self._num_audits += self.current == "auditing"
        self.current = None
        return True

    def cancel(self) -> None:
        """End a trial: the batch has changed too much."""
        self.current = None

    def note_change(self) -> None:
        """Something is different: what changed nothing before may do so now."""
        self._num_failures = self._num_audits = 0

    def _begin(self, trial: Trial, wait: int, length: TrialLength, loss_s: float) -> None:
        if self._allowance_s is None or self._num_rounds_since < wait:
            return
        if self._allowance_s <= loss_s * length.fewest:
            return
        affordable = length.most if loss_s <= 0.0 else int(self._allowance_s / loss_s)
        self.current = trial
        self._rounds_left = min(length.most, affordable)
        self._num_rounds_since = 0
