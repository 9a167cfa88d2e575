"""What rounds say of what was expected of them: of their times, and of the tokens that they brought."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from specdec.scheduling.speculation.controller import RoundObservation
from specdec.scheduling.speculation.decision import (
    Decision,
    Region,
    drafted_gain,
    expected_gain,
    num_decoding_of,
)
from specdec.scheduling.speculation.evidence import Alarm, Evidence, Lately
from specdec.scheduling.speculation.goodput import Kind

_FEW_ROUNDS = 5.0
_OF_COMPARISON, _FROM_BEFORE = 16.0, 8.0
"""Rounds of a comparison, and those that what was known of a mode before counts as at most. Rounds of a long
time ago, and of another usual, tell less of which of two is better, however many they are."""
_STILL_COMPARED = 256
"""Rounds for which it is known which of two modes is better."""
_LARGEST_SURPRISE, _ENOUGH_PROPOSALS = 2.0, 12
"""Of what is accepted, and of how many proposals together: of fewer, half or twice as much is chance."""


class RoundEvidence:
    """Gathers what each round says, and believes it with the next decision. `now` counts rounds.

    What parts of rounds cost is learnt from the same rounds, so that what they took is compared with what it
    should have been by the costs of just that time. Counted by both, a start on a machine half as fast as it
    was measured would make drafts look four times as dear.
    """

    def __init__(self) -> None:
        """Begin without doubts."""
        self._evidence = Evidence()
        self._alarm = Alarm()
        self._gain_alarm = Alarm(_LARGEST_SURPRISE)
        self._gain = self._expected_gain = 0.0
        self._num_proposals = 0
        """Of proposals since the last look at what is accepted of them."""
        self._lately = Lately()
        self._compared: dict[frozenset[Kind], int] = {}
        """When two modes were last run beside one another."""
        self._ratios: list[float] = []
        """What rounds have taken over what was expected, of those as decided, since the decision."""

    def factor(self, now: int, kind: Kind, region: Region) -> float:
        """Return by how much the model's rate of a kind of rounds is to be corrected."""
        return self._evidence.factor(now, kind, region)

    def time_factor(self, now: int, kind: Kind, region: Region) -> float:
        """Return how many times as long as expected rounds of a kind take."""
        return self._evidence.time_factor(now, kind, region)

    def little_known(self, now: int, kinds: Iterable[Kind]) -> Set[Kind]:
        """Return those kinds of which little has been seen, or long ago."""
        return {kind for kind in kinds if self._evidence.num_rounds(now, kind) < _FEW_ROUNDS}

    def compare(self, now: int, usual: Kind, other: Kind, decision: Decision) -> None:
        """Believe which of two modes is better, where enough rounds of both were seen just now.

        What rounds of both have taken at other times tells that less well than one would think: the machine
        was another one, and so were its costs. Where too few were seen, since requests come and go, there is
        nothing better than that. What the other mode took more or less than was thought, it is thought to
        take more or less in other batches, too.
        """
        self._compared[frozenset((usual, other))] = now
        came = self._lately.ratio(other)
        if came is None:
            return
        self.take_in(now, decision)
        region, evidence = decision.region, self._evidence
        usual_ratio = evidence.time_factor(now, usual, region)
        beside = self._lately.ratio(usual) or usual_ratio
        known = max(0.0, min(evidence.num_rounds(now, other) - _OF_COMPARISON, _FROM_BEFORE))
        before = evidence.time_factor(now, other, region)
        ratio = (known * before + _OF_COMPARISON * usual_ratio * came / beside) / (known + _OF_COMPARISON)
        evidence.rescale(other, ratio / before)
        evidence.settle(now, other, region, ratio)

    def last_compared(self, kind: Kind, others: Iterable[Kind]) -> Mapping[Kind, int]:
        """Return in which round each of some kinds was run beside one of them, if it ever was."""
        pairs = ((other, frozenset((kind, other))) for other in others if other != kind)
        return {other: self._compared[pair] for other, pair in pairs if pair in self._compared}

    def just_compared(self, now: int, kind: Kind, others: Iterable[Kind]) -> Set[Kind]:
        """Return those of some kinds that were run beside one of them not long ago."""
        return {other for other in others if self.are_compared(now, kind, other)}

    def are_compared(self, now: int, one: Kind, other: Kind) -> bool:
        """Whether two kinds were run beside one another not long ago."""
        then = self._compared.get(frozenset((one, other)))
        return then is not None and now - then <= _STILL_COMPARED

    def goes_off(self, decision: Decision, ratio: float) -> bool:
        """Whether rounds take so much more or less than they did, over what was expected, that it is odd."""
        return self._alarm.goes_off(decision.compares_as, ratio)

    def gain_goes_off(self, decision: Decision, observation: RoundObservation) -> bool:
        """Whether of what is drafted so much more or less is accepted than lately that it is odd: of those
        that something was expected of, not of newcomers.
        """
        known = [one for one in observation.outcomes if one.request_id in decision.index]
        self._expected_gain += drafted_gain(decision, observation)
        self._gain += sum(one.num_accepted for one in known)
        self._num_proposals += len(known)
        if self._num_proposals < _ENOUGH_PROPOSALS:
            return False
        ratio = (1.0 + self._gain) / (1.0 + self._expected_gain)
        self._gain = self._expected_gain = 0.0
        self._num_proposals = 0
        return self._gain_alarm.goes_off(decision.option.kind, ratio)

    def note_time(self, kind: Kind, ratio: float) -> None:
        """A round of a kind took `ratio` times as long as was expected, by what costs are known to be."""
        self._ratios.append(ratio)
        self._lately.note(kind, ratio)

    def note_tokens(
        self,
        now: int,
        kind: Kind,
        observation: RoundObservation,
        decision: Decision,
        *,
        own_s: float,
        stand_in_gain: float,
    ) -> None:
        """Compare the tokens of a round as decided, and its time if prompts were read in it.

        Args:
            now: the round.
            kind: of the round.
            observation: what it was.
            decision: what was decided.
            own_s: what it would have taken without prompts, seconds by the costs that were decided by.
            stand_in_gain: accepted tokens that are expected of a proposal that stands in.
        """
        if observation.num_prompt_rows > 0:
            self._ratios.append(own_s / decision.expected_s(beside_prompts=True))
        num_decoding = num_decoding_of(observation)
        self._evidence.note_tokens(
            now,
            kind,
            num_decoding + expected_gain(decision, observation),
            num_decoding + drafted_gain(decision, observation) + len(observation.stand_ins) * stand_in_gain,
        )

    def take_in(self, now: int, decision: Decision | None) -> None:
        """Learn from the times of all rounds since the last decision."""
        if decision is not None and self._ratios:
            self._evidence.note_times(now, decision.option.kind, decision.region, self._ratios)
            self._ratios.clear()

    def settle(self, now: int, kinds: Sequence[Kind], decision: Decision) -> None:
        """Believe what a trial has shown, if it was long enough: rounds of both kinds that it compares."""
        ratios = {kind: ratio for kind in kinds if (ratio := self._lately.ratio(kind)) is not None}
        if len(ratios) < len(kinds):
            return
        self.take_in(now, decision)
        for one, ratio in ratios.items():
            self._evidence.settle(now, one, decision.region, ratio)

    def rate_lately(self, now: int, kind: Kind | None, decision: Decision) -> float | None:
        """Return the tokens per second of what is done usually, by what it took just before."""
        usual = None if kind is None else decision.options.get(kind)
        if kind is None or usual is None or (ratio := self._lately.ratio(kind)) is None:
            return None
        return usual.rate * self._evidence.token_factor(now, kind) / ratio

    def forget_lately(self, *kinds: Kind) -> None:
        """What was just before does not compare with what comes: of some kinds, or (none given) of all."""
        self._lately.forget(*kinds)
