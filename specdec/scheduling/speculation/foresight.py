"""What rounds of a batch would bring, by what is known of its requests and of costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specdec.scheduling.speculation.cost import CostModel
from specdec.scheduling.speculation.cost_learning import CostLearning
from specdec.scheduling.speculation.evidence import Overheads
from specdec.scheduling.speculation.goodput import AheadOutlook, Batch, Evaluation, Kind, Option, at_rows
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.speculation.request_facts import RequestFacts
from specdec.scheduling.speculation.settings import ControllerSettings
from specdec.scheduling.state import Schedulable


class Foresight:
    """Describes batches and evaluates them. It reads what others learn, and changes nothing."""

    def __init__(
        self,
        settings: ControllerSettings,
        facts: RequestFacts,
        costs: CostModel,
        overheads: Overheads,
        learning: CostLearning,
        measured: CostModel,
    ) -> None:
        """Look ahead by these, as they are at the time of the question.

        `measured` are the costs of the start, which nobody corrects.
        """
        self._settings = settings
        self._facts = facts
        self._costs = costs
        self._overheads = overheads
        self._learning = learning
        self._measured = measured

    def batch_of(self, sequences: Sequence[Schedulable]) -> Batch:
        """Describe these sequences as they are now."""
        cap = self._settings.cap_for(len(sequences))
        most = self._settings.max_draft_tokens
        caps = np.array([min(one.max_draft_tokens, cap) for one in sequences], dtype=np.int64)
        requested = np.array(
            [
                -1
                if one.requested_draft_tokens is None
                else min(one.requested_draft_tokens, one.max_draft_tokens, most)
                for one in sequences
            ],
            dtype=np.int64,
        )
        estimate = self._facts.estimate(sequences)
        drafters = self._facts.drafters_of(sequences)
        if drafters is not None:
            own_caps = np.array(self._settings.drafter_caps)[drafters]
            caps, requested = np.minimum(caps, own_caps), np.minimum(requested, own_caps)
        contexts = np.array([one.committed_len for one in sequences], dtype=np.float64)
        return Batch(
            estimate=estimate,
            caps=caps,
            requested=requested,
            context_tokens=float(contexts.sum()),
            contexts=contexts,
            draft_contexts=np.array([self._facts.draft_context(one) for one in sequences], dtype=np.float64),
            itl_s=tuple(sorted({one.itl_s for one in sequences if one.itl_s is not None})),
            drafters=drafters,
        )

    def evaluate(
        self, batch: Batch, time_factors: Mapping[Kind, float], plain_s: float | None = None
    ) -> Evaluation:
        """Return what rounds of each kind would take and bring.

        `time_factors` say how many times as long as expected they have taken lately, `plain_s` how long a
        round without drafts takes where it is not one of this batch alone.
        """
        way_s = self._way_s((batch.num_sequences + 1) // 2)
        return self._evaluate(batch, self._costs, time_factors, plain_s, way_s)

    def beyond_targets(
        self, batch: Batch, plain_s: float, modes: Sequence[OverlapMode], outlook: AheadOutlook
    ) -> Option | None:
        """Return what latency targets would leave if nothing had been learnt of costs, but that the machine
        is as fast as it is now: a round without drafts takes `plain_s`. It takes what it takes by the present
        costs. None: no drafts.
        """
        number = batch.num_sequences
        table = self._measured.verify.table(number, batch.context_tokens)
        measured_s = float(at_rows(table, number)) + self._overheads.of(number, has_drafts=False)
        kinds: tuple[Kind, ...] = ("plain", *modes)
        time_factors = dict.fromkeys(kinds, plain_s / measured_s)
        way_s = self._way_s((number + 1) // 2)
        evaluation = self._evaluate(batch, self._measured, time_factors, plain_s, way_s)
        options = evaluation.options(modes, outlook)
        drafting = [option for kind, option in options.items() if kind != "plain"]
        found = options.get("lockstep") or max(drafting, key=lambda option: option.rate, default=None)
        if found is None:
            return None
        return found.shortened(self.price_s(batch, found) / found.round_s)

    def _evaluate(
        self,
        batch: Batch,
        costs: CostModel,
        time_factors: Mapping[Kind, float],
        plain_s: float | None,
        way_s: float | None,
    ) -> Evaluation:
        number, of = batch.num_sequences, self._overheads.of
        overhead_s = of(number, has_drafts=True)
        overheads: dict[Kind, float] = {
            "plain": of(number, has_drafts=False),
            "lockstep": overhead_s,
            "draft_ahead": overhead_s,
            "ping_pong": of((number + 1) // 2, has_drafts=True),
        }
        return Evaluation(
            batch,
            costs,
            overheads,
            max_rows=self._settings.max_rows,
            num_rows_beside=self._settings.num_rows_beside,
            prompts=self._learning.prompts,
            time_factors=time_factors,
            plain_s=plain_s,
            way_s=way_s,
        )

    def by_cohort(
        self, batch: Batch, num_here: int, time_factors: Mapping[Kind, float], plain_s: float
    ) -> Option | None:
        """Return the best choice for ping_pong, where the first `num_here` sequences are in one cohort.

        Rows and steps are those of a cohort: what is best for all together need not suit either. `plain_s` is
        what a round of all takes without drafts, which says what latency targets can be kept. None: there is
        no choice with drafts.
        """
        cohorts = batch.part(0, num_here), batch.part(num_here, batch.num_sequences)
        each = [self._of_cohort(one, time_factors, plain_s) for one in cohorts]
        if all(one.kind == "plain" for one in each):
            return None
        unbounded_rate = None
        if any(one.unbounded_rate is not None for one in each):
            # Of the tokens of one cohort in about half of the time.
            unbounded_rate = 0.5 * sum(one.unbounded_rate or one.rate for one in each)
        return Option(
            kind="ping_pong",
            num_draft_tokens=np.concatenate([one.num_draft_tokens for one in each]),
            tokens=sum(one.tokens for one in each),
            round_s=sum(one.round_s for one in each),
            draft_s=max(one.draft_s for one in each),
            verify_s=max(one.verify_s for one in each),
            alone_s=sum(one.round_s if one.alone_s is None else one.alone_s for one in each),
            beside_prompts_s=sum(
                one.round_s if one.beside_prompts_s is None else one.beside_prompts_s for one in each
            ),
            unbounded_rate=unbounded_rate,
        )

    def price_s(self, batch: Batch, option: Option) -> float:
        """Return the seconds of a round by the present costs.

        Roughly: it tells by how much the costs that an option was chosen by have changed since.
        """
        chosen, parts = option.num_draft_tokens, 2 if option.kind == "ping_pong" else 1
        is_overlapped = option.kind in ("ping_pong", "draft_ahead")
        number = -(-batch.num_sequences // parts)
        has_drafts = bool(chosen.any())
        overhead_s = self._overheads.of(number, has_drafts=has_drafts)
        table = self._costs.verify.table(number, batch.context_tokens / parts, is_overlapped=is_overlapped)
        is_chosen = np.arange(batch.estimate.filled.shape[1]) < chosen[:, None]
        rows = (batch.num_sequences + float(batch.estimate.filled[is_chosen].sum())) / parts
        verify_s = float(at_rows(table, rows))
        if not has_drafts:
            return (verify_s + overhead_s) * parts
        draft_s = 0.0
        drafters = np.zeros(batch.num_sequences, dtype=np.int64) if batch.drafters is None else batch.drafters
        for place in np.unique(drafters).tolist():
            is_its = drafters == place
            context = batch.context_tokens / batch.num_sequences
            if batch.draft_contexts is not None:
                context = float(batch.draft_contexts[is_its].mean())
            steps = np.arange(int(chosen.max()))
            taking_part = (chosen[is_its][:, None] > steps).sum(0) * option.num_branches
            steps_s = self._costs.drafts[place].by_steps(
                np.ceil(taking_part / parts), context, is_overlapped=is_overlapped
            )
            draft_s += float(steps_s[-1])
        if not is_overlapped:
            return draft_s + verify_s + overhead_s
        if parts > 1 and (way_s := self._way_s(number)) is not None:
            return parts * max(draft_s + overhead_s, verify_s - way_s)
        return parts * max(draft_s, verify_s + overhead_s)

    def _way_s(self, num_in_cohort: int) -> float | None:
        return self._learning.way_s(num_in_cohort) if self._settings.is_target_elsewhere else None

    def _of_cohort(self, cohort: Batch, time_factors: Mapping[Kind, float], plain_s: float) -> Option:
        way_s = self._way_s(cohort.num_sequences)
        evaluation = self._evaluate(cohort, self._costs, time_factors, plain_s, way_s)
        found = evaluation.cohort()
        return evaluation.plain if found is None else found.shortened(0.5)
