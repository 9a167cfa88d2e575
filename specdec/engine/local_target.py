"""The target in this process: a runner, a sampler, and what they must remember of each sequence."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from specdec.core.description import TargetDescription
from specdec.core.idle_work import IdleWork
from specdec.core.ids import RequestId
from specdec.core.outputs import TokenLogprobs
from specdec.core.plan import AdmittedSequence, TargetResult, TargetStep, TargetWork, WorkResult
from specdec.model.batch import NO_TOKEN, Generated, SequenceSlice
from specdec.model.runner import ModelRunner
from specdec.sampling.sampler import RowSpec, SamplingRows, SequenceSampling, TokenChooser
from specdec.tree.topology import Topology


@dataclass(slots=True, kw_only=True)
class _SequenceState:
    sampling: SequenceSampling
    block_table: array[int] = field(default_factory=lambda: array("i"))


class LocalTarget:
    """Implements `engine.target.Target` on a `ModelRunner`. Not thread-safe.

    A submitted step is run when it is collected: in one process there is nothing to overlap with.
    """

    def __init__(
        self, runner: ModelRunner, sampler: TokenChooser, *, idle_work: Sequence[IdleWork] = ()
    ) -> None:
        """Run `runner` and `sampler`; `idle_work` is what makes them faster (see `HasIdleWork`)."""
        self.idle_work: Sequence[IdleWork] = idle_work
        self._runner = runner
        self._sampler = sampler
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
        )

    @property
    def description(self) -> TargetDescription:
        """Facts about the model, and the length that both it and the cache allow."""
        return self._description

    @property
    def runner(self) -> ModelRunner:
        """What runs the model, for measurements of the bare forward."""
        return self._runner

    def submit(self, step: TargetStep) -> None:
        """Queue a round."""
        self._pending.append(step)

    def collect(self) -> TargetResult:
        """Run the oldest queued round and return its answer."""
        step = self._pending.popleft()
        for request_id in step.released:
            self._sequences.pop(request_id, None)
        for admitted in step.admitted:
            self._admit(admitted)
        if not step.works:
            return TargetResult(step_id=step.step_id, results=())
        return self._run(step)

    def close(self) -> None:
        """Forget all sequences and queued rounds."""
        self._sequences.clear()
        self._pending.clear()

    def _admit(self, admitted: AdmittedSequence) -> None:
        self._sequences[admitted.request_id] = _SequenceState(
            sampling=SequenceSampling(admitted.params, admitted.seed)
        )

    def _run(self, step: TargetStep) -> TargetResult:
        slices = [self._slice(work) for work in step.works]
        generated = self._try_generate(step.works, slices)
        if generated is not None:
            results = self._results(step.works, generated.token_ids)
            forward_s, sample_s = generated.forward_s, generated.choose_s
        else:
            started_s = time.perf_counter()
            logits = self._runner.forward(slices)
            _synchronize(logits)
            forward_s = time.perf_counter() - started_s
            results = self._sample(step.works, logits)
            sample_s = time.perf_counter() - started_s - forward_s
        return TargetResult(
            step_id=step.step_id,
            results=self._without_spoiling_drafts(step.works, results),
            forward_s=forward_s,
            sample_s=sample_s,
        )

    def _try_generate(self, works: Sequence[TargetWork], slices: Sequence[SequenceSlice]) -> Generated | None:
        """Forward and choice in one call, where both are compiled and nobody wants to see the logits."""
        sequences = [self._sequences[work.request_id].sampling for work in works]
        if any(params.logprobs is not None for params, _ in sequences):
            return None
        chooser = self._sampler.chooser(sequences, self._runner.vocab_size)
        return None if chooser is None else self._runner.try_generate(slices, [0] * len(slices), chooser)

    def _without_spoiling_drafts(
        self, works: Sequence[TargetWork], results: tuple[WorkResult, ...]
    ) -> tuple[WorkResult, ...]:
        """Run works that gave no token again, without their drafts.

        A draft token whose values are not finite spoils the rows before it, which do not see it: its weight
        in their attention is 0, and 0 times NaN is NaN.
        """
        spoilt = [
            index
            for index, (work, result) in enumerate(zip(works, results, strict=True))
            if work.num_sampled_rows > 1 and not result.token_ids
        ]
        if not spoilt:
            return results
        again = [_without_draft(works[index]) for index in spoilt]
        answers = self._sample(again, self._runner.forward([self._slice(work) for work in again]))
        corrected = list(results)
        for index, answer in zip(spoilt, answers, strict=True):
            error = results[index].error if answer.error is None else answer.error
            corrected[index] = msgspec.structs.replace(answer, error=error)
        return tuple(corrected)

    def _slice(self, work: TargetWork) -> SequenceSlice:
        """Apply the work's block table update and describe its rows."""
        table = self._sequences[work.request_id].block_table
        assert work.table_start <= len(table), "a block table update leaves a gap"
        table[work.table_start :] = array("i", work.block_ids)
        return SequenceSlice(
            token_ids=work.token_ids,
            start=work.start,
            block_table=table,
            num_logit_rows=work.num_sampled_rows,
            parents=None if work.parents is None else _row_parents(work),
        )

    def _sample(self, works: Sequence[TargetWork], logits: torch.Tensor) -> tuple[WorkResult, ...]:
        if logits.shape[0] == 0:
            return tuple(WorkResult(token_ids=()) for _ in works)
        specs = [self._row_spec(work) for work in works if work.num_sampled_rows]
        sampled = self._sampler.sample(logits, SamplingRows.build(specs, logits.device))
        token_ids: list[int] = sampled.token_ids.masked_fill(~sampled.finite, NO_TOKEN).tolist()
        return self._results(works, token_ids, logits)

    def _results(
        self, works: Sequence[TargetWork], token_ids: list[int], logits: torch.Tensor | None = None
    ) -> tuple[WorkResult, ...]:
        """Share out the rows' tokens; without `logits` there are no log-probabilities."""
        results: list[WorkResult] = []
        first = 0
        for work in works:
            chosen, error = token_ids[first : first + work.num_sampled_rows], None
            if NO_TOKEN in chosen:
                num_finite = chosen.index(NO_TOKEN)
                error = _non_finite(work, num_finite)
                # Rows of a tree are not in the order of any one path.
                chosen = chosen[:num_finite] if work.parents is None else []
            logprobs = None
            if logits is not None:
                logprobs = self._logprobs(work, logits[first : first + len(chosen)], chosen)
            results.append(WorkResult(token_ids=tuple(chosen), logprobs=logprobs, error=error))
            first += work.num_sampled_rows
        return tuple(results)

    def _row_spec(self, work: TargetWork) -> RowSpec:
        params, seed = self._sequences[work.request_id].sampling
        first_row = len(work.token_ids) - work.num_sampled_rows
        if work.parents is None:
            return RowSpec(params, seed, work.start + first_row + 1, work.num_sampled_rows)
        depths = Topology.from_parents(_row_parents(work)).depths  # 1 for the first row of the work
        return RowSpec(params, seed, work.start, work.num_sampled_rows, depths[first_row:])

    def _logprobs(
        self, work: TargetWork, logits: torch.Tensor, token_ids: list[int]
    ) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities at the work's first sampled rows, when its request wants them."""
        params = self._sequences[work.request_id].sampling.params
        if params.logprobs is None or not token_ids:
            return None
        rows = SamplingRows.build([self._row_spec(work)._replace(num_rows=len(token_ids))], logits.device)
        return tuple(self._sampler.logprobs(logits, token_ids, params.logprobs, params.logprobs_mode, rows))


def _without_draft(work: TargetWork) -> TargetWork:
    num_drafted = work.num_sampled_rows - 1 if work.parents is None else len(work.parents)
    return msgspec.structs.replace(
        work, token_ids=work.token_ids[: len(work.token_ids) - num_drafted], num_sampled_rows=1, parents=None
    )


def _non_finite(work: TargetWork, row: int) -> str:
    position = work.start + len(work.token_ids) - work.num_sampled_rows + row
    return f"non-finite logits after the token at position {position}"


def _row_parents(work: TargetWork) -> tuple[int, ...]:
    """Parent row of every row of a tree work: the rows before the draft are a chain."""
    assert work.parents is not None
    num_chain = len(work.token_ids) - len(work.parents)
    return (*range(-1, num_chain - 1), *work.parents)


def _synchronize(logits: torch.Tensor) -> None:
    """Wait for the forward, so that its time is not booked as sampling."""
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
