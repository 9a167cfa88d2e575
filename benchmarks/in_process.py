"""A target and a draft model in this process, measured as an engine and as bare forwards."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.build import EngineParts, build_parts
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.ranks.leader import LeadingTarget
from specdec.engine.targets.local_target import LocalTarget
from specdec.kv.config import CacheConfig
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.runner import ForwardInputs, ModelRunner
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.synthetic_config import SyntheticAcceptance
from specdec.sampling.noise import choice_seed
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import SpeculationController

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What one run of a batch did."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    prefill_s: float
    """Until every request had its first token."""
    num_rounds: int
    num_prefill_rounds: int
    """Of these, until every request had its first token."""
    draft_s: float
    verify_s: float
    coordinator_s: float
    num_drafts: int
    num_accepted: int
    num_runs: int = 1

    @property
    def decode_s(self) -> float:
        """After every request had its first token."""
        return self.seconds - self.prefill_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Of all requests, without their first tokens."""
        return sum(len(token_ids) - 1 for token_ids in self.token_ids) / self.decode_s

    @property
    def decode_round_s(self) -> float:
        """One round, on average, after every request had its first token."""
        return self.decode_s / max(1, self.num_rounds - self.num_prefill_rounds)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verified proposal; 1 when nothing was drafted."""
        return 1.0 + (self.num_accepted / self.num_drafts if self.num_drafts else 0.0)

    def summary(self) -> dict[str, float]:
        """Numbers per run and per round, in milliseconds."""
        return {
            "num_rounds": self.num_rounds / self.num_runs,
            "prefill_ms": 1e3 * self.prefill_s / self.num_runs,
            "draft_ms_per_round": 1e3 * self.draft_s / self.num_rounds,
            "verify_ms_per_round": 1e3 * self.verify_s / self.num_rounds,
            "coordinator_ms_per_round": 1e3 * self.coordinator_s / self.num_rounds,
            "mean_acceptance_length": self.mean_acceptance_length,
        }


def merge(runs: Sequence[RunRecord]) -> RunRecord:
    """Return several runs as one after the other."""
    totals = {field.name: sum(getattr(run, field.name) for run in runs) for field in fields(RunRecord)[1:]}
    return RunRecord(token_ids=tuple(itertools.chain.from_iterable(run.token_ids for run in runs)), **totals)


def engine_config(
    target: Path,
    draft: Path,
    dtype: str,
    *,
    max_num_seqs: int,
    num_draft_tokens: int,
    num_threads: int,
    max_model_len: int = 1024,
    made_up: SyntheticAcceptance | None = None,
) -> EngineConfig:
    """One configuration for the engine in process and for the cluster; `made_up` decides what is accepted."""
    return EngineConfig(
        target=ModelConfig.model_validate(
            {
                "model": str(target),
                "dtype": dtype,
                "max_model_len": max_model_len,
                "num_threads": num_threads,
            }
        ),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            controller="fixed",  # every request says its own k
            model=str(draft),
            num_speculative_tokens=num_draft_tokens,
            num_threads=num_threads,
            cache=_cache(256 << 20),
            compile=CompileConfig(),
            synthetic_acceptance=made_up,
        ),
        cache=_cache(3 << 30),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
    )


def _cache(memory_bytes: int) -> CacheConfig:
    """Without prefix cache: runs are repeated, and each is to compute its prompts."""
    return CacheConfig(block_size=_BLOCK_SIZE, memory_bytes=memory_bytes, enable_prefix_caching=False)


def open_engine(parts: EngineParts, controller: SpeculationController | None = None) -> Engine:
    """Return a warmed-up engine of what `build_parts` has made; `controller` takes the place of theirs."""
    engine = Engine.from_parts(
        target=parts.target,
        proposer=parts.proposer,
        tokenizer=parts.tokenizer,
        scheduler=parts.scheduler,
        controller=controller or parts.controller,
        prefix_caching=parts.prefix_caching,
        grammar=parts.grammar,
        max_branches=parts.max_branches,
        kv_budgets=parts.kv_budgets,
    )
    engine.warm_up()
    return engine


class InProcess:
    """An engine whose requests may draft (k) or not (0): the same models, kernels and cache for both."""

    def __init__(self, config: EngineConfig) -> None:
        parts = build_parts(config)
        assert isinstance(parts.target, LocalTarget | LeadingTarget)
        assert isinstance(parts.proposer, DraftModelProposer)
        self.target_runner = parts.target.runner
        draft_runner = parts.proposer.runner
        assert isinstance(draft_runner, ModelRunner)
        self.draft_runner = draft_runner
        self.engine = open_engine(parts)
        self._num_runs = 0

    def run(self, prompts: Sequence[tuple[int, ...]], num_tokens: int, k: int) -> RunRecord:
        """Generate `num_tokens` greedy tokens for every prompt, all submitted at once."""
        self._num_runs += 1
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return run_batch(self.engine, batch_requests(prompts, params, k, f"run-{self._num_runs}"))

    def close(self) -> None:
        """Free everything."""
        self.engine.close()


def run_batch(engine: Engine, requests: Sequence[Request], *, reads_text: bool = True) -> RunRecord:
    """Run requests, all submitted at once, on an engine that has no others.

    With `reads_text` false, somebody else has it read text, as in `Engine.step`.
    """
    before = _counters(engine)
    started_s = time.perf_counter()
    for request in requests:
        engine.add_request(request)
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    num_waiting = len(tokens)
    prefill_s = 0.0
    num_steps = num_prefill_rounds = 0
    while engine.has_work:
        num_steps += 1
        for output in engine.step(reads_text=reads_text):
            num_waiting -= not tokens[output.request_id] and bool(output.token_ids)
            tokens[output.request_id].extend(output.token_ids)
        if num_waiting == 0 and prefill_s == 0.0:
            prefill_s = time.perf_counter() - started_s
            num_prefill_rounds = num_steps
    seconds = time.perf_counter() - started_s
    after = _counters(engine)
    rounds, draft_s, verify_s, coordinator_s, drafts, accepted = (
        end - start for start, end in zip(before, after, strict=True)
    )
    assert (engine.metrics().num_running, rounds) == (0, num_steps)
    return RunRecord(
        token_ids=tuple(tuple(tokens[request.request_id]) for request in requests),
        seconds=seconds,
        prefill_s=prefill_s,
        num_rounds=int(rounds),
        num_prefill_rounds=num_prefill_rounds,
        draft_s=draft_s,
        verify_s=verify_s,
        coordinator_s=coordinator_s,
        num_drafts=int(drafts),
        num_accepted=int(accepted),
    )


def batch_requests(
    prompts: Sequence[tuple[int, ...]], params: SamplingParams, k: int | None, name: str
) -> list[Request]:
    """One request per prompt, with fixed seeds; k None leaves it to the controller."""
    return [
        Request(
            request_id=RequestId(f"{name}-{index}"),
            prompt_token_ids=prompt,
            params=params,
            seed=choice_seed(index, 0),
            num_draft_tokens=k,
        )
        for index, prompt in enumerate(prompts)
    ]


def bare_forward_s(runner: ModelRunner, *, batch: int, rows: int, context: int, repeats: int) -> float:
    """Median seconds of the compiled forward alone: inputs laid out once, nothing sampled.

    `batch` sequences of `context` cached tokens each run `rows` new rows, all of which yield logits.
    It writes to the runner's pool, so the engine must have no request meanwhile.
    """
    inputs = bare_inputs(runner, batch=batch, rows=rows, context=context)
    seconds = []
    for number in range(repeats + 5):
        started_s = time.perf_counter()
        runner.forward_packed(inputs)
        if number >= 5:
            seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def bare_inputs(runner: ModelRunner, *, batch: int, rows: int, context: int) -> ForwardInputs:
    """Lay out `batch` sequences of `context` cached tokens and `rows` new rows, all of which yield logits."""
    blocks_each = -(-(context + rows) // runner.block_size)
    slices = [
        SequenceSlice(
            token_ids=list(range(1, rows + 1)),
            start=context,
            block_table=list(range(1 + index * blocks_each, 1 + (index + 1) * blocks_each)),
            num_logit_rows=rows,
        )
        for index in range(batch)
    ]
    return runner.pack(slices)


def _counters(engine: Engine) -> tuple[float, ...]:
    metrics = engine.metrics()
    return (
        metrics.num_rounds,
        metrics.draft_s,
        metrics.verify_s,
        metrics.coordinator_s,
        metrics.num_drafts,
        metrics.num_accepted_tokens,
    )
