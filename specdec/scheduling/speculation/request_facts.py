"""What is known of each request: how many of its draft tokens stand, and what was picked for its drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.acceptance import MAX_CLASSES, AcceptanceEstimate, AcceptanceTracker
from specdec.scheduling.speculation.budget_picks import BudgetCosts, BudgetPicks
from specdec.scheduling.speculation.controller import RoundObservation
from specdec.scheduling.speculation.cost import CostModel
from specdec.scheduling.speculation.decision import Decision
from specdec.scheduling.speculation.drafter_budgets import BudgetedDrafter
from specdec.scheduling.speculation.drafter_picks import DrafterPicks
from specdec.scheduling.speculation.drafter_worth import drafter_costs
from specdec.scheduling.speculation.goodput import Ints
from specdec.scheduling.speculation.settings import ControllerSettings
from specdec.scheduling.state import Schedulable

_IDLE_ROUNDS, _TIDY_ROUNDS = 1024, 64
"""After so many rounds without a verdict a request is forgotten: little of what was known of it would count.
Every so many rounds that is seen to: streams of short requests leave hundreds meanwhile."""


class RequestFacts:
    """Acceptance by request and class, and the KV budget and the drafter that are picked for each."""

    def __init__(self, settings: ControllerSettings) -> None:
        """Pick among the budgets or the drafters of `settings`, where there are several."""
        num_picks = max(1, len(settings.drafter_caps) + len(settings.kv_budgets))
        self._max_draft_tokens = settings.max_draft_tokens
        are_trees = len(settings.tree_levels) > 0 and all(settings.tree_levels)
        self.acceptance = AcceptanceTracker(
            max(1, settings.max_draft_tokens),
            num_picks * MAX_CLASSES + 1,  # each class by what is picked, and one for those beyond
            "tree" if are_trees else "chain",
        )
        self._classes: dict[RequestId, str] = {}
        self._verdict_round = 0
        """Rounds in which there were drafts."""
        self.budgets: BudgetPicks | None = None
        """Of a drafter that is alone; None: there are not several to choose from."""
        has_several_drafters = len(settings.drafter_caps) > 1
        if len(settings.kv_budgets) > 1 and not has_several_drafters:
            self.budgets = BudgetPicks(
                settings.kv_budgets, self.acceptance, is_kept=settings.keeps_kv_budgets
            )
        self.drafters: DrafterPicks | None = None
        """With their budgets; None: there are not several to choose from."""
        if has_several_drafters:
            self.drafters = DrafterPicks(settings.drafter_caps, self.acceptance, _budgeted_drafter(settings))

    def review(
        self,
        now: int,
        sequences: Sequence[Schedulable],
        last: Decision | None,
        costs: CostModel,
        *,
        is_drafting: bool,
    ) -> None:
        """Think over what is picked for whom, in round `now`.

        Args:
            now: counts rounds.
            sequences: all there are.
            last: the decision before.
            costs: what drafts and rows take.
            is_drafting: whether requests are drafted for at present, but for probes.
        """
        if self.budgets is not None:
            weighed = self._budget_costs(last, costs, len(sequences), is_drafting=is_drafting)
            self.budgets.review(self._verdict_round, sequences, weighed)
        if self.drafters is not None:
            weighed_drafters = drafter_costs(
                costs,
                len(sequences),
                float(sum(one.committed_len for one in sequences)),
                self.acceptance.num_positions,
                rate=None if last is None else last.rates[last.option.kind],
                is_drafting=is_drafting,
            )
            self.drafters.review(now, sequences, weighed_drafters)

    def _budget_costs(
        self, last: Decision | None, costs: CostModel, num_sequences: int, *, is_drafting: bool
    ) -> BudgetCosts:
        best = None if last is None else last.best_drafting
        if last is None or best is None:
            half = max(1, self._max_draft_tokens // 2)
            return BudgetCosts(read_s=0.0, rate=0.0, num_draft_tokens=half)
        return BudgetCosts(
            read_s=costs.draft.correction(num_sequences) * costs.draft.per_token,
            rate=last.rates[best.kind],
            num_draft_tokens=max(1, round(float(best.num_draft_tokens.mean()))),
            is_drafting=is_drafting,
        )

    @property
    def has_trial(self) -> bool:
        """Whether somebody has another drafter for a while: such rounds say nothing of others."""
        return self.drafters is not None and self.drafters.has_trial

    def is_due(self, now: int) -> bool:
        """Whether such a trial is over by round `now`, and there is something to review."""
        return self.drafters is not None and self.drafters.is_due(now)

    def least_tried(self, sequences: Sequence[Schedulable]) -> Ints:
        """Return the fewest tokens to draft for each, [N]: one for who tries a drafter, be it of no worth."""
        assert self.drafters is not None
        return np.array(
            [
                self.drafters.is_trying(one.request_id)
                and one.requested_draft_tokens is None
                and one.max_draft_tokens > 0
                for one in sequences
            ],
            dtype=np.int64,
        )

    def estimate(self, sequences: Sequence[Schedulable]) -> AcceptanceEstimate:
        """Return what to expect of each request's next proposal."""
        if self.drafters is not None:
            return self.drafters.estimate(sequences)
        return self.acceptance.estimate(
            [one.request_id for one in sequences], [self._class_of(one) for one in sequences]
        )

    def drafters_of(self, sequences: Sequence[Schedulable]) -> Ints | None:
        """Return which drafter each request has, [N]; None: there is but one."""
        if self.drafters is None:
            return None
        return np.array([self.drafters.drafter(one) for one in sequences], dtype=np.int64)

    def draft_context(self, one: Schedulable) -> int:
        """Return how many committed tokens a request's drafts attend to."""
        picks = self.budgets or self.drafters
        return one.draft_context if picks is None else picks.draft_context(one)

    def take_over(self, sequences: Sequence[Schedulable]) -> None:
        """Learn of these from now on, each as one of its class."""
        before, self._classes = self._classes, {one.request_id: self._class_of(one) for one in sequences}
        self.acceptance.reclass_changed(before, self._classes)

    def welcome(self, one: Schedulable) -> int | None:
        """Learn of one more; return the most that its drafter drafts, None: it has no bound of its own."""
        if self.drafters is not None:
            return self.drafters.welcome(one)
        self._classes.setdefault(one.request_id, self._class_of(one))
        return None

    def note(self, now: int, observation: RoundObservation, owed: Mapping[RequestId, int]) -> None:
        """Learn from the verdicts of round `now`; `owed`: the drafts that should have been there."""
        self._verdict_round += bool(observation.outcomes)
        if self.drafters is None:
            self.acceptance.note(observation.outcomes, owed, self._classes)
        else:
            self.drafters.note(observation.outcomes, owed, observation.drafters)
        if now % _TIDY_ROUNDS == 0:
            self.acceptance.forget_idle(_IDLE_ROUNDS)

    def _class_of(self, one: Schedulable) -> str:
        return one.class_name if self.budgets is None else self.budgets.class_of(one)


def _budgeted_drafter(settings: ControllerSettings) -> BudgetedDrafter | None:
    if settings.budgeted_drafter is None:
        return None
    return BudgetedDrafter(
        place=settings.budgeted_drafter,
        budgets=settings.kv_budgets,
        is_kept=settings.keeps_kv_budgets,
    )
