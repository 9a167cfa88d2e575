"""How likely the next draft tokens of a request are accepted, learnt from verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.core.decaying import kept_after, moved
from specdec.core.ids import RequestId
from specdec.core.request import OTHER_CLASS
from specdec.scheduling.speculation.controller import DraftOutcome

Floats = NDArray[np.float64]

MAX_CLASSES = 64
"""Classes that are told apart; those that come later count as `OTHER_CLASS`."""

_FIRST_GUESS = 0.65
"""Acceptance of a class that nothing is known of."""
_FIRST_GUESS_TRIALS = 4.0
_FIRST_FALL = 1.0
"""How soon nodes of a tree of which nothing is known stand less often: node j as often as the first one over
j to the power of this."""
_MOST_FALL, _NUM_NEWTON = 4.0, 4
_FIRST_AVAILABILITY = 0.99
_CLASS_TRIALS = 24.0
"""Trials at one position of a class that weigh as much as its mean over all positions."""
_CLASS_DECAY = 1.0 / 256.0
_REQUEST_TRIALS = 8.0
"""Trials of a request that weigh as much as its class, before it is known how alike requests are."""
_FEWEST_FAILURES, _MOST_FAILURES = 0.75, 16.0
"""Failures that what a class says may weigh as much as."""
_SPREAD_DECAY = 1.0 / 64.0
_FEWEST_EXPECTED = 1.5
"""Failures expected of a request before it has a say in how alike those of its class are."""
_CHANCE_SPREAD = 0.75
"""Variance of decaying counts over that of plain ones, about."""
_POSITION_TRIALS = 24.0
"""Trials at one position of a request that weigh as much as what its other positions say."""
_REQUEST_DECAY = 1.0 / 128.0
_KEPT_OF_OTHER_CLASS = 0.25
"""What is known of single positions of a request counts so much once it is of another class."""
_UNTRIED_DECAY = 1.0 / 256.0
"""Positions that nobody reaches or asks for are forgotten too, if slowly: bad luck must not rule them out."""
_FAST_DECAY = 1.0 / 12.0
_SURPRISE = 3.0
"""Standard deviations between lately and before, from which on what was before is forgotten."""
_AVAILABILITY_DECAY = 1.0 / 32.0
_AVAILABILITY_TRIALS = 4.0
_CLASS_STALE_ROUNDS = 512.0
_MOST_UNREAD_ROUNDS = 64
"""Rounds whose verdicts may lie unread: learning from a few at a time costs as much as from many."""
_STALE_ROUNDS = 256.0
"""After so many rounds without a verdict a request is known half as well."""


class AcceptanceEstimate(NamedTuple):
    """What to expect of the next proposals of some requests. Arrays are [requests, positions]."""

    accepted: Floats
    """Probability that draft token j is accepted, given that it is there and all before it are accepted.
    Of a tree: how often node j stands over how often node j - 1 does."""
    present: Floats
    """Probability that a proposal has a token j, given that it has one before it."""

    @property
    def reached(self) -> Floats:
        """Probability that draft token j is there and accepted: what asking for it adds in tokens."""
        reached: Floats = np.cumprod(self.accepted * self.present, axis=1, dtype=np.float64)
        return reached

    @property
    def filled(self) -> Floats:
        """Probability that a proposal has a token j: what asking for it adds in rows."""
        filled: Floats = np.cumprod(self.present, axis=1, dtype=np.float64)
        return filled


class _Counts:
    """Growing arrays, one row per request or class, all zero at first."""

    def __init__(self, num_positions: int) -> None:
        self.num_positions = num_positions
        self.trials: Floats = np.zeros((8, num_positions))
        self.successes: Floats = np.zeros((8, num_positions))

    def reserve(self, num_rows: int) -> None:
        self.trials = _with_rows(self.trials, num_rows)
        self.successes = _with_rows(self.successes, num_rows)


def _with_rows(array: Floats, num_rows: int) -> Floats:
    if num_rows <= array.shape[0]:
        return array
    grown = np.zeros((max(num_rows, 2 * array.shape[0]), *array.shape[1:]))
    grown[: array.shape[0]] = array
    return grown


_FAILURES, _EXPECTED, _FAST_FAILURES, _FAST_EXPECTED, _WANTED, _GOT, _IS_ODD = range(7)
"""Columns of the totals of a request. Expected failures are those that its class would have had; odd is who
has changed suddenly: what its class says is of little worth then."""


class AcceptanceTracker:
    """Decaying counts by request, class and position.

    The chance that a token fails, given that it is reached, is modelled as that of its class at its position,
    times a factor of the request (proportional hazards), with a Gamma prior on the factor: a few verdicts of
    a new request move all its positions at once. The prior is as narrow as requests of the class are alike
    (empirical Bayes, by moments). What is known of single positions comes on top of it. The factor is
    followed at two speeds: where they disagree, what was before is forgotten.

    Of a tree whose nodes come in order of value, position j is node j. What asking for it adds is how often
    it stands, v_j, whatever stands before it; that is the product of v_i / v_(i - 1), and so a trial at j is
    that node j - 1 stood, a success that node j did. Of a chain that is what it says; of a tree it is right
    on the average, and a success may come without a trial. Where little is known, tokens of a chain are
    thought to be accepted as often as others. Nodes of a tree fall off ever more slowly, since siblings of
    likely nodes come late: v_j is thought to be a power of j, as that of the nodes that are known is. By the
    mean, trees would hardly become larger than those that are known.
    """

    def __init__(
        self,
        num_positions: int,
        max_classes: int = MAX_CLASSES,
        shape: Literal["chain", "tree"] = "chain",
    ) -> None:
        """Track the first `num_positions` draft tokens of proposals, of so many classes apart."""
        self.num_positions = max(1, num_positions)
        self._usual_rates = _usual_in_chains if shape == "chain" else _usual_in_trees
        self._max_classes = max_classes
        self._slots: dict[RequestId, int] = {}
        self._names: list[RequestId] = []
        """Of the request that has each slot, or had it last."""
        self._free: list[int] = []
        self._requests = _Counts(self.num_positions)
        self._totals = np.zeros((8, 7))
        self._last_round = np.zeros(8)
        """Of each slot; of free ones infinity."""
        self._class_of_slot = np.zeros(8, dtype=np.int64)
        self._classes: dict[str, int] = {OTHER_CLASS: 0}
        self._class_verdicts = _Counts(self.num_positions)
        self._class_lengths = _Counts(self.num_positions)
        self._class_failures = np.tile(1.0 - self._class_rates(0), (8, 1))
        self._class_presence = np.full((8, self.num_positions), _FIRST_AVAILABILITY)
        self._class_spread: dict[int, float] = {}
        """Variance of the factors of a class's requests."""
        self._class_last_round: dict[int, int] = {}
        self._round = 0
        self._unread: list[tuple[Sequence[DraftOutcome], Mapping[RequestId, int]]] = []
        self._first_unread = 0
        self._classes_of_unread: Mapping[RequestId, str] = {}

    def __len__(self) -> int:
        """Return the number of requests that something is known of."""
        self._read()
        return len(self._slots)

    def note(
        self,
        outcomes: Sequence[DraftOutcome],
        budgets: Mapping[RequestId, int],
        classes: Mapping[RequestId, str],
    ) -> None:
        """Learn from the verdicts of one round, at the latest when something is asked.

        Args:
            outcomes: verdicts, at most one per request.
            budgets: draft tokens asked for; with them, how often and how far drafts are there is learnt.
                Empty: nothing is learnt of that.
            classes: of requests that may be new; afterwards it may only get more of them.
        """
        if classes is not self._classes_of_unread:
            self._read()
            self._classes_of_unread = classes
        self._round += 1
        if not outcomes and not budgets:
            return
        if not self._unread:
            self._first_unread = self._round
        self._unread.append((outcomes, budgets))
        if len(self._unread) >= _MOST_UNREAD_ROUNDS:
            self._read()

    def forget(self, request_ids: Sequence[RequestId]) -> None:
        """Forget these requests; their classes remember. Unknown ids are ignored."""
        self._read()
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)
                self._last_round[slot] = np.inf

    def forget_idle(self, num_rounds: int) -> None:
        """Forget requests that have had no verdict for so many rounds."""
        self._read()
        is_idle = self._last_round[: len(self._names)] < self._round - num_rounds
        self.forget([self._names[slot] for slot in np.flatnonzero(is_idle).tolist()])

    def estimate(self, request_ids: Sequence[RequestId], classes: Sequence[str]) -> AcceptanceEstimate:
        """Return what to expect of requests, known or not, were they of these classes.

        Of another class than its verdicts are counted to, a request is known by how much more often its
        tokens fail than others'.
        """
        self._read()
        slots = np.array([self._slots.get(one, -1) for one in request_ids], dtype=np.int64)
        of_class = np.array([self._class_index(name) for name in classes], dtype=np.int64)
        is_known = slots >= 0
        age = np.where(is_known, self._round - self._last_round[slots], np.inf)
        fresh = kept_after(age, _STALE_ROUNDS)
        totals = self._totals[slots] * fresh[:, None]
        factor = self._factor(totals, of_class)
        failing = self._class_failures[of_class] * factor[:, None]
        np.clip(failing, 0.004, 0.99, out=failing)
        counted = np.where(self._class_of_slot[slots] == of_class, fresh, 0.0)[:, None]
        trials = self._requests.trials[slots] * counted
        successes = self._requests.successes[slots] * counted
        accepted = (successes + _POSITION_TRIALS * (1.0 - failing)) / (trials + _POSITION_TRIALS)
        np.minimum(accepted, 1.0, out=accepted)
        present = self._class_presence[of_class]  # a copy: indexed by an array
        present[:, 0] = (totals[:, _GOT] + _AVAILABILITY_TRIALS * present[:, 0]) / (
            totals[:, _WANTED] + _AVAILABILITY_TRIALS
        )
        return AcceptanceEstimate(accepted, present)

    def reclass(self, request_id: RequestId, name: str) -> None:
        """Count what is learnt of a request from now on to another class.

        How much more often its tokens fail than others' is thought to stay; single positions are learnt anew.
        """
        self._read()
        slot = self._slots.get(request_id)
        if slot is None:
            return
        index = self._class_index(name)
        if self._class_of_slot[slot] != index:
            self._class_of_slot[slot] = index
            self._requests.trials[slot] *= _KEPT_OF_OTHER_CLASS
            self._requests.successes[slot] *= _KEPT_OF_OTHER_CLASS

    def reclass_changed(self, before: Mapping[RequestId, str], after: Mapping[RequestId, str]) -> None:
        """Do so for those whose class is another one than before."""
        for request_id, name in after.items():
            if before.get(request_id, name) != name:
                self.reclass(request_id, name)

    def num_trials(self, name: str) -> float:
        """Return how many verdicts on first tokens are known of a class, old ones counting less."""
        self._read()
        index = self._classes.get(name)
        return 0.0 if index is None else float(self._class_verdicts.trials[index, 0])

    def class_acceptance(self, name: str = OTHER_CLASS) -> Floats:
        """Return what a new request of a class begins with, [positions]."""
        self._read()
        acceptance: Floats = 1.0 - self._class_failures[self._classes.get(name, 0)]
        return acceptance

    def _read(self) -> None:
        """Learn from what lies unread."""
        if not self._unread:
            return
        rounds, self._unread = self._unread, []
        verdicts = [one for outcomes, _ in rounds for one in outcomes]
        if verdicts:
            self._read_verdicts(verdicts, self._round - self._first_unread + 1)
        self._read_lengths(rounds)

    def _read_verdicts(self, verdicts: Sequence[DraftOutcome], num_rounds: int) -> None:
        is_there = np.arange(self.num_positions) < np.array([one.num_drafted for one in verdicts])[:, None]
        is_success = self._accepted(verdicts) & is_there
        is_trial = is_there.copy()
        is_trial[:, 1:] &= is_success[:, :-1]
        slots, counts, (trials, successes) = _by_request(
            [self._slot(one.request_id) for one in verdicts], is_trial, is_success
        )
        requests = self._requests
        kept = (1.0 - _REQUEST_DECAY) ** trials * (1.0 - _UNTRIED_DECAY) ** (counts[:, None] - trials)
        requests.trials[slots] = requests.trials[slots] * kept + trials
        requests.successes[slots] = requests.successes[slots] * kept + successes
        of_class = self._class_of_slot[slots]
        failed = (trials - successes).sum(1)
        expected = (trials * self._class_failures[of_class]).sum(1)
        self._follow_factor(slots, trials.sum(1), failed, expected)
        self._last_round[slots] = self._round
        for index, members in _by_class(of_class):
            self._fade_class(index, num_rounds)
            _decay_in(self._class_verdicts, index, trials[members].sum(0), successes[members].sum(0))
            self._class_failures[index] = 1.0 - self._class_rates(index)
            self._note_spread(index, self._totals[slots[members]], num_rounds)

    def _class_rates(self, index: int) -> Floats:
        """Return the acceptance of a class by position; where little is known, what is usual."""
        trials, successes = self._class_verdicts.trials[index], self._class_verdicts.successes[index]
        usual = self._usual_rates(trials, successes)
        rates: Floats = (successes + _CLASS_TRIALS * usual) / (trials + _CLASS_TRIALS)
        return np.minimum(rates, 1.0)

    def _accepted(self, verdicts: Sequence[DraftOutcome]) -> NDArray[np.bool_]:
        """Return which tokens of each proposal were accepted, [verdicts, positions]."""
        num_accepted = np.array([one.num_accepted for one in verdicts])
        is_success: NDArray[np.bool_] = np.arange(self.num_positions) < num_accepted[:, None]
        for index, one in enumerate(verdicts):
            if one.accepted_nodes is not None:
                is_success[index] = False
                is_success[index, [node for node in one.accepted_nodes if node < self.num_positions]] = True
        return is_success

    def _follow_factor(
        self, slots: NDArray[np.int64], trials: Floats, failed: Floats, expected: Floats
    ) -> None:
        totals = self._totals[slots]
        slow, fast = (1.0 - _REQUEST_DECAY) ** trials, (1.0 - _FAST_DECAY) ** trials
        totals[:, _FAILURES] = totals[:, _FAILURES] * slow + failed
        totals[:, _EXPECTED] = totals[:, _EXPECTED] * slow + expected
        totals[:, _FAST_FAILURES] = totals[:, _FAST_FAILURES] * fast + failed
        totals[:, _FAST_EXPECTED] = totals[:, _FAST_EXPECTED] * fast + expected
        factor = self._factor(totals, self._class_of_slot[slots])
        foreseen = totals[:, _FAST_EXPECTED] * factor
        # A decaying count of window w has half the variance of a plain one of that expectation.
        surprise = np.abs(totals[:, _FAST_FAILURES] - foreseen) / np.sqrt(0.5 * foreseen + 0.5)
        changed = surprise > _SURPRISE
        if changed.any():
            totals[changed, _FAILURES] = totals[changed, _FAST_FAILURES]
            totals[changed, _EXPECTED] = totals[changed, _FAST_EXPECTED]
            totals[changed, _IS_ODD] = 1.0
            self._requests.trials[slots[changed]] *= 0.1
            self._requests.successes[slots[changed]] *= 0.1
        self._totals[slots] = totals

    def _factor(self, totals: Floats, of_class: NDArray[np.int64]) -> Floats:
        """Return how much more often tokens of a request fail than those of its class."""
        prior = _REQUEST_TRIALS * self._class_failures[of_class, 0]
        for index, members in _by_class(of_class):
            spread = self._class_spread.get(index)
            if spread is not None:
                prior[members] = np.where(totals[members, _IS_ODD] > 0.0, prior[members], 1.0 / spread)
        np.clip(prior, _FEWEST_FAILURES, _MOST_FAILURES, out=prior)
        factor: Floats = (totals[:, _FAILURES] + prior) / (totals[:, _EXPECTED] + prior)
        return factor

    def _note_spread(self, index: int, totals: Floats, num_rounds: int) -> None:
        """Learn how alike requests of a class are: how far failures scatter beyond what chance does."""
        expected = totals[:, _EXPECTED]
        counts = expected > _FEWEST_EXPECTED
        if not counts.any():
            return
        expected, failures = expected[counts], totals[counts, _FAILURES]
        chance = _CHANCE_SPREAD * (1.0 - float(self._class_failures[index, 0]))
        excess = ((failures - expected) ** 2 / expected - chance).sum() / expected.sum()
        start = 1.0 / max(_REQUEST_TRIALS * float(self._class_failures[index, 0]), _FEWEST_FAILURES)
        before = self._class_spread.get(index, start)
        weight = 1.0 - (1.0 - _SPREAD_DECAY) ** min(int(counts.sum()) * num_rounds, 8)
        after = moved(before, float(excess), weight)
        self._class_spread[index] = min(max(after, 1.0 / _MOST_FAILURES), 1.0 / _FEWEST_FAILURES)

    def _read_lengths(self, rounds: Sequence[tuple[Sequence[DraftOutcome], Mapping[RequestId, int]]]) -> None:
        wanted: list[tuple[RequestId, int, int]] = []
        for outcomes, budgets in rounds:
            got = {one.request_id: one.num_drafted for one in outcomes}
            wanted += [(one, budget, got.get(one, 0)) for one, budget in budgets.items() if budget > 0]
        if not wanted:
            return
        budget = np.minimum([one[1] for one in wanted], self.num_positions)
        length = np.array([one[2] for one in wanted])
        positions = np.arange(self.num_positions)
        is_trial = (positions < budget[:, None]) & (positions <= length[:, None])
        slots, counts, (trials, successes) = _by_request(
            [self._slot(one[0]) for one in wanted], is_trial, is_trial & (positions < length[:, None])
        )
        totals = self._totals[slots]
        kept = (1.0 - _AVAILABILITY_DECAY) ** counts
        totals[:, _WANTED] = totals[:, _WANTED] * kept + counts
        totals[:, _GOT] = totals[:, _GOT] * kept + successes[:, 0]
        self._totals[slots] = totals
        self._last_round[slots] = self._round
        of_class = self._class_of_slot[slots]
        for index, members in _by_class(of_class):
            _decay_in(self._class_lengths, index, trials[members].sum(0), successes[members].sum(0))
            lengths = self._class_lengths
            self._class_presence[index] = (lengths.successes[index] + 4.0 * _FIRST_AVAILABILITY) / (
                lengths.trials[index] + 4.0
            )

    def _fade_class(self, index: int, num_rounds: int) -> None:
        """Let a class that had no verdicts before these rounds be learnt anew: now they tell more than those
        before.
        """
        age = self._round - self._class_last_round.get(index, self._round) - (num_rounds - 1)
        self._class_last_round[index] = self._round
        if age > 1:
            fade = kept_after(age, _CLASS_STALE_ROUNDS)
            self._class_verdicts.trials[index] *= fade
            self._class_verdicts.successes[index] *= fade

    def _slot(self, request_id: RequestId) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._free.pop() if self._free else len(self._slots)
            self._reserve(slot + 1)
            self._slots[request_id] = slot
            self._names[slot : slot + 1] = [request_id]
            self._requests.trials[slot] = self._requests.successes[slot] = 0.0
            self._totals[slot] = 0.0
            self._last_round[slot] = self._round
            self._class_of_slot[slot] = self._class_index(
                self._classes_of_unread.get(request_id, OTHER_CLASS)
            )
        return slot

    def _reserve(self, num_rows: int) -> None:
        if num_rows > self._totals.shape[0]:
            self._requests.reserve(num_rows)
            self._totals = _with_rows(self._totals, num_rows)
            num_rows = self._totals.shape[0]
            self._last_round = np.resize(self._last_round, num_rows)
            self._class_of_slot = np.resize(self._class_of_slot, num_rows)

    def _class_index(self, name: str) -> int:
        index = self._classes.get(name)
        if index is None:
            if len(self._classes) >= self._max_classes:
                return 0
            index = self._classes[name] = len(self._classes)
            for counts in (self._class_verdicts, self._class_lengths):
                counts.reserve(index + 1)
            if index >= self._class_failures.shape[0]:
                self._class_failures = _with_rows(self._class_failures, index + 1)
                self._class_presence = _with_rows(self._class_presence, index + 1)
            self._class_failures[index], self._class_presence[index] = self._of_all_classes()
        return index

    def _of_all_classes(self) -> tuple[Floats, Floats]:
        """Return what a class begins with that nothing is known of: the mean of the others, by their
        trials.
        """
        num_classes = len(self._classes) - 1
        weights = self._class_verdicts.trials[:num_classes, 0] + 1.0
        weights = (weights / weights.sum())[:, None]
        failures: Floats = (self._class_failures[:num_classes] * weights).sum(0)
        presence: Floats = (self._class_presence[:num_classes] * weights).sum(0)
        return failures, presence


def _by_request(
    slots: Sequence[int], *values: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Floats]]:
    """Return each slot once, how often it was there, and the rows of values added up for it."""
    unique, inverse, counts = np.unique(slots, return_inverse=True, return_counts=True)
    if len(unique) == len(slots):
        return (
            np.array(slots, dtype=np.int64),
            np.ones(len(slots), dtype=np.int64),
            [rows.astype(np.float64) for rows in values],
        )
    sums = [np.zeros((len(unique), rows.shape[1])) for rows in values]
    for its, rows in zip(sums, values, strict=True):
        np.add.at(its, inverse, rows)
    return unique, counts, sums


def _by_class(of_class: NDArray[np.int64]) -> list[tuple[int, NDArray[np.bool_] | slice]]:
    """Return each class there is, with who is of it."""
    first = int(of_class[0])
    if len(of_class) == 1 or (of_class == first).all():
        return [(first, slice(None))]
    return [(int(index), of_class == index) for index in np.unique(of_class)]


def _decay_in(counts: _Counts, index: int, trials: Floats, successes: Floats) -> None:
    untried = trials.max() - trials
    kept = (1.0 - _CLASS_DECAY) ** trials * (1.0 - 0.5 * _CLASS_DECAY) ** untried
    counts.trials[index] = counts.trials[index] * kept + trials
    counts.successes[index] = counts.successes[index] * kept + successes


def _usual_in_chains(trials: Floats, successes: Floats) -> Floats:
    """Return the mean over all positions, for each."""
    mean = (successes.sum() + _FIRST_GUESS_TRIALS * _FIRST_GUESS) / (trials.sum() + _FIRST_GUESS_TRIALS)
    return np.full(len(trials), mean)


def _usual_in_trees(trials: Floats, successes: Floats) -> Floats:
    """Return how often each node stands over how often the one before does, where that is a power of its
    place: the power of which as many successes are expected as there were.
    """
    first = (successes[0] + _FIRST_GUESS_TRIALS * _FIRST_GUESS) / (trials[0] + _FIRST_GUESS_TRIALS)
    places = np.arange(1.0, len(trials))
    log_ratios = np.log(places / (places + 1.0))
    weights = trials[1:].copy()
    weights[:1] += _FIRST_GUESS_TRIALS
    num_successes = successes[1:].sum() + _FIRST_GUESS_TRIALS * 0.5**_FIRST_FALL
    fall = _FIRST_FALL
    for _ in range(_NUM_NEWTON if len(places) else 0):
        expected = weights * np.exp(fall * log_ratios)
        fall += float((num_successes - expected.sum()) / (expected * log_ratios).sum())
        fall = min(max(fall, 0.0), _MOST_FALL)
    return np.concatenate(([first], np.exp(fall * log_ratios)))
