"""The target in this process: a runner, a sampler, and what they must remember of each sequence."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch

from specdec.attention.observation import Observation
from specdec.core.description import TargetDescription
from specdec.core.error_codes import NO_TOKEN_ALLOWED, NON_FINITE_LOGITS
from specdec.core.idle_work import IdleWork, idle_work_of
from specdec.core.ids import RequestId
from specdec.core.outputs import TokenLogprobs
from specdec.core.plan import AdmittedSequence, ErrorCode, TargetResult, TargetStep, TargetWork, WorkResult
from specdec.engine.targets.attention_watch import AttentionWatch
from specdec.engine.targets.judge import Judge
from specdec.engine.targets.kept_rows import KeptRows
from specdec.engine.targets.rows_beside import part_logits, part_tokens, with_answers_beside, with_told_beside
from specdec.engine.targets.self_drafter import SelfDraft, SelfDrafter
from specdec.engine.targets.target_drafting import DraftedStep, TargetDrafting, with_draft, with_told_drafts
from specdec.engine.targets.work_rows import (
    all_rows,
    node_parents,
    num_drafted,
    paths,
    row_topology,
    rows_of_answer,
    with_drafted,
)
from specdec.kv.block_scores import BlockScores
from specdec.kv.selection import KvSelection
from specdec.model.batch import NO_TOKEN, Generated, PositionShift, SequenceSlice
from specdec.model.devices import device_name
from specdec.model.exit_states import ExitStates
from specdec.model.resumed_forward import ResumedForward
from specdec.model.runner import ModelRunner
from specdec.model.sampling_defaults import sampling_defaults_of
from specdec.proposers.base import Proposer
from specdec.proposers.draft_loop import ChainStart, FusedDraftLoop
from specdec.proposers.hidden import HiddenSource
from specdec.sampling.sampler import RowSpec, SamplingRows, TokenChooser
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.sampling.shaping import LogitShaper, apply_masks, shaper_for
from specdec.tree.growth import TreeShape
from specdec.verification.answers import verdict_of
from specdec.verification.base import VerificationRule
from specdec.verification.sample_and_match import SampleAndMatch


@dataclass(slots=True, kw_only=True)
class _SequenceState:
    sampling: SequenceSampling
    shaper: LogitShaper | None
    token_ids: list[int]
    """Committed tokens and behind them the last draft, where there is a shaper."""
    needs_logits: bool
    """Whether something is done with its logits beside the token function."""
    shift: PositionShift | None
    scores: BlockScores | None
    """What its own drafts are to attend to; None: the length says."""
    num_copied: int = 0
    """Tokens whose K/V are where its own drafts attend to them."""
    block_table: array[int] = field(default_factory=lambda: array("i"))


class _Logits(NamedTuple):
    """Logits of the sampled rows, [R, V] each."""

    raw: torch.Tensor
    """As the model gives them."""
    shaped: torch.Tensor
    """As they were sampled from."""


class _Failure(NamedTuple):
    """Why a row has no token."""

    error: str | None
    code: ErrorCode | None


MakeDrafter = Callable[[HiddenSource], Proposer]
"""Makes what drafts at the target, given where its hidden states are."""
_PromptScores = dict[int, tuple[TokenLogprobs, ...]]
"""By index of the work, log-probabilities of its scored tokens."""
_NO_FAILURE = _Failure(None, None)


class LocalTarget:
    """Implements `engine.target.Target` on a `ModelRunner`. Not thread-safe.

    A submitted step is run when it is collected: in one process there is nothing to overlap with.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: TokenChooser,
        *,
        rule: VerificationRule | None = None,
        idle_work: Sequence[IdleWork] = (),
        self_drafting: KvSelection | None = None,
        self_tree: TreeShape | None = None,
        view: ModelRunner | None = None,
        resumed: ResumedForward | None = None,
        self_loop: FusedDraftLoop | None = None,
        make_drafter: MakeDrafter | None = None,
    ) -> None:
        """Run `runner` and `sampler`; `idle_work` is what makes them faster (see `HasIdleWork`).

        `rule` verifies drafts (None: sample_and_match, by whoever asked). With `self_drafting`, which says
        what such drafts attend to, it drafts for itself where a work asks for it, trees of the shape
        `self_tree` (None: chains), by `view`, a form of the model on the same K/V (None: by the model), where
        it can through `self_loop` over the same runner; `resumed` verifies, once it is compiled, from where
        drafts of `view` have stopped. With `make_drafter`, another drafts there from the hidden states that
        `runner` keeps.
        """
        self.idle_work: Sequence[IdleWork] = idle_work
        rule = rule or SampleAndMatch()
        self._judge = Judge(rule) if rule.capabilities.needs_p_rows else None
        self._draft_stream = rule.capabilities.draft_stream
        self._runner = runner
        self._sampler = sampler
        self._resumed = resumed
        self._self_drafter: SelfDrafter | None = None
        if self_drafting is not None:
            assert self._judge is None, "drafts at the noise of the target are for sample_and_match"
            drafting = view or runner
            packed = drafting.packed_copy if drafting.attends_packed else None
            self._self_drafter = SelfDrafter(drafting, sampler, self_drafting, self_tree, packed, self_loop)
        self.hidden: KeptRows | None = None
        """Hidden states of its sequences, where the runner keeps some."""
        if runner.hidden is not None and runner.taps is not None:
            self.hidden = KeptRows(runner.hidden, runner.taps.layers)
        self._drafting: TargetDrafting | None = None
        if make_drafter is not None:
            assert self_drafting is None, "one of them drafts"
            assert self.hidden is not None, "there is nothing to draft from"
            self._drafting = TargetDrafting(make_drafter(self.hidden), rule.capabilities, runner.vocab_size)
            self.idle_work = (*idle_work, *idle_work_of(self._drafting.proposer))
        self._make_scores = None if self_drafting is None else self_drafting.make_scores
        self._watch: AttentionWatch | None = None
        if self._make_scores is not None and self._make_scores() is not None:
            self._watch = AttentionWatch(runner)
        self._sequences: dict[RequestId, _SequenceState] = {}
        self._pending: deque[TargetStep] = deque()
        loaded = runner.loaded
        self._description = TargetDescription(
            model_id=loaded.path.name,
            revision=loaded.revision,
            dtype=str(loaded.dtype).removeprefix("torch."),
            vocab_size=runner.vocab_size,
            max_model_len=runner.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            rule=rule.capabilities.name,
            kv_variants=None if loaded.rotary is None else loaded.rotary.variants,
            quantization=loaded.quantization,
            batch_invariant=loaded.invariant is not None,
            drafts_itself=self_drafting is not None or make_drafter is not None,
            sampling_defaults=sampling_defaults_of(loaded.path),
            device=device_name(loaded.device),
            row_buckets=runner.row_buckets,
        )

    @property
    def description(self) -> TargetDescription:
        """Facts about the model, and the length that both it and the cache allow."""
        return self._description

    @property
    def runner(self) -> ModelRunner:
        """What runs the model, for measurements of the bare forward."""
        return self._runner

    @property
    def is_elsewhere(self) -> bool:
        """No: `collect` runs them."""
        return False

    def submit(self, step: TargetStep) -> None:
        """Queue a round."""
        self._pending.append(step)

    def collect(self) -> TargetResult:
        """Run the oldest queued round and return its answer."""
        return run_to_the_end(self.run, self._pending.popleft())

    def run(self, step: TargetStep) -> TargetResult:
        """Run a step as it is; `run_to_the_end` says what may remain to be done."""
        return self.run_drafted(self.begin(step))

    def begin(self, step: TargetStep) -> DraftedStep:
        """Take in what a step says of sequences; draft for it from hidden states, where that is done here.

        Of a model over several ranks that is rank 0: the others are given the step with its drafts.
        """
        if step.moves:
            self._runner.move_slots(step.moves)
            if self.hidden is not None:
                self.hidden.moved(step.moves)
        for request_id in step.released:
            self._sequences.pop(request_id, None)
        if self.hidden is not None:
            self.hidden.release(step.released)
        for admitted in step.admitted:
            self._admit(admitted)
        if self._drafting is None:
            return DraftedStep(step, (None,) * len(step.works), 0.0)
        started_s = time.perf_counter()
        self._drafting.release(step.released)
        for admitted in step.admitted:
            self._drafting.admit(admitted)
        drafts = self._drafting.draft(step.works)
        works = tuple(map(with_draft, step.works, drafts))
        draft_s = time.perf_counter() - started_s
        drafted = msgspec.structs.replace(step, works=works)
        return DraftedStep(drafted, drafts, draft_s, self._drafting.take_seconds())

    def run_drafted(self, drafted: DraftedStep) -> TargetResult:
        """Run a step that `begin` has returned."""
        step = drafted.step
        if not step.works:
            return TargetResult(step_id=step.step_id, results=())
        if self._self_drafter is not None and any(work.num_self_drafted for work in step.works):
            return self._run_with_drafts(step, self._self_drafter)
        result = self._run(step)
        if self._drafting is not None:
            self._drafting.learn(step.works, result.results)
        if drafted.has_drafts:
            results = with_told_drafts(result.results, drafted.drafts)
            result = msgspec.structs.replace(
                result, results=results, draft_s=drafted.draft_s, drafters_s=drafted.drafters_s
            )
        return result

    def close(self) -> None:
        """Forget all sequences and queued rounds."""
        self._sequences.clear()
        self._pending.clear()
        if self._drafting is not None:
            self._drafting.close()

    def _admit(self, admitted: AdmittedSequence) -> None:
        params = admitted.params
        shaper = shaper_for(
            params,
            eos_token_ids=self._description.eos_token_ids,
            num_prompt_tokens=admitted.num_prompt_tokens,
        )
        rotary = self._runner.loaded.rotary
        self._sequences[admitted.request_id] = _SequenceState(
            sampling=SequenceSampling(params, admitted.seed),
            shaper=shaper,
            token_ids=list(admitted.token_ids),
            shift=None if rotary is None else rotary.shift(admitted.kv_variant, admitted.num_prompt_tokens),
            needs_logits=shaper is not None or params.grammar is not None or params.logprobs is not None,
            # Whoever has a grammar is not drafted for here.
            scores=None if self._make_scores is None or params.grammar is not None else self._make_scores(),
        )

    def _run_with_drafts(self, step: TargetStep, drafter: SelfDrafter) -> TargetResult:
        """Draft behind the works that ask for it, then run the step with their drafts."""
        started_s = time.perf_counter()
        drafting = [work for work in step.works if work.num_self_drafted]
        budgets = [work.kv_budget for work in drafting]
        starts = [self._start(work) for work in drafting]
        states = [self._sequences[work.request_id] for work in drafting]
        drafter.catch_up(starts, [state.num_copied for state in states])
        for state, start in zip(states, starts, strict=True):
            state.num_copied = start.start
        num_rows = sum(len(start.token_ids) + start.budget - 1 for start in starts)
        with nullcontext() if self._resumed is None else self._resumed.collecting(num_rows) as exit_states:
            made = iter(drafter.draft(starts, self._scores_of(drafting), budgets))
        drafts = [next(made) if work.num_self_drafted else SelfDraft() for work in step.works]
        works = tuple(
            with_drafted(work, *draft) if work.num_self_drafted else work
            for work, draft in zip(step.works, drafts, strict=True)
        )
        draft_s = time.perf_counter() - started_s
        drafted_for = {work.request_id for work in drafting}
        result = self._run(msgspec.structs.replace(step, works=works), drafted_for, exit_states)
        results = tuple(
            msgspec.structs.replace(answer, drafted=draft.token_ids, drafted_parents=draft.parents)
            if draft.token_ids
            else answer
            for answer, draft in zip(result.results, drafts, strict=True)
        )
        return msgspec.structs.replace(result, results=results, draft_s=draft_s)

    def _start(self, work: TargetWork) -> ChainStart:
        """Describe where a work's draft begins."""
        assert work.num_sampled_rows == 1, "nothing can be drafted behind a draft"
        assert work.masks is None, "whoever has the grammar does not draft here"
        state = self._sequences[work.request_id]
        if state.shaper is not None:
            _tell_shaper(state.shaper, state, work)
        return ChainStart(
            token_ids=work.token_ids,
            start=work.start,
            block_table=_updated_table(state, work),
            budget=work.num_self_drafted,
            params=state.sampling.params,
            seed=state.sampling.seed,
            shaper=state.shaper,
            shift=state.shift,
        )

    def _run(
        self,
        step: TargetStep,
        drafted_for: Set[RequestId] = frozenset(),
        exit_states: ExitStates | None = None,
    ) -> TargetResult:
        """Run a step as it is; `drafted_for` are the sequences for which it was drafted here.

        `exit_states` are what these drafts have left of rows of the step.
        """
        slices = [self._slice(work) for work in step.works]
        observation: Observation | None = None
        watched: Sequence[BlockScores | None] = ()
        if self._watch is not None:
            watched = self._watched(step.works, drafted_for)
            observation = self._watch.ask(step.works, watched)
        generated = self._try_generate(step.works, slices, observation, exit_states)
        if generated is not None:
            results = self._told(step.works, generated.token_ids)
            forward_s, sample_s = generated.forward_s, generated.choose_s
        else:
            started_s = time.perf_counter()
            logits = self._forward(slices, observation, exit_states)
            _synchronize(logits)
            forward_s = time.perf_counter() - started_s
            logits_beside: torch.Tensor | None = None
            if any(work.beside is not None for work in step.works):
                num_own = list(map(_num_logit_rows, step.works))
                logits, logits_beside = part_logits(step.works, num_own, logits)
            scores: _PromptScores = {}
            if any(work.scored_token_ids for work in step.works):
                logits, scores = self._score(step.works, logits)
            results = self._sample(step.works, logits)
            if scores:
                results = _with_scores(results, scores)
            if logits_beside is not None:
                sequences = [self._sequences[work.request_id].sampling for work in step.works]
                results = with_answers_beside(
                    results, step.works, sequences, logits_beside, self._sampler, self._draft_stream
                )
            sample_s = time.perf_counter() - started_s - forward_s
        if self.hidden is not None:
            for work, told in zip(step.works, results, strict=True):
                table = self._sequences[work.request_id].block_table
                end_row = work.start + len(work.token_ids)
                # Who drafts here reads them once they have been moved.
                path = _standing_path(work, told) if self._drafting is None else (end_row, ())
                self.hidden.note(work.request_id, table, end_row, path)
        if observation is not None:
            assert self._watch is not None
            self._watch.learn(observation, step.works, results, watched)
        return TargetResult(
            step_id=step.step_id,
            results=results,
            forward_s=forward_s,
            sample_s=sample_s,
            kv_generation=self._runner.kv_generation,
        )

    def _told(self, works: Sequence[TargetWork], token_ids: list[int]) -> tuple[WorkResult, ...]:
        """Share out tokens that were chosen at all rows, those beside included."""
        if all(work.beside is None for work in works):
            return self._results(works, token_ids)
        own, answers = part_tokens(works, list(map(_num_logit_rows, works)), token_ids)
        return with_told_beside(self._results(works, own), works, answers)

    def _scores_of(self, works: Sequence[TargetWork]) -> list[BlockScores | None]:
        return [self._sequences[work.request_id].scores for work in works]

    def _watched(self, works: Sequence[TargetWork], drafted_for: Set[RequestId]) -> list[BlockScores | None]:
        """Return the scores of sequences that may be looked at: drafted for in this round, or without any.

        All others have a plain round, which is to cost what it costs where nothing is ever looked at.
        """
        return [
            scores
            if scores is not None and (work.request_id in drafted_for or scores.values is None)
            else None
            for work, scores in zip(works, self._scores_of(works), strict=True)
        ]

    def _forward(
        self,
        slices: Sequence[SequenceSlice],
        observation: Observation | None,
        exit_states: ExitStates | None,
    ) -> torch.Tensor:
        if self._resumed is not None and exit_states is not None:
            logits = self._resumed.try_run(slices, exit_states)
            if logits is not None:
                return logits
        return self._runner.forward(slices, observation)

    def _try_generate(
        self,
        works: Sequence[TargetWork],
        slices: Sequence[SequenceSlice],
        observation: Observation | None,
        exit_states: ExitStates | None,
    ) -> Generated | None:
        """Forward and choice in one call, where both are compiled and nobody wants to see the logits."""
        states = [self._sequences[work.request_id] for work in works]
        if any(state.needs_logits for state in states) or any(work.scored_token_ids for work in works):
            return None
        sequences = [state.sampling for state in states]
        if self._judge is not None and any(map(self._judge.concerns, works, sequences)):
            return None
        if self._draft_stream != "target" and any(map(_is_answered_by_chance, works, sequences)):
            return None  # one call has one noise stream for all rows
        chooser = self._sampler.chooser(sequences, self._runner.vocab_size)
        if chooser is None:
            return None
        if self._resumed is not None and exit_states is not None:
            generated = self._resumed.try_generate(slices, chooser, exit_states)
            if generated is not None:
                return generated
        return self._runner.try_generate(slices, [0] * len(slices), chooser, observation)

    def _slice(self, work: TargetWork) -> SequenceSlice:
        """Apply the work's block table update and describe its rows."""
        state = self._sequences[work.request_id]
        shift = state.shift
        token_ids, parents = all_rows(work)
        return SequenceSlice(
            token_ids=token_ids,
            start=work.start,
            block_table=_updated_table(state, work),
            num_logit_rows=_num_logit_rows(work) + len(token_ids) - len(work.token_ids),
            parents=parents,
            shift=None if shift is None or work.start >= shift.end else shift,
        )

    def _score(self, works: Sequence[TargetWork], logits: torch.Tensor) -> tuple[torch.Tensor, _PromptScores]:
        """Return the sampled rows alone, and by work what its other rows say of the prompt."""
        scores: _PromptScores = {}
        sampled: list[torch.Tensor] = []
        first = 0
        for index, work in enumerate(works):
            end = first + _num_logit_rows(work)
            num_scored = len(work.scored_token_ids)
            if num_scored:
                params, seed = self._sequences[work.request_id].sampling
                rows = SamplingRows.build([RowSpec(params, seed, work.start + 1, num_scored)], logits.device)
                seen, num_top = logits[first : first + num_scored], params.prompt_logprobs or 0
                scores[index] = tuple(
                    self._sampler.logprobs(seen, work.scored_token_ids, num_top, "raw", rows)
                )
            sampled.append(logits[end - work.num_sampled_rows : end])
            first = end
        return torch.cat(sampled), scores

    def _sample(self, works: Sequence[TargetWork], logits: torch.Tensor) -> tuple[WorkResult, ...]:
        if logits.shape[0] == 0:
            return tuple(WorkResult(token_ids=()) for _ in works)
        specs = [self._row_spec(work) for work in works if work.num_sampled_rows]
        shaped = self._shape(works, logits)
        sampled = self._sampler.sample(shaped, SamplingRows.build(specs, logits.device))
        token_ids: list[int] = sampled.token_ids.masked_fill(~sampled.finite, NO_TOKEN).tolist()
        return self._results(works, token_ids, _Logits(logits, shaped))

    def _shape(self, works: Sequence[TargetWork], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits as their requests want them changed: a copy, or themselves when none wants."""
        if all(self._sequences[work.request_id].shaper is None and work.masks is None for work in works):
            return logits
        first_token_id = self._sampler.first_token_id
        shaped = logits.clone()
        first = 0
        for work in works:
            state = self._sequences[work.request_id]
            if state.shaper is not None and work.num_sampled_rows:
                _tell_shaper(state.shaper, state, work)
                rows = shaped[first : first + work.num_sampled_rows]
                state.shaper.shape(rows, paths(work), first_token_id=first_token_id)
            if work.masks is not None:
                rows = shaped[first : first + work.num_sampled_rows]
                apply_masks(rows, work.masks, first_token_id=first_token_id)
            first += work.num_sampled_rows
        return shaped

    def _results(
        self, works: Sequence[TargetWork], token_ids: list[int], logits: _Logits | None = None
    ) -> tuple[WorkResult, ...]:
        """Share out the rows' tokens; without `logits` there are no log-probabilities."""
        results: list[WorkResult] = []
        first = 0
        for work in works:
            rows = slice(first, first + work.num_sampled_rows)
            chosen: Sequence[int] = token_ids[rows]
            failure = _NO_FAILURE
            if NO_TOKEN in chosen:
                num_finite = chosen.index(NO_TOKEN)
                failure = _failure(
                    work, num_finite, None if logits is None else logits.raw[first + num_finite]
                )
                # Rows of a tree are not in the order of any one path.
                chosen = chosen[:num_finite] if work.parents is None else []
            logprobs = None
            if logits is not None:
                is_decided = False
                if self._judge is not None and chosen and self._is_judged(work):
                    chosen = self._judged(work, chosen, logits.shaped[first : first + len(chosen)])
                    is_decided = True
                of_tokens = rows_of_answer(work, chosen) if is_decided else range(len(chosen))
                logprobs = self._logprobs(work, logits, [first + row for row in of_tokens], chosen)
            if work.parents is not None and chosen:
                self._keep_path(work, chosen)
            results.append(
                WorkResult(
                    token_ids=tuple(chosen), logprobs=logprobs, error=failure.error, error_code=failure.code
                )
            )
            first = rows.stop
        return tuple(results)

    def _is_judged(self, work: TargetWork) -> bool:
        assert self._judge is not None
        return self._judge.concerns(work, self._sequences[work.request_id].sampling)

    def _judged(self, work: TargetWork, chosen: Sequence[int], logits: torch.Tensor) -> Sequence[int]:
        """Return what the rule makes of a work's draft, up to the row of the last of its `chosen` tokens."""
        assert self._judge is not None
        sampling = self._sequences[work.request_id].sampling
        rows = SamplingRows.build([self._row_spec(work)._replace(num_rows=len(chosen))], logits.device)
        decided = self._judge.decide(work, sampling, self._sampler.distributions(logits, rows))
        return self._sampler.agreed(decided, len(chosen))

    def _row_spec(self, work: TargetWork) -> RowSpec:
        params, seed = self._sequences[work.request_id].sampling
        first_row = len(work.token_ids) - work.num_sampled_rows
        if work.parents is None:
            return RowSpec(params, seed, work.start + first_row + 1, work.num_sampled_rows)
        depths = row_topology(work).depths  # 1 for the first row of the work
        return RowSpec(params, seed, work.start, work.num_sampled_rows, depths[first_row:])

    def _keep_path(self, work: TargetWork, answer: Sequence[int]) -> None:
        """Remember, behind the committed tokens, those of a tree that stand by this answer."""
        state = self._sequences[work.request_id]
        if state.shaper is None:
            return
        parents = node_parents(work)
        first = len(work.token_ids) - num_drafted(work)
        verdict = verdict_of(work.token_ids[first:], parents, answer)
        state.token_ids[work.start + first :] = verdict.token_ids[:-1]

    def _logprobs(
        self, work: TargetWork, logits: _Logits, where: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of tokens of a work, when they are wanted; `where`: their rows of the logits."""
        params = self._sequences[work.request_id].sampling.params
        if params.logprobs is None or not token_ids:
            return None
        mode = params.logprobs_mode
        seen = (logits.raw if mode == "raw" else logits.shaped)[list(where)]
        spec = self._row_spec(work)._replace(num_rows=len(token_ids), depths=None)  # no noise is looked at
        rows = SamplingRows.build([spec], seen.device)
        return tuple(self._sampler.logprobs(seen, token_ids, params.logprobs, mode, rows))


def _standing_path(work: TargetWork, result: WorkResult) -> tuple[int, Sequence[int]]:
    """Return where the draft of a work begins, and which nodes of a tree stand."""
    first = len(work.token_ids) - num_drafted(work)
    parents = node_parents(work)
    if parents is None or not result.token_ids:
        return work.start + first, ()
    verdict = verdict_of(work.token_ids[first:], parents, result.token_ids)
    return work.start + first, verdict.accepted_nodes


def _with_scores(results: Sequence[WorkResult], scores: _PromptScores) -> tuple[WorkResult, ...]:
    return tuple(
        msgspec.structs.replace(result, prompt_logprobs=scores.get(index))
        for index, result in enumerate(results)
    )


def _updated_table(state: _SequenceState, work: TargetWork) -> array[int]:
    """Return the sequence's block table, as it is from this work on."""
    table = state.block_table
    assert work.table_start <= len(table), "a block table update leaves a gap"
    table[work.table_start :] = array("i", work.block_ids)
    return table


def _tell_shaper(shaper: LogitShaper, state: _SequenceState, work: TargetWork) -> None:
    """Tell a shaper of all tokens that are committed."""
    state.token_ids[work.start :] = work.token_ids
    num_committed = work.start + len(work.token_ids) - num_drafted(work)
    shaper.commit(state.token_ids[shaper.num_committed : num_committed])


def _is_answered_by_chance(work: TargetWork, sampling: SequenceSampling) -> bool:
    """Return whether noise has a say at rows beside."""
    return work.beside is not None and work.beside.num_answered > 0 and not sampling.params.is_greedy


def _num_logit_rows(work: TargetWork) -> int:
    """Rows whose logits are wanted, but for those beside."""
    return len(work.token_ids) if work.scored_token_ids else work.num_sampled_rows


def run_to_the_end(run: Callable[[TargetStep], TargetResult], step: TargetStep) -> TargetResult:
    """Run a step, and works of it that gave no token again, without their drafts and rows beside.

    A draft token whose values are not finite spoils the rows before it, which do not see it: its weight
    in their attention is 0, and 0 times NaN is NaN.
    """
    result = run(step)
    spoilt = [
        index
        for index, (work, answer) in enumerate(zip(step.works, result.results, strict=True))
        if not answer.token_ids and (work.num_sampled_rows > 1 or work.beside is not None or answer.drafted)
    ]
    if not spoilt:
        return result
    again = run(
        TargetStep(step_id=step.step_id, works=tuple(_without_draft(step.works[index]) for index in spoilt))
    )
    corrected = list(result.results)
    for index, answer in zip(spoilt, again.results, strict=True):
        told = result.results[index] if answer.error is None else answer
        corrected[index] = msgspec.structs.replace(answer, error=told.error, error_code=told.error_code)
    return msgspec.structs.replace(result, results=tuple(corrected))


def _without_draft(work: TargetWork) -> TargetWork:
    num_kept = len(work.token_ids) - num_drafted(work)
    return msgspec.structs.replace(
        work,
        token_ids=work.token_ids[:num_kept],
        num_sampled_rows=1,
        parents=None,
        masks=None if work.masks is None else work.masks[:1],
        num_self_drafted=0,
        beside=None,
    )


def _failure(work: TargetWork, row: int, logits_V: torch.Tensor | None) -> _Failure:
    """Say why nothing was chosen at a sampled row; `logits_V` are the model's, where they are at hand."""
    position = work.start + len(work.token_ids) - work.num_sampled_rows + row
    if logits_V is not None and bool(logits_V.amax().isfinite()):
        return _Failure(
            f"the request forbids every token after the one at position {position}", NO_TOKEN_ALLOWED
        )
    return _Failure(f"non-finite logits after the token at position {position}", NON_FINITE_LOGITS)


def _synchronize(logits: torch.Tensor) -> None:
    """Wait for the forward, so that its time is not booked as sampling."""
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
