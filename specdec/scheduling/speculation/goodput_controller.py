"""Chooses k, mode, and whether to speculate at all, by expected and measured tokens per second."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from specdec.core.clock import Clock
from specdec.core.ids import RequestId
from specdec.kv.selection import KvBudget
from specdec.scheduling.speculation.comparison import Comparison
from specdec.scheduling.speculation.continuations import Continuations
from specdec.scheduling.speculation.controller import RoundObservation
from specdec.scheduling.speculation.cost import CostModel
from specdec.scheduling.speculation.cost_learning import CostLearning
from specdec.scheduling.speculation.cost_profile import CostProfile
from specdec.scheduling.speculation.decision import Decision, Region, added_up, levels_of, region_of
from specdec.scheduling.speculation.evidence import Overheads
from specdec.scheduling.speculation.explanation import Bound, ControllerState, Reason
from specdec.scheduling.speculation.foresight import Foresight
from specdec.scheduling.speculation.goodput import Ints, Kind, Option
from specdec.scheduling.speculation.kind_switch import KindSwitch
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.speculation.prospects import Prospects
from specdec.scheduling.speculation.request_facts import RequestFacts
from specdec.scheduling.speculation.rhythm import LONGEST_PASSED_OVER_S, Passed, Rhythm
from specdec.scheduling.speculation.round_evidence import RoundEvidence
from specdec.scheduling.speculation.settings import ControllerSettings
from specdec.scheduling.speculation.settling import Settling, kind_of
from specdec.scheduling.speculation.trial_choice import begin_trial, longer_drafts, probed, tried_or_usual
from specdec.scheduling.speculation.trials import Trials
from specdec.scheduling.speculation.worth import PoolWorth
from specdec.scheduling.state import Schedulable

_FIRST_ROUNDS = 8
"""Rounds after the start in which the cost model is still corrected: no evidence against it."""
_SETTLING = ("auditing", "comparing")
"""Trials whose rounds are believed, beside what rounds have taken just before."""

_LEARNT_EVERY_S = 0.03
"""Rounds that come to this are learnt from together. Of what one alone would cost, 0.15 ms behind a step that
has streamed a model through the processor's caches, most is waiting for memory: 4 % of a round of 3.5 ms."""
_SORTED_EVERY_S = 0.02
"""Plain rounds that come to this are sorted together, for the same reason: it took 0.015 ms for each."""
_PRICED_EVERY_S = 0.1
"""Of plain rounds, after which a decision is priced anew by what was learnt of costs: that takes 0.25 ms."""
_TOLD_EVERY_S = 1.0
"""`state` is no older than that."""


class GoodputController:
    """Implements `SpeculationController` by expected goodput. Times of rounds come with observations.

    The model (`Foresight` over `RequestFacts` and `CostModel`) says which k each kind of round should have
    and what it brings; `RoundEvidence` corrects that by what rounds of that kind have brought. What is done
    (`KindSwitch`) changes only for something better by a margin, and not for a while after the last change.
    What is thought worse is tried now and then (`Trials`). `Rhythm` says when all this is thought over.
    """

    minds_targets = True

    def __init__(
        self, settings: ControllerSettings, profile: CostProfile, clock: Clock | None = None
    ) -> None:
        """Begin with measured costs (`assumed_profile()` where there are none).

        With a clock it looks at how long it thinks itself, and thinks less often where that is long.
        """
        self._settings = settings
        num_steps = max(1, settings.max_draft_tokens)
        costs_of_start = partial(
            CostModel,
            profile,
            max_rows=settings.max_rows,
            max_sequences=settings.max_sequences * max(1, settings.max_branches),
            max_steps=num_steps,
            num_drafters=max(1, len(settings.drafter_caps)),
            tree_levels=settings.tree_levels,
        )
        self._costs = costs_of_start()
        overheads = Overheads()
        self._facts = RequestFacts(settings)
        self._learning = CostLearning(
            self._costs,
            overheads,
            has_several_drafters=self._facts.drafters is not None,
            budgeted_drafter=settings.budgeted_drafter,
        )
        self._foresight = Foresight(
            settings, self._facts, self._costs, overheads, self._learning, measured=costs_of_start()
        )
        self._continuations = Continuations(settings.max_branches, num_steps)
        self._evidence = RoundEvidence()
        self._settling = Settling()
        self._rhythm = Rhythm(settings.decide_every, clock)
        self._switch = KindSwitch(margin=settings.margin, dwell_rounds=settings.dwell_rounds)
        self._trials = Trials(settings.trial_share)
        self._worth = PoolWorth(settings.margin)
        self._known_regions: set[Region] = set()
        self._decision: Decision | None = None
        self._round = 0
        self._unlearnt: list[tuple[RoundObservation, Passed]] = []
        """Rounds that have not been learnt from yet, and those before each that were passed over."""
        self._unlearnt_s = 0.0
        self._unsorted: list[RoundObservation] = []
        """Rounds behind those, as plain as those before, of which most will be passed over."""
        self._unsorted_s = 0.0
        self._asked_round = self._prepared_round = -1
        """The last ones of which it was asked whether the decision stands, and whether another is due."""
        self._dearer_kinds: dict[Kind, float] = {}
        """See `_dearer`: of the decision, since it was last priced anew."""
        self._unpriced_s = 0.0
        """What rounds have taken since."""
        self._may_be_passed_over = False
        """Whether rounds as decided are plain, and short."""
        self._may_sort_later = False
        """Whether most rounds will be passed over, as far as was learnt."""
        self._drafts_nothing = False
        """Whether nobody is drafted for, as decided, be it who may."""
        self._chosen_for: tuple[tuple[Schedulable, ...], int] = (), 0
        """All sequences of the last round, and how many of them were in it."""
        self._prepared: Prospects | None = None

    @property
    def mode(self) -> OverlapMode:
        """The mode of the last decision; lockstep without drafts."""
        decision = self._decision
        if decision is None or decision.option.kind == "plain":
            return "lockstep"
        return decision.option.kind

    @property
    def pick_kv_budget(self) -> Callable[[RequestId, str], KvBudget] | None:
        """Tells the KV budget of a request of a class; None: there are not several to choose from."""
        budgets, drafters = self._facts.budgets, self._facts.drafters
        if drafters is not None and drafters.picks_budgets:
            return drafters.budget
        return None if budgets is None else budgets.of

    @property
    def pick_drafter(self) -> Callable[[RequestId, str], int] | None:
        """Tells the drafter of a request of a class; None: there are not several to choose from."""
        drafters = self._facts.drafters
        return None if drafters is None else drafters.of

    @property
    def state(self) -> ControllerState:
        """What was decided last, and why."""
        decision = self._decision
        return ControllerState() if decision is None else self._explain(decision)

    def choose(self, decoding: Sequence[Schedulable], elsewhere: Sequence[Schedulable] = ()) -> Sequence[int]:
        """Return k for each sequence; decide anew where the batch has changed, or now and then."""
        if not decoding:
            return []
        sequences = (*decoding, *elsewhere)
        are_same = sequences == self._chosen_for[0]
        self._chosen_for = sequences, len(decoding)
        decision = self._decision
        # Nothing has been learnt, nobody has come or gone: it stands as it stood when that was asked last.
        stands = are_same and self._asked_round == self._round
        self._asked_round = self._round
        if decision is None or (
            not stands and self._is_to_be_made_anew(decision, sequences, are_same=are_same)
        ):
            self._learn_observed()
            with self._rhythm.deciding.timed():
                decision = self._decide(sequences, len(decoding))
        if self._drafts_nothing and not any(one.requested_draft_tokens for one in decoding):
            return [0] * len(decoding)
        index, chosen = decision.index, decision.num_draft_tokens
        return [
            self._of_newcomer(decision, one) if (at := index.get(one.request_id)) is None else chosen[at]
            for one in decoding
        ]

    def fan_out(
        self, request: Schedulable, num_pending: int, max_branches: int, *, is_foreign: bool = False
    ) -> tuple[int, ...]:
        """Share out continuations by what is expected of this request."""
        return self._continuations.shares(
            self._decision, request.request_id, num_pending, max_branches, is_foreign=is_foreign
        )

    def observe(self, observation: RoundObservation) -> None:
        """Take in a finished round."""
        if self._unlearnt_s >= _LEARNT_EVERY_S:  # nobody had it think
            self._learn_observed()
        self._unsorted.append(observation)
        self._unsorted_s += _round_s(observation)
        if not self._may_sort_later or self._unsorted_s >= _SORTED_EVERY_S:
            self._sort()

    def _sort(self) -> None:
        """Tell apart, of the last rounds, those that are to be learnt from and those that are passed over."""
        observed, self._unsorted, self._unsorted_s = self._unsorted, [], 0.0
        for observation in observed:
            if self._may_be_passed_over and self._is_passed_over(observation):
                continue
            passed = self._rhythm.take_passed_over()
            self._unlearnt.append((observation, passed))
            self._unlearnt_s += passed.seconds + _round_s(observation)

    def think(self) -> None:
        """Learn from the last rounds; if it is time for a decision, find out what there is to choose from."""
        self._learn_some()
        sequences, num_here = self._chosen_for
        decision, is_asked = self._decision, self._prepared_round == self._round
        if is_asked or self._prepared is not None or decision is None:
            return
        self._prepared_round = self._round
        if self._is_due(decision):
            with self._rhythm.deciding.timed(goes_on=True):
                self._prepared = self._look_at(sequences, num_here)

    def _learn_some(self) -> None:
        """Learn from what was observed, if it is enough, or if it cannot wait."""
        if not self._unlearnt:
            return
        is_enough = self._unlearnt_s >= _LEARNT_EVERY_S
        if is_enough or self._cannot_wait() or self._rhythm.is_start(self._round):
            self._learn_observed()

    def _cannot_wait(self) -> bool:
        """Whether what was observed tells whether a trial goes on. Probes go on for many rounds, of which
        most tell nothing: with one request, learning from each by itself was much of their time.
        """
        trials = self._trials
        if trials.current == "probing" and not self._facts.has_trial:
            return len(self._unlearnt) >= trials.num_rounds_left
        return trials.current is not None or self._facts.has_trial

    def _learn_observed(self) -> None:
        self._sort()
        observed, self._unlearnt, self._unlearnt_s = self._unlearnt, [], 0.0
        for observation, passed in observed:
            self._learn(observation, passed)
        self._note_whether_to_sort_later()

    def _note_whether_to_sort_later(self) -> None:
        self._may_sort_later = (
            self._may_be_passed_over
            and self._trials.current is None
            and self._settling.is_calm
            and not self._rhythm.is_alert(self._round, self._switch.switched_round)
        )

    def _is_passed_over(self, observation: RoundObservation) -> bool:
        """Whether a round is as those before, and says nothing new."""
        decision, round_s = self._decision, observation.round_s
        if decision is None or self._trials.current is not None:
            return False
        if round_s is None or observation.num_prompt_rows > 0 or not self._settling.is_calm:
            return False
        if kind_of(observation) != "plain" or observation.stand_ins or observation.ahead:
            return False
        return self._rhythm.passes_over(
            self._round,
            round_s,
            switched_round=self._switch.switched_round,
        )

    def _learn(self, observation: RoundObservation, passed: Passed) -> None:
        self._round += passed.num_rounds + 1
        decision = self._decision
        if decision is None:
            return
        kind = self._settling.note(observation)
        self._facts.note(self._round, observation, self._owed(observation, decision))
        self._continuations.note(self._round, observation)
        if self._evidence.gain_goes_off(decision, observation):
            self._rhythm.note_alarm(self._round)
        self._note_times(observation, decision, kind, passed)

    def _owed(self, observation: RoundObservation, decision: Decision) -> Mapping[RequestId, int]:
        """Return whose drafts should have been there, and how many: not of those that were still read."""
        if not self._settling.is_catching_up:
            owed = self._continuations.owed(observation, decision)
            if not self._settings.looks_first or not observation.stand_ins:
                return owed
            found = {one.request_id for one in observation.stand_ins}
            return {one: budget for one, budget in owed.items() if one not in found}
        there = {one.request_id for one in observation.outcomes}
        return {one: budget for one, budget in observation.budgets.items() if one in there}

    # ------------------------------------------------------------------------------------ deciding

    def _is_to_be_made_anew(
        self, decision: Decision, sequences: Sequence[Schedulable], *, are_same: bool
    ) -> bool:
        """Whether to decide again; `are_same`: those of the last round, for whom the decision held then."""
        holds = (are_same and self._rhythm.is_too_soon) or self._rhythm.still_holds(decision, sequences)
        if self._is_due(decision) or not holds:
            # Where nobody is to be drafted for there is nothing to decide, but to tell what goes on.
            is_moot = decision.option.kind == "plain" and not any(map(_may_get_drafts, sequences))
            return not is_moot or self._rhythm.since_decision_s >= _TOLD_EVERY_S
        return False

    def _is_due(self, decision: Decision) -> bool:
        return self._rhythm.is_due(self._round, decision.batch.num_sequences) or self._facts.is_due(
            self._round
        )

    def _of_newcomer(self, decision: Decision, one: Schedulable) -> int:
        """Return k of a sequence that came after the decision: its own, or the mean of those without one."""
        usual = one.requested_draft_tokens
        if usual is None:
            if decision.option.kind == "plain" or decision.is_partial:
                return 0
            asked = decision.batch.requested.tolist()
            chosen = [k for k, own in zip(decision.num_draft_tokens, asked, strict=True) if own < 0]
            usual = round(sum(chosen) / len(chosen)) if chosen else 0
        cap = self._facts.welcome(one)
        return min(usual, self._settings.max_draft_tokens if cap is None else cap)

    def _look_at(self, sequences: tuple[Schedulable, ...], num_here: int) -> Prospects:
        """Find out what these, of which the first `num_here` are in the next round, could be given."""
        self._evidence.take_in(self._round, self._decision)
        is_drafting = self._switch.kind != "plain"
        self._facts.review(self._round, sequences, self._decision, self._costs, is_drafting=is_drafting)
        batch = self._foresight.batch_of(sequences)
        region = region_of(batch)
        kinds: tuple[Kind, ...] = ("plain", *self._settings.modes)
        time_factors = {kind: self._evidence.time_factor(self._round, kind, region) for kind in kinds}
        evaluation = self._foresight.evaluate(batch, time_factors)
        batch = evaluation.batch
        outlook = self._continuations.outlook
        options = evaluation.options(self._settings.modes, outlook)
        if "ping_pong" in options and num_here < len(sequences):
            by_cohort = self._foresight.by_cohort(batch, num_here, time_factors, evaluation.plain_s)
            options = {kind: option for kind, option in options.items() if kind != "ping_pong"}
            options |= {} if by_cohort is None else {"ping_pong": by_cohort}
        return Prospects(
            index={one.request_id: at for at, one in enumerate(sequences)},
            num_here=num_here,
            batch=batch,
            region=region,
            evaluation=evaluation,
            outlook=outlook,
            options=options,
            prices={kind: self._foresight.price_s(batch, option) for kind, option in options.items()},
        )

    def _decide(self, sequences: tuple[Schedulable, ...], num_here: int) -> Decision:
        """Decide for all, of which the first `num_here` are to be in the next round."""
        prospects, self._prepared = self._prepared, None
        if prospects is None or not prospects.are_of(sequences, num_here):
            prospects = self._look_at(sequences, num_here)
        self._evidence.take_in(self._round, self._decision)
        self._dearer_kinds.clear()
        self._decision = self._decide_among(prospects, sequences)
        self._facts.take_over(sequences)
        is_plain = self._decision.option.kind == "plain"
        self._drafts_nothing = is_plain and not any(self._decision.num_draft_tokens)
        self._may_be_passed_over = is_plain and self._decision.expected_s() <= LONGEST_PASSED_OVER_S
        self._note_whether_to_sort_later()
        return self._decision

    def _decide_among(self, prospects: Prospects, sequences: tuple[Schedulable, ...]) -> Decision:
        batch, region, options = prospects.batch, prospects.region, prospects.options
        evaluation, outlook = prospects.evaluation, prospects.outlook
        rates = {
            kind: option.rate * self._evidence.factor(self._round, kind, region)
            for kind, option in options.items()
        }
        is_known = self._decision is not None and self._decision.region == region
        if not is_known:
            self._evidence.forget_lately()
            if region not in self._known_regions:
                self._known_regions.add(region)
                self._trials.note_new_situation()
        self._switch.pass_time(self._rhythm.since_decision_s)
        self._rhythm.note_decision(self._round, is_known=is_known)
        kind = self._kind_for(rates, batch.num_sequences)
        compared = Comparison(
            options=options,
            rates=rates,
            kind=kind,
            margin=self._settings.margin,
            little_known=self._evidence.little_known(self._round, options),
            last_compared=self._evidence.last_compared(kind, options),
            just_compared=self._evidence.just_compared(self._round, kind, options),
            has_choice=bool((batch.requested < 0).any()),
            beyond_targets=self._beyond_targets(prospects),
        )
        longer = None
        # Who tries a drafter would try longer drafts of it, too.
        if not self._facts.has_trial or self._trials.current == "stretching":
            longer = longer_drafts(
                self._trials, compared, evaluation, outlook, self._facts.acceptance.num_positions
            )
        before = self._trials.current
        begin_trial(self._trials, compared, batch.num_sequences, longer)
        option, reason = tried_or_usual(self._trials, compared, longer)
        if before is None and (reason in _SETTLING or reason == "probing"):
            self._evidence.forget_lately(option.kind)
        has_targets = math.isfinite(evaluation.bound_s) and batch.caps.any()
        if reason == "no_gain" and len(options) == 1 and has_targets:
            reason = "latency_target"
        chosen: Ints = option.num_draft_tokens
        asks_for_verdicts = reason == "probing" and compared.in_doubt[1]
        is_partial = asks_for_verdicts and (option.kind == "lockstep" or option is compared.beyond_targets)
        if asks_for_verdicts and option.kind == "lockstep":
            chosen = np.where(batch.requested < 0, probed(chosen), chosen)
        elif self._facts.has_trial and kind == "lockstep" and reason != "auditing":
            chosen = np.maximum(chosen, self._facts.least_tried(sequences))
            is_partial = True
        accepted = batch.estimate.accepted
        return Decision(
            batch=batch,
            index=prospects.index,
            region=region,
            options=options,
            rates=rates,
            undrafted_rate=evaluation.undrafted_rate * self._evidence.factor(self._round, "plain", region),
            option=option,
            reason=reason,
            bounded_by=self._bound_of(prospects, compared, reason),
            num_draft_tokens=chosen.tolist(),
            is_partial=is_partial,
            acceptance_levels=levels_of(accepted),
            prices=prospects.prices,
            gains=added_up(batch.estimate.reached)[np.arange(len(sequences)), chosen].tolist(),
            gains_if_drafted=added_up(np.cumprod(accepted, axis=1, dtype=np.float64)).tolist(),
        )

    def _beyond_targets(self, prospects: Prospects) -> Option | None:
        """Return what a probe would do where drafts were learnt to take longer than latency targets allow,
        and would not by what was measured at the start: while nothing is drafted nobody would learn that it
        is over.
        """
        batch, trials, bound_s = prospects.batch, self._trials, prospects.evaluation.bound_s
        if len(prospects.options) > 1 or not math.isfinite(bound_s) or not (batch.requested < 0).any():
            return None
        if trials.current != "probing" and not trials.is_due("probing"):
            return None
        plain_s = prospects.evaluation.plain_s
        return self._foresight.beyond_targets(batch, plain_s, self._settings.modes, prospects.outlook)

    def _bound_of(self, prospects: Prospects, compared: Comparison, reason: Reason) -> Bound:
        """Return what keeps k from being larger, but for trials."""
        is_short_for_targets = reason == "latency_target" or compared.is_bounded_by_targets
        if is_short_for_targets or prospects.evaluation.cuts_wishes:
            return "slo"
        batch = prospects.batch
        cap = self._settings.cap_for(batch.num_sequences)
        if cap == self._settings.max_draft_tokens:
            return "none"
        is_at_cap = (batch.requested < 0) & (compared.usual.num_draft_tokens >= cap)
        return "batch_size" if is_at_cap.any() else "none"

    def _kind_for(self, rates: dict[Kind, float], num_sequences: int) -> Kind:
        """Return what is done but for trials; see to it that a change of it is known."""
        switch = self._switch
        # A trial of a drafter says nothing of what is done otherwise.
        are_compared = partial(self._evidence.are_compared, self._round)
        if (not self._facts.has_trial or switch.kind is None) and switch.review(
            self._round, rates, num_sequences, are_compared
        ):
            self._evidence.forget_lately()
            self._rhythm.note_change()
            self._trials.note_change()
        assert switch.kind is not None
        return switch.kind

    # ------------------------------------------------------------------------------------ learning

    def _note_times(
        self, observation: RoundObservation, decision: Decision, kind: Kind, passed: Passed
    ) -> None:
        """Learn from how long a round took; of many short ones, from some what the parts cost."""
        is_settled = self._settling.is_as_it_seems and self._settling.is_alike
        round_s = _round_s(observation)
        self._rhythm.note_round(passed.seconds + round_s)
        trial = self._trials.current
        tells = trial is not None and (
            trial != "probing" or self._learning.doubts_drafts(observation.num_sequences)
        )
        heard_s = self._rhythm.hear(
            self._round,
            passed.seconds + round_s,
            switched_round=self._switch.switched_round,
            is_trial=tells,
        )
        is_as_decided = observation.num_prompt_rows == 0 and self._is_as_decided(decision, kind)
        if heard_s is not None:
            with self._rhythm.learning.timed():
                if is_settled:
                    self._learning.note(observation, decision)
                    self._unpriced_s += heard_s
                    if self._unpriced_s >= _PRICED_EVERY_S or not self._may_sort_later:
                        self._dearer_kinds.clear()
                        self._unpriced_s = 0.0
                if round_s > 0.0:
                    self._note_goodput(observation, decision, kind, round_s)
                    self._worth.note(decision, self._switch.kind or "plain", heard_s)
        is_tried = (
            trial is not None or decision.reason == "probing"
        )  # a probe may end among rounds of a bunch
        lost_s = self._lost_s(observation, decision, kind, round_s) if is_tried else 0.0
        if round_s > 0.0 and is_as_decided:
            self._note_ratio(observation, decision, round_s / decision.expected_s())
        counts = is_settled and observation.mode == self.mode  # the first ones are of the former mode
        if trial == "comparing":
            counts = self._is_as_decided(decision, kind) and self._is_comparable(observation, decision)
        if round_s > 0.0 and self._trials.note_round(
            round_s,
            lost_s,
            counts=counts,
            is_spent=not self._settling.is_catching_up,
            has_drafts=bool(observation.outcomes),
            num_passed=passed.num_rounds,
            passed_s=passed.seconds,
        ):
            self._rhythm.note_trial_end()
            usual = self._switch.kind or "plain"
            if trial == "auditing":
                self._evidence.settle(self._round, ("plain", usual), decision)
            elif trial == "comparing":
                self._evidence.compare(self._round, usual, decision.option.kind, decision)
            elif trial == "probing" and usual == "plain" and not decision.is_partial:
                self._evidence.settle(self._round, (usual, decision.option.kind), decision)

    def _is_as_decided(self, decision: Decision, kind: Kind) -> bool:
        """Whether the last round was one of those that were decided on, and says something of them."""
        return (
            decision.option.kind == kind
            and not decision.is_partial
            and self._settling.is_alike
            and self._round > _FIRST_ROUNDS
        )

    def _is_comparable(self, observation: RoundObservation, decision: Decision) -> bool:
        """Whether a round as decided tells how good decisions of its kind are."""
        is_usual = decision.reason != "stretching" and self._settling.is_as_it_seems
        is_late = observation.mode == "ping_pong" and not decision.is_followed(observation)
        return is_usual and not is_late and decision.is_of_all(observation)

    def _note_ratio(self, observation: RoundObservation, decision: Decision, ratio: float) -> None:
        """Compare a round's time with what was expected of it: every round's, for that takes next to none."""
        if self._trials.current is None and self._evidence.goes_off(decision, ratio):
            self._rhythm.note_alarm(self._round)
            self._trials.note_alarm()
        if self._is_comparable(observation, decision):
            kind = decision.option.kind
            self._evidence.note_time(kind, ratio / self._dearer(decision, kind))

    def _dearer(self, decision: Decision, kind: Kind) -> float:
        """Return how many times as long rounds of a kind take, by the present costs, as by those that were
        decided by.
        """
        dearer = self._dearer_kinds.get(kind)
        if dearer is None:
            price_s = self._foresight.price_s(decision.batch, decision.options[kind])
            dearer = self._dearer_kinds[kind] = price_s / decision.prices[kind]
        return dearer

    def _note_goodput(
        self, observation: RoundObservation, decision: Decision, kind: Kind, round_s: float
    ) -> None:
        """Compare the tokens of a round, by its own time, with what was expected of it."""
        own_s = self._learning.own_s(observation, kind, round_s)
        is_as_decided = self._is_as_decided(decision, kind)
        if is_as_decided and self._is_comparable(observation, decision) and own_s > 0.3 * round_s:
            gain = self._continuations.stand_in_gain
            then_s = own_s / self._dearer(decision, kind)
            self._evidence.note_tokens(
                self._round, kind, observation, decision, own_s=then_s, stand_in_gain=gain
            )

    def _lost_s(self, observation: RoundObservation, decision: Decision, kind: Kind, round_s: float) -> float:
        """Return how much longer a round of a trial took than its tokens would have taken as usual."""
        option, usual = decision.option, self._switch.kind
        usual_rate = decision.rates.get(usual or option.kind, option.rate)
        if self._trials.current in _SETTLING:
            usual_rate = self._evidence.rate_lately(self._round, usual, decision) or usual_rate
        if usual is not None and usual in decision.options:
            usual_rate /= self._dearer(decision, usual)
        own_s = self._learning.own_s(observation, kind, round_s)
        expected_s = decision.expected_s(beside_prompts=observation.num_prompt_rows > 0)
        return min(own_s, 4.0 * expected_s) - observation.num_committed / usual_rate

    # ---------------------------------------------------------------------------------- explaining

    def _explain(self, decision: Decision) -> ControllerState:
        option = decision.option
        by_mode = decision.rates_by_mode
        by_k = np.bincount(decision.num_draft_tokens)
        return ControllerState(
            mode=self.mode,
            is_speculating=any(decision.num_draft_tokens),
            reason=decision.reason,
            bounded_by=decision.bounded_by,
            mean_num_draft_tokens=float(np.mean(decision.num_draft_tokens)),
            num_requests_by_k=tuple(by_k.tolist()),
            goodput_on=max(by_mode.values(), default=0.0),
            goodput_off=decision.undrafted_rate,
            goodput_by_mode=tuple(by_mode.items()),
            draft_s=option.draft_s,
            verify_s=option.verify_s,
            round_s=option.round_s,
            acceptance=tuple(decision.batch.estimate.accepted.mean(0).tolist()),
            pool_worth=self._worth.ratio,
            num_switches=self._switch.num_switches,
            num_probe_rounds=self._trials.num_rounds["probing"],
            num_audit_rounds=self._trials.num_rounds["auditing"],
            num_stretch_rounds=self._trials.num_rounds["stretching"],
            num_comparison_rounds=self._trials.num_rounds["comparing"],
        )


def _round_s(observation: RoundObservation) -> float:
    round_s = observation.round_s
    return observation.draft_s + observation.verify_s if round_s is None else round_s


def _may_get_drafts(one: Schedulable) -> bool:
    return one.requested_draft_tokens != 0
