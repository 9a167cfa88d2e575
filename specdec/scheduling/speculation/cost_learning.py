"""What the parts of rounds cost, learnt from rounds."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.core.decaying import DecayingMean
from specdec.core.ids import RequestId
from specdec.scheduling.speculation.controller import RoundObservation
from specdec.scheduling.speculation.cost import CostModel, VerifyShape
from specdec.scheduling.speculation.decision import Decision, mean_draft_context
from specdec.scheduling.speculation.evidence import Overheads
from specdec.scheduling.speculation.goodput import Kind
from specdec.scheduling.speculation.settling import kind_of
from specdec.scheduling.speculation.time_spread import NO_PROMPTS, PromptLoad

_PROMPT_DECAY = 0.02
_MUCH_DEARER = 2.0
"""Drafts that are thought to take so many times as long as they were measured to are in doubt: what made them
so may be over."""
_WAY = 0.5
"""Of the time between the target and who waits for it, what the target does not spend itself, but could
on another step. The rest is what its process does with messages."""


class CostLearning:
    """Corrects a `CostModel` and `Overheads` by what was observed, and tells what prompts took of a round."""

    def __init__(
        self,
        costs: CostModel,
        overheads: Overheads,
        *,
        has_several_drafters: bool,
        budgeted_drafter: int | None = None,
    ) -> None:
        """Correct these, which others read; `budgeted_drafter`: which attends to a part of a text, if any."""
        self._costs = costs
        self._overheads = overheads
        self._has_several_drafters = has_several_drafters
        self._budgeted_drafter = budgeted_drafter
        self._wire = Overheads()
        """Between the target's own work on a step and who waits for its answer."""
        self._with_prompts = DecayingMean()
        """Rounds that read prompts, for each token."""
        self._of_prompts_s = DecayingMean()
        """What they take for that, for each such round."""

    @property
    def prompts(self) -> PromptLoad:
        """What was lately read of prompts."""
        if self._of_prompts_s.weight <= 0.0 or self._with_prompts.weight <= 0.0:
            return NO_PROMPTS
        return PromptLoad(self._with_prompts.value, self._of_prompts_s.value)

    def way_s(self, num_sequences: int) -> float:
        """Return how much sooner than its answer is here the target is free for another step."""
        return _WAY * self._wire.of(num_sequences, has_drafts=True)

    def doubts_drafts(self, num_sequences: int) -> bool:
        """Return whether drafting for so many is thought to take much longer than the start has measured."""
        return any(one.correction(num_sequences) > _MUCH_DEARER for one in self._costs.drafts)

    def note(self, observation: RoundObservation, decision: Decision) -> None:
        """Learn from a round that was run as decided, or nearly."""
        context = observation.context_tokens or decision.batch.context_tokens
        self._note_verification(observation, context, _longer_context(observation, decision, context))
        self._note_prompts(observation)
        if self._has_several_drafters:
            self._note_drafters(observation, decision)
        else:
            self._note_drafts(observation, decision, context)
        # Rounds that admit requests have more to do than others, with drafts or without.
        has_prompts = observation.num_prompt_rows > 0
        if observation.mode != "ping_pong" and observation.round_s is not None and not has_prompts:
            rest_s = observation.round_s - observation.draft_s - observation.verify_s
            has_drafts = kind_of(observation) != "plain"
            self._overheads.note(observation.num_sequences, rest_s, has_drafts=has_drafts)

    def own_s(self, observation: RoundObservation, kind: Kind, round_s: float) -> float:
        """Return how long a round would have taken without the prompts that were read in it."""
        if observation.num_prompt_rows == 0:
            return round_s
        if observation.mode != "ping_pong":
            # Admitting requests takes time between the steps.
            rest_s = self._overheads.of(observation.num_sequences, has_drafts=kind != "plain")
            round_s = min(round_s, observation.draft_s + observation.verify_s + rest_s)
        return round_s - self._prompt_s(observation)

    def _note_verification(
        self, observation: RoundObservation, context: float, longer_context: float
    ) -> None:
        shape = VerifyShape(observation.num_sequences, context, observation.num_rows, longer_context)
        is_overlapped = observation.mode != "lockstep"
        target_s = observation.target_s
        if observation.mode != "ping_pong":
            self._costs.verify.note(shape, observation.verify_s, is_overlapped=is_overlapped)
            if target_s is not None and observation.num_prompt_rows == 0:
                has_drafts = kind_of(observation) != "plain"
                self._wire.note(shape.num_sequences, observation.verify_s - target_s, has_drafts=has_drafts)
        elif target_s is not None:
            wire_s = self._wire.of(shape.num_sequences, has_drafts=True)
            self._costs.verify.note(shape, target_s + wire_s, is_overlapped=is_overlapped)

    def _note_drafts(self, observation: RoundObservation, decision: Decision, context: float) -> None:
        budgets = observation.budgets or {one.request_id: one.num_drafted for one in observation.outcomes}
        ready_s = observation.draft_ready_s
        if not budgets or ready_s is None:
            return
        num_branches = 1
        if observation.mode == "draft_ahead":
            if decision.option.kind != "draft_ahead":
                return  # continuations of the decision before: nobody knows how many
            num_branches = decision.option.num_branches
        attended = self._attended(observation, decision, budgets, 0, context)
        if attended is None:
            return
        is_overlapped = observation.mode != "lockstep"
        work_s = observation.draft_work_s
        if work_s is not None and work_s > ready_s:
            work_s = None  # that was another answer, heard meanwhile
        self._costs.draft.note(
            budgets,
            attended,
            num_branches,
            ready_s,
            work_s=work_s,
            is_overlapped=is_overlapped,
            reads_prompts=observation.num_prompt_rows > 0,
        )

    def _note_drafters(self, observation: RoundObservation, decision: Decision) -> None:
        """Learn what each of several drafters takes."""
        for place, seconds in observation.drafting_s.items():
            budgets = {
                one: budget
                for one, budget in observation.budgets.items()
                if observation.drafters.get(one) == place
            }
            attended = self._attended(observation, decision, budgets, place, observation.context_tokens)
            if attended is not None:
                reads_prompts = observation.num_prompt_rows > 0
                self._costs.drafts[place].note(budgets, attended, 1, seconds, reads_prompts=reads_prompts)

    def _attended(
        self,
        observation: RoundObservation,
        decision: Decision,
        budgets: Mapping[RequestId, int],
        drafter: int,
        context: float,
    ) -> float | None:
        """Return how many tokens a draft token attended to; None: nobody can tell.

        Where all have come since the decision, the whole of a text of mean length, unless there is a budget.
        """
        usual = context / max(1, observation.num_sequences)
        return mean_draft_context(decision, budgets, None if drafter == self._budgeted_drafter else usual)

    def _note_prompts(self, observation: RoundObservation) -> None:
        has_prompts = observation.num_prompt_rows > 0
        seconds = self._prompt_s(observation) if has_prompts else 0.0
        kept = 1.0 - _PROMPT_DECAY
        self._with_prompts.add(has_prompts, observation.num_committed, kept=kept)
        self._of_prompts_s.add(seconds, has_prompts, kept=kept)

    def _prompt_s(self, observation: RoundObservation) -> float:
        """Return what the rows that read prompts have cost a round."""
        num_prompt_rows = observation.num_prompt_rows
        table = self._costs.verify.table(observation.num_sequences, observation.context_tokens)
        last = len(table) - 1
        rows = min(observation.num_rows, last)
        return float(table[rows] - table[max(0, rows - num_prompt_rows)])


def _longer_context(observation: RoundObservation, decision: Decision, context: float) -> float:
    """Return by how much contexts of draft rows are longer than the mean of all, added up."""
    contexts, index = decision.batch.contexts, decision.index
    if contexts is None:
        return 0.0
    mean = context / max(1, observation.num_sequences)
    outcomes = (*observation.outcomes, *observation.stand_ins)
    return sum(
        one.num_drafted * (float(contexts[index[one.request_id]]) - mean)
        for one in outcomes
        if one.request_id in index
    )
