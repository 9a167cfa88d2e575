"""One round: plan, propose, pack, verify, commit.

A round is in flight between `_launch` and `_land`. With one flight at a time that is lockstep; with two, over
disjoint cohorts of requests, one cohort is drafted for while the other is verified.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.core.clock import Clock
from specdec.core.error_codes import GRAMMAR_FAILED, NO_TOKEN_ALLOWED, NON_FINITE_LOGITS
from specdec.core.ids import RequestId
from specdec.core.outputs import RequestOutput, RoundTrace, TracedRound
from specdec.core.plan import TargetResult, TargetStep, TargetWork, WorkResult
from specdec.core.proposal import AheadOutcome, Proposal
from specdec.core.rows_beside import RowsBeside
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.engine.metrics.round_counts import FinishedRound, RoundCounts
from specdec.engine.metrics.round_times import RoundTimes
from specdec.engine.requests.live_request import LiveRequest
from specdec.engine.requests.roster import Roster
from specdec.engine.rounds.drafting import Drafting, Proposals
from specdec.engine.rounds.packing import Packer
from specdec.engine.rounds.shadows import Shadows
from specdec.engine.rounds.timed_controller import TimedController
from specdec.engine.rounds.unread_texts import UnreadTexts
from specdec.engine.targets.answer_checks import require_answer
from specdec.engine.targets.target import Target
from specdec.engine.text.text_stream import Finish
from specdec.proposers.base import AheadWish, AsksAhead, AsksOthers, HearsBeside, Proposer
from specdec.proposers.several.proposer import SeveralProposers
from specdec.scheduling.speculation.controller import DraftOutcome, RoundObservation, SpeculationController
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.state import RoundPlan
from specdec.verification.answers import rows_of_verdict, verdict_of
from specdec.verification.registry import capabilities_of

_DEPTHS: Mapping[OverlapMode, int] = {"lockstep": 1, "ping_pong": 2, "draft_ahead": 1}
"""Rounds in flight at a time."""
_WAITED_S = 5e-5
"""An answer that took longer was not there yet when it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flight:
    """A round between its launch and its landing."""

    mode: OverlapMode
    step: TargetStep
    lives: Sequence[LiveRequest]
    """By work. Some may have ended when the answer comes."""
    proposals: Proposals
    budgets: Mapping[RequestId, int]
    num_behind: int
    """See `RoundObservation`."""
    ahead: Sequence[AheadOutcome]
    num_prompt_rows: int
    num_context_tokens: int
    draft_s: float
    """Asking for drafts, and waiting for them."""
    asking_s: float
    """Of that, what was no waiting."""
    draft_ready_s: float | None
    """From asking for them to the last answer, waited for or not."""
    drafted_s: float
    """When they were there."""
    drafting_s: float
    """T_draft, as whoever drafted measures it."""
    submitted_s: float
    drafters: Mapping[RequestId, int]
    """Of several, who was asked for drafts."""
    drafter_s: Mapping[int, float]
    """What each of several took."""
    shadow_s: float
    """What drafters took that are not heard, after the submission."""


@dataclass(frozen=True, slots=True)
class _Landing:
    """What a flight has brought."""

    outputs: list[RequestOutput] = field(default_factory=list)
    outcomes: list[DraftOutcome] = field(default_factory=list)
    stand_ins: list[DraftOutcome] = field(default_factory=list)
    """Of proposals that stood in for missing ones."""


class RoundLoop:
    """Runs rounds over a roster. Only `_commit` advances sequences."""

    def __init__(
        self,
        *,
        roster: Roster,
        target: Target,
        proposer: Proposer,
        controller: SpeculationController,
        metrics: EngineMetrics,
        clock: Clock,
        max_branches: int,
        drafter_names: tuple[str, ...] = (),
        beside: Callable[[], None] | None = None,
    ) -> None:
        """Run rounds of these parts; continuations are drafted for `max_branches` verdicts of a request.

        `drafter_names` are those of several drafters. `beside` is called while a target that is elsewhere is
        at work: for what no round should wait for, but others do.

        Raises:
            ConfigError: the target verifies by a rule that cannot work with what the proposer gives, or
                shall draft and cannot.
        """
        self._roster = roster
        self._target = target
        self._proposer = proposer
        self._controller = TimedController(controller, clock)
        self._metrics = metrics
        self._clock = clock
        self._max_branches = max_branches
        self._beside = beside
        self._rule = capabilities_of(target.description.rule)
        self._drafting = Drafting(proposer, target.description, self._rule, metrics, drafter_names)
        self._packer = Packer(roster, self._drafting, needs_p_rows=self._rule.needs_p_rows)
        shadows = proposer.shadows if isinstance(proposer, SeveralProposers) else ()
        self._shadows = Shadows(shadows, metrics, clock)
        self._ahead: AsksAhead | None = None
        if proposer.capabilities.looks_ahead and isinstance(proposer, AsksAhead):
            self._ahead = proposer
        self._asks = proposer if isinstance(proposer, AsksOthers) else None
        self._hears_beside = proposer if isinstance(proposer, HearsBeside) else None
        self._kv_generation: int | None = None
        self._flights: deque[_Flight] = deque()
        self._landed_s: float | None = None
        """When the last round ended, if there has been work since."""
        self._times = RoundTimes(metrics, clock)
        self._beside_s = 0.0
        """What was done beside the target since the last landing, that it did not need, has taken."""
        self._behind_submit_s = 0.0
        """All that has been done since the last landing while the target was at work, in launching."""
        self._counts = RoundCounts(metrics)
        self._unread = UnreadTexts()

    @property
    def num_in_flight(self) -> int:
        """Rounds that have been launched and not landed."""
        return len(self._flights)

    @property
    def _has_work(self) -> bool:
        return bool(self._flights) or len(self._roster) > 0

    def run(self) -> list[RequestOutput]:
        """Launch what there is to launch, land the oldest flight and return what it brought.

        The text of that is still to be read: see `read_texts`.

        Raises:
            TransportError: the target is lost. No sequence of a flight that has not landed has advanced.
        """
        self._times.begin()
        mode = self._mode()
        is_launched = False
        while len(self._flights) < _DEPTHS[mode] and self._launch(mode):
            is_launched = True
        if not is_launched and self._target.is_elsewhere:
            self._behind_submit_s += self._do_beside(None)
        outputs = self._land(self._flights.popleft())
        self._times.end(has_work=self._has_work)
        return outputs

    def read_texts(self) -> None:
        """Let the outputs of the last round have their text: before they leave, or their requests go on."""
        self._unread.read()

    def count(self) -> None:
        """Count what is to be counted of rounds that have landed."""
        self._counts.count()

    def abandon(self) -> None:
        """Forget what is in flight: the target is lost."""
        self._counts.count()
        self._flights.clear()
        self._times.rest()
        self._beside_s = self._behind_submit_s = 0.0

    def release(self, request_id: RequestId) -> None:
        """Have everybody who drafts forget a request that has left the roster."""
        self._proposer.release((request_id,))
        self._shadows.release(request_id)
        if not self._has_work and not self._times.is_in_round:  # the next request may come in an hour
            self._counts.count()
            self._times.rest()
            self._landed_s = None

    def _mode(self) -> OverlapMode:
        """Return the controller's mode, where the proposer is of a kind that it works with."""
        mode, capabilities = self._controller.mode, self._proposer.capabilities
        if mode == "draft_ahead" and self._ahead is None:
            return "lockstep"
        return mode if capabilities.remote else "lockstep"

    def _decided(self, planned: OverlapMode) -> OverlapMode:
        """Return how a round is run that was planned for a mode, which may have changed with the plan.

        Two in flight take plans of their own: ping_pong begins, or ends, with later rounds.
        """
        if planned == "ping_pong":
            return planned
        decided = self._mode()
        return "lockstep" if decided == "ping_pong" else decided

    def _launch(self, mode: OverlapMode) -> bool:
        """Plan a round, get its drafts and send it off; return False when there is nothing to plan."""
        started_s = self._clock.now_s()
        plan = self._plan(started_s, mode)
        if plan is None:
            return False
        mode = self._decided(mode)
        planned_s = self._clock.now_s()
        is_read_beside = self._is_read_beside(plan)
        proposals = {} if is_read_beside else self._drafting.propose(plan, self._roster.running)
        proposed_s = self._clock.now_s()
        step = self._packer.pack(plan, proposals)
        lives = [self._roster.running[work.request_id] for work in step.works]
        for live in lives:
            live.is_in_flight = True
        submitted_s = self._clock.now_s()
        self._target.submit(step)
        sent_s = self._clock.now_s()
        shadow_s = self._shadows.draft(lives)
        draft_s = proposed_s - planned_s
        asking_s = 0.0 if self._asks is None else self._asks.take_asking_s()
        self._times.waited(draft_s - asking_s)
        flight = _Flight(
            mode=mode,
            step=step,
            lives=lives,
            proposals=proposals,
            budgets=plan.num_draft_tokens,
            num_behind=self._drafting.num_behind if mode == "lockstep" and not is_read_beside else 0,
            ahead=() if self._ahead is None else self._ahead.take_ahead_outcomes(),
            num_prompt_rows=_num_prompt_rows(step, lives),
            num_context_tokens=sum(live.committed_len for live in lives),
            draft_s=draft_s,
            asking_s=asking_s,
            draft_ready_s=draft_s if self._ahead is None else self._ahead.ready_s,
            drafted_s=proposed_s,
            drafting_s=0.0 if self._ahead is None else self._ahead.take_drafting_s(),
            submitted_s=submitted_s,
            drafters=self._drafting.drafters_of(plan.num_draft_tokens, self._roster.running),
            drafter_s=self._drafting.take_seconds(),
            shadow_s=shadow_s,
        )
        self._flights.append(flight)
        if mode == "draft_ahead":
            self._look_ahead(flight)
        if self._target.is_elsewhere:
            self._do_beside(plan if is_read_beside else None)
            self._behind_submit_s += self._clock.now_s() - sent_s
        return True

    def _is_read_beside(self, plan: RoundPlan) -> bool:
        """Whether whoever drafts elsewhere is told of tokens, to read them, while the target verifies."""
        if not self._target.is_elsewhere or any(plan.num_draft_tokens.values()):
            return False
        capabilities = self._proposer.capabilities
        return capabilities.remote and not capabilities.hidden_layers

    def _do_beside(self, read: RoundPlan | None) -> float:
        """Do, while the target is at work, what no round waits for; return how long it took."""
        started_s = self._clock.now_s()
        if read is not None:
            self._drafting.propose(read, self._roster.running)
            if self._asks is not None:
                self._asks.take_asking_s()
        if self._beside is not None:
            self._beside()
        self._counts.count()
        self._controller.think_beside()
        took_s = self._clock.now_s() - started_s
        self._beside_s += took_s
        return took_s

    def _land(self, flight: _Flight) -> list[RequestOutput]:
        """Wait for the answer to a flight and commit it."""
        awaited_s = self._clock.now_s()
        result = self._target.collect()
        require_answer(flight.step, result, may_verify=self._rule.needs_p_rows)
        verified_s = self._clock.now_s()
        waited_s, delay_s, behind_s = verified_s - awaited_s, self._beside_s, self._behind_submit_s
        self._beside_s = self._behind_submit_s = 0.0
        if waited_s >= _WAITED_S:  # all the while the target was at work
            waited_s, delay_s = waited_s + behind_s, 0.0
        self._times.waited(waited_s)
        landing = self._commit(flight, result, verified_s)
        for work, answer in zip(flight.step.works, result.results, strict=True):
            if work.beside is not None:
                self._hear_beside(work.beside, flight.proposals[work.request_id], answer)
        self._observe(flight, result, landing, verified_s, delay_s)
        if not self._target.is_elsewhere or not self._has_work:
            self._counts.count()
            self._controller.think()
        return landing.outputs

    def _plan(self, now_s: float, mode: OverlapMode) -> RoundPlan | None:
        roster = self._roster
        plan = roster.plan(self._controller, now_s, roster.cohort_size if mode == "ping_pong" else None)
        if self._flights and (plan.preempted or not plan.num_tokens):
            return None  # what is in flight may free what is missing
        if plan.preempted or not plan.num_tokens:
            plan = roster.plan(self._controller, now_s)
        assert plan.num_tokens, "a round without work: the planner must always let the first in order go on"
        applied = self._roster.apply(plan, now_s)
        self._metrics.num_recomputed_tokens += applied.num_recomputed
        self._metrics.prefix_cache_queries += applied.num_queried
        self._metrics.prefix_cache_hits += applied.num_hit
        self._metrics.num_preemptions += len(plan.preempted)
        return plan

    def _look_ahead(self, flight: _Flight) -> None:
        """Ask for continuations of what the round in flight may bring.

        Whose prompt ends in it has no drafts in it, but in the next one, for which nobody should wait. It is
        given as many as others have, which is within all bounds, or fewer if it asks for fewer.
        """
        assert self._ahead is not None
        wishes = []
        usual = max(flight.budgets.values(), default=0)
        for work, live in zip(flight.step.works, flight.lives, strict=True):
            budget = flight.budgets.get(work.request_id, 0)
            if not live.is_decoding:
                own = live.requested_draft_tokens
                budget = min(usual if own is None else min(own, usual), live.max_draft_tokens)
            if budget == 0 or work.num_sampled_rows == 0:
                continue
            proposal = flight.proposals.get(work.request_id)
            pending = proposal.token_ids if proposal is not None else ()
            is_foreign = proposal is not None and proposal.is_fallback
            fan_out = self._controller.fan_out(live, len(pending), self._max_branches, is_foreign=is_foreign)
            if any(fan_out):
                wish = AheadWish(
                    view=live,
                    pending=pending,
                    num_draft_tokens=budget,
                    fan_out=fan_out,
                    is_foreign=is_foreign,
                )
                wishes.append(wish)
        self._ahead.look_ahead(wishes)

    def _commit(self, flight: _Flight, result: TargetResult, now_s: float) -> _Landing:
        if result.kv_generation != self._kv_generation:
            if self._kv_generation is not None:
                self._roster.drop_cache()
            self._kv_generation = result.kv_generation
        self._unread.read()
        landing = _Landing()
        outputs = landing.outputs
        for work, live, answer in zip(flight.step.works, flight.lives, result.results, strict=True):
            live.is_in_flight = False
            if self._roster.running.get(work.request_id) is not live:
                continue  # it has ended meanwhile
            if answer.prompt_logprobs is not None:
                live.note_prompt_logprobs(work.start, answer.prompt_logprobs)
            if answer.error is not None and not answer.token_ids:
                outputs.append(self._fail(live, answer, now_s))
            elif work.num_sampled_rows == 0:
                live.sequence.advance_computed(len(work.token_ids))
                self._roster.note_computed(live)
                if not live.generates and live.num_computed == live.committed_len:
                    outputs.append(self._retire(live, live.end(Finish(reason="length"), now_s)))
            else:
                proposal = flight.proposals.get(work.request_id)
                drafter = flight.drafters.get(work.request_id)
                if answer.drafted:
                    proposal = self._drafting.of_target(live, answer, drafter)
                elif work.num_self_drafted:
                    self._metrics.num_missing_proposals += 1
                num_before = live.committed_len
                self._advance(live, answer, proposal, landing, now_s, drafter)
                if live.stats.trace is not None:
                    num_drafted = 0 if proposal is None else len(proposal.token_ids)
                    self._trace(live.stats.trace, flight, now_s, num_drafted, live.committed_len - num_before)
                self._shadows.learn(live)
                outputs.append(self._settle(live, now_s))
        return landing

    def _hear_beside(self, beside: RowsBeside, proposal: Proposal, answer: WorkResult) -> None:
        """Let the proposer have what the target says at the rows beside its proposal."""
        assert self._hears_beside is not None, "rows beside are asked for by who hears of them"
        self._metrics.num_rows_beside += beside.num_rows
        if answer.beside:
            self._hears_beside.hear_beside(proposal, answer.beside)

    def _trace(
        self, trace: RoundTrace, flight: _Flight, verified_s: float, num_drafted: int, num_committed: int
    ) -> None:
        trace.note(
            TracedRound(
                index=trace.num_rounds,
                propose_s=flight.drafted_s - flight.draft_s,
                proposed_s=flight.drafted_s,
                verify_s=flight.submitted_s,
                verified_s=verified_s,
                committed_s=self._clock.now_s(),
                num_drafted=num_drafted,
                num_committed=num_committed,
            )
        )

    def _advance(
        self,
        live: LiveRequest,
        answer: WorkResult,
        proposal: Proposal | None,
        landing: _Landing,
        now_s: float,
        drafter: int | None,
    ) -> None:
        """Commit what the target says; note what became of the draft, if there was one."""
        drafted, parents = ((), None) if proposal is None else (proposal.token_ids, proposal.parents)
        verdict = verdict_of(drafted, parents, answer.token_ids)
        logprobs = answer.logprobs
        if logprobs is not None and parents is not None:
            rows = rows_of_verdict(verdict, parents, len(drafted), len(answer.token_ids))
            logprobs = tuple(logprobs[row] for row in rows)
        first_place = live.committed_len
        num_kept = live.commit(verdict.token_ids, logprobs, now_s)
        self._roster.note_computed(live)
        if parents is not None:
            self._metrics.num_moved_kv += self._roster.note_path(
                live, first_place, verdict.accepted_nodes[: num_kept - 1]
            )
        if proposal is None or not drafted:
            return
        if not self._rule.exact and not live.params.is_greedy:
            self._metrics.num_lossy_tokens += num_kept
            live.stats.speculation.num_lossy_tokens += num_kept
        accepted_nodes = verdict.accepted_nodes[:num_kept]
        num_before = first_place - live.num_prompt_tokens
        self._counts.note_draft(live.request, num_before, proposal, len(accepted_nodes))
        outcome = _outcome(live, proposal, accepted_nodes)
        if not proposal.is_fallback:
            self._drafting.count(live, drafter, outcome.num_drafted, outcome.num_accepted)
        (landing.stand_ins if proposal.is_fallback else landing.outcomes).append(outcome)

    def _settle(self, live: LiveRequest, now_s: float) -> RequestOutput:
        """Return what is new of a request that has advanced; give back what it does not need any more."""
        output = live.take_output(now_s, with_text=False)
        self._unread.add(output, live)
        if output.finish_reason is not None:
            self._retire(live, output)
        elif live.has_outgrown_cache:
            self._roster.send_back(live.request_id)
        else:
            live.table.trim(live.committed_len)
        return output

    def _fail(self, live: LiveRequest, answer: WorkResult, now_s: float) -> RequestOutput:
        """End a request that cannot go on; others may share its K/V, unless these may be what is wrong."""
        if answer.error_code != NO_TOKEN_ALLOWED:
            self._roster.withdraw(live)
        return self._retire(live, live.end(_failure(live, answer), now_s))

    def _retire(self, live: LiveRequest, output: RequestOutput) -> RequestOutput:
        self._roster.remove(live.request_id)
        self._roster.settle_turn(live)
        self.release(live.request_id)
        assert output.finish_reason is not None
        self._metrics.finished[output.finish_reason] += 1
        return output

    def _observe(
        self,
        flight: _Flight,
        result: TargetResult,
        landing: _Landing,
        verified_s: float,
        delay_s: float,
    ) -> None:
        """Tell the controller of a round, and count it; it is `delay_s` longer by what was done beside."""
        num_committed = sum(len(output.token_ids) for output in landing.outputs)
        draft_s = flight.draft_s + result.draft_s
        target_s = result.forward_s + result.sample_s
        verify_s = verified_s - flight.submitted_s - result.draft_s
        # Who is not heard drafts while the target verifies, or before that where both are in this process.
        beside_s = verify_s - max(target_s, verify_s - flight.shadow_s - delay_s)
        verify_s -= beside_s
        works = flight.step.works
        num_rows = sum(map(_num_rows, works, result.results))
        num_decoding = sum(work.num_sampled_rows > 0 for work in works)
        thought_s = self._controller.take_thought_s()
        if flight.mode != "lockstep" or self._flights:
            thought_s = 0.0  # it may have thought while it would have waited
        self._counts.note_round(
            FinishedRound(
                mode=flight.mode,
                num_requests=len(works),
                num_rows=num_rows,
                num_places=self._roster.max_num_seqs,
                num_committed=num_committed,
                asked_s=flight.drafted_s - flight.draft_s,
                drafted_s=flight.drafted_s,
                drafting_s=flight.drafting_s,
                waited_s=draft_s - flight.asking_s,
                budgets=flight.budgets,
                num_decoding=num_decoding,
                submitted_s=flight.submitted_s,
                verify_s=verify_s,
                forward_s=result.forward_s,
                sample_s=result.sample_s,
            )
        )
        self._controller.observe(
            RoundObservation(
                mode=flight.mode,
                num_rows=num_rows,
                num_sequences=len(works),
                num_committed=num_committed,
                num_decoding=num_decoding,
                num_prompt_rows=flight.num_prompt_rows,
                context_tokens=flight.num_context_tokens,
                budgets=flight.budgets,
                num_behind=flight.num_behind,
                draft_s=draft_s,
                draft_ready_s=flight.draft_ready_s if result.draft_s == 0.0 else draft_s,
                draft_work_s=flight.drafting_s or None,
                verify_s=verify_s,
                target_s=target_s or None,
                round_s=None
                if self._landed_s is None
                else verified_s - self._landed_s - thought_s - beside_s,
                drafters=flight.drafters,
                drafting_s=self._drafting.with_target_seconds(flight.drafter_s, result),
                num_elsewhere=sum(len(other.lives) for other in self._flights),
                outcomes=landing.outcomes,
                stand_ins=landing.stand_ins,
                ahead=flight.ahead,
            )
        )
        self._landed_s = verified_s if self._has_work else None


def _num_rows(work: TargetWork, answer: WorkResult) -> int:
    """Return the rows that the target has run for a work: with drafts of its own, more than it was given."""
    return work.num_rows + len(answer.drafted)


def _outcome(live: LiveRequest, proposal: Proposal, accepted_nodes: tuple[int, ...]) -> DraftOutcome:
    """Return what became of a proposal, and count it for its request."""
    num_drafted, num_accepted = proposal.num_tokens, len(accepted_nodes)
    speculation = live.stats.speculation
    speculation.num_drafts += 1
    speculation.num_draft_tokens += num_drafted
    speculation.num_accepted_tokens += num_accepted
    speculation.per_step_drafted.append(num_drafted)
    speculation.per_step_accepted.append(num_accepted)
    return DraftOutcome(
        request_id=live.request_id,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        accepted_nodes=None if proposal.parents is None else accepted_nodes,
    )


def _num_prompt_rows(step: TargetStep, lives: Sequence[LiveRequest]) -> int:
    pairs = zip(step.works, lives, strict=True)
    return sum(len(work.token_ids) for work, live in pairs if not live.is_decoding)


def _failure(live: LiveRequest, answer: WorkResult) -> Finish:
    """Say why a request cannot go on."""
    if live.grammar is not None and live.grammar.failure is not None:
        error = f"{live.params.grammar.param if live.params.grammar else 'grammar'}: {live.grammar.failure}"
        return Finish(reason="error", error=error, error_code=GRAMMAR_FAILED)
    return Finish(reason="error", error=answer.error, error_code=answer.error_code or NON_FINITE_LOGITS)
