"""What rounds really brought, against what was expected of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from specdec.scheduling.speculation.goodput import Kind

_LARGEST_RATIO = 2.5
"""A round that takes so many times what its kind takes, or less than the inverse, is an outlier."""
_NUM_IN_A_ROW = 3
"""So many outliers in a row are none."""
_LARGEST_LOG_SURPRISE = math.log(1.5)
"""Further from what is usual, up or down, a round is a surprise."""
_NUM_SURPRISES = 2
"""In a row; a single one is a pause of something."""
_USUAL_DECAY = 1.0 / 16.0
_TIME_DECAY = 1.0 / 128.0
_TOKEN_DECAY = 1.0 / 128.0
_DOUBTED_ROUNDS = 6.0
"""Rounds of one kind whose times weigh as much as the belief that the model is right."""
_DOUBTED_REGION_ROUNDS = 4.0
_DOUBTED_TOKENS = 100.0
"""The same for the numbers of tokens, which vary more: sequences times rounds."""
_STALE_ROUNDS = 3000.0
_TOKENS_STALE_ROUNDS = 500.0
"""What is missing of drafts may be so because little was known of acceptance yet: it is soon looked at
again."""


class OutlierGate:
    """Leaves out single rounds that took far more or less than others: a pause of the garbage collector, say.

    Where it goes on for several rounds it is how things are now.
    """

    def __init__(self) -> None:
        self._num_in_a_row = 0

    def lets_through(self, ratio: float) -> bool:
        """Return whether a round that took `ratio` times what was to be expected should be learnt from."""
        if 1.0 / _LARGEST_RATIO <= ratio <= _LARGEST_RATIO:
            self._num_in_a_row = 0
            return True
        self._num_in_a_row += 1
        return self._num_in_a_row >= _NUM_IN_A_ROW


class Alarm:
    """Goes off when rounds suddenly take much more or less than they lately did, for what was expected."""

    def __init__(self) -> None:
        self._usual: dict[Hashable, float] = {}
        """By what is compared: logarithm of measured over expected, lately."""
        self._num_in_a_row = 0

    def goes_off(self, what: Hashable, ratio: float) -> bool:
        """Take note of a round that took `ratio` times what was expected, of those that compare as `what`."""
        log_ratio = math.log(ratio)
        usual = self._usual.setdefault(what, log_ratio)
        if abs(log_ratio - usual) <= _LARGEST_LOG_SURPRISE:
            self._usual[what] = usual + _USUAL_DECAY * (log_ratio - usual)
            self._num_in_a_row = 0
            return False
        self._num_in_a_row += 1
        if self._num_in_a_row < _NUM_SURPRISES:
            return False
        self._num_in_a_row = 0
        self._usual[what] = log_ratio
        return True


@dataclass(slots=True)
class _Sums:
    """Decaying sums of what was expected and what came."""

    expected_s: float = 0.0
    measured_s: float = 0.0
    num_timed: float = 0.0
    expected_tokens: float = 0.0
    measured_tokens: float = 0.0
    last_round: int = 0

    def add(self, now: int, expected_s: float, measured_s: float, expected: float, measured: float) -> None:
        fresh = self.freshness(now)
        kept = (1.0 - _TIME_DECAY) * fresh
        self.expected_s = self.expected_s * kept + 1.0
        self.measured_s = self.measured_s * kept + measured_s / expected_s
        self.num_timed = self.num_timed * kept + 1.0
        kept = (1.0 - _TOKEN_DECAY) * self.freshness(now, _TOKENS_STALE_ROUNDS)
        self.expected_tokens = self.expected_tokens * kept + expected
        self.measured_tokens = self.measured_tokens * kept + measured
        self.last_round = now

    def freshness(self, now: int, half_life: float = _STALE_ROUNDS) -> float:
        age = now - self.last_round
        return 1.0 if age <= 1 else float(0.5 ** (age / half_life))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRound:
    """One round beside what was expected of it."""

    kind: Kind
    region: Hashable
    expected_s: float
    measured_s: float
    expected_tokens: float
    """By the decision."""
    drafted_tokens: float
    """By the drafts that there were, and how likely they were thought to be accepted. Not what was accepted:
    that is learnt where acceptance is, and sooner."""


class Evidence:
    """How far the model is off, by kind of round and region of batch and context.

    It is what makes a wrong model harmless: an option is worth what the model says times what rounds like it
    have brought lately, over what the model had said of them.
    """

    def __init__(self) -> None:
        self._by_kind: dict[Kind, _Sums] = {}
        self._by_region: dict[tuple[Kind, Hashable], _Sums] = {}
        self._gates: dict[Kind, OutlierGate] = {}

    def note(self, now: int, measured: MeasuredRound) -> None:
        """Learn from round number `now`."""
        ratio = measured.measured_s / measured.expected_s
        gate = self._gates.setdefault(measured.kind, OutlierGate())
        if not gate.lets_through(ratio / self._time_factor(now, measured.kind, measured.region)):
            return
        for sums in (
            self._by_kind.setdefault(measured.kind, _Sums(last_round=now)),
            self._by_region.setdefault((measured.kind, measured.region), _Sums(last_round=now)),
        ):
            sums.add(
                now,
                measured.expected_s,
                measured.measured_s,
                measured.expected_tokens,
                measured.drafted_tokens,
            )

    def factor(self, now: int, kind: Kind, region: Hashable) -> float:
        """Return by what the model's goodput of a kind has to be multiplied."""
        return self._token_factor(now, kind) / self._time_factor(now, kind, region)

    def num_rounds(self, now: int, kind: Kind, region: Hashable) -> float:
        """Return how many rounds of a kind are known in a region, old ones counting less."""
        sums = self._by_region.get((kind, region))
        return 0.0 if sums is None else sums.num_timed * sums.freshness(now)

    def _time_factor(self, now: int, kind: Kind, region: Hashable) -> float:
        overall = self._by_kind.get(kind)
        if overall is None:
            return 1.0
        fresh = overall.freshness(now)
        factor = (overall.measured_s * fresh + _DOUBTED_ROUNDS) / (
            overall.expected_s * fresh + _DOUBTED_ROUNDS
        )
        here = self._by_region.get((kind, region))
        if here is None:
            return factor
        fresh = here.freshness(now)
        return (here.measured_s * fresh + _DOUBTED_REGION_ROUNDS * factor) / (
            here.expected_s * fresh + _DOUBTED_REGION_ROUNDS
        )

    def _token_factor(self, now: int, kind: Kind) -> float:
        sums = self._by_kind.get(kind)
        if sums is None:
            return 1.0
        fresh = sums.freshness(now, _TOKENS_STALE_ROUNDS)
        return (sums.measured_tokens * fresh + _DOUBTED_TOKENS) / (
            sums.expected_tokens * fresh + _DOUBTED_TOKENS
        )


class Overheads:
    """Seconds of a round that are neither drafting nor verifying: running medians.

    By number of sequences, and by whether there were drafts; where one of both is not known, it is as the
    other. Rounds with drafts never have less to do: where it seems so, the machine was slower at one time
    than at another, and both are thought to be alike.
    """

    _NUM_RECENT = 15

    def __init__(self) -> None:
        self._with_drafts: dict[int, deque[float]] = {}
        self._without: dict[int, deque[float]] = {}

    def note(self, num_sequences: int, seconds: float, *, has_drafts: bool) -> None:
        """Learn from one round."""
        known = self._with_drafts if has_drafts else self._without
        recent = known.setdefault(num_sequences.bit_length(), deque(maxlen=self._NUM_RECENT))
        recent.append(max(0.0, seconds))

    def of(self, num_sequences: int, *, has_drafts: bool) -> float:
        """Return what to expect: of the closest number of sequences that is known; 0 before the first."""
        known = [of for of in (self._with_drafts, self._without) if of]
        typical = [self._typical(of, num_sequences) for of in known]
        return (max if has_drafts else min)(typical, default=0.0)

    def _typical(self, known: Mapping[int, deque[float]], num_sequences: int) -> float:
        size = num_sequences.bit_length()
        closest = min(known, key=lambda other: (abs(other - size), other))
        recent = sorted(known[closest])
        median = recent[len(recent) // 2]
        # More sequences take longer by their number; of fewer, half is thought to stay.
        ratio = math.ldexp(1.0, size - closest)
        return median * (ratio if ratio >= 1.0 else 0.5 + 0.5 * ratio)
