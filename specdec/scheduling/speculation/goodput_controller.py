"""Chooses k, mode, and whether to speculate at all, by expected and measured tokens per second."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specdec.core.clock import Clock
from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome
from specdec.kv.selection import KvBudget
from specdec.scheduling.speculation.acceptance import MAX_CLASSES, AcceptanceTracker
from specdec.scheduling.speculation.budget_picks import BudgetCosts, BudgetPicks
from specdec.scheduling.speculation.controller import RoundObservation
from specdec.scheduling.speculation.cost import CostModel, VerifyShape
from specdec.scheduling.speculation.cost_profile import CostProfile
from specdec.scheduling.speculation.decision import (
    NUM_LEVELS,
    Decision,
    added_up,
    drafted_gain,
    expected_gain,
    levels_of,
    mean_draft_context,
    num_decoding_of,
    region_of,
)
from specdec.scheduling.speculation.drafter_picks import DrafterCosts, DrafterPicks, drafter_costs
from specdec.scheduling.speculation.evidence import Alarm, Evidence, Lately, Overheads
from specdec.scheduling.speculation.explanation import ControllerState, Reason
from specdec.scheduling.speculation.goodput import AheadOutlook, Batch, Evaluation, Kind, Option
from specdec.scheduling.speculation.guesses import GuessRanks, share_guesses, share_guesses_behind_foreign
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.speculation.pace import Pace
from specdec.scheduling.speculation.settings import ControllerSettings
from specdec.scheduling.speculation.standins import StandIns
from specdec.scheduling.speculation.trials import Trial, TrialLength, Trials
from specdec.scheduling.state import Schedulable

_LEAST_PROBED, _MOST_PROBED = 4, 16
"""Requests that a probe drafts for, in one round: a quarter of them, within these."""
_PROBE_VERDICTS = 48
"""Proposals that a probe brings, if it may take that long."""
_EARLY_ROUNDS = 32
_DECISION_S, _DECISION_S_PER_SEQUENCE = 0.08, 0.004
"""After so many seconds a decision is thought over, if there were enough rounds."""
_HEARD_EVERY_S = 0.03
"""Costs are learnt from one round in so many seconds."""
_SHARE_OF_DECIDING, _SHARE_OF_LEARNING = 0.005, 0.004
"""Both are done less often where that would take more of the time than this."""
_HASTE = 4.0
"""While much is new they may take so many times as much."""
_CALMER, _CALMEST = 1.3, 4.0
"""While decisions change nothing they are thought over less often, and fewer rounds are learnt from: by this
factor each time, and by no more than that in all."""
_MOST_UNDECIDED_ROUNDS = 128
"""After so many rounds it is, however short they are, if there is time for it."""
_MUCH_THE_SAME = 8
"""While nothing is drafted and no more than one in so many sequences has changed, a decision still holds."""
_URGENT = 0.03
"""So much better plain decoding has to be to be gone back to at once, as a share."""
_RESTLESS_S = 10.0
"""After so many seconds a switch counts half for how restless things are."""
_MOST_RESTLESS = 5.0
_TRANSIENT_ROUNDS: Mapping[Kind, int] = {"plain": 1, "lockstep": 0, "ping_pong": 2, "draft_ahead": 3}
"""Rounds after a change of kind that say nothing of it: drafts are not there yet, or no more under way."""
_ROUNDS_TO_CALM_DOWN = 2
"""After rounds in which the drafter worked beside the target it goes on for a while: the first rounds
without it are not yet alone."""
_FIRST_ROUNDS = 8
"""Rounds after the start in which the cost model is still corrected: no evidence against it."""
_PIPELINED_PROBE_ROUNDS = 10
_FEWEST_AUDIT_ROUNDS, _MOST_AUDIT_ROUNDS = 3, 24
_CLOSE, _FEWEST_CLOSE_ROUNDS = 0.8, 5
"""Where plain decoding is thought to have this share of the goodput or more, audits take longer at least."""
_STRETCHES = 1.5, 3.0
"""How much longer the drafts of a stretch are, in turn: somewhat longer ones may be slower where much longer
ones are faster."""
_STRETCH_ROUNDS = TrialLength(2, 6)
"""At most as many as it takes to correct a cost that was wrong (`CorrectionGrid`)."""
_LARGEST_CHANGE = 1.5
"""A batch whose size has changed by this factor is another one."""
_WORTH_WINDOW_S = 120.0
_IDLE_ROUNDS, _TIDY_ROUNDS = 1024, 64
"""After so many rounds without a verdict a request is forgotten: little of what was known of it would count.
Every so many rounds that is seen to: streams of short requests leave hundreds meanwhile."""
_MAX_FAN_OUTS = 4096
_FAN_OUT_ROUNDS = 512
"""Shares are worked out anew after so many rounds: more is known of ranks then."""
_LATE_DECAY = 1.0 / 64.0
_LATE_FORGIVEN_ROUNDS = 512.0


class GoodputController:
    """Implements `SpeculationController` by expected goodput. Times of rounds come with observations.

    The model (`Evaluation` over `AcceptanceTracker` and `CostModel`) says which k each kind of round should
    have and what it brings; `Evidence` corrects that by what rounds of that kind have brought. What is done
    changes only for something better by a margin, and not for a while after the last change. What is thought
    worse is tried now and then (`Trials`).
    """

    def __init__(
        self, settings: ControllerSettings, profile: CostProfile, clock: Clock | None = None
    ) -> None:
        """Begin with measured costs (`assumed_profile()` where there are none).

        With a clock it looks at how long it thinks itself, and thinks less often where that is long.
        """
        self._settings = settings
        self._deciding = Pace(clock, _SHARE_OF_DECIDING)
        self._learning = Pace(clock, _SHARE_OF_LEARNING)
        num_steps = max(1, settings.max_draft_tokens)
        num_drafters = max(1, len(settings.drafter_caps))
        self._acceptance = AcceptanceTracker(num_steps, num_drafters * MAX_CLASSES)
        self._costs = CostModel(
            profile,
            max_rows=settings.max_rows,
            max_sequences=settings.max_sequences * max(1, settings.max_branches),
            max_steps=num_steps,
            num_drafters=num_drafters,
        )
        self._overheads = Overheads()
        self._evidence = Evidence()
        self._alarm = Alarm()
        self._lately = Lately()
        self._ratios: list[float] = []
        """What rounds have taken over what was expected, of those as decided, since the decision."""
        self._alert_until = _EARLY_ROUNDS
        """Up to this round every one is learnt from, and decisions are thought over often."""
        self._trials = Trials(settings.trial_share)
        self._ranks = GuessRanks()
        self._in_time = 1.0
        self._stand_ins = StandIns(num_steps)
        self._kind: Kind | None = None
        self._decision: Decision | None = None
        self._classes: dict[RequestId, str] = {}
        self._round = 0
        self._decided_round = 0
        self._has_tried = False
        """Whether a trial has ended since: what was tried is not to go on."""
        self._since_decision_s = 0.0
        self._unheard_s = 0.0
        self._calm = 1.0
        self._restless = 0.0
        self._switched_round = 0
        self._switched_batch = 0
        self._num_switches = 0
        self._worth = 1.0
        self._wire_s = 0.0
        self._fan_outs: dict[tuple[bytes, int, int], tuple[int, ...]] = {}
        self._num_alike = 0
        self._num_since_overlap = _ROUNDS_TO_CALM_DOWN
        self._last_kind: Kind = "plain"
        self._verdict_round = 0
        """Rounds in which there were drafts."""
        self._picks: BudgetPicks | None = None
        if len(settings.kv_budgets) > 1:
            self._picks = BudgetPicks(
                settings.kv_budgets, self._acceptance, is_kept=settings.keeps_kv_budgets
            )

        self._drafters: DrafterPicks | None = None
        if len(settings.drafter_caps) > 1:
            assert self._picks is None, "either drafters or KV budgets are picked"
            self._drafters = DrafterPicks(settings.drafter_caps, self._acceptance, settings.budgeted_drafter)

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
        return None if self._picks is None else self._picks.of

    @property
    def pick_drafter(self) -> Callable[[RequestId, str], int] | None:
        """Tells the drafter of a request of a class; None: there are not several to choose from."""
        return None if self._drafters is None else self._drafters.of

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
        decision = self._decision
        if decision is None or self._is_due() or not self._still_holds(decision, sequences):
            with self._deciding.timed():
                decision = self._decide(sequences, len(decoding))
        index, chosen = decision.index, decision.num_draft_tokens
        return [
            self._of_newcomer(decision, one) if (at := index.get(one.request_id)) is None else chosen[at]
            for one in decoding
        ]

    def _still_holds(self, decision: Decision, sequences: tuple[Schedulable, ...]) -> bool:
        """Whether a decision is one for this batch, too, of which some may have gone and some have come."""
        index = decision.index
        newcomers = [one for one in sequences if one.request_id not in index]
        num_gone = len(index) - (len(sequences) - len(newcomers))
        if not newcomers and not num_gone:
            return True
        if self._since_decision_s >= self._deciding.interval_s:
            is_plain = decision.option.kind == "plain"
            return max(len(newcomers), num_gone) <= (len(index) // _MUCH_THE_SAME if is_plain else 0)
        is_as_large = 1 / _LARGEST_CHANGE < len(sequences) / len(index) < _LARGEST_CHANGE
        return is_as_large and not any(
            one.requested_draft_tokens is not None or one.itl_s is not None for one in newcomers
        )

    def _of_newcomer(self, decision: Decision, one: Schedulable) -> int:
        """Return k of a sequence that came after the decision: the mean of the others."""
        if decision.option.kind == "plain" or decision.is_partial:
            return 0
        chosen = decision.num_draft_tokens
        usual = round(sum(chosen) / len(chosen))
        if self._drafters is not None:
            return min(usual, self._drafters.welcome(one))
        self._classes.setdefault(one.request_id, self._class_of(one))
        return usual

    def _is_due(self) -> bool:
        """Return whether it is time to think again: soon after the start, later every few rounds.

        Short rounds are more of them, for thinking takes time too.
        """
        if self._has_tried:
            return True
        num_rounds = self._round - self._decided_round
        if self._drafters is not None and self._drafters.is_due(self._round):
            return True
        if num_rounds < min(self._settings.decide_every, 1 + self._round // 4):
            return False
        if self._round < self._alert_until:
            return self._since_decision_s >= self._deciding.interval_s / _HASTE
        if self._since_decision_s < self._deciding.interval_s:
            return False
        if num_rounds >= self._calm * _MOST_UNDECIDED_ROUNDS:
            return True
        num_sequences = 0 if self._decision is None else self._decision.batch.num_sequences
        return self._since_decision_s >= self._calm * (_DECISION_S + _DECISION_S_PER_SEQUENCE * num_sequences)

    def fan_out(
        self, request: Schedulable, num_pending: int, max_branches: int, *, is_foreign: bool = False
    ) -> tuple[int, ...]:
        """Share out continuations by what is expected of this request."""
        return self._shares(request.request_id, num_pending, max_branches, is_foreign=is_foreign)

    def _shares(
        self, request_id: RequestId, num_pending: int, max_branches: int, *, is_foreign: bool
    ) -> tuple[int, ...]:
        decision = self._decision
        at = None if decision is None else decision.index.get(request_id)
        if decision is None or at is None:
            return (0,) * (num_pending + 1)
        num_branches = min(max_branches, decision.option.num_branches)
        if num_pending == 0:
            return (num_branches,)
        levels = decision.acceptance_levels[at]
        if is_foreign:
            own = (levels[0] + 0.5) / NUM_LEVELS
            accepted = self._stand_ins.accepted[:num_pending]
            return share_guesses_behind_foreign(accepted, own, self._ranks.rates, num_branches)
        key = (levels[: num_pending + 1], num_pending, num_branches)
        shared = self._fan_outs.get(key)
        if shared is None:
            depths = np.minimum(np.arange(num_pending + 1), len(levels) - 1)
            accepted = (np.frombuffer(levels, np.uint8)[depths] + 0.5) / NUM_LEVELS
            shared = share_guesses(accepted, self._ranks.rates, num_branches)
            self._fan_outs[key] = shared
        return shared

    def observe(self, observation: RoundObservation) -> None:
        """Learn from a finished round."""
        self._round += 1
        decision = self._decision
        if decision is None:
            return
        self._verdict_round += bool(observation.outcomes)
        owed = self._owed(observation) if observation.mode == "draft_ahead" else observation.budgets
        if self._drafters is None:
            self._acceptance.note(observation.outcomes, owed, self._classes)
        else:
            self._drafters.note(observation.outcomes, owed, observation.drafters)
        if observation.stand_ins or (self._stand_ins.are_there and observation.mode == "draft_ahead"):
            num_wanted = sum(budget > 0 for budget in observation.budgets.values())
            self._stand_ins.note(num_wanted - len(observation.outcomes), observation.stand_ins)
        if len(self._fan_outs) > _MAX_FAN_OUTS or self._round % _FAN_OUT_ROUNDS == 0:
            self._fan_outs.clear()
        if self._round % _TIDY_ROUNDS == 0:
            self._acceptance.forget_idle(_IDLE_ROUNDS)
        for ahead in observation.ahead:
            self._note_ahead(ahead)
        if observation.mode != "draft_ahead":  # what was late once need not be so for ever
            self._in_time += (1.0 - self._in_time) / _LATE_FORGIVEN_ROUNDS
        self._note_times(observation, decision)

    # ------------------------------------------------------------------------------------ deciding

    def _decide(self, sequences: tuple[Schedulable, ...], num_here: int) -> Decision:
        """Decide for all, of which the first `num_here` are to be in the next round."""
        settings = self._settings
        num_sequences = len(sequences)
        self._note_evidence()
        if self._picks is not None:
            self._picks.review(self._verdict_round, sequences, self._budget_costs())
        if self._drafters is not None:
            self._drafters.review(self._round, sequences, self._drafter_costs(sequences))
        batch = self._batch_of(sequences)
        region = region_of(batch)
        evaluation = self._evaluate(batch)
        outlook = AheadOutlook(
            rates=self._ranks.rates,
            max_branches=settings.max_branches,
            in_time=self._in_time,
            stand_in_gain=self._stand_ins.gain,
            stand_in_rows=self._stand_ins.rows,
        )
        options = evaluation.options(settings.modes, outlook)
        rates = {
            kind: option.rate * self._evidence.factor(self._round, kind, region)
            for kind, option in options.items()
        }
        self._decided_round = self._round
        self._has_tried = False
        self._restless *= 0.5 ** (self._since_decision_s / _RESTLESS_S)
        self._since_decision_s = 0.0
        is_known = self._decision is not None and self._decision.region == region
        if not is_known:
            self._lately.forget()
        self._calm = min(self._calm * _CALMER, _CALMEST) if is_known else 1.0
        has_trial = self._drafters is not None and self._drafters.has_trial
        if not has_trial or self._kind is None:  # it says nothing of what is done otherwise
            self._switch(options, rates, num_sequences)
        longer = self._longer(evaluation, outlook, options)
        option, reason = self._apply_trial(options, rates, num_sequences, longer)
        if reason == "no_gain" and len(options) == 1 and math.isfinite(batch.itl_s):
            reason = "latency_target"
        chosen = option.num_draft_tokens
        is_partial = reason == "probing" and option.kind == "lockstep" and self._tried(options, rates)[1]
        if is_partial:
            chosen = self._probed(chosen)
        elif has_trial and self._kind == "lockstep" and reason != "auditing":
            chosen = np.maximum(chosen, self._least_tried(sequences))
            is_partial = True
        elif option.kind == "ping_pong" and num_here < num_sequences and reason != "stretching":
            # Rows and steps are those of a cohort: what is best for all together need not suit either.
            chosen = np.concatenate(
                [
                    self._for_cohort(batch.part(0, num_here)),
                    self._for_cohort(batch.part(num_here, num_sequences)),
                ]
            )
        self._classes = {one.request_id: self._class_of(one) for one in sequences}
        self._decision = Decision(
            batch=batch,
            index={one.request_id: at for at, one in enumerate(sequences)},
            region=region,
            options=options,
            rates=rates,
            option=option,
            reason=reason,
            num_draft_tokens=chosen.tolist(),
            is_partial=is_partial,
            acceptance_levels=levels_of(batch.estimate.accepted),
            gains=added_up(batch.estimate.reached)[np.arange(num_sequences), chosen].tolist(),
            gains_if_drafted=added_up(np.cumprod(batch.estimate.accepted, axis=1, dtype=np.float64)).tolist(),
        )
        return self._decision

    def _evaluate(self, batch: Batch) -> Evaluation:
        number, of = batch.num_sequences, self._overheads.of
        overhead_s = of(number, has_drafts=True)
        overheads: dict[Kind, float] = {
            "plain": of(number, has_drafts=False),
            "lockstep": overhead_s,
            "draft_ahead": overhead_s,
            "ping_pong": of((number + 1) // 2, has_drafts=True),
        }
        settings = self._settings
        return Evaluation(
            batch,
            self._costs,
            overheads,
            max_rows=settings.max_rows,
            num_rows_beside=settings.num_rows_beside,
        )

    def _batch_of(self, sequences: tuple[Schedulable, ...]) -> Batch:
        cap = self._settings.cap_for(len(sequences))
        num_positions = self._acceptance.num_positions
        caps = np.array([min(one.max_draft_tokens, cap) for one in sequences], dtype=np.int64)
        requested = np.array(
            [
                -1
                if one.requested_draft_tokens is None
                else min(one.requested_draft_tokens, one.max_draft_tokens, num_positions)
                for one in sequences
            ],
            dtype=np.int64,
        )
        drafters = None
        if self._drafters is None:
            estimate = self._acceptance.estimate(
                [one.request_id for one in sequences], [self._class_of(one) for one in sequences]
            )
        else:
            estimate = self._drafters.estimate(sequences)
            drafters = np.array([self._drafters.drafter(one) for one in sequences], dtype=np.int64)
            caps = np.minimum(caps, np.array(self._settings.drafter_caps)[drafters])
        contexts = np.array([one.committed_len for one in sequences], dtype=np.float64)
        return Batch(
            estimate=estimate,
            caps=caps,
            requested=requested,
            context_tokens=float(contexts.sum()),
            contexts=contexts,
            draft_contexts=np.array([self._draft_context(one) for one in sequences], dtype=np.float64),
            itl_s=min((one.itl_s for one in sequences if one.itl_s is not None), default=math.inf),
            drafters=drafters,
        )

    def _class_of(self, one: Schedulable) -> str:
        return one.class_name if self._picks is None else self._picks.class_of(one)

    def _draft_context(self, one: Schedulable) -> int:
        picks = self._picks or self._drafters
        return one.draft_context if picks is None else picks.draft_context(one)

    def _budget_costs(self) -> BudgetCosts:
        decision = self._decision
        best = None if decision is None else decision.best_drafting
        if decision is None or best is None:
            half = max(1, self._settings.max_draft_tokens // 2)
            return BudgetCosts(read_s=0.0, rate=0.0, num_draft_tokens=half)
        return BudgetCosts(
            read_s=self._costs.draft.per_token,
            rate=decision.rates[best.kind],
            num_draft_tokens=max(1, round(float(best.num_draft_tokens.mean()))),
            is_drafting=self._kind != "plain",
        )

    def _drafter_costs(self, sequences: Sequence[Schedulable]) -> DrafterCosts:
        decision = self._decision
        rate = None
        if decision is not None:
            rate = decision.rates[decision.option.kind]
        return drafter_costs(
            self._costs,
            len(sequences),
            float(sum(one.committed_len for one in sequences)),
            self._acceptance.num_positions,
            rate=rate,
            is_drafting=self._kind != "plain",
        )

    def _least_tried(self, sequences: Sequence[Schedulable]) -> np.typing.NDArray[np.int64]:
        """Return the fewest tokens to draft for each: one for who tries a drafter, be it of no worth."""
        assert self._drafters is not None
        return np.array(
            [
                self._drafters.is_trying(one.request_id)
                and one.requested_draft_tokens is None
                and one.max_draft_tokens > 0
                for one in sequences
            ],
            dtype=np.int64,
        )

    def _switch(
        self, options: Mapping[Kind, Option], rates: Mapping[Kind, float], num_sequences: int
    ) -> None:
        """Change what is done, for something better by the margin, and not too soon after the last time."""
        current = self._kind
        best = max(rates, key=lambda kind: rates[kind])
        if current is None:
            self._set_kind(best, num_sequences)
            return
        if best == current or len(options) == 1:
            return  # alone: nobody can use a draft at this moment, which says nothing of those to come
        if current not in options:  # ping_pong takes two
            self._set_kind(best, num_sequences)
            return
        has_changed = not 1 / _LARGEST_CHANGE < num_sequences / self._switched_batch < _LARGEST_CHANGE
        # What goes back and forth is about as good either way, and each change costs something.
        restless = 0.0 if has_changed else max(0.0, min(self._restless, _MOST_RESTLESS) - 1.0)
        dwell_rounds = self._settings.dwell_rounds * 2.0**restless
        is_settled = self._round - self._switched_round >= dwell_rounds
        # Going back to plain decoding takes half as much, and where it is clearly better, no patience: it is
        # what nobody may be worse off than.
        margin = self._settings.margin * (0.5 if best == "plain" else 1.0)
        is_urgent = best == "plain" and rates[best] > rates[current] * (1.0 + _URGENT)
        if not (has_changed or is_settled or is_urgent):
            return
        if rates[best] > rates[current] * (1.0 + margin):
            self._set_kind(best, num_sequences)

    def _set_kind(self, kind: Kind, num_sequences: int) -> None:
        if kind == self._kind:
            return
        self._num_switches += self._kind is not None
        self._restless += self._kind is not None
        self._kind = kind
        self._switched_round = self._round
        self._switched_batch = num_sequences
        self._lately.forget()
        self._calm = 1.0
        self._trials.note_change()

    def _apply_trial(
        self,
        options: Mapping[Kind, Option],
        rates: Mapping[Kind, float],
        num_sequences: int,
        longer: Option | None,
    ) -> tuple[Option, Reason]:
        """Return what to do: as decided, or something else to see whether that was right."""
        assert self._kind is not None
        plain = options["plain"]
        usual = options.get(self._kind, plain)
        trials = self._trials
        tried, _ = self._tried(options, rates)
        if longer is not None:
            factor = rates[usual.kind] / usual.rate
            loss_s = _loss_s(longer.tokens, longer.rate * factor, rates[usual.kind])
            trials.begin("stretching", _STRETCH_ROUNDS, loss_s)
        if self._kind != "plain":
            is_close = rates["plain"] >= _CLOSE * rates[usual.kind]
            fewest = _FEWEST_CLOSE_ROUNDS if is_close else _FEWEST_AUDIT_ROUNDS
            fewest += _ROUNDS_TO_CALM_DOWN if self._kind != "lockstep" else 0
            length = TrialLength(fewest, _MOST_AUDIT_ROUNDS)
            was_on = trials.current
            trials.begin("auditing", length, _loss_s(plain.tokens, rates["plain"], rates[usual.kind]))
            if trials.current != was_on:
                self._lately.forget("plain")
        if tried is not None:
            num_probed = _num_probed(num_sequences)
            fewest = 3 if tried.kind == "lockstep" else _PIPELINED_PROBE_ROUNDS
            fewest = max(fewest, 6 // num_probed)
            length = TrialLength(fewest, max(fewest, _PROBE_VERDICTS // num_probed))
            # By the model alone: that rounds like these were slower is what is in doubt.
            trials.begin("probing", length, _loss_s(tried.tokens, tried.rate, rates[usual.kind]))
        trial: Trial | None = trials.current
        if trial == "probing" and tried is not None:
            return tried, trial
        if trial == "auditing" and usual is not plain:
            return plain, trial
        if trial == "stretching" and longer is not None:
            return longer, trial
        trials.cancel()
        return usual, self._reason(options, usual)

    def _longer(
        self, evaluation: Evaluation, outlook: AheadOutlook, options: Mapping[Kind, Option]
    ) -> Option | None:
        """Return what a stretch does, where there is one or might be; None: nothing.

        Longer drafts have to bring clearly more tokens: what they cost is in doubt, not what they bring.
        """
        kind = self._kind
        if kind is None or kind == "plain" or kind not in options:
            return None
        if self._trials.current != "stretching" and not self._trials.is_due("stretching"):
            return None
        usual = options[kind]
        stretch = _STRETCHES[self._trials.num_ended("stretching") % len(_STRETCHES)]
        longest = math.ceil(stretch * int(usual.num_draft_tokens.max()))
        found = evaluation.option(kind, outlook, min(longest, self._acceptance.num_positions))
        if found is None or found.tokens < usual.tokens * (1.0 + self._settings.margin):
            return None
        return found

    def _tried(
        self, options: Mapping[Kind, Option], rates: Mapping[Kind, float]
    ) -> tuple[Option | None, bool]:
        """Return what a probe does, and whether it only asks for verdicts; None: there is nothing to look at.

        That is what should be better than what is done, but was measured not to be. While speculation is off
        it may also be lockstep, which tells most of acceptance in few rounds.
        """
        usual = rates.get(self._kind or "plain", rates["plain"])
        others = [option for kind, option in options.items() if kind not in ("plain", self._kind)]
        best = max(others, key=lambda option: option.rate, default=None)
        if best is not None and best.rate > usual * (1.0 + self._settings.margin):
            return best, False
        return (options.get("lockstep", best), True) if self._kind == "plain" else (None, False)

    def _for_cohort(self, cohort: Batch) -> np.typing.NDArray[np.int64]:
        option = self._evaluate(cohort).cohort()
        return np.maximum(cohort.requested, 0) if option is None else option.num_draft_tokens

    def _probed(self, chosen: np.typing.NDArray[np.int64]) -> np.typing.NDArray[np.int64]:
        """Draft for the youngest only: drafters have least to read of them. At least one token each."""
        is_probed = np.arange(len(chosen)) >= len(chosen) - _num_probed(len(chosen))
        return np.where(is_probed, np.maximum(chosen, 1), 0)

    def _reason(self, options: Mapping[Kind, Option], usual: Option) -> Reason:
        if usual.kind != "plain":
            return "gain"
        best = max((option.rate for kind, option in options.items() if kind != "plain"), default=0.0)
        return "measured_slower" if best > usual.rate * (1.0 + self._settings.margin) else "no_gain"

    # ------------------------------------------------------------------------------------ learning

    def _owed(self, observation: RoundObservation) -> Mapping[RequestId, int]:
        """Return whose drafts should have been there in a round of draft_ahead, and how many.

        Of these, what is missing is not there. Most that are missing were not foreseen, which is no fault of
        the drafter's: it owes what was foreseen, and what it was asked for and has not prepared.
        """
        excused = {
            ahead.request_id
            for ahead in observation.ahead
            if (ahead.rank is None or ahead.is_late) and not self._is_unprepared(ahead)
        }
        return {one: budget for one, budget in observation.budgets.items() if one not in excused}

    def _is_unprepared(self, ahead: AheadOutcome) -> bool:
        """Return whether nothing was prepared for a verdict that something was asked for."""
        if ahead.num_prepared > 0 or ahead.is_late:
            return False
        shared = self._shares(
            ahead.request_id, ahead.num_pending, self._settings.max_branches, is_foreign=ahead.is_foreign
        )
        return shared[ahead.num_accepted] > 0

    def _note_ahead(self, ahead: AheadOutcome) -> None:
        self._in_time += _LATE_DECAY * ((0.0 if ahead.is_late else 1.0) - self._in_time)
        if ahead.num_prepared == 0:
            return
        if ahead.num_accepted < ahead.num_pending and not ahead.is_foreign:
            self._ranks.note(ahead.num_prepared, ahead.rank)
        elif ahead.rank != 0 and ahead.num_prepared > 1:
            # The first guess behind a proposal that stands, or that is not the drafter's own, is what it
            # would have drafted; those after it are guesses.
            self._ranks.note(ahead.num_prepared - 1, None if ahead.rank is None else ahead.rank - 1)

    def _note_costs(self, observation: RoundObservation, decision: Decision) -> None:
        context = observation.context_tokens or decision.batch.context_tokens
        shape = VerifyShape(observation.num_sequences, context, observation.num_rows)
        is_overlapped = observation.mode != "lockstep"
        if observation.mode != "ping_pong":
            self._costs.verify.note(shape, observation.verify_s, is_overlapped=is_overlapped)
            if observation.target_s is not None:
                self._wire_s += 0.05 * (min(observation.verify_s - observation.target_s, 0.1) - self._wire_s)
        elif observation.target_s is not None:
            seconds = observation.target_s + self._wire_s
            self._costs.verify.note(shape, seconds, is_overlapped=is_overlapped)
        budgets = observation.budgets or {one.request_id: one.num_drafted for one in observation.outcomes}
        ready_s = observation.draft_ready_s
        if self._drafters is not None:
            self._note_drafters(observation, decision)
        elif budgets and ready_s is not None and observation.num_prompt_rows == 0:
            num_branches = decision.option.num_branches if observation.mode == "draft_ahead" else 1
            attended = mean_draft_context(decision, budgets, context / max(1, observation.num_sequences))
            self._costs.draft.note(budgets, attended, num_branches, ready_s, is_overlapped=is_overlapped)
        # Rounds that admit requests have more to do than others, with drafts or without.
        has_prompts = observation.num_prompt_rows > 0
        if observation.mode != "ping_pong" and observation.round_s is not None and not has_prompts:
            rest_s = observation.round_s - observation.draft_s - observation.verify_s
            has_drafts = _kind_of(observation) != "plain"
            self._overheads.note(observation.num_sequences, rest_s, has_drafts=has_drafts)

    def _note_drafters(self, observation: RoundObservation, decision: Decision) -> None:
        """Learn what each of several drafters takes."""
        if observation.num_prompt_rows > 0:
            return
        usual = observation.context_tokens / max(1, observation.num_sequences)
        for place, seconds in observation.drafting_s.items():
            budgets = {
                one: budget
                for one, budget in observation.budgets.items()
                if observation.drafters.get(one) == place
            }
            attended = mean_draft_context(decision, budgets, usual)
            self._costs.drafts[place].note(budgets, attended, 1, seconds)

    def _note_times(self, observation: RoundObservation, decision: Decision) -> None:
        """Learn from how long a round took; of many short ones, from some what the parts cost."""
        kind = _kind_of(observation)
        self._num_alike = self._num_alike + 1 if kind == self._last_kind else 0
        is_overlapped = observation.mode != "lockstep"
        self._num_since_overlap = 0 if is_overlapped else self._num_since_overlap + 1
        self._last_kind = kind
        round_s = observation.round_s
        if round_s is None:
            round_s = observation.draft_s + observation.verify_s
        self._since_decision_s += round_s
        if round_s > 0.0 and observation.num_prompt_rows == 0 and self._is_as_decided(decision, kind):
            self._note_ratio(observation, decision, round_s)
        # Asked before this round's own time counts: long ones must not be heard more often than others.
        is_to_be_heard = self._is_to_be_heard()
        self._unheard_s += round_s
        lost_s = 0.0
        if is_to_be_heard:
            with self._learning.timed():
                if self._is_as_it_seems and self._num_alike >= _TRANSIENT_ROUNDS[kind]:
                    self._note_costs(observation, decision)
                if round_s > 0.0:
                    lost_s = self._note_goodput(observation, decision, kind, round_s)
                    self._note_worth(decision, self._unheard_s)
            self._unheard_s = 0.0
        is_settled = self._is_as_it_seems and self._num_alike >= _TRANSIENT_ROUNDS[kind]
        trial = self._trials.current
        if round_s > 0.0 and self._trials.note_round(round_s, lost_s, is_settled=is_settled):
            self._has_tried = True
            if trial == "auditing":
                self._settle(decision)

    def _is_as_decided(self, decision: Decision, kind: Kind) -> bool:
        """Whether the last round was one of those that were decided on, and says something of them."""
        return (
            decision.option.kind == kind
            and not decision.is_partial
            and self._num_alike >= _TRANSIENT_ROUNDS[kind]
            and self._round > _FIRST_ROUNDS
        )

    def _note_ratio(self, observation: RoundObservation, decision: Decision, round_s: float) -> None:
        """Compare a round's time with what was expected of it: every round's, for that takes next to none."""
        ratio = round_s / decision.expected_s
        if self._trials.current is None and self._alarm.goes_off(decision.compares_as, ratio):
            self._calm = 1.0
            self._alert_until = self._round + _EARLY_ROUNDS
            self._trials.note_alarm()
        if decision.reason != "stretching" and self._is_as_it_seems and decision.is_of_all(observation):
            self._ratios.append(ratio)
            self._lately.note(decision.option.kind, ratio)

    def _settle(self, decision: Decision) -> None:
        """Believe what an audit has shown, if it was long enough: rounds with drafts and without, in turn."""
        kinds: tuple[Kind, ...] = ("plain", self._kind or "plain")
        ratios = {kind: ratio for kind in kinds if (ratio := self._lately.ratio(kind)) is not None}
        if len(ratios) < len(kinds):
            return
        self._note_evidence()
        for kind, ratio in ratios.items():
            self._evidence.settle(self._round, kind, decision.region, ratio)

    def _rate_lately(self, decision: Decision) -> float | None:
        """Return the tokens per second of what is done usually, by what it took just before."""
        kind = self._kind
        usual = None if kind is None else decision.options.get(kind)
        if kind is None or usual is None or (ratio := self._lately.ratio(kind)) is None:
            return None
        return usual.rate * self._evidence.token_factor(self._round, kind) / ratio

    def _note_evidence(self) -> None:
        """Learn from the times of all rounds since the last decision."""
        decision = self._decision
        if decision is not None and self._ratios:
            self._evidence.note_times(self._round, decision.option.kind, decision.region, self._ratios)
            self._ratios.clear()

    @property
    def _is_as_it_seems(self) -> bool:
        """Whether what ran last had the machine for itself, if it should have."""
        return self._num_since_overlap == 0 or self._num_since_overlap > _ROUNDS_TO_CALM_DOWN

    def _is_to_be_heard(self) -> bool:
        is_new = self._round < self._alert_until or self._round - self._switched_round < _EARLY_ROUNDS
        if self._trials.current is not None:
            return True
        if is_new:
            return self._unheard_s >= self._learning.interval_s / _HASTE
        return self._unheard_s >= max(self._calm * _HEARD_EVERY_S, self._learning.interval_s)

    def _note_goodput(
        self, observation: RoundObservation, decision: Decision, kind: Kind, round_s: float
    ) -> float:
        """Compare a round with what was expected of it; return what it has lost, if it was a trial."""
        expected_s, own_s = decision.expected_s, self._own_s(observation, kind, round_s)
        is_usual = self._is_as_decided(decision, kind) and decision.reason != "stretching"
        if is_usual and self._is_as_it_seems and decision.is_of_all(observation) and own_s > 0.3 * round_s:
            if observation.num_prompt_rows > 0:
                self._ratios.append(own_s / expected_s)
            num_decoding = num_decoding_of(observation)
            self._evidence.note_tokens(
                self._round,
                kind,
                num_decoding + expected_gain(decision, observation),
                num_decoding
                + drafted_gain(decision, observation)
                + len(observation.stand_ins) * self._stand_ins.gain_if_there,
            )
        option = decision.option
        usual_rate = decision.rates.get(self._kind or option.kind, option.rate)
        if self._trials.current == "auditing":
            usual_rate = self._rate_lately(decision) or usual_rate
        return min(own_s, 4.0 * expected_s) - observation.num_committed / usual_rate

    def _own_s(self, observation: RoundObservation, kind: Kind, round_s: float) -> float:
        """Return how long a round would have taken without the prompts that were read in it."""
        if observation.num_prompt_rows == 0:
            return round_s
        if observation.mode != "ping_pong":
            # Admitting requests takes time between the steps.
            rest_s = self._overheads.of(observation.num_sequences, has_drafts=kind != "plain")
            round_s = min(round_s, observation.draft_s + observation.verify_s + rest_s)
        return round_s - self._prompt_s(observation)

    def _prompt_s(self, observation: RoundObservation) -> float:
        """Return what the rows that read prompts have cost a round."""
        num_prompt_rows = observation.num_prompt_rows
        table = self._costs.verify.table(observation.num_sequences, observation.context_tokens)
        last = len(table) - 1
        rows = min(observation.num_rows, last)
        return float(table[rows] - table[max(0, rows - num_prompt_rows)])

    def _note_worth(self, decision: Decision, round_s: float) -> None:
        best = decision.best_drafting
        ratio = 0.0 if best is None else decision.rates[best.kind] / decision.rates["plain"]
        weight = -math.expm1(-min(round_s, 1.0) / _WORTH_WINDOW_S)
        self._worth += weight * (ratio - self._worth)

    # ---------------------------------------------------------------------------------- explaining

    def _explain(self, decision: Decision) -> ControllerState:
        option = decision.option
        best = decision.best_drafting
        by_k = np.bincount(decision.num_draft_tokens)
        return ControllerState(
            mode=self.mode,
            is_speculating=option.kind != "plain",
            reason=decision.reason,
            mean_num_draft_tokens=float(np.mean(decision.num_draft_tokens)),
            num_requests_by_k=tuple(by_k.tolist()),
            goodput_on=0.0 if best is None else decision.rates[best.kind],
            goodput_off=decision.rates["plain"],
            goodput_by_mode=tuple((kind, rate) for kind, rate in decision.rates.items() if kind != "plain"),
            draft_s=option.draft_s,
            verify_s=option.verify_s,
            round_s=option.round_s,
            acceptance=tuple(decision.batch.estimate.accepted.mean(0).tolist()),
            pool_worth=self._worth,
            num_switches=self._num_switches,
            num_probe_rounds=self._trials.num_rounds["probing"],
            num_audit_rounds=self._trials.num_rounds["auditing"],
            num_stretch_rounds=self._trials.num_rounds["stretching"],
        )


def _loss_s(tokens: float, rate: float, usual_rate: float) -> float:
    """Return how much longer so many tokens take at a rate than at the usual one."""
    return tokens / rate - tokens / usual_rate


def _num_probed(num_sequences: int) -> int:
    return min(max(_LEAST_PROBED, min(num_sequences // 4, _MOST_PROBED)), num_sequences)


def _kind_of(observation: RoundObservation) -> Kind:
    if observation.mode == "lockstep" and not observation.outcomes and not any(observation.budgets.values()):
        return "plain"
    return observation.mode
