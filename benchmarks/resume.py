"""What it costs to draft again after a pause, in which the draft model has read on or has not.

    python -m benchmarks.resume --json benchmarks/results/resume.json    # about twenty minutes
    python -m benchmarks.resume --quick

Draft and target group have a core each (`benchmarks.groups`), the target 100 million parameters, the draft
model 29 million; everything is accepted. A batch drafts, pauses for so many tokens, and drafts again; behind
95 of them most is unread that ever is (draft workers read on 48 at a time). Runs with and without a pause
take turns, either first in every other pair. The cost is what its last part takes longer than the same part
of the same batch that has not paused, in rounds of the latter, for each request of the batch. Runs that
others on the same machine have disturbed are made again (`benchmarks.stolen`).
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from benchmarks.cores import keep_to_cores
from benchmarks.groups import TwoGroups
from benchmarks.in_process import batch_requests, engine_config
from benchmarks.random_models import WIDE, Shape, write_random_model
from benchmarks.report import Spread, mean_bound, progress_bar, report_headlines, write_results
from benchmarks.stolen import least_stolen
from benchmarks.workload import read_prompts, window
from specdec.core.ids import RequestId
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.proposers.synthetic_config import SyntheticAcceptance

_K = 4
_PROMPT_TOKENS = 64
_BEFORE, _AFTER = 40, 60
"""Tokens of each request that are drafted for before and after the pause."""
_DRAFT = Shape(hidden_size=512, intermediate_size=1536, num_layers=9, num_kv_heads=2)
_SURE = SyntheticAcceptance(acceptance=(1.0,), bonus_after_miss=(1.0,), bonus_after_all=(1.0,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    batches: tuple[int, ...]
    pauses: tuple[int, ...]
    pairs: int
    pairs_of_short: int
    """Where the pause is at most `_SHORT` tokens: these are to cost less than a round."""

    def num_pairs(self, pause: int) -> int:
        """Return how often a pause is measured."""
        return self.pairs_of_short if pause <= _SHORT else self.pairs


_SHORT = 256
FULL = Plan(batches=(1, 4), pauses=(64, 95, 256, 1024), pairs=15, pairs_of_short=40)
QUICK = Plan(batches=(1, 4), pauses=(64, 256), pairs=3, pairs_of_short=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastPart:
    """From the end of the pause to the end."""

    seconds: float
    num_rounds: int


class Bench:
    """Two groups and the text they go on with."""

    def __init__(self, config: EngineConfig, texts: list[str], cores: Sequence[int]) -> None:
        self._groups = TwoGroups(config, target_cores=cores[:1], draft_cores=cores[1:])
        assert self._groups.synthetic is not None
        self._groups.synthetic.acceptance = _SURE
        tokenizer = self._groups.engine.tokenizer
        self._text = [token for text in texts for token in tokenizer.encode(text)]
        self._num_runs = 0

    def close(self) -> None:
        """End everything."""
        self._groups.close()

    def run(self, batch: int, pause: int, number: int, *, drafts_in_pause: bool) -> LastPart:
        """Run one batch; its last part begins where every request has passed the pause."""
        self._num_runs += 1
        engine, controller = self._groups.engine, self._groups.controller
        params = SamplingParams(temperature=0.0, max_tokens=_BEFORE + pause + _AFTER, ignore_eos=True)
        prompts = window(self._text, batch, _PROMPT_TOKENS, number)
        tokens: dict[RequestId, int] = {}
        for request in batch_requests(prompts, params, None, f"run-{self._num_runs}"):
            tokens[request.request_id] = 0
            engine.add_request(request)
        controller.set(_K, "lockstep", 1, 1.0)
        started_s, num_before = time.perf_counter(), engine.metrics().num_rounds
        is_last = False
        while engine.has_work:
            least = min(tokens.values())
            if not drafts_in_pause and least >= _BEFORE and not is_last:
                controller.set(0, "lockstep", 1, 1.0)
            if least >= _BEFORE + pause and not is_last:
                is_last = True
                controller.set(_K, "lockstep", 1, 1.0)
                started_s, num_before = time.perf_counter(), engine.metrics().num_rounds
            for output in engine.step():
                tokens[output.request_id] += len(output.token_ids)
        return LastPart(
            seconds=time.perf_counter() - started_s, num_rounds=engine.metrics().num_rounds - num_before
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one pause."""

    batch: int
    pause: int
    cost_rounds: Spread
    """How much longer the last part takes, in rounds of a batch that has not paused, per request."""
    upper_rounds: float
    """The true mean is below this with 95 % confidence."""
    round_ms: float
    num_rounds: float
    num_rounds_without_pause: float


def measure(bench: Bench, batch: int, pause: int, num_pairs: int, progress: Progress) -> Cost:
    """Compare batches that pause with the same ones that do not."""
    task = progress.add_task(f"batch {batch}, {pause} tokens without drafts", total=num_pairs + 1)
    costs, round_s, paused_rounds, steady_rounds = [], [], [], []
    for number in range(num_pairs + 1):
        run = partial(bench.run, batch, pause, number)
        parts: dict[bool, LastPart] = {}
        for drafts_in_pause in (True, False) if number % 2 else (False, True):
            parts[drafts_in_pause] = least_stolen(partial(run, drafts_in_pause=drafts_in_pause)).result
        steady, paused = parts[True], parts[False]
        one_s = steady.seconds / steady.num_rounds
        round_s.append(one_s)
        # Both end at the same token; the steady one may begin its last part some tokens beyond the pause.
        costs.append((paused.seconds - steady.seconds) / one_s / batch)
        paused_rounds.append(paused.num_rounds)
        steady_rounds.append(steady.num_rounds)
        progress.advance(task)
    return Cost(
        batch=batch,
        pause=pause,
        cost_rounds=Spread(tuple(costs[1:])),
        upper_rounds=mean_bound(costs[1:], 1.0),
        round_ms=1e3 * statistics.median(round_s[1:]),
        num_rounds=statistics.median(paused_rounds[1:]),
        num_rounds_without_pause=statistics.median(steady_rounds[1:]),
    )


def _config(target: Path, draft: Path, plan: Plan) -> EngineConfig:
    return engine_config(
        target,
        draft,
        "bfloat16",
        max_num_seqs=max(plan.batches),
        num_draft_tokens=_K,
        num_threads=1,
        max_model_len=_PROMPT_TOKENS + _BEFORE + max(plan.pauses) + _AFTER + 16,
        made_up=_SURE,
    )


def main(
    quick: Annotated[bool, typer.Option(help="Fewer pauses and batches.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Measure what it costs to draft again after a pause.

    Example: python -m benchmarks.resume --quick --json runs/resume.json
    """
    plan = QUICK if quick else FULL
    cores = keep_to_cores(2)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        progress = stack.enter_context(progress_bar())
        write_random_model(models / "target", folder / "target", WIDE)
        write_random_model(models / "target", folder / "draft", _DRAFT)
        starting = progress.add_task("starting", total=1)
        config = _config(folder / "target", folder / "draft", plan)
        bench = stack.enter_context(
            contextlib.closing(Bench(config, list(read_prompts(models / "prompts.jsonl")), cores))
        )
        progress.advance(starting)
        costs = [
            measure(bench, batch, pause, plan.num_pairs(pause), progress)
            for batch in plan.batches
            for pause in plan.pauses
        ]
    short = [cost for cost in costs if cost.pause <= _SHORT]
    headlines = {
        "resume_256_worst_rounds": max(cost.cost_rounds.median for cost in short),
        "resume_256_worst_upper_rounds": max(cost.upper_rounds for cost in short),
    }
    write_results(json, {"plan": plan, "costs": costs, "headlines": headlines})
    report_headlines(headlines)


if __name__ == "__main__":
    typer.run(main)
