"""What rounds really brought, against what was expected of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.core.decaying import DecayingMean, kept_after, moved
from specdec.scheduling.speculation.batch_sizes import size_class
from specdec.scheduling.speculation.goodput import Kind

_LARGEST_RATIO = 2.5
"""A round that takes so many times what its kind takes, or less than the inverse, is an outlier."""
_NUM_IN_A_ROW = 3
"""So many outliers in a row are none."""
_LARGEST_SURPRISE = 1.5
"""By more than this factor from what is usual, up or down, a round is a surprise."""
_NUM_SURPRISES = 2
"""In a row; a single one is a pause of something."""
_USUAL_DECAY = 1.0 / 16.0
_TIME_DECAY = 1.0 / 256.0
_TOKEN_DECAY = 1.0 / 128.0
_DOUBTED_ROUNDS = 6.0
"""Rounds of one kind whose times weigh as much as the belief that the model is right."""
_DOUBTED_REGION_ROUNDS = 4.0
_DOUBTED_TOKENS = 100.0
"""The same for the numbers of tokens, which vary more: sequences times rounds."""
_SETTLED_ENTRIES, _MOST_SETTLED_ENTRIES = 32.0, 1024.0
"""What was measured beside another kind weighs at least as much as so many rounds, and more only where it is
far from what is believed."""
_LATELY_ROUNDS, _FEWEST_LATELY = 16, 4
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

    def __init__(self, largest_surprise: float = _LARGEST_SURPRISE) -> None:
        """Be surprised at what is more than so many times the usual, or so many times less."""
        self._largest_surprise = largest_surprise
        self._usual: dict[Hashable, float] = {}
        """By what is compared: measured over expected, lately."""
        self._num_in_a_row = 0

    def goes_off(self, what: Hashable, ratio: float) -> bool:
        """Take note of a round that took `ratio` times what was expected, of those that compare as `what`."""
        usual = self._usual.setdefault(what, ratio)
        if usual <= self._largest_surprise * ratio and ratio <= self._largest_surprise * usual:
            self._usual[what] = moved(usual, ratio, _USUAL_DECAY)
            self._num_in_a_row = 0
            return False
        self._num_in_a_row += 1
        if self._num_in_a_row < _NUM_SURPRISES:
            return False
        self._num_in_a_row = 0
        self._usual[what] = ratio
        return True


@dataclass(slots=True)
class _Sums:
    """What came for what was expected, lately."""

    decay: float
    """By entry."""
    half_life: float
    """In rounds, while there are no entries."""
    came: DecayingMean = field(default_factory=DecayingMean)
    """By what was expected."""
    last_round: int = 0

    def add(self, now: int, expected: float, came: float, num_entries: int = 1) -> None:
        kept = (1.0 - self.decay) ** num_entries * self._freshness(now)
        self.came.add(came, expected, kept=kept)
        self.last_round = now

    def ratio(self, now: int, doubted: float, believed: float = 1.0) -> float:
        """Return how much more came, where `doubted` more entries had brought what is believed."""
        fresh = self._freshness(now)
        return (self.came.total * fresh + doubted * believed) / (self.came.weight * fresh + doubted)

    def weight(self, now: int) -> float:
        """Return what was expected of all entries together, as far as it still counts."""
        return self.came.weight * self._freshness(now)

    def set_ratio(self, now: int, ratio: float, doubted: float, believed: float) -> None:
        """Make it so that `ratio` answers this, by as many entries as there are, or a few.

        By more of them where what is believed is many times as much: of what answers this it must stay a
        small part, for it may change.
        """
        enough = min(4.0 * doubted * believed / ratio, _MOST_SETTLED_ENTRIES)
        expected = max(self.weight(now), _SETTLED_ENTRIES, enough)
        self.came = DecayingMean(max(0.0, ratio * (expected + doubted) - doubted * believed), expected)
        self.last_round = now

    def rescale(self, factor: float) -> None:
        """As if so many times as much had come."""
        self.came = DecayingMean(factor * self.came.total, self.came.weight)

    def _freshness(self, now: int) -> float:
        age = now - self.last_round
        return 1.0 if age <= 1 else kept_after(age, self.half_life)


class Evidence:
    """How far the model is off, by kind of round and region of batch and context.

    It is what makes a wrong model harmless: an option is worth what the model says times what rounds like it
    have brought lately, over what the model had said of them.
    """

    def __init__(self) -> None:
        self._times: dict[Kind, _Sums] = {}
        self._times_here: dict[tuple[Kind, Hashable], _Sums] = {}
        self._tokens: dict[Kind, _Sums] = {}
        self._gates: dict[Kind, OutlierGate] = {}

    def note_times(self, now: int, kind: Kind, region: Hashable, ratios: Sequence[float]) -> None:
        """Learn from rounds, up to number `now`, that took so many times what was expected of them."""
        gate = self._gates.setdefault(kind, OutlierGate())
        usual = self.time_factor(now, kind, region)
        believed = [ratio for ratio in ratios if gate.lets_through(ratio / usual)]
        if not believed:
            return
        number, came = len(believed), sum(believed)
        for sums in (
            self._times.setdefault(kind, _Sums(_TIME_DECAY, _STALE_ROUNDS, last_round=now)),
            self._times_here.setdefault((kind, region), _Sums(_TIME_DECAY, _STALE_ROUNDS, last_round=now)),
        ):
            sums.add(now, number, came, number)

    def note_tokens(self, now: int, kind: Kind, expected: float, drafted: float) -> None:
        """Learn from the drafts of round number `now`.

        Args:
            now: number of the round.
            kind: its kind.
            expected: tokens of the round, by the decision.
            drafted: by the drafts that there were, and how likely they were thought to be accepted. Not what
                was accepted: that is learnt where acceptance is, and sooner.
        """
        new = _Sums(_TOKEN_DECAY, _TOKENS_STALE_ROUNDS, last_round=now)
        self._tokens.setdefault(kind, new).add(now, expected, drafted)

    def settle(self, now: int, kind: Kind, region: Hashable, ratio: float) -> None:
        """Believe that rounds take `ratio` times what is expected: it was measured beside another kind's.

        What rounds of both have taken at other times says less: the machine may have been another one.
        """
        overall = self._times.setdefault(kind, _Sums(_TIME_DECAY, _STALE_ROUNDS, last_round=now))
        new = _Sums(_TIME_DECAY, _STALE_ROUNDS, last_round=now)
        here = self._times_here.setdefault((kind, region), new)
        here.set_ratio(now, ratio, _DOUBTED_REGION_ROUNDS, overall.ratio(now, _DOUBTED_ROUNDS))

    def rescale(self, kind: Kind, factor: float) -> None:
        """Believe that rounds of a kind take so many times as long as was thought, wherever they are run."""
        for sums in (
            self._times.get(kind),
            *(one for (its, _), one in self._times_here.items() if its == kind),
        ):
            if sums is not None:
                sums.rescale(factor)

    def factor(self, now: int, kind: Kind, region: Hashable) -> float:
        """Return by what the model's goodput of a kind has to be multiplied."""
        return self.token_factor(now, kind) / self.time_factor(now, kind, region)

    def num_rounds(self, now: int, kind: Kind) -> float:
        """Return how many rounds of a kind the evidence is worth."""
        times = self._times.get(kind)
        return 0.0 if times is None else times.weight(now)

    def token_factor(self, now: int, kind: Kind) -> float:
        """Return by what the model's tokens of a kind have to be multiplied."""
        tokens = self._tokens.get(kind)
        return 1.0 if tokens is None else tokens.ratio(now, _DOUBTED_TOKENS)

    def time_factor(self, now: int, kind: Kind, region: Hashable) -> float:
        """Return by what the model's times of a kind have to be multiplied."""
        overall = self._times.get(kind)
        if overall is None:
            return 1.0
        factor = overall.ratio(now, _DOUBTED_ROUNDS)
        here = self._times_here.get((kind, region))
        return factor if here is None else here.ratio(now, _DOUBTED_REGION_ROUNDS, factor)


class Lately:
    """What rounds of each kind have taken in the last moments, over what was expected of them."""

    def __init__(self) -> None:
        self._means: dict[Kind, float] = {}
        self._numbers: dict[Kind, int] = {}

    def note(self, kind: Kind, ratio: float) -> None:
        """Learn from one round."""
        number = self._numbers[kind] = self._numbers.get(kind, 0) + 1
        mean = self._means.get(kind, 1.0)
        self._means[kind] = mean + (min(ratio, _LARGEST_RATIO) - mean) / min(number, _LATELY_ROUNDS)

    def ratio(self, kind: Kind) -> float | None:
        """Return it; None where it is not known of enough rounds."""
        return self._means[kind] if self._numbers.get(kind, 0) >= _FEWEST_LATELY else None

    def forget(self, *kinds: Kind) -> None:
        """Begin anew with some, or all where none is named."""
        for kind in kinds or tuple(self._numbers):
            self._numbers.pop(kind, None)


class Overheads:
    """Seconds of a round that are neither drafting nor verifying, or others that pauses must not count in:
    running medians.

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
        recent = known.setdefault(size_class(num_sequences), deque(maxlen=self._NUM_RECENT))
        recent.append(max(0.0, seconds))

    def of(self, num_sequences: int, *, has_drafts: bool) -> float:
        """Return what to expect: of the closest number of sequences that is known; 0 before the first."""
        known = [of for of in (self._with_drafts, self._without) if of]
        typical = [self._typical(of, num_sequences) for of in known]
        return (max if has_drafts else min)(typical, default=0.0)

    def _typical(self, known: Mapping[int, deque[float]], num_sequences: int) -> float:
        size = size_class(num_sequences)
        closest = min(known, key=lambda other: (abs(other - size), other))
        recent = sorted(known[closest])
        median = recent[len(recent) // 2]
        # More sequences take longer by their number; of fewer, half is thought to stay.
        ratio = math.ldexp(1.0, size - closest)
        return median * (ratio if ratio >= 1.0 else 0.5 + 0.5 * ratio)
